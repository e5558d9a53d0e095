//! `/v1/chat/completions`.

use crate::body::{Body, Raw};
use crate::error::FieldError;
use crate::fields::Fields;
use crate::generation::{FinishReason, GenerationFields, StopReason, take_top};
use crate::logprobs::{ChatLogprobs, PromptLogprobs};
use crate::prompts;
use crate::tools::{ToolCall, ToolCallDelta, Tools, take_calls};
use crate::unsupported::{CHAT, COMMON, MESSAGE};
use crate::usage::Usage;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

/// Messages of a conversation.
pub const MAX_MESSAGES: usize = 4096;
/// Parts of a message.
const MAX_PARTS: usize = 4096;
/// What a message says.
const CONTENT: &str = "a string or a list of text parts";

/// A chat request with everything in it that the engine acts on.
#[derive(Clone, Debug, PartialEq)]
pub struct ChatRequest {
    /// A served name.
    pub model: String,
    /// What is answered.
    pub conversation: Conversation,
    /// Whether the answer shows what was thought before it.
    pub include_reasoning: bool,
    /// How to generate.
    pub generation: GenerationFields,
}

/// What a prompt is made of.
#[derive(Clone, Debug, PartialEq)]
pub struct Conversation {
    /// What was said so far, at least one message.
    pub messages: Vec<Message>,
    /// What the model may call.
    pub tools: Option<Tools>,
    /// How it becomes a prompt.
    pub rendering: Rendering,
}

/// What a client says about the chat template.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendering {
    /// Another template than the model's own.
    pub template: Option<String>,
    /// Variables of the template's own.
    pub variables: Map<String, Value>,
    /// Texts to answer from, for templates that know them.
    pub documents: Vec<Value>,
    /// End the prompt where the assistant begins to speak.
    pub add_generation_prompt: bool,
    /// The last message is the beginning of the answer.
    pub continue_final_message: bool,
}

impl Default for Rendering {
    fn default() -> Rendering {
        Rendering {
            template: None,
            variables: Map::new(),
            documents: Vec::new(),
            add_generation_prompt: true,
            continue_final_message: false,
        }
    }
}

/// One turn of a conversation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Message {
    /// Who speaks.
    pub role: Role,
    /// What is said. Parts of a list are joined by newlines.
    pub content: String,
    /// Which of several speakers of that role.
    pub name: Option<String>,
    /// What the assistant called.
    pub tool_calls: Vec<ToolCall>,
    /// The call that a tool's result is for.
    pub tool_call_id: Option<String>,
    /// What the assistant thought before it answered.
    pub reasoning: Option<String>,
}

impl Message {
    /// Plain text.
    pub fn new(role: Role, content: impl Into<String>) -> Message {
        let content = content.into();
        Message { role, content, name: None, tool_calls: Vec::new(), tool_call_id: None, reasoning: None }
    }
}

/// Who speaks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Role {
    /// Instructions; `developer` is OpenAI's newer word for them, and templates know only the older.
    #[serde(alias = "developer")]
    System,
    /// The person asking.
    User,
    /// The model.
    #[default]
    Assistant,
    /// What a tool gave.
    Tool,
}

impl ChatRequest {
    /// Reads a body; any field it cannot honour is refused by name.
    pub fn from_body(body: &Body<'_>) -> Result<ChatRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.required("model", "the name of a served model")?;
        let conversation = Conversation::take(&mut fields)?;
        let generation =
            GenerationFields { logprobs: take_logprobs(&mut fields)?, ..GenerationFields::take(&mut fields)? };
        let include_reasoning = fields.optional("include_reasoning", "true or false")?.unwrap_or(true);
        fields.finish(&[COMMON, CHAT])?;
        Ok(ChatRequest { model, conversation, include_reasoning, generation })
    }
}

