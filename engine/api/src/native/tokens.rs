//! `/tokenize` and `/detokenize`, by vLLM's names.

use crate::body::Body;
use crate::chat::Conversation;
use crate::error::FieldError;
use crate::fields::Fields;
use crate::prompts;
use serde::{Deserialize, Serialize};

/// A text or a conversation to turn into tokens.
#[derive(Clone, Debug, PartialEq)]
pub struct TokenizeRequest {
    /// A served name; the first one if absent.
    pub model: Option<String>,
    /// What to tokenize.
    pub input: TokenizeInput,
    /// Whether the answer spells the tokens out.
    pub return_token_strs: bool,
}

/// What to tokenize.
#[derive(Clone, Debug, PartialEq)]
pub enum TokenizeInput {
    /// A plain prompt.
    Prompt {
        /// The text.
        text: String,
        /// Begin with the token that the model wants first, if it wants one.
        add_special_tokens: bool,
    },
    /// A conversation, rendered by the model's template.
    Messages(Conversation),
}

impl TokenizeRequest {
    /// Reads a body; any field it cannot honour is refused by name.
    pub fn from_body(body: &Body<'_>) -> Result<TokenizeRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.optional("model", "the name of a served model")?;
        let return_token_strs = fields.optional("return_token_strs", "true or false")?.unwrap_or(false);
        let prompt = prompts::take_text(&mut fields, "prompt")?;
        let input = match (prompt, fields.has("messages")) {
            (Some(text), false) => {
                let add_special_tokens = fields.optional("add_special_tokens", "true or false")?.unwrap_or(true);
                TokenizeInput::Prompt { text, add_special_tokens }
            }
            (None, true) => TokenizeInput::Messages(Conversation::take(&mut fields)?),
            (Some(_), true) => {
                return Err(FieldError::invalid("messages", "give either `prompt` or `messages`, not both"));
            }
            (None, false) => return Err(FieldError::invalid("prompt", "`prompt` or `messages` is required")),
        };
        fields.finish(&[])?;
        Ok(TokenizeRequest { model, input, return_token_strs })
    }
}

/// The tokens of a text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TokenizeResponse {
    /// How many.
    pub count: usize,
    /// Longest sequence the server takes.
    pub max_model_len: u32,
    /// Their ids.
    pub tokens: Vec<u32>,
    /// What each says, where asked for.
    pub token_strs: Option<Vec<String>>,
}

/// Tokens to turn into text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DetokenizeRequest {
    /// A served name; the first one if absent.
    pub model: Option<String>,
    /// Ids.
    pub tokens: Vec<u32>,
}

impl DetokenizeRequest {
    /// Reads a body.
    pub fn from_body(body: &Body<'_>) -> Result<DetokenizeRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.optional("model", "the name of a served model")?;
        let tokens = prompts::take_tokens(&mut fields, "tokens")?;
        fields.finish(&[])?;
        Ok(DetokenizeRequest { model, tokens })
    }
}

/// The text of tokens.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DetokenizeResponse {
    /// The text, without special tokens.
    pub prompt: String,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn either_a_prompt_or_messages() {
        for (body, param) in [
            (&br#"{}"#[..], "prompt"),
            (br#"{"prompt":"a","messages":[{"role":"user","content":"b"}]}"#, "messages"),
            (br#"{"messages":[]}"#, "messages"),
            (br#"{"messages":[{"role":"robot","content":"b"}]}"#, "messages[0].role"),
            (br#"{"prompt":"a","chat_template":"x"}"#, "chat_template"),
        ] {
            let error = TokenizeRequest::from_body(&Body::new(body)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{}", String::from_utf8_lossy(body));
        }
        let request = TokenizeRequest::from_body(&Body::new(r#"{"prompt":"a","add_special_tokens":false}"#)).unwrap();
        let expected = TokenizeInput::Prompt { text: "a".to_owned(), add_special_tokens: false };
        assert_eq!(request.input, expected);
    }
}
