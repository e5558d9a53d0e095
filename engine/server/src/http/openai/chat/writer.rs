//! A chat's answers on their way out: taken apart into text, thoughts and calls, whole or event by event.

use crate::answer::{Answer, End, Piece, Thoughts, Whole};
use crate::dialogue::Expected;
use crate::generation::Shows;
use crate::http::error::ApiError;
use crate::http::openai::logprobs;
use crate::http::respond::{EventBuffer, Events, Head};
use crate::reply::Reply;
use crate::text::tokenizer::Tokenizer;
use crate::tools::Part;
use std::sync::Arc;
use windlass_engine_api::chat::{
    AssistantMessage, ChatChoice, ChatChunk, ChatChunkChoice, ChatCompletion, Delta, Role,
};
use windlass_engine_api::generation::FinishReason;
use windlass_engine_api::logprobs::ChatLogprobs;
use windlass_engine_api::tools::{FunctionCall, FunctionDelta, ToolCall, ToolCallDelta};
use windlass_engine_api::usage::Usage;

/// The only kind of tools there is.
const FUNCTION: &str = "function";

/// Writes answers as this endpoint does.
pub struct Writer {
    head: Head,
    tokenizer: Arc<Tokenizer>,
    shows: Shows,
    include_reasoning: bool,
    expected: Expected,
    choices: Vec<Choice>,
}

/// One answer on its way.
struct Choice {
    /// Takes it apart; absent where all of it is text.
    reply: Option<Reply>,
    calls: u32,
}

impl Choice {
    fn new(expected: &Expected) -> Choice {
        Choice { reply: expected.reader(), calls: 0 }
    }
}

impl Writer {
    /// For so many answers, of which none was written yet.
    pub fn new(
        head: Head,
        tokenizer: Arc<Tokenizer>,
        shows: Shows,
        expected: Expected,
        include_reasoning: bool,
        answers: usize,
    ) -> Writer {
        let choices = (0..answers).map(|_| Choice::new(&expected)).collect();
        Writer { head, tokenizer, shows, include_reasoning, expected, choices }
    }

    /// The body, once all answers are there.
    pub async fn whole(mut self, answers: Vec<Answer>) -> Result<ChatCompletion, ApiError> {
        let answers = futures::future::try_join_all(answers.into_iter().map(Answer::whole)).await?;
        let usage = answers.iter().fold(Usage::default(), |sum, answer| sum + answer.usage);
        let prompt = answers.first().and_then(|answer| answer.thoughts.prompt.as_ref());
        let prompt = prompt.filter(|_| self.shows.prompt_logprobs);
        let prompt_logprobs = prompt.map(|prompt| logprobs::prompt(self.tokenizer.vocabulary(), prompt));
        let choices = (0..).zip(answers).map(|answer| self.choice(answer)).collect();
        let Head { id, created, model, fingerprint } = self.head;
        let system_fingerprint = fingerprint.to_string();
        let object = "chat.completion".to_owned();
        Ok(ChatCompletion { id, object, created, model, system_fingerprint, choices, usage, prompt_logprobs })
    }

    fn choice(&mut self, (index, answer): (u32, Whole)) -> ChatChoice {
        let logprobs = self.logprobs(&answer.thoughts);
        let message = self.message(index, answer.text);
        let finish_reason = self.finish_reason(index, &answer.end);
        ChatChoice { index, message, logprobs, finish_reason, stop_reason: answer.end.stop }
    }

    fn message(&mut self, index: u32, text: String) -> AssistantMessage {
        let role = Role::Assistant;
        let mut message = AssistantMessage { role, ..AssistantMessage::default() };
        let Some(reply) = self.choices[index as usize].reply.as_mut() else {
            return AssistantMessage { content: Some(text), ..message };
        };
        let parts = reply.push(&text).into_iter().chain(reply.finish());
        for part in parts {
            match part {
                Part::Text(more) => message.content.get_or_insert_default().push_str(&more),
                Part::Reasoning(more) => message.reasoning.get_or_insert_default().push_str(&more),
                Part::Call(name) => message.tool_calls.push(ToolCall {
                    id: self.expected.call_id(),
                    kind: FUNCTION.to_owned(),
                    function: FunctionCall { name, arguments: String::new() },
                }),
                Part::Arguments(json) => {
                    if let Some(call) = message.tool_calls.last_mut() {
                        call.function.arguments += &json;
                    }
                }
            }
        }
        message.reasoning = message.reasoning.filter(|_| self.include_reasoning);
        message.reasoning_content.clone_from(&message.reasoning);
        if message.tool_calls.is_empty() {
            message.content.get_or_insert_default();
        }
        message
    }

