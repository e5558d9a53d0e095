//! Ranges of numbers and sizes of lists.

use super::Choices;
use std::fmt::Display;
use windlass_engine_api::error::FieldError;
use windlass_engine_api::generation::GenerationFields;
use windlass_engine_api::structure::Structure;
use windlass_engine_core::request::TokenId;

/// Answers to one prompt.
pub const MAX_CHOICES: u32 = 128;
/// Stop strings of a request.
pub const MAX_STOPS: usize = 16;
/// Bytes of one stop string.
pub(super) const MAX_STOP_BYTES: usize = 1024;
/// Stop tokens of a request.
const MAX_STOP_TOKENS: usize = 128;

/// A number from `low` to `high`.
pub(super) fn ranged(name: &str, value: Option<f64>, default: f32, low: f64, high: f64) -> Result<f32, FieldError> {
    match value {
        None => Ok(default),
        Some(value) if (low..=high).contains(&value) => Ok(value as f32),
        Some(value) => Err(out_of_range(name, value, format!("from {low} to {high}"))),
    }
}

/// A share of probability: greater than 0.
pub(super) fn share(name: &str, value: Option<f64>) -> Result<f32, FieldError> {
    match value {
        None => Ok(1.0),
        // The smallest positive float keeps "greater than 0" true after rounding.
        Some(value) if value > 0.0 && value <= 1.0 => Ok((value as f32).max(f32::MIN_POSITIVE)),
        Some(value) => Err(out_of_range(name, value, "greater than 0 and at most 1".to_owned())),
    }
}

/// 0 keeps all.
pub(super) fn top_k(value: Option<i64>) -> Result<u32, FieldError> {
    match value {
        None | Some(-1) => Ok(0),
        Some(value) => u32::try_from(value).map_err(|_| {
            out_of_range("top_k", value, "a whole number from 0, or -1; both 0 and -1 keep all".to_owned())
        }),
    }
}

/// How many answers to give and to generate.
pub(super) fn choices(n: Option<u32>, best_of: Option<u32>) -> Result<Choices, FieldError> {
    let given = n.unwrap_or(1);
    let generated = best_of.unwrap_or(given);
    if !(1..=MAX_CHOICES).contains(&given) {
        return Err(out_of_range("n", given, format!("from 1 to {MAX_CHOICES}")));
    }
    match (given..=MAX_CHOICES).contains(&generated) {
        true => Ok(Choices { given, generated }),
        false => {
            let right = format!("from n, which is {given}, to {MAX_CHOICES}");
            Err(out_of_range("best_of", generated, right))
        }
    }
}

/// A form says itself where an answer may end.
pub(super) fn check_structure(structure: Option<&Structure>, min_tokens: u32) -> Result<(), FieldError> {
    match structure {
        Some(structure) if min_tokens > 0 => {
            let message =
                format!("`min_tokens` does not go with `{}`, which says how long an answer is", structure.field);
            Err(FieldError::invalid("min_tokens", message))
        }
        _ => Ok(()),
    }
}

/// Length penalties of a beam search.
const LENGTH_PENALTIES: std::ops::RangeInclusive<f64> = -10.0..=10.0;