impl Conversation {
    /// Takes it out of a request.
    pub fn take(fields: &mut Fields<'_>) -> Result<Conversation, FieldError> {
        const EXPECTED: &str = "a list of messages";
        let messages: Option<Vec<Raw<'_>>> = fields.list("messages", MAX_MESSAGES, EXPECTED)?;
        let messages = messages.ok_or_else(|| fields.missing("messages", EXPECTED))?;
        if messages.is_empty() {
            return Err(FieldError::invalid("messages", "`messages` is empty; send at least one message"));
        }
        let take = |(index, message)| take_message(fields.inside(format!("messages[{index}]"), message)?);
        let messages = messages.into_iter().enumerate().map(take).collect::<Result<Vec<_>, _>>()?;
        check_lengths(fields, &messages)?;
        Ok(Conversation { messages, tools: Tools::take(fields)?, rendering: Rendering::take(fields)? })
    }
}

impl Rendering {
    fn take(fields: &mut Fields<'_>) -> Result<Rendering, FieldError> {
        let truth = "true or false";
        let continue_final_message = fields.optional("continue_final_message", truth)?.unwrap_or(false);
        let add_generation_prompt = fields.optional("add_generation_prompt", truth)?;
        if continue_final_message && add_generation_prompt == Some(true) {
            let message =
                "`continue_final_message` goes on with the last message, so `add_generation_prompt` must be false";
            return Err(FieldError::invalid("continue_final_message", message));
        }
        Ok(Rendering {
            template: fields.optional("chat_template", "a Jinja template")?,
            variables: fields.free("chat_template_kwargs", "an object")?.unwrap_or_default(),
            documents: fields.free("documents", "a list of objects")?.unwrap_or_default(),
            add_generation_prompt: add_generation_prompt.unwrap_or(!continue_final_message),
            continue_final_message,
        })
    }
}

/// `logprobs` says whether, `top_logprobs` how many beside each token.
fn take_logprobs(fields: &mut Fields<'_>) -> Result<Option<u32>, FieldError> {
    let wanted: bool = fields.optional("logprobs", "true or false")?.unwrap_or(false);
    let top = take_top(fields, "top_logprobs")?;
    match top {
        Some(1..) if !wanted => {
            Err(FieldError::invalid("top_logprobs", "`top_logprobs` needs `logprobs` to be true; set it"))
        }
        _ => Ok(wanted.then_some(top.unwrap_or(0))),
    }
}

/// Refuses what cannot fit, however its template joins it.
fn check_lengths(fields: &Fields<'_>, messages: &[Message]) -> Result<(), FieldError> {
    let bytes: usize = messages.iter().map(|message| message.content.len()).sum();
    let most = fields.limits().prompt_bytes;
    if bytes > most {
        return Err(prompts::too_long(fields, "messages", format!("{bytes} bytes, more than {most}")));
    }
    Ok(())
}

fn take_message(mut fields: Fields<'_>) -> Result<Message, FieldError> {
    let role = fields.required("role", "system, developer, user, assistant or tool")?;
    let content = take_content(&mut fields)?;
    let (mut tool_calls, mut tool_call_id, mut reasoning) = (Vec::new(), None, None);
    match role {
        Role::Assistant => {
            tool_calls = take_calls(&mut fields)?;
            let older: Option<String> = fields.optional("reasoning_content", "a string")?;
            reasoning = fields.optional("reasoning", "a string")?.or(older);
        }
        Role::Tool => tool_call_id = fields.optional("tool_call_id", "the id of the call it answers")?,
        Role::System | Role::User => (),
    }
    let name = fields.optional("name", "a string")?;
    let missing = fields.missing("content", CONTENT);
    fields.finish(&[MESSAGE])?;
    let content = match content {
        Some(content) => content,
        None if !tool_calls.is_empty() => String::new(),
        None => return Err(missing),
    };
    Ok(Message { role, content, name, tool_calls, tool_call_id, reasoning })
}

fn take_content(message: &mut Fields<'_>) -> Result<Option<String>, FieldError> {
    let Some(raw) = message.raw("content") else { return Ok(None) };
    if !raw.get().starts_with('[') {
        return prompts::read_text(message, "content", raw, CONTENT).map(Some);
    }
    message.check_count("content", raw, MAX_PARTS, CONTENT)?;
    let path = message.param("content");
    let take = |(index, part)| take_part(message.inside(format!("{path}[{index}]"), part)?);
    let parts = message.read_as::<Vec<Raw<'_>>>("content", raw, CONTENT)?.into_iter().enumerate().map(take);
    Ok(Some(parts.collect::<Result<Vec<_>, _>>()?.join("\n")))
}

