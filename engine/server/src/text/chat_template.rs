//! Renders a conversation to a prompt with a chat template: the checkpoint's own, one that the flags name, or one that
//! a request brings where the flags let it.
//!
//! It is a program from elsewhere, whoever wrote it, and runs in processes of its own ([`super::renderers`]); here is
//! what goes in and what comes out.

use super::renderers::{Answer, Job, Renderers};
use super::tokenizer::SpecialTokens;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::collections::HashSet;
use std::sync::Arc;
use windlass_engine_api::chat::{Conversation, Message, Role};
use windlass_engine_api::tools::{Tool, ToolCall, Tools};

/// A template ready to render.
pub struct ChatTemplate {
    renderers: Arc<Renderers>,
    source: String,
    /// Names that it looks up.
    variables: HashSet<String>,
    bos_text: String,
    eos_text: String,
}

/// Variables that are the engine's to set.
const OWN_VARIABLES: &[&str] =
    &["messages", "tools", "documents", "add_generation_prompt", "bos_token", "eos_token", "chat_template", "tokenize"];

/// How a call's arguments are given: most templates want an object, some the text.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Arguments {
    Object,
    Text,
}

/// A conversation that the template refuses, or a template that is not usable.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error, Serialize, Deserialize)]
pub enum TemplateError {
    /// The source is no template.
    #[error("the chat template is not valid: {0}")]
    Invalid(String),
    /// The template called `raise_exception`: roles in an order the model was not trained on, say.
    #[error("the chat template refuses the conversation: {0}")]
    Refused(String),
    /// It failed on this conversation, or reached a limit.
    #[error("the chat template failed: {0}")]
    Failed(String),
    /// Too many others are being rendered.
    #[error("too many conversations are being rendered; try again")]
    Busy,
    /// There is no process to render it.
    #[error("there is no process to render the conversation: {0}")]
    NoProcess(String),
}

impl ChatTemplate {
    /// Compiles `source`, which takes until a process has done it.
    pub fn new(
        source: &str,
        special: &SpecialTokens,
        renderers: &Arc<Renderers>,
    ) -> Result<ChatTemplate, TemplateError> {
        let answer = renderers.run_now(&Job::Template { source: source.to_owned(), variables: None })?;
        ChatTemplate::compiled(source, special, renderers, answer)
    }

    /// The same without holding up other requests.
    pub async fn of_request(
        source: &str,
        special: &SpecialTokens,
        renderers: &Arc<Renderers>,
    ) -> Result<ChatTemplate, TemplateError> {
        let answer = renderers.run(Job::Template { source: source.to_owned(), variables: None }).await?;
        ChatTemplate::compiled(source, special, renderers, answer)
    }

    fn compiled(
        source: &str,
        special: &SpecialTokens,
        renderers: &Arc<Renderers>,
        answer: Answer,
    ) -> Result<ChatTemplate, TemplateError> {
        let Answer::Variables(variables) = answer else { return Err(answer.unexpected()) };
        let (bos_text, eos_text) = (special.bos_text.clone(), special.eos_text.clone());
        let (renderers, source) = (renderers.clone(), source.to_owned());
        Ok(ChatTemplate { renderers, source, variables, bos_text, eos_text })
    }

    /// As it is written.
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Whether it looks at a variable.
    pub fn knows(&self, variable: &str) -> bool {
        self.variables.contains(variable)
    }

    /// Whether a client may set a variable.
    pub fn takes(&self, variable: &str) -> bool {
        self.knows(variable) && !OWN_VARIABLES.contains(&variable)
    }

    /// The prompt, ending where the assistant begins to speak or goes on.
    pub async fn render(&self, conversation: &Conversation) -> Result<String, TemplateError> {
        let calls = conversation.messages.iter().any(|message| !message.tool_calls.is_empty());
        let prompt = match self.render_with(conversation, Arguments::Object).await {
            Err(TemplateError::Failed(_)) if calls => self.render_with(conversation, Arguments::Text).await,
            rendered => rendered,
        }?;
        match conversation.messages.last().filter(|_| conversation.rendering.continue_final_message) {
            Some(last) => continued(prompt, last),
            None => Ok(prompt),
        }
    }

    async fn render_with(&self, conversation: &Conversation, arguments: Arguments) -> Result<String, TemplateError> {
        let mut variables = variables(conversation, arguments);
        variables.extend([("bos_token", &self.bos_text), ("eos_token", &self.eos_text)].map(named));
        let job = Job::Template { source: self.source.clone(), variables: Some(variables) };
        match self.renderers.run(job).await? {
            Answer::Prompt(prompt) => Ok(prompt),
            answer => Err(answer.unexpected()),
        }
    }
}

fn named<T: Serialize>((name, value): (&str, T)) -> (String, Value) {
    (name.to_owned(), json!(value))
}

/// What a conversation tells its template. What is not there is none, since templates ask whether it is.
fn variables(conversation: &Conversation, arguments: Arguments) -> Map<String, Value> {
    let Conversation { messages, tools, rendering } = conversation;
    let messages: Vec<Value> = messages.iter().map(|message| message_value(message, arguments)).collect();
    let offered = |tools: &Tools| tools.offered.iter().map(Tool::to_json).collect::<Vec<_>>();
    let documents = Some(&rendering.documents).filter(|documents| !documents.is_empty());
    let mut variables = rendering.variables.clone();
    variables.extend([
        ("messages".to_owned(), messages.into()),
        ("add_generation_prompt".to_owned(), rendering.add_generation_prompt.into()),
        ("tools".to_owned(), json!(tools.as_ref().map(offered))),
        ("documents".to_owned(), json!(documents)),
    ]);
    variables
}

/// A prompt up to the end of its last message.
fn continued(mut prompt: String, last: &Message) -> Result<String, TemplateError> {
    let text = last.content.trim();
    match prompt.rfind(text).filter(|_| !text.is_empty()) {
        Some(at) => {
            prompt.truncate(at + text.len());
            Ok(prompt)
        }
        None => {
            Err(TemplateError::Refused("the last message is not to be found in the prompt to go on with".to_owned()))
        }
    }
}

/// A message as templates read it.
fn message_value(message: &Message, arguments: Arguments) -> Value {
    let role = match message.role {
        Role::System => "system",
        Role::User => "user",
        Role::Assistant => "assistant",
        Role::Tool => "tool",
    };
    let fields = [
        ("role", Some(role)),
        ("content", Some(message.content.as_str())),
        ("name", message.name.as_deref()),
        ("tool_call_id", message.tool_call_id.as_deref()),
        ("reasoning_content", message.reasoning.as_deref()),
    ];
    let mut value: Map<String, Value> =
        fields.into_iter().filter_map(|(name, value)| Some(named((name, value?)))).collect();
    if !message.tool_calls.is_empty() {
        let calls = message.tool_calls.iter().map(|call| call_value(call, arguments));
        value.insert("tool_calls".to_owned(), calls.collect());
    }
    value.into()
}

fn call_value(call: &ToolCall, arguments: Arguments) -> Value {
    let text = call.function.arguments.as_str();
    let arguments = match (arguments, serde_json::from_str::<Value>(text)) {
        (Arguments::Object, Ok(object)) => object,
        _ => text.into(),
    };
    json!({"id": call.id, "type": "function", "function": {"name": call.function.name, "arguments": arguments}})
}