    /// Calls end an answer where the model ended it, not where its length did.
    fn finish_reason(&self, index: u32, end: &End) -> FinishReason {
        let called = self.choices[index as usize].reply.as_ref().is_some_and(Reply::called);
        match end.reason {
            FinishReason::Stop if called && self.expected.calls_end_it() => FinishReason::ToolCalls,
            reason => reason,
        }
    }

    fn logprobs(&self, thoughts: &Thoughts) -> Option<ChatLogprobs> {
        self.shows.logprobs.then(|| logprobs::chat(self.tokenizer.vocabulary(), &thoughts.tokens))
    }

    fn chunk(&self, choices: &[ChatChunkChoice<'_>], usage: Option<Usage>, out: &mut EventBuffer) {
        let Head { id, created, model, fingerprint: system_fingerprint } = &self.head;
        let (object, created) = ("chat.completion.chunk", *created);
        out.event(&ChatChunk { id, object, created, model, system_fingerprint, choices, usage });
    }

    /// What a piece means, where an answer is more than text.
    fn parts(&mut self, index: u32, piece: &Piece) -> Option<Vec<Part>> {
        let reply = self.choices[index as usize].reply.as_mut()?;
        let mut parts = reply.push(&piece.text);
        if piece.end.is_some() {
            parts.extend(reply.finish());
        }
        parts.retain(|part| self.include_reasoning || !matches!(part, Part::Reasoning(_)));
        Some(parts)
    }

    /// An event for a part; `plain` is what it shares with the others of its piece.
    fn part(&mut self, part: &Part, plain: ChatChunkChoice<'_>, usage: Option<Usage>, out: &mut EventBuffer) {
        let (index, id) = (plain.index as usize, self.expected.call_id());
        if matches!(part, Part::Call(_)) {
            self.choices[index].calls += 1;
        }
        let last = self.choices[index].calls.saturating_sub(1);
        let call = |id, kind, name, arguments| {
            [ToolCallDelta { index: last, id, kind, function: FunctionDelta { name, arguments } }]
        };
        let calls;
        let delta = match part {
            Part::Text(text) => Delta { content: Some(text), ..Delta::default() },
            Part::Reasoning(text) => Delta { reasoning: Some(text), reasoning_content: Some(text), ..Delta::default() },
            Part::Call(name) => {
                calls = call(Some(id.as_str()), Some(FUNCTION), Some(name.as_str()), "");
                Delta { tool_calls: &calls, ..Delta::default() }
            }
            Part::Arguments(json) => {
                calls = call(None, None, None, json.as_str());
                Delta { tool_calls: &calls, ..Delta::default() }
            }
        };
        self.chunk(&[ChatChunkChoice { delta, ..plain }], usage, out);
    }
}

impl Events for Writer {
    fn piece(&mut self, index: u32, piece: &Piece, usage: Option<Usage>, out: &mut EventBuffer) {
        let plain =
            ChatChunkChoice { index, delta: Delta::default(), logprobs: None, finish_reason: None, stop_reason: None };
        if piece.first {
            let delta = Delta { role: Some(Role::Assistant), content: Some(""), ..Delta::default() };
            self.chunk(&[ChatChunkChoice { delta, ..plain.clone() }], usage, out);
        }
        // Log probabilities come with the first event of their piece.
        let mut logprobs = self.logprobs(&piece.thoughts).filter(|_| !piece.thoughts.tokens.is_empty());
        match self.parts(index, piece) {
            Some(parts) => {
                for part in &parts {
                    self.part(part, ChatChunkChoice { logprobs: logprobs.take(), ..plain.clone() }, usage, out);
                }
                if logprobs.is_some() {
                    self.chunk(&[ChatChunkChoice { logprobs, ..plain.clone() }], usage, out);
                }
            }
            None if !piece.text.is_empty() || logprobs.is_some() => {
                let delta = Delta { content: Some(&piece.text), ..Delta::default() };
                self.chunk(&[ChatChunkChoice { delta, logprobs, ..plain.clone() }], usage, out);
            }
            None => (),
        }
        if let Some(end) = &piece.end {
            let (finish_reason, stop_reason) = (Some(self.finish_reason(index, end)), end.stop.clone());
            self.chunk(&[ChatChunkChoice { finish_reason, stop_reason, ..plain }], usage, out);
        }
    }

    fn usage(&self, usage: Usage, out: &mut EventBuffer) {
        self.chunk(&[], Some(usage), out);
    }
}
