//! An encoder without a model: time from a formula, vectors from the words that texts have in common.
//!
//! Each token has a direction of its own, and a text points where its tokens do together. So texts that share words are
//! near each other, whatever they are computed beside.

use super::batcher::Encode;
use std::time::Duration;
use windlass_engine_core::sim::{StepTime, mix};
use windlass_engine_model::{EncoderError, EncoderInput, EncoderShape, Purpose};

/// Numbers of a vector, where vectors are what it gives.
pub const DIMENSIONS: u32 = 64;

/// The simulated encoder. A batch takes as long as a step with as many prompt tokens, padding counted.
#[derive(Debug)]
pub struct SimEncoder {
    shape: EncoderShape,
    step_time: StepTime,
}

impl SimEncoder {
    /// One that takes and gives what `shape` says.
    pub fn new(shape: EncoderShape, step_time: StepTime) -> SimEncoder {
        SimEncoder { shape, step_time }
    }

    fn time_of(&self, texts: &[EncoderInput]) -> Duration {
        let longest = texts.iter().map(EncoderInput::len).max().unwrap_or(0);
        let tokens = (texts.len() * longest) as f64;
        Duration::from_secs_f64((self.step_time.base_us + self.step_time.prefill_token_us * tokens) * 1e-6)
    }

    fn result(&self, text: &EncoderInput) -> Vec<f32> {
        match self.shape.purpose {
            Purpose::Vectors { .. } => direction(text.tokens.iter()),
            Purpose::Scores => vec![likeness(text)],
        }
    }
}

impl Encode for SimEncoder {
    fn shape(&self) -> &EncoderShape {
        &self.shape
    }

    fn run(&self, texts: &[EncoderInput]) -> Result<Vec<Vec<f32>>, EncoderError> {
        std::thread::sleep(self.time_of(texts));
        Ok(texts.iter().map(|text| self.result(text)).collect())
    }
}

/// How much two texts that were read together have in common, 0 to 1.
fn likeness(text: &EncoderInput) -> f32 {
    let of = |kind: u32| {
        let typed = text.tokens.iter().zip(&text.types).filter(move |(_, of)| **of == kind);
        direction(typed.map(|(token, _)| token))
    };
    let cosine: f32 = of(0).iter().zip(&of(1)).map(|(a, b)| a * b).sum();
    (1.0 + cosine) / 2.0
}

/// Where tokens point together: a vector of length 1.
fn direction<'a>(tokens: impl Iterator<Item = &'a u32>) -> Vec<f32> {
    let mut sum = vec![0.0; DIMENSIONS as usize];
    for &token in tokens {
        let signs = mix(0, token.into());
        sum.iter_mut().enumerate().for_each(|(bit, value)| *value += if signs >> bit & 1 == 1 { 1.0 } else { -1.0 });
    }
    let length = sum.iter().map(|value| value * value).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
    sum.iter().map(|value| value / length).collect()
}
