//! How a model converses: its chat template, and how it writes the calls and thoughts of its answers.

use crate::reply::{Reply, Thinking, ThoughtFormat};
use crate::structure::Thought;
use crate::text::chat_template::{ChatTemplate, TemplateError};
use crate::text::renderers::Renderers;
use crate::text::tokenizer::{SpecialTokens, Tokenizer};
use crate::text::vocabulary::Vocabulary;
use crate::tools::{self, Format, Listed, Named, Parts, ToolFormat};
use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use windlass_engine_api::chat::{Conversation, Rendering};
use windlass_engine_api::error::FieldError;
use windlass_engine_api::structure::Structure;
use windlass_engine_api::tools::{ToolChoice, Tools};
use windlass_engine_core::request::TokenId;

/// What the flags say of it.
#[derive(Clone, Debug)]
pub struct DialogueConfig {
    /// A template instead of the model's own.
    pub template: Option<PathBuf>,
    /// Requests may bring a template.
    pub trust_requests: bool,
    /// How calls are written.
    pub calls: Chosen<ToolFormat>,
    /// How thoughts are written.
    pub thoughts: Chosen<ThoughtFormat>,
}

/// A choice that can be left to the model's own files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Chosen<T> {
    /// As the model's files tell, where they do so surely.
    Auto,
    /// None.
    Off,
    /// This.
    Fixed(T),
}

/// A model's way to converse.
pub struct Dialogue {
    template: Option<ChatTemplate>,
    /// Where templates from requests run; absent where none do.
    guests: Option<Guests>,
    calls: Option<ToolFormat>,
    thoughts: Option<ThoughtFormat>,
    /// The tokens around thoughts, where they are tokens of their own.
    thought_tokens: Option<(TokenId, TokenId)>,
    /// Control tokens that readers of answers must see.
    marks: Arc<[TokenId]>,
}

/// Templates from requests have a process of their own, so that none waits for them but them.
struct Guests {
    renderers: Arc<Renderers>,
    special: SpecialTokens,
}

