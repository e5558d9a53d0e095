//! Tools for models whose template knows none: told in words, and called as Hermes' models do.

use crate::text::python_json::compact;
use serde_json::{Value, json};
use windlass_engine_api::chat::{Conversation, Message, Role};
use windlass_engine_api::tools::{Tool, ToolCall};

/// The conversation in plain text: tools in the instructions, calls and their results as messages say them.
pub fn described(conversation: &Conversation) -> Conversation {
    let mut messages: Vec<Message> = conversation.messages.iter().map(plain).collect();
    if let Some(tools) = &conversation.tools {
        let instructions = instructions(&tools.offered);
        match messages.first_mut().filter(|first| first.role == Role::System) {
            Some(first) => first.content = format!("{}\n\n{instructions}", first.content),
            None => messages.insert(0, Message::new(Role::System, instructions)),
        }
    }
    Conversation { messages, tools: None, rendering: conversation.rendering.clone() }
}

fn instructions(tools: &[Tool]) -> String {
    let tools: Vec<String> = tools.iter().map(|tool| compact(&tool.to_json())).collect();
    format!(
        "You can call these functions:\n<tools>\n{}\n</tools>\nTo call one, write its name and arguments as JSON \
         between tags:\n<tool_call>\n{{\"name\": \"the function's name\", \"arguments\": {{}}}}\n</tool_call>",
        tools.join("\n")
    )
}

fn plain(message: &Message) -> Message {
    match message.role {
        Role::Tool => Message::new(Role::User, format!("<tool_response>\n{}\n</tool_response>", message.content)),
        Role::Assistant if !message.tool_calls.is_empty() => {
            let said = (!message.content.is_empty()).then(|| message.content.clone());
            let lines: Vec<String> = said.into_iter().chain(message.tool_calls.iter().map(call)).collect();
            Message::new(Role::Assistant, lines.join("\n"))
        }
        _ => message.clone(),
    }
}

fn call(call: &ToolCall) -> String {
    let arguments: Value = serde_json::from_str(&call.function.arguments).unwrap_or_default();
    let json = compact(&json!({"name": call.function.name, "arguments": arguments}));
    format!("<tool_call>\n{json}\n</tool_call>")
}