/// The length penalty, if a search is asked for, which goes with whole answers of free form alone.
pub(super) fn beam_search(fields: &GenerationFields) -> Result<Option<f64>, FieldError> {
    if !fields.use_beam_search {
        return match fields.length_penalty {
            None | Some(1.0) => Ok(None),
            Some(_) => Err(FieldError::invalid("length_penalty", "`length_penalty` is for `use_beam_search`")),
        };
    }
    let penalized =
        [fields.frequency_penalty, fields.presence_penalty].iter().any(|cost| cost.is_some_and(|cost| cost != 0.0));
    let others = [
        ("stream", fields.stream.is_some()),
        ("stop", !fields.stop.is_empty()),
        ("min_tokens", fields.min_tokens.unwrap_or(0) > 0),
        ("echo or prompt_logprobs", fields.echo || fields.prompt_logprobs.is_some()),
        ("penalties", penalized || fields.repetition_penalty.is_some_and(|cost| cost != 1.0)),
        ("logit_bias, bad_words or allowed_token_ids", restricts_tokens(fields)),
        ("a form of the answer", fields.structure.is_some()),
    ];
    if let Some((other, _)) = others.iter().find(|(_, asked)| *asked) {
        let message = format!("`use_beam_search` does not go with {other}");
        return Err(FieldError::invalid("use_beam_search", message));
    }
    if fields.best_of.is_some_and(|best_of| Some(best_of) != fields.n) {
        let message = "`best_of` is `n` with `use_beam_search`, which searches with `n` beams";
        return Err(FieldError::invalid("best_of", message));
    }
    let penalty = fields.length_penalty.unwrap_or(1.0);
    match LENGTH_PENALTIES.contains(&penalty) {
        true => Ok(Some(penalty)),
        false => Err(out_of_range("length_penalty", penalty, "from -10 to 10".to_owned())),
    }
}

fn restricts_tokens(fields: &GenerationFields) -> bool {
    !fields.logit_bias.is_empty() || !fields.bad_words.is_empty() || fields.allowed_token_ids.is_some()
}

/// How much of the prompt counts.
pub(super) fn prompt_tokens(most: Option<u32>) -> Result<Option<u32>, FieldError> {
    match most {
        Some(0) => Err(out_of_range("truncate_prompt_tokens", 0, "at least 1".to_owned())),
        most => Ok(most),
    }
}

/// Most and fewest tokens of an answer; `fewest` is the least that the most may be.
pub(super) fn check_lengths(max_tokens: Option<u32>, min_tokens: u32, fewest: u32) -> Result<(), FieldError> {
    match max_tokens {
        Some(most) if most < fewest => {
            let right = "at least 1, or 0 with echo or prompt_logprobs, for what is told of the prompt".to_owned();
            Err(out_of_range("max_tokens", most, right))
        }
        Some(most) if min_tokens > most => {
            Err(out_of_range("min_tokens", min_tokens, format!("at most max_tokens, which is {most}")))
        }
        _ => Ok(()),
    }
}

/// What to watch for in the text.
pub(super) fn check_stops(stops: &[String]) -> Result<(), FieldError> {
    if stops.len() > MAX_STOPS {
        let message = format!("`stop` holds {} strings; at most {MAX_STOPS} are watched for", stops.len());
        return Err(FieldError::invalid("stop", message));
    }
    let wrong = |stop: &&String| stop.is_empty() || stop.len() > MAX_STOP_BYTES;
    match stops.iter().find(wrong) {
        Some(stop) => {
            let message = format!("a string in `stop` has {} bytes; each must have 1 to {MAX_STOP_BYTES}", stop.len());
            Err(FieldError::invalid("stop", message))
        }
        None => Ok(()),
    }
}

/// What to watch for among the tokens.
pub(super) fn check_stop_tokens(tokens: &[TokenId], vocabulary: u32) -> Result<(), FieldError> {
    if tokens.len() > MAX_STOP_TOKENS {
        let message =
            format!("`stop_token_ids` holds {} tokens; at most {MAX_STOP_TOKENS} are watched for", tokens.len());
        return Err(FieldError::invalid("stop_token_ids", message));
    }
    match tokens.iter().find(|token| **token >= vocabulary) {
        Some(token) => Err(out_of_range("stop_token_ids", token, format!("below {vocabulary}, the vocabulary"))),
        None => Ok(()),
    }
}

/// The refusal of a value; `right` ends the sentence "it must be".
pub(super) fn out_of_range(name: &str, value: impl Display, right: String) -> FieldError {
    FieldError::invalid(name, format!("`{name}` is {value}; it must be {right}"))
}
