//! What both endpoints say about how to generate.

use crate::error::FieldError;
use crate::fields::Fields;
use crate::logprobs::MAX_TOP_LOGPROBS;
use crate::structure::Structure;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use std::collections::BTreeMap;
use std::fmt;

/// Sampling and length as the client wrote them; absent fields take the server's defaults.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GenerationFields {
    /// Sharpness of the distribution; 0 is greedy.
    pub temperature: Option<f64>,
    /// Nucleus sampling.
    pub top_p: Option<f64>,
    /// Most likely tokens kept; 0 or -1 keeps all.
    pub top_k: Option<i64>,
    /// Share of the likeliest token's probability below which tokens are dropped.
    pub min_p: Option<f64>,
    /// Share of probability that typical tokens keep.
    pub typical_p: Option<f64>,
    /// Cost of tokens in prompt or answer, as a factor.
    pub repetition_penalty: Option<f64>,
    /// Cost of tokens in the answer, for each time.
    pub frequency_penalty: Option<f64>,
    /// Cost of tokens in the answer, once.
    pub presence_penalty: Option<f64>,
    /// Added to the logits of tokens, by token id.
    pub logit_bias: BTreeMap<String, f64>,
    /// Texts that the answer must not hold.
    pub bad_words: Vec<String>,
    /// The only tokens that may be generated.
    pub allowed_token_ids: Option<Vec<u32>>,
    /// Makes the answer repeatable.
    pub seed: Option<i64>,
    /// Answers to one prompt.
    pub n: Option<u32>,
    /// Answers generated, of which the `n` most likely are given.
    pub best_of: Option<u32>,
    /// Search for the `n` most likely answers.
    pub use_beam_search: bool,
    /// Power of its length by which an answer's log probability is divided in that search.
    pub length_penalty: Option<f64>,
    /// Log probabilities of the answer, with so many of the most likely tokens.
    pub logprobs: Option<u32>,
    /// Log probabilities of the prompt, with so many of the most likely tokens.
    pub prompt_logprobs: Option<u32>,
    /// Lower ones go first, where the server's policy asks for it.
    pub priority: i32,
    /// Share cached prompts only with requests of the same salt.
    pub cache_salt: Option<String>,
    /// Begin the answer with the prompt.
    pub echo: bool,
    /// What the answer must look like.
    pub structure: Option<Structure>,
    /// Keep only so many of the prompt's last tokens.
    pub truncate_prompt_tokens: Option<u32>,
    /// Most tokens to generate (`max_completion_tokens`, or the older `max_tokens`).
    pub max_tokens: Option<u32>,
    /// Fewest tokens to generate.
    pub min_tokens: Option<u32>,
    /// Strings that end the answer.
    pub stop: Vec<String>,
    /// Tokens that end the answer.
    pub stop_token_ids: Vec<u32>,
    /// Show the stop string that ended the answer.
    pub include_stop_str_in_output: bool,
    /// Leave special tokens out of the text; absent is true.
    pub skip_special_tokens: Option<bool>,
    /// Go on past the model's end-of-sequence token.
    pub ignore_eos: bool,
    /// Answer as server-sent events.
    pub stream: Option<StreamOptions>,
}

/// How to stream. Its presence in [`GenerationFields`] means that the answer is streamed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StreamOptions {
    /// A last chunk carries the usage.
    pub include_usage: bool,
    /// Every chunk carries the usage so far (vLLM's extension).
    pub continuous_usage_stats: bool,
}

/// Texts that end an answer or must not be in it, and tokens that end it.
pub(crate) const MAX_ENDS: usize = 1024;
/// Tokens that have a bias.
const MAX_BIASES: usize = 1024;
/// Tokens that are allowed.
const MAX_TOKENS: usize = 1 << 20;

