//! `/v1/chat/completions`.

use crate::error::FieldError;
use crate::fields::Fields;
use crate::generation::{FinishReason, GenerationFields, StopReason, take_top};
use crate::logprobs::{ChatLogprobs, PromptLogprobs};
use crate::unsupported::{CHAT, COMMON, MESSAGE};
use crate::usage::Usage;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// A chat request with everything in it that the engine acts on.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// A served name.
    pub model: String,
    /// The conversation so far, at least one message.
    pub messages: Vec<Message>,
    /// How to generate.
    pub generation: GenerationFields,
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said. Parts of a list are joined by newlines.
    pub content: String,
    /// Which of several speakers of that role.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Who speaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions; `developer` is OpenAI's newer word for them, and templates know only the older.
    #[serde(alias = "developer")]
    System,
    /// The person asking.
    User,
    /// The model.
    Assistant,
}

impl ChatRequest {
    /// Reads a body; any field it cannot honour is refused by name.
    pub fn from_body(body: &[u8]) -> Result<ChatRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.required("model", "the name of a served model")?;
        let messages: Vec<Value> = fields.required("messages", "a list of messages")?;
        if messages.is_empty() {
            return Err(FieldError::invalid("messages", "`messages` is empty; send at least one message"));
        }
        let generation =
            GenerationFields { logprobs: take_logprobs(&mut fields)?, ..GenerationFields::take(&mut fields)? };
        let messages = messages.into_iter().enumerate().map(take_message).collect::<Result<_, _>>()?;
        fields.finish(&[COMMON, CHAT])?;
        Ok(ChatRequest { model, messages, generation })
    }
}

/// `logprobs` says whether, `top_logprobs` how many beside each token.
fn take_logprobs(fields: &mut Fields) -> Result<Option<u32>, FieldError> {
    let wanted: bool = fields.optional("logprobs", "true or false")?.unwrap_or(false);
    let top = take_top(fields, "top_logprobs")?;
    match top {
        Some(1..) if !wanted => {
            Err(FieldError::invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true; set it"))
        }
        _ => Ok(wanted.then_some(top.unwrap_or(0))),
    }
}

fn take_message((index, value): (usize, Value)) -> Result<Message, FieldError> {
    let mut fields = Fields::of(format!("messages[{index}]"), value)?;
    let role = fields.required("role", "system, developer, user or assistant")?;
    let content = fields.optional("content", "a string or a list of text parts")?;
    let name = fields.optional("name", "a string")?;
    let path = fields.param("content");
    fields.finish(&[MESSAGE])?;
    match content {
        Some(Value::String(content)) => Ok(Message { role, content, name }),
        Some(Value::Array(parts)) => Ok(Message { role, content: join_parts(&path, parts)?, name }),
        Some(_) => Err(FieldError::invalid(&path, format!("`{path}` must be a string or a list of text parts"))),
        None => Err(FieldError::invalid(&path, format!("`{path}` is required: a string or a list of text parts"))),
    }
}

fn join_parts(path: &str, parts: Vec<Value>) -> Result<String, FieldError> {
    let take_text = |(index, part)| {
        let mut fields = Fields::of(format!("{path}[{index}]"), part)?;
        let kind: String = fields.required("type", "\"text\"")?;
        if kind != "text" {
            let param = fields.param("type");
            let message =
                format!("`{param}` is {kind:?}; the model reads text only, so each part must be of type text");
            return Err(FieldError::invalid(param, message));
        }
        let text: String = fields.required("text", "a string")?;
        fields.finish(&[])?;
        Ok(text)
    };
    let texts = parts.into_iter().enumerate().map(take_text).collect::<Result<Vec<_>, _>>()?;
    Ok(texts.join("\n"))
}

/// A whole answer.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatCompletion {
    /// Names the request in logs.
    pub id: String,
    /// Always `chat.completion`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The name the client used.
    pub model: String,
    /// As many as were asked for.
    pub choices: Vec<ChatChoice>,
    /// Token counts.
    pub usage: Usage,
    /// Only if asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prompt_logprobs: Option<PromptLogprobs>,
}

/// The answer in a whole response.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChatChoice {
    /// Which of the answers.
    pub index: u32,
    /// What the model says.
    pub message: AssistantMessage,
    /// Only if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Why it ended.
    pub finish_reason: FinishReason,
    /// What the client named that ended it.
    pub stop_reason: Option<StopReason>,
}

/// What the model says.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssistantMessage {
    /// Always `assistant`.
    pub role: Role,
    /// The text.
    pub content: String,
    /// Always absent.
    pub refusal: Option<String>,
}

