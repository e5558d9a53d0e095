//! Requests as a profile describes them: random words, so that no prefix is shared by chance.

use crate::cli::{BenchArgs, Profile};
use axum::body::Bytes;
use rand::rngs::SmallRng;
use rand::{Rng, SeedableRng};
use serde_json::json;

/// Frequent words, each a token in most vocabularies.
const WORDS: &[&str] = &[
    "time",
    "year",
    "people",
    "way",
    "day",
    "man",
    "thing",
    "woman",
    "life",
    "child",
    "world",
    "school",
    "state",
    "family",
    "student",
    "group",
    "country",
    "problem",
    "hand",
    "part",
    "place",
    "case",
    "week",
    "company",
    "system",
    "program",
    "question",
    "work",
    "government",
    "number",
    "night",
    "point",
    "home",
    "water",
    "room",
    "mother",
    "area",
    "money",
    "story",
    "fact",
    "month",
    "lot",
    "right",
    "study",
    "book",
    "eye",
    "job",
    "word",
    "business",
    "issue",
];

/// Sizes of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shape {
    /// Tokens of a prompt, on average.
    pub prompt_tokens: u32,
    /// Tokens of an answer.
    pub answer_tokens: u32,
}

impl Shape {
    /// The profile's sizes, unless others are asked for.
    pub fn of(args: &BenchArgs) -> Shape {
        let (prompt_tokens, answer_tokens) = match args.profile {
            Profile::Chat => (200, 150),
            Profile::PrefillHeavy => (2000, 32),
            Profile::DecodeHeavy => (32, 512),
            Profile::Batch => (500, 128),
        };
        Shape {
            prompt_tokens: args.prompt_tokens.unwrap_or(prompt_tokens).max(1),
            answer_tokens: args.answer_tokens.unwrap_or(answer_tokens).max(1),
        }
    }

    /// The body of request `number`: prompts vary by a half, answers are as long as they may be.
    pub fn body(self, model: &str, seed: u64, number: u64) -> Bytes {
        let mut random = SmallRng::seed_from_u64(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ number);
        let words = (f64::from(self.prompt_tokens) * random.random_range(0.5..1.5)).round().max(1.0) as usize;
        let prompt: Vec<&str> = (0..words).map(|_| WORDS[random.random_range(0..WORDS.len())]).collect();
        let body = json!({"model": model, "prompt": prompt.join(" "), "max_tokens": self.answer_tokens,
            "ignore_eos": true, "temperature": 1.0, "seed": number, "stream": true,
            "stream_options": {"include_usage": true}});
        body.to_string().into()
    }
}
