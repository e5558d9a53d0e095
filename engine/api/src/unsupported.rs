//! Fields of OpenAI's and vLLM's requests that this engine does not act on, each with the values that change nothing.
//!
//! A client that spells out a default is served; one that asks for something is told by name that it is not done.

use serde_json::Value;

/// A field that is known and not acted on.
pub struct Unsupported {
    /// As the client spells it.
    pub name: &'static str,
    /// Values accepted.
    pub rule: Rule,
    /// Why nothing else is, as the end of a sentence.
    pub why: &'static str,
}

/// Which values of a field change nothing.
pub enum Rule {
    /// Any value: bookkeeping of the client's side.
    Ignored,
    /// None; `null` is absent.
    Absent,
    /// These, written as JSON.
    Only(&'static [&'static str]),
}

impl Unsupported {
    /// Whether `value` asks for nothing.
    pub fn accepts(&self, value: &Value) -> bool {
        match self.rule {
            Rule::Ignored => true,
            Rule::Absent => false,
            Rule::Only(accepted) => accepted.iter().any(|text| same(text, value)),
        }
    }
}

/// Numbers by value (`0` is `0.0`), everything else as written.
fn same(accepted: &str, value: &Value) -> bool {
    match serde_json::from_str::<Value>(accepted) {
        Ok(Value::Number(number)) => value.as_f64() == number.as_f64(),
        Ok(expected) => expected == *value,
        Err(_) => false,
    }
}

const fn ignored(name: &'static str) -> Unsupported {
    Unsupported { name, rule: Rule::Ignored, why: "" }
}

const fn absent(name: &'static str, why: &'static str) -> Unsupported {
    Unsupported { name, rule: Rule::Absent, why }
}

const fn only(name: &'static str, accepted: &'static [&'static str], why: &'static str) -> Unsupported {
    Unsupported { name, rule: Rule::Only(accepted), why }
}

const OLD_CALLS: &str = "use tools, which replaced it";
const ONLY_TEXT: &str = "the model reads and writes text only";
const OWN_TEMPLATE: &str = "the model's own chat template is used as it is";

/// Fields of both endpoints.
pub const COMMON: &[Unsupported] = &[
    ignored("user"),
    ignored("metadata"),
    ignored("safety_identifier"),
    ignored("prompt_cache_key"),
    ignored("prompt_cache_retention"),
    only("store", &["false"], "responses are not stored"),
    only("service_tier", &["\"auto\"", "\"default\""], "there is one tier"),
    absent("repetition_detection", "repetition is not detected"),
    only("spaces_between_special_tokens", &["true"], "special tokens are never part of the output"),
    only("return_token_ids", &["false"], "the answer holds text only"),
    only("return_tokens_as_token_ids", &["false"], "the answer holds text only"),
    absent("kv_transfer_params", "KV is not transferred"),
    absent("guided_decoding_backend", "there is one"),
    absent("guided_whitespace_pattern", "a little white space is allowed in JSON"),
    only("vllm_xargs", &["{}"], "there are no extra arguments"),
];

/// Fields inside `structured_outputs` that change nothing.
pub const STRUCTURE: &[Unsupported] = &[
    only("disable_fallback", &["false", "true"], "there is nothing to fall back to"),
    only("disable_any_whitespace", &["false"], "a little white space is allowed in JSON"),
    only("disable_additional_properties", &["false"], "say so in the schema"),
    absent("whitespace_pattern", "a little white space is allowed in JSON"),
    absent("structural_tag", "structural tags are not available"),
];

/// Fields of `/v1/chat/completions` alone.
pub const CHAT: &[Unsupported] = &[
    only("functions", &["[]"], OLD_CALLS),
    only("function_call", &["\"none\"", "\"auto\""], OLD_CALLS),
    only("modalities", &["[\"text\"]"], ONLY_TEXT),
    absent("audio", ONLY_TEXT),
    absent("prediction", "predicted outputs are not available"),
    absent("web_search_options", "there is no search"),
    only("reasoning_effort", &["\"none\""], "reasoning effort cannot be set"),
    only("verbosity", &["\"medium\""], "verbosity cannot be set"),
    absent("thinking_token_budget", "reasoning has no budget of its own"),
    only("add_special_tokens", &["false"], OWN_TEMPLATE),
    only("mm_processor_kwargs", &["{}"], ONLY_TEXT),
    only("media_io_kwargs", &["{}"], ONLY_TEXT),
];

/// Fields of `/v1/completions` alone.
pub const COMPLETIONS: &[Unsupported] = &[
    only("suffix", &["\"\""], "text is not inserted before a suffix"),
    only("add_special_tokens", &["true"], "the tokenizer's own rule is used"),
    absent("prompt_embeds", "prompts are text or token ids"),
];

/// Parameters of Text Generation Inference.
pub const TGI: &[Unsupported] = &[
    only("best_of", &["1"], "use /v1/completions"),
    only("watermark", &["false"], "answers carry no watermark"),
    only("decoder_input_details", &["false"], "the prompt's tokens are not repeated"),
    only("top_n_tokens", &["0"], "use /v1/completions"),
    absent("adapter_id", "there are no adapters"),
];

/// Fields of `/v1/embeddings`.
pub const EMBEDDINGS: &[Unsupported] = &[
    ignored("user"),
    ignored("priority"),
    only("add_special_tokens", &["true"], "the tokenizer's own rule is used"),
    only("normalize", &["true"], "the model's own rule is used"),
    only("embed_dtype", &["\"float32\""], "vectors are 32-bit floats"),
    only("endianness", &["\"native\"", "\"little\""], "numbers begin with their lowest byte"),
    absent("messages", "send texts as input"),
];

/// Fields of `/v1/score` and `/v1/rerank`.
pub const RANKING: &[Unsupported] = &[
    ignored("user"),
    ignored("priority"),
    only("activation", &["true"], "scores are from 0 to 1"),
    only("use_activation", &["true"], "scores are from 0 to 1"),
    absent("max_tokens_per_doc", "use truncate_prompt_tokens"),
];

/// Fields of a chat message besides `role`, `content` and `name`, which clients send back from earlier answers.
pub const MESSAGE: &[Unsupported] = &[
    ignored("refusal"),
    only("annotations", &["[]"], ONLY_TEXT),
    absent("audio", ONLY_TEXT),
    only("tool_calls", &["[]"], "only the assistant calls tools"),
    absent("function_call", OLD_CALLS),
    absent("tool_call_id", "only messages of the role tool answer calls"),
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accepted_values_are_valid_json_and_numbers_compare_by_value() {
        for field in [COMMON, STRUCTURE, CHAT, COMPLETIONS, MESSAGE, EMBEDDINGS, RANKING, TGI].into_iter().flatten() {
            if let Rule::Only(values) = field.rule {
                for text in values {
                    assert!(serde_json::from_str::<Value>(text).is_ok(), "{}: {text}", field.name);
                }
            }
        }
        let best_of = TGI.iter().find(|field| field.name == "best_of").unwrap();
        assert!(
            best_of.accepts(&Value::from(1.0)) && best_of.accepts(&Value::from(1)) && !best_of.accepts(&Value::from(2))
        );
    }

    #[test]
    fn no_field_is_listed_twice_for_an_endpoint() {
        for own in [CHAT, COMPLETIONS] {
            let mut names: Vec<_> = COMMON.iter().chain(own).map(|field| field.name).collect();
            names.sort_unstable();
            let before = names.len();
            names.dedup();
            assert_eq!(names.len(), before);
        }
    }
}