/// One event of a streamed answer.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunk<'a> {
    /// The same in every event of an answer.
    pub id: &'a str,
    /// Always `chat.completion.chunk`.
    pub object: &'static str,
    /// Seconds since 1970.
    pub created: u64,
    /// The name the client used.
    pub model: &'a str,
    /// One, or none in the event that carries the usage.
    pub choices: &'a [ChatChunkChoice<'a>],
    /// Only with `include_usage`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub usage: Option<Usage>,
}

/// What an event adds.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct ChatChunkChoice<'a> {
    /// Which of the answers.
    pub index: u32,
    /// The addition.
    pub delta: Delta<'a>,
    /// Only if asked for.
    pub logprobs: Option<ChatLogprobs>,
    /// Set in the last event with a choice.
    pub finish_reason: Option<FinishReason>,
    /// What the client named that ended it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub stop_reason: Option<StopReason>,
}

/// The addition of one event.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct Delta<'a> {
    /// In the first event only.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role: Option<Role>,
    /// More text.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub content: Option<&'a str>,
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(extra: &str) -> FieldError {
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{extra}}}"#);
        ChatRequest::from_body(body.as_bytes()).unwrap_err()
    }

    #[test]
    fn defaults_spelled_out_are_served() {
        let body = br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"n":1,"logprobs":false,"tools":[],
            "tool_choice":"auto","response_format":{"type":"text"},"presence_penalty":0.0,"frequency_penalty":0,
            "logit_bias":{},"store":false,"service_tier":"auto","user":"u","metadata":{"a":"b"},"seed":null,
            "parallel_tool_calls":true,"stop":null}"#;
        let request = ChatRequest::from_body(body).unwrap();
        let defaults = GenerationFields {
            n: Some(1),
            presence_penalty: Some(0.0),
            frequency_penalty: Some(0.0),
            ..GenerationFields::default()
        };
        assert_eq!(request.generation, defaults);
    }

    #[test]
    fn what_is_not_done_is_refused_by_name() {
        for (extra, param) in [
            (r#""n":-1"#, "n"),
            (r#""logprobs":5"#, "logprobs"),
            (r#""top_logprobs":5"#, "top_logprobs"),
            (r#""logprobs":true,"top_logprobs":21"#, "top_logprobs"),
            (r#""logit_bias":{"a":"b"}"#, "logit_bias"),
            (r#""echo":true"#, "echo"),
            (r#""tools":[{"type":"function"}]"#, "tools"),
            (r#""response_format":{"type":"xml"}"#, "response_format.type"),
            (r#""chat_template":"{{1}}""#, "chat_template"),
            (r#""chat_template_kwargs":{"chat_template":"x"}"#, "chat_template_kwargs"),
            (r#""unheard_of":1"#, "unheard_of"),
            (r#""stream_options":{"include_usage":true}"#, "stream_options"),
            (r#""max_tokens":-1"#, "max_tokens"),
            (r#""max_tokens":9223372036854775808"#, "max_tokens"),
            (r#""stop":[1]"#, "stop"),
        ] {
            assert_eq!(refusal(extra).param.as_deref(), Some(param), "{extra}");
        }
    }

    #[test]
    fn a_message_is_refused_with_its_path() {
        for (message, param) in [
            (r#"{"role":"user"}"#, "messages[0].content"),
            (r#"{"role":"robot","content":""}"#, "messages[0].role"),
            (r#"{"role":"tool","content":""}"#, "messages[0].role"),
            (r#"{"role":"user","content":[{"type":"image_url"}]}"#, "messages[0].content[0].type"),
            (r#"{"role":"assistant","content":"","tool_calls":[{}]}"#, "messages[0].tool_calls"),
            (r#"7"#, "messages[0]"),
        ] {
            let body = format!(r#"{{"model":"m","messages":[{message}]}}"#);
            let error = ChatRequest::from_body(body.as_bytes()).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{message}");
        }
    }

    #[test]
    fn text_parts_are_joined_and_an_earlier_answer_can_be_sent_back() {
        let body = br#"{"model":"m","messages":[
            {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
            {"role":"assistant","content":"c","refusal":null,"annotations":[],"audio":null,"tool_calls":null}]}"#;
        let request = ChatRequest::from_body(body).unwrap();
        assert_eq!(request.messages[0].content, "a\nb");
        assert_eq!(request.messages[1].role, Role::Assistant);
    }

    #[test]
    fn the_newer_name_of_the_limit_wins() {
        let body =
            br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"max_completion_tokens":2}"#;
        assert_eq!(ChatRequest::from_body(body).unwrap().generation.max_tokens, Some(2));
    }
}