/// A conversation that cannot be had with this model.
#[derive(Debug, thiserror::Error)]
pub enum DialogueError {
    /// There is no template.
    #[error("this model has no chat template; use /v1/completions, or start the server with --chat-template")]
    NoTemplate,
    /// The template fails on it.
    #[error(transparent)]
    Template(#[from] TemplateError),
    /// A field asks for what the model does not do.
    #[error(transparent)]
    Field(#[from] FieldError),
}

/// What an answer will look like, decided before it is generated.
#[derive(Clone, Debug)]
pub struct Expected {
    tools: Option<Tools>,
    calls: Option<ToolFormat>,
    thoughts: Option<ThoughtFormat>,
    /// It begins inside a thought.
    inside: bool,
    /// Which thoughts a form of the answer waits for.
    pub thought: Option<Thought>,
}

impl Dialogue {
    /// Finds out what the flags leave open. `program` is this one.
    pub fn new(
        config: &DialogueConfig,
        template: Option<ChatTemplate>,
        tokenizer: &Tokenizer,
        program: &Path,
    ) -> Dialogue {
        let special = tokenizer.special().clone();
        let guests =
            config.trust_requests.then(|| Guests { renderers: Renderers::new(program.to_owned(), 1), special });
        let vocabulary = tokenizer.vocabulary();
        let tokens = |format: ThoughtFormat| Some((vocabulary.find(format.begin)?, vocabulary.find(format.end)?));
        let known = ThoughtFormat::NAMES.iter().map(|(_, format)| *format);
        let calls = match config.calls {
            Chosen::Auto => template.as_ref().and_then(|template| ToolFormat::of_template(template.source())),
            Chosen::Off => None,
            Chosen::Fixed(format) => Some(format),
        };
        let thoughts = match config.thoughts {
            Chosen::Auto => known.filter(|format| !format.always).find(|format| tokens(*format).is_some()),
            Chosen::Off => None,
            Chosen::Fixed(format) => Some(format),
        };
        let call_marks = calls.map_or(&[][..], ToolFormat::marks).iter().copied();
        let marks = call_marks.chain(thoughts.iter().flat_map(|format| [format.begin, format.end]));
        let marks = marks.filter_map(|mark| vocabulary.find(mark)).collect();
        Dialogue { template, guests, calls, thoughts, thought_tokens: thoughts.and_then(tokens), marks }
    }

    /// The prompt of a conversation, and what the answer to it will look like.
    pub async fn prompt(&self, conversation: &Conversation) -> Result<(String, Expected), DialogueError> {
        let brought = match &conversation.rendering.template {
            Some(source) => Some(self.brought(source).await?),
            None => None,
        };
        let template = brought.as_ref().or(self.template.as_ref()).ok_or(DialogueError::NoTemplate)?;
        let tools = conversation.tools.as_ref();
        self.check_tools(template, tools)?;
        check_rendering(template, &conversation.rendering)?;
        // Tools that must not be called are not told of.
        let told = match tools.filter(|tools| tools.choice == ToolChoice::None) {
            Some(_) => Cow::Owned(Conversation { tools: None, ..conversation.clone() }),
            None => Cow::Borrowed(conversation),
        };
        let told = if template.knows("tools") { told } else { Cow::Owned(tools::described(&told)) };
        let text = template.render(&told).await?;
        let inside = self.thoughts.is_some_and(|format| format.open_after(&text));
        let thought = self.thought_tokens.map(|(begin, end)| Thought { begin, end, inside });
        let (tools, calls, thoughts) = (tools.cloned(), self.calls, self.thoughts);
        Ok((text, Expected { tools, calls, thoughts, inside, thought }))
    }

    /// The template that a request brings.
    async fn brought(&self, source: &str) -> Result<ChatTemplate, DialogueError> {
        let Some(Guests { renderers, special }) = &self.guests else {
            let message = "`chat_template` is not supported: templates from requests run only where the server was \
                           started with --trust-request-chat-template";
            let param = Some("chat_template".to_owned());
            return Err(FieldError { param, message: message.to_owned(), code: "unsupported_parameter" }.into());
        };
        Ok(ChatTemplate::of_request(source, special, renderers).await?)
    }

    /// The form that tools give an answer.
    pub fn form(&self, tools: &Tools, vocabulary: &Vocabulary) -> Result<Option<Structure>, FieldError> {
        match (&tools.choice, self.calls) {
            (ToolChoice::Auto, Some(format)) => {
                let template = self.template.as_ref().map_or("", ChatTemplate::source);
                tools::strict(tools, format, template, vocabulary)
            }
            _ => Ok(tools::forced(tools)),
        }
    }

    /// Control tokens that readers of answers must see.
    pub fn marks(&self) -> Arc<[TokenId]> {
        self.marks.clone()
    }

    /// Whether the model's calls would be understood. A template without tools is told of them in words, by Hermes'
    /// format.
    fn check_tools(&self, template: &ChatTemplate, tools: Option<&Tools>) -> Result<(), FieldError> {
        let Some(tools) = tools else { return Ok(()) };
        let readable = match self.calls {
            None => tools.choice != ToolChoice::Auto,
            Some(ToolFormat::Hermes) => true,
            Some(_) => template.knows("tools"),
        };
        if readable || tools.choice == ToolChoice::None {
            return Ok(());
        }
        let message = "`tools` cannot be left to the model: how it writes calls is not known, or its template knows no \
                       tools. Send `tool_choice` as required or with a name, or start the server with --tool-call-parser \
                       and, for that format, --chat-template";
        Err(FieldError::invalid("tools", message))
    }
}

impl Expected {
    /// A reader for one answer; `None` where all of it is text.
    pub fn reader(&self) -> Option<Reply> {
        let format = self.tools.as_ref().and_then(|tools| self.format(tools));
        if format.is_none() && self.thoughts.is_none() {
            return None;
        }
        let offered = self.tools.iter().flat_map(|tools| &tools.offered);
        let names = offered.map(|tool| tool.name.clone()).collect();
        let most = if self.tools.as_ref().is_some_and(|tools| tools.parallel) { u32::MAX } else { 1 };
        let thinking = self.thoughts.map(|format| Thinking::new(format, self.inside));
        Some(Reply::new(thinking, format, Parts::new(names, most)))
    }

    fn format(&self, tools: &Tools) -> Option<Box<dyn Format>> {
        match &tools.choice {
            ToolChoice::None => None,
            ToolChoice::Auto => self.calls.map(ToolFormat::reader),
            ToolChoice::Required => Some(Box::new(Listed::default())),
            ToolChoice::Named(name) => Some(Box::new(Named::new(name))),
        }
    }

    /// Whether an answer that ended with calls says so: one that the client named says `stop`, as OpenAI's and vLLM's.
    pub fn calls_end_it(&self) -> bool {
        !matches!(&self.tools, Some(Tools { choice: ToolChoice::Named(_), .. }))
    }

    /// A name for a call. Mistral's templates insist on nine letters and digits.
    pub fn call_id(&self) -> String {
        let id = uuid::Uuid::new_v4().simple().to_string();
        match self.calls {
            Some(ToolFormat::Mistral) => id[..9].to_owned(),
            _ => format!("call_{}", &id[..24]),
        }
    }
}

/// Refuses what the template would not look at.
fn check_rendering(template: &ChatTemplate, rendering: &Rendering) -> Result<(), FieldError> {
    if !rendering.documents.is_empty() && !template.knows("documents") {
        let message = "`documents` is not supported: this model's chat template knows none";
        return Err(FieldError::invalid("documents", message));
    }
    match rendering.variables.keys().find(|name| !template.takes(name)) {
        Some(name) => {
            let param = format!("chat_template_kwargs.{name}");
            let message = format!("`{param}` is not supported: it is no variable of this model's chat template");
            Err(FieldError { param: Some(param), message, code: "unsupported_parameter" })
        }
        None => Ok(()),
    }
}
