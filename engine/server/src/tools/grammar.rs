//! The form of an answer that must call: a list of calls where any tool will do, the arguments alone where one is named.

use crate::structure::with_whitespace;
use serde_json::{Value, json};
use windlass_engine_api::structure::{Form, Structure};
use windlass_engine_api::tools::{Tool, ToolChoice, Tools};

/// Calls in an answer that must have one.
const MAX_CALLS: usize = 16;

/// What the answer is held to, if it must call.
pub fn forced(tools: &Tools) -> Option<Structure> {
    let form = match &tools.choice {
        ToolChoice::None | ToolChoice::Auto => return None,
        ToolChoice::Required => Form::Grammar(list(tools)),
        ToolChoice::Named(name) => {
            let named = tools.offered.iter().find(|tool| tool.name == *name)?;
            Form::Json(schema(named))
        }
    };
    Some(Structure { field: "tools", form })
}

/// Each tool's schema is a grammar of its own, so that its references stay inside it.
fn list(tools: &Tools) -> String {
    let more = if tools.parallel { format!("(\", \" call){{0,{}}}", MAX_CALLS - 1) } else { String::new() };
    let alternatives: Vec<String> = (0..tools.offered.len()).map(|index| format!("call_{index}")).collect();
    let mut lark = format!("start: \"[\" call {more} \"]\"\ncall: {}\n", alternatives.join(" | "));
    for (index, tool) in tools.offered.iter().enumerate() {
        let head = json!(format!("{{\"name\": {}, \"parameters\": ", json!(tool.name)));
        lark += &format!("call_{index}: {head} arguments_{index} \"}}\"\n");
        lark += &format!("arguments_{index}: %json {}\n", with_whitespace(schema(tool)).unwrap_or_default());
    }
    lark
}

/// The arguments of a call of it.
pub(super) fn schema(tool: &Tool) -> Value {
    let mut schema = tool.parameters.clone();
    if let Value::Object(fields) = &mut schema {
        fields.entry("type").or_insert_with(|| json!("object"));
    }
    schema
}
