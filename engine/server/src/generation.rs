//! From what a client wrote about sampling and length to what the engine does: the last place that sees optional
//! fields.

use windlass_engine_api::error::FieldError;
use windlass_engine_api::generation::GenerationFields;
use windlass_engine_core::request::{Request, RequestId, Sampling, Tenant, TokenId};

/// Stop strings of a request.
pub const MAX_STOPS: usize = 16;
/// Bytes of one stop string.
const MAX_STOP_BYTES: usize = 1024;
/// Stop tokens of a request.
const MAX_STOP_TOKENS: usize = 128;

/// How to generate, complete and in range.
#[derive(Clone, Debug)]
pub struct Generation {
    /// Most tokens; `None` for all that fit.
    pub max_tokens: Option<u32>,
    /// Fewest tokens.
    pub min_tokens: u32,
    /// Strings that end the answer.
    pub stops: Vec<String>,
    /// Tokens that the client named to end it.
    pub stop_token_ids: Vec<TokenId>,
    sampling: Sampling,
    ignore_eos: bool,
}

impl Generation {
    /// Checks every value. `vocabulary` bounds token ids, `random_seed` is used where the client gives none.
    pub fn validate(fields: GenerationFields, vocabulary: u32, random_seed: u64) -> Result<Generation, FieldError> {
        let sampling = Sampling {
            temperature: ranged("temperature", fields.temperature, 1.0, 0.0, 2.0)?,
            top_k: top_k(fields.top_k)?,
            top_p: top_p(fields.top_p)?,
            min_p: ranged("min_p", fields.min_p, 0.0, 0.0, 1.0)?,
            seed: fields.seed.map_or(random_seed, i64::cast_unsigned),
        };
        let min_tokens = fields.min_tokens.unwrap_or(0);
        check_lengths(fields.max_tokens, min_tokens)?;
        check_stops(&fields.stop)?;
        check_stop_tokens(&fields.stop_token_ids, vocabulary)?;
        Ok(Generation {
            max_tokens: fields.max_tokens,
            min_tokens,
            stops: fields.stop,
            stop_token_ids: fields.stop_token_ids,
            sampling,
            ignore_eos: fields.ignore_eos,
        })
    }

    /// The engine's request for `prompt`. `ends` are the model's end-of-sequence tokens, `max_tokens` counts where the
    /// client gave no limit.
    pub fn request(
        &self,
        id: RequestId,
        tenant: Tenant,
        prompt: Vec<TokenId>,
        max_tokens: u32,
        ends: &[TokenId],
    ) -> Request {
        let ends = if self.ignore_eos { &[] } else { ends };
        Request {
            id,
            tenant,
            prompt,
            max_tokens: self.max_tokens.unwrap_or(max_tokens),
            min_tokens: self.min_tokens,
            stop_tokens: [ends, &self.stop_token_ids].concat(),
            sampling: self.sampling.clone(),
        }
    }
}

fn ranged(name: &str, value: Option<f64>, default: f32, low: f64, high: f64) -> Result<f32, FieldError> {
    match value {
        None => Ok(default),
        Some(value) if (low..=high).contains(&value) => Ok(value as f32),
        Some(value) => Err(out_of_range(name, value, format!("from {low} to {high}"))),
    }
}

fn top_p(value: Option<f64>) -> Result<f32, FieldError> {
    match value {
        None => Ok(1.0),
        // The smallest positive float keeps "greater than 0" true after rounding.
        Some(value) if value > 0.0 && value <= 1.0 => Ok((value as f32).max(f32::MIN_POSITIVE)),
        Some(value) => Err(out_of_range("top_p", value, "greater than 0 and at most 1".to_owned())),
    }
}

fn top_k(value: Option<i64>) -> Result<u32, FieldError> {
    match value {
        None | Some(-1) => Ok(0),
        Some(value) => u32::try_from(value).map_err(|_| {
            out_of_range("top_k", value, "a whole number from 0, or -1; both 0 and -1 keep all".to_owned())
        }),
    }
}

fn check_lengths(max_tokens: Option<u32>, min_tokens: u32) -> Result<(), FieldError> {
    match max_tokens {
        Some(0) => Err(out_of_range("max_tokens", 0, "at least 1".to_owned())),
        Some(most) if min_tokens > most => {
            Err(out_of_range("min_tokens", min_tokens, format!("at most max_tokens, which is {most}")))
        }
        _ => Ok(()),
    }
}

fn check_stops(stops: &[String]) -> Result<(), FieldError> {
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

fn check_stop_tokens(tokens: &[TokenId], vocabulary: u32) -> Result<(), FieldError> {
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

fn out_of_range(name: &str, value: impl std::fmt::Display, right: String) -> FieldError {
    FieldError::invalid(name, format!("`{name}` is {value}; it must be {right}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn validate(fields: GenerationFields) -> Result<Generation, FieldError> {
        Generation::validate(fields, 100, 7)
    }

    #[test]
    fn absent_fields_take_the_apis_defaults() {
        let generation = validate(GenerationFields::default()).unwrap();
        let expected = Sampling { temperature: 1.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 7 };
        assert_eq!(generation.sampling, expected);
        let request = generation.request(RequestId(1), Tenant(0), vec![1], 42, &[9]);
        assert_eq!((request.max_tokens, request.stop_tokens), (42, vec![9]));
    }

    #[test]
    fn ignoring_the_end_keeps_the_clients_own_stop_tokens() {
        let fields = GenerationFields { ignore_eos: true, stop_token_ids: vec![3], ..Default::default() };
        let request = validate(fields).unwrap().request(RequestId(1), Tenant(0), vec![1], 1, &[9]);
        assert_eq!(request.stop_tokens, [3]);
    }

    #[test]
    fn values_out_of_range_are_refused_by_name() {
        type Set = fn(&mut GenerationFields);
        let cases: [(&str, Set); 14] = [
            ("temperature", |fields| fields.temperature = Some(-0.1)),
            ("temperature", |fields| fields.temperature = Some(2.1)),
            ("temperature", |fields| fields.temperature = Some(f64::NAN)),
            ("top_p", |fields| fields.top_p = Some(0.0)),
            ("top_p", |fields| fields.top_p = Some(1.1)),
            ("top_k", |fields| fields.top_k = Some(-2)),
            ("top_k", |fields| fields.top_k = Some(i64::MAX)),
            ("min_p", |fields| fields.min_p = Some(-1.0)),
            ("max_tokens", |fields| fields.max_tokens = Some(0)),
            ("min_tokens", |fields| (fields.max_tokens, fields.min_tokens) = (Some(1), Some(2))),
            ("stop", |fields| fields.stop = vec![String::new()]),
            ("stop", |fields| fields.stop = vec!["x".repeat(MAX_STOP_BYTES + 1)]),
            ("stop", |fields| fields.stop = vec!["x".to_owned(); 10_000]),
            ("stop_token_ids", |fields| fields.stop_token_ids = vec![100]),
        ];
        for (name, set) in cases {
            let mut fields = GenerationFields::default();
            set(&mut fields);
            assert_eq!(validate(fields).unwrap_err().param.as_deref(), Some(name));
        }
    }
}