fn take_part(mut part: Fields<'_>) -> Result<String, FieldError> {
    let kind: String = part.required("type", "\"text\"")?;
    if kind != "text" {
        let param = part.param("type");
        let message = format!("`{param}` is {kind:?}; the model reads text only, so each part must be of type text");
        return Err(FieldError::invalid(param, message));
    }
    let text = prompts::take_text(&mut part, "text")?.ok_or_else(|| part.missing("text", "a string"))?;
    part.finish(&[])?;
    Ok(text)
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
    /// What answers depend on besides the request.
    pub system_fingerprint: String,
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
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct AssistantMessage {
    /// Always `assistant`.
    pub role: Role,
    /// The text; absent where there are only calls.
    pub content: Option<String>,
    /// Always absent.
    pub refusal: Option<String>,
    /// What it calls.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub tool_calls: Vec<ToolCall>,
    /// What it thought before it answered.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<String>,
    /// The same by its older name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<String>,
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
    /// What answers depend on besides the request.
    pub system_fingerprint: &'a str,
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
    /// More of what is thought.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning: Option<&'a str>,
    /// The same by its older name.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reasoning_content: Option<&'a str>,
    /// More of the calls.
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    pub tool_calls: &'a [ToolCallDelta<'a>],
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(extra: &str) -> FieldError {
        let body = format!(r#"{{"model":"m","messages":[{{"role":"user","content":"hi"}}],{extra}}}"#);
        ChatRequest::from_body(&Body::new(&body)).unwrap_err()
    }

    #[test]
    fn defaults_spelled_out_are_served() {
        let body = br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"n":1,"logprobs":false,"tools":[],
            "tool_choice":"auto","response_format":{"type":"text"},"presence_penalty":0.0,"frequency_penalty":0,
            "logit_bias":{},"store":false,"service_tier":"auto","user":"u","metadata":{"a":"b"},"seed":null,
            "parallel_tool_calls":true,"stop":null}"#;
        let request = ChatRequest::from_body(&Body::new(body)).unwrap();
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
            (r#""tools":[{"type":"function"}]"#, "tools[0].function"),
            (r#""response_format":{"type":"xml"}"#, "response_format.type"),
            (r#""chat_template":7"#, "chat_template"),
            (r#""chat_template_kwargs":7"#, "chat_template_kwargs"),
            (r#""continue_final_message":true,"add_generation_prompt":true"#, "continue_final_message"),
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
            (r#"{"role":"tool"}"#, "messages[0].content"),
            (r#"{"role":"user","content":"","tool_calls":[{}]}"#, "messages[0].tool_calls"),
            (r#"{"role":"user","content":"","tool_call_id":"x"}"#, "messages[0].tool_call_id"),
            (r#"{"role":"user","content":[{"type":"image_url"}]}"#, "messages[0].content[0].type"),
            (r#"{"role":"assistant","content":"","tool_calls":[{}]}"#, "messages[0].tool_calls[0].type"),
            (r#"7"#, "messages[0]"),
        ] {
            let body = format!(r#"{{"model":"m","messages":[{message}]}}"#);
            let error = ChatRequest::from_body(&Body::new(&body)).unwrap_err();
            assert_eq!(error.param.as_deref(), Some(param), "{message}");
        }
    }

    #[test]
    fn text_parts_are_joined_and_an_earlier_answer_can_be_sent_back() {
        let body = br#"{"model":"m","messages":[
            {"role":"user","content":[{"type":"text","text":"a"},{"type":"text","text":"b"}]},
            {"role":"assistant","content":"c","refusal":null,"annotations":[],"audio":null,"tool_calls":null}]}"#;
        let request = ChatRequest::from_body(&Body::new(body)).unwrap();
        assert_eq!(request.conversation.messages[0].content, "a\nb");
        assert_eq!(request.conversation.messages[1].role, Role::Assistant);
    }

    #[test]
    fn the_newer_name_of_the_limit_wins() {
        let body =
            br#"{"model":"m","messages":[{"role":"user","content":"hi"}],"max_tokens":1,"max_completion_tokens":2}"#;
        assert_eq!(ChatRequest::from_body(&Body::new(body)).unwrap().generation.max_tokens, Some(2));
    }
}
