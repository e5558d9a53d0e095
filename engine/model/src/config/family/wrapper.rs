//! Models of more than text: the family of the text decoder in each, and the values that its configuration omits.

use serde_json::{Value, json};

use crate::config::{ConfigError, Unsupported};

/// A model of more than text, whose text decoder is of a known family.
#[derive(Debug)]
pub(crate) struct Wrapper {
    /// `model_type` of `config.json`.
    pub name: &'static str,
    /// `model_type` of its `text_config`.
    text: &'static str,
    /// The published values of the family, which `text_config` may omit.
    defaults: fn() -> Value,
}

/// All supported models.
pub(crate) const WRAPPERS: [Wrapper; 2] = [
    Wrapper { name: "gemma3", text: "gemma3_text", defaults: gemma3 },
    Wrapper { name: "mistral3", text: "mistral", defaults: mistral },
];

/// `Gemma3TextConfig` of transformers.
fn gemma3() -> Value {
    json!({"vocab_size": 262_208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-6, "rope_theta": 1e6, "rope_local_base_freq": 1e4, "query_pre_attn_scalar": 256,
        "sliding_window": 4096, "hidden_activation": "gelu_pytorch_tanh", "tie_word_embeddings": true})
}

/// `MistralConfig` of transformers.
fn mistral() -> Value {
    json!({"vocab_size": 32_000, "hidden_size": 4096, "intermediate_size": 14_336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-6,
        "rope_theta": 1e4, "sliding_window": 4096, "hidden_act": "silu", "tie_word_embeddings": false})
}

impl Wrapper {
    /// The model that `config.json` describes, if it is one of more than text.
    pub fn of(config: &Value) -> Option<&'static Wrapper> {
        WRAPPERS.iter().find(|wrapper| config["model_type"] == wrapper.name)
    }

    /// The configuration of the decoder, as a folder of the text model would have it.
    pub fn text_config(&self, config: &Value) -> Result<Value, ConfigError> {
        let Value::Object(own) = &config["text_config"] else {
            let (key, found) = ("config.json: text_config".to_owned(), config["text_config"].to_string());
            return Err(ConfigError::Invalid { key, found, expected: "an object".to_owned() });
        };
        let mut text = (self.defaults)();
        text["model_type"] = self.text.into();
        own.iter().for_each(|(key, value)| text[key] = value.clone());
        match text["model_type"] == self.text {
            true => Ok(text),
            false => {
                let (key, value) = ("config.json: text_config.model_type".to_owned(), text["model_type"].to_string());
                Err(Unsupported::Feature { key, value, feature: "this text model in one of more than text" }.into())
            }
        }
    }
}