impl GenerationFields {
    /// Takes the common fields out of a request.
    pub fn take(fields: &mut Fields<'_>) -> Result<GenerationFields, FieldError> {
        const COUNT: &str = "a whole number of tokens, at most 4294967295";
        let older = fields.optional("max_tokens", COUNT)?;
        let newer = fields.optional("max_completion_tokens", COUNT)?;
        let stop = fields.texts("stop", MAX_ENDS, "a string or a list of strings")?;
        Ok(GenerationFields {
            temperature: fields.optional("temperature", "a number")?,
            top_p: fields.optional("top_p", "a number")?,
            top_k: fields.optional("top_k", "a whole number")?,
            min_p: fields.optional("min_p", "a number")?,
            typical_p: fields.optional("typical_p", "a number")?,
            repetition_penalty: fields.optional("repetition_penalty", "a number")?,
            frequency_penalty: fields.optional("frequency_penalty", "a number")?,
            presence_penalty: fields.optional("presence_penalty", "a number")?,
            logit_bias: take_biases(fields)?,
            bad_words: fields.list("bad_words", MAX_ENDS, "a list of strings")?.unwrap_or_default(),
            allowed_token_ids: fields.list("allowed_token_ids", MAX_TOKENS, "a list of token ids")?,
            n: fields.optional("n", "a whole number")?,
            best_of: fields.optional("best_of", "a whole number")?,
            use_beam_search: fields.optional("use_beam_search", "true or false")?.unwrap_or(false),
            length_penalty: fields.optional("length_penalty", "a number")?,
            logprobs: None,
            prompt_logprobs: take_top(fields, "prompt_logprobs")?,
            priority: fields.optional("priority", "a whole number of 32 bits")?.unwrap_or(0),
            cache_salt: fields.optional("cache_salt", "a string")?,
            echo: false,
            structure: Structure::take(fields)?,
            truncate_prompt_tokens: fields.optional("truncate_prompt_tokens", "a whole number of tokens")?,
            include_stop_str_in_output: fields
                .optional("include_stop_str_in_output", "true or false")?
                .unwrap_or(false),
            skip_special_tokens: fields.optional("skip_special_tokens", "true or false")?,
            seed: fields.optional("seed", "a whole number of 64 bits")?,
            max_tokens: newer.or(older),
            min_tokens: fields.optional("min_tokens", COUNT)?,
            stop: stop.unwrap_or_default(),
            stop_token_ids: fields.list("stop_token_ids", MAX_ENDS, "a list of token ids")?.unwrap_or_default(),
            ignore_eos: fields.optional("ignore_eos", "true or false")?.unwrap_or(false),
            stream: take_stream(fields)?,
        })
    }
}

fn take_biases(fields: &mut Fields<'_>) -> Result<BTreeMap<String, f64>, FieldError> {
    let biases: Option<Bounded> = fields.optional("logit_bias", "an object of numbers by token id")?;
    match biases {
        None => Ok(BTreeMap::new()),
        Some(Bounded(Some(biases))) => Ok(biases),
        Some(Bounded(None)) => {
            let message = format!("`logit_bias` has more than {MAX_BIASES} tokens, the most that can be biased");
            Err(FieldError::invalid("logit_bias", message))
        }
    }
}

/// Numbers by name; `None` where there are too many.
struct Bounded(Option<BTreeMap<String, f64>>);

impl<'de> Deserialize<'de> for Bounded {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Bounded, D::Error> {
        deserializer.deserialize_map(BoundedVisitor)
    }
}

struct BoundedVisitor;

impl<'de> Visitor<'de> for BoundedVisitor {
    type Value = Bounded;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object of numbers")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Bounded, A::Error> {
        let mut numbers = BTreeMap::new();
        while numbers.len() <= MAX_BIASES {
            let Some((name, number)) = map.next_entry()? else { return Ok(Bounded(Some(numbers))) };
            numbers.insert(name, number);
        }
        while map.next_entry::<IgnoredAny, IgnoredAny>()?.is_some() {}
        Ok(Bounded(None))
    }
}

/// Takes how many most likely tokens to tell of.
pub(crate) fn take_top(fields: &mut Fields<'_>, name: &str) -> Result<Option<u32>, FieldError> {
    let top = fields.optional(name, "a whole number from 0 to 20")?;
    match top.filter(|top| *top > MAX_TOP_LOGPROBS) {
        Some(top) => {
            Err(FieldError::invalid(name, format!("`{name}` is {top}; it must be from 0 to {MAX_TOP_LOGPROBS}")))
        }
        None => Ok(top),
    }
}

fn take_stream(fields: &mut Fields<'_>) -> Result<Option<StreamOptions>, FieldError> {
    let stream: bool = fields.optional("stream", "true or false")?.unwrap_or(false);
    match fields.object("stream_options")? {
        Some(_) if !stream => {
            Err(FieldError::invalid("stream_options", "`stream_options` needs `stream` to be true; remove it"))
        }
        Some(mut options) => {
            let taken = StreamOptions {
                include_usage: options.optional("include_usage", "true or false")?.unwrap_or(false),
                continuous_usage_stats: options.optional("continuous_usage_stats", "true or false")?.unwrap_or(false),
            };
            // Padding against traffic analysis is a default of OpenAI's own servers, and asking for none is harmless.
            let obfuscation: Option<bool> = options.optional("include_obfuscation", "true or false")?;
            if obfuscation == Some(true) {
                let message = "`stream_options.include_obfuscation` is supported only as false";
                return Err(FieldError::invalid("stream_options.include_obfuscation", message));
            }
            options.finish(&[])?;
            Ok(Some(taken))
        }
        None => Ok(stream.then(StreamOptions::default)),
    }
}

/// Why an answer ended, as clients read it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FinishReason {
    /// The model ended it, or a stop string or stop token did.
    Stop,
    /// The token limit did.
    Length,
    /// The model did, to have its calls made.
    ToolCalls,
}

/// What exactly ended an answer with [`FinishReason::Stop`], when it was something the client named (vLLM's extension).
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum StopReason {
    /// One of `stop_token_ids`.
    Token(u32),
    /// One of `stop`.
    Text(String),
}
