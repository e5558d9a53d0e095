//! Tools that a chat may call: what the client offers, and the calls that it gets back.

use crate::body::{Raw, compact_bytes};
use crate::error::FieldError;
use crate::fields::{Fields, kind};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Tools in one request.
pub const MAX_TOOLS: usize = 128;
/// Characters of a tool's name.
pub const MAX_NAME_CHARS: usize = 64;
/// Bytes of all tools together, as JSON.
pub const MAX_TOOLS_BYTES: usize = 256 << 10;
/// Calls in one message of a conversation.
const MAX_CALLS: usize = 128;

/// The tools of a request and what the model is to do with them.
#[derive(Clone, Debug, PartialEq)]
pub struct Tools {
    /// At least one, with different names.
    pub offered: Vec<Tool>,
    /// Whether to call.
    pub choice: ToolChoice,
    /// Whether an answer may hold several calls.
    pub parallel: bool,
}

/// A function of the client's.
#[derive(Clone, Debug, PartialEq)]
pub struct Tool {
    /// Letters, digits, `_`, `-` and `.`, at most [`MAX_NAME_CHARS`].
    pub name: String,
    /// What it does, for the model.
    pub description: Option<String>,
    /// A JSON schema of an object.
    pub parameters: Value,
    /// Whether calls that the model makes by itself keep the schema. Those that are required or named always do.
    pub strict: bool,
}

/// Whether to call tools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ToolChoice {
    /// No.
    None,
    /// As the model thinks fit.
    Auto,
    /// At least one.
    Required,
    /// This one.
    Named(String),
}

/// A call, in an answer or sent back in the conversation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ToolCall {
    /// What the tool's result refers to.
    pub id: String,
    /// Always `function`.
    #[serde(rename = "type")]
    pub kind: String,
    /// What is called.
    pub function: FunctionCall,
}

/// What is called with what.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FunctionCall {
    /// The function's name.
    pub name: String,
    /// Its arguments: JSON written into a string.
    pub arguments: String,
}

/// What an event adds to the calls of an answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct ToolCallDelta<'a> {
    /// Which of the calls.
    pub index: u32,
    /// In the first event of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub id: Option<&'a str>,
    /// `function`, in the first event of a call.
    #[serde(rename = "type", skip_serializing_if = "Option::is_none")]
    pub kind: Option<&'static str>,
    /// The addition.
    pub function: FunctionDelta<'a>,
}

/// What an event adds to one call.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct FunctionDelta<'a> {
    /// In the first event of a call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<&'a str>,
    /// More of the arguments.
    pub arguments: &'a str,
}

impl Tools {
    /// Takes `tools`, `tool_choice` and `parallel_tool_calls`. No tools is the same as an empty list of them.
    pub fn take(fields: &mut Fields<'_>) -> Result<Option<Tools>, FieldError> {
        let offered: Vec<Raw<'_>> = fields.list("tools", MAX_TOOLS, "a list of tools")?.unwrap_or_default();
        let choice = fields.raw("tool_choice");
        let parallel = fields.optional("parallel_tool_calls", "true or false")?.unwrap_or(true);
        check_size(&offered)?;
        let take = |(index, tool)| take_tool(fields.inside(format!("tools[{index}]"), tool)?);
        let offered = offered.into_iter().enumerate().map(take).collect::<Result<Vec<_>, _>>()?;
        check_names(&offered)?;
        let choice = take_choice(fields, choice, &offered)?;
        Ok((!offered.is_empty()).then_some(Tools { offered, choice, parallel }))
    }
}

impl Tool {
    /// As chat templates read it, which is as the client wrote it.
    pub fn to_json(&self) -> Value {
        let mut function = Map::new();
        function.insert("name".to_owned(), json!(self.name));
        function.extend(self.description.as_ref().map(|text| ("description".to_owned(), json!(text))));
        function.insert("parameters".to_owned(), self.parameters.clone());
        json!({"type": "function", "function": function})
    }
}

fn check_size(offered: &[Raw<'_>]) -> Result<(), FieldError> {
    let bytes: usize = offered.iter().map(|tool| compact_bytes(tool)).sum();
    if bytes > MAX_TOOLS_BYTES {
        let message = format!("`tools` has {bytes} bytes; at most {MAX_TOOLS_BYTES} are read");
        return Err(FieldError::invalid("tools", message));
    }
    Ok(())
}

fn take_tool(mut tool: Fields<'_>) -> Result<Tool, FieldError> {
    take_function_type(&mut tool)?;
    let mut function = take_function(&mut tool, "an object with name, description and parameters")?;
    tool.finish(&[])?;
    let name = take_name(&mut function)?;
    let description = function.optional("description", "a string")?;
    let strict = function.optional("strict", "true or false")?.unwrap_or(false);
    let parameters = take_parameters(&mut function)?;
    function.finish(&[])?;
    Ok(Tool { name, description, parameters, strict })
}

fn take_function<'a>(fields: &mut Fields<'a>, expected: &str) -> Result<Fields<'a>, FieldError> {
    let function = fields.object("function")?;
    function.ok_or_else(|| fields.missing("function", expected))
}

fn take_function_type(fields: &mut Fields<'_>) -> Result<(), FieldError> {
    let kind: String = fields.required("type", "\"function\"")?;
    if kind == "function" {
        return Ok(());
    }
    let param = fields.param("type");
    let message = format!("`{param}` is {kind:?}; the only tools are those of type function");
    Err(FieldError::invalid(param, message))
}

fn take_name(function: &mut Fields<'_>) -> Result<String, FieldError> {
    let name: String = function.required("name", "the function's name")?;
    let plain = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    if (1..=MAX_NAME_CHARS).contains(&name.len()) && name.chars().all(plain) {
        return Ok(name);
    }
    let param = function.param("name");
    let message = format!("`{param}` must be 1 to {MAX_NAME_CHARS} letters, digits, _, - or .");
    Err(FieldError::invalid(param, message))
}

fn take_parameters(function: &mut Fields<'_>) -> Result<Value, FieldError> {
    let parameters: Option<Value> = function.free("parameters", "a JSON schema of an object")?;
    let param = function.param("parameters");
    let wrong = |why: &str| Err(FieldError::invalid(&param, format!("`{param}` {why}")));
    match parameters {
        None => Ok(json!({"type": "object", "properties": {}})),
        Some(Value::Object(schema)) => match schema.get("type") {
            None => Ok(Value::Object(schema)),
            Some(kind) if kind == "object" => Ok(Value::Object(schema)),
            Some(_) => wrong("must describe an object: its type must be \"object\""),
        },
        Some(_) => wrong("must be a JSON schema, which is an object"),
    }
}

fn check_names(offered: &[Tool]) -> Result<(), FieldError> {
    let mut names: Vec<&str> = offered.iter().map(|tool| tool.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(FieldError::invalid("tools", format!("`tools` has two functions called {:?}", pair[0]))),
        None => Ok(()),
    }
}

fn take_choice(fields: &Fields<'_>, choice: Option<Raw<'_>>, offered: &[Tool]) -> Result<ToolChoice, FieldError> {
    let choice = match choice.map(|choice| (choice, choice.get())) {
        None => return Ok(if offered.is_empty() { ToolChoice::None } else { ToolChoice::Auto }),
        Some((_, "\"none\"")) => return Ok(ToolChoice::None),
        Some((_, "\"auto\"")) => return Ok(ToolChoice::Auto),
        Some((_, "\"required\"")) => ToolChoice::Required,
        Some((object, word)) if word.starts_with('"') => {
            let message =
                format!("`tool_choice` is {}; it must be none, auto, required or a named function", kind(object));
            return Err(FieldError::invalid("tool_choice", message));
        }
        Some((object, _)) => ToolChoice::Named(take_named(fields.inside("tool_choice".to_owned(), object)?)?),
    };
    match &choice {
        ToolChoice::Required if offered.is_empty() => {
            Err(FieldError::invalid("tool_choice", "`tool_choice` is required and there are no `tools`"))
        }
        ToolChoice::Named(name) if offered.iter().all(|tool| tool.name != *name) => {
            let message = format!("`tool_choice` names {name:?}, which is not among the `tools`");
            Err(FieldError::invalid("tool_choice", message))
        }
        _ => Ok(choice),
    }
}

fn take_named(mut choice: Fields<'_>) -> Result<String, FieldError> {
    take_function_type(&mut choice)?;
    let mut function = take_function(&mut choice, "an object with the function's name")?;
    choice.finish(&[])?;
    let name = function.required("name", "the function's name")?;
    function.finish(&[])?;
    Ok(name)
}

/// Takes the calls of an earlier answer out of a message.
pub(crate) fn take_calls(message: &mut Fields<'_>) -> Result<Vec<ToolCall>, FieldError> {
    let calls: Vec<Raw<'_>> = message.list("tool_calls", MAX_CALLS, "a list of calls")?.unwrap_or_default();
    let param = message.param("tool_calls");
    let take = |(index, call)| take_call(message.inside(format!("{param}[{index}]"), call)?);
    calls.into_iter().enumerate().map(take).collect()
}

fn take_call(mut call: Fields<'_>) -> Result<ToolCall, FieldError> {
    take_function_type(&mut call)?;
    let id = call.required("id", "the call's id")?;
    // Clients send deltas back that they put together.
    let _index: Option<u32> = call.optional("index", "a number")?;
    let mut function = take_function(&mut call, "an object with name and arguments")?;
    call.finish(&[])?;
    let name = take_name(&mut function)?;
    let arguments: String = function.required("arguments", "JSON in a string")?;
    let arguments = if arguments.trim().is_empty() { "{}".to_owned() } else { arguments };
    // Templates get it as it is written, or what is made of it then.
    function.written::<IgnoredAny>("arguments", &arguments)?;
    function.finish(&[])?;
    Ok(ToolCall { id, kind: "function".to_owned(), function: FunctionCall { name, arguments } })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::Body;

    fn take(body: Value) -> Result<Option<Tools>, FieldError> {
        Tools::take(&mut Fields::parse(&Body::new(&body.to_string())).unwrap())
    }

    fn tool(name: &str) -> Value {
        json!({"type": "function", "function": {"name": name, "parameters": {"type": "object"}}})
    }

    #[test]
    fn tools_are_called_as_the_model_likes_unless_the_client_says_otherwise() {
        for (choice, expected) in [
            (Value::Null, ToolChoice::Auto),
            (json!("auto"), ToolChoice::Auto),
            (json!("none"), ToolChoice::None),
            (json!("required"), ToolChoice::Required),
            (json!({"type": "function", "function": {"name": "b"}}), ToolChoice::Named("b".to_owned())),
        ] {
            let tools = take(json!({"tools": [tool("a"), tool("b")], "tool_choice": choice})).unwrap().unwrap();
            assert_eq!((tools.choice, tools.parallel, tools.offered.len()), (expected, true, 2));
        }
        assert_eq!(take(json!({"tools": [], "tool_choice": "auto", "parallel_tool_calls": false})).unwrap(), None);
    }

    #[test]
    fn what_is_wrong_is_refused_by_name() {
        let function = |function: Value| json!({"tools": [{"type": "function", "function": function}]});
        let many: Vec<Value> = (0..=MAX_TOOLS).map(|index| tool(&format!("t{index}"))).collect();
        let long = "x".repeat(MAX_TOOLS_BYTES);
        for (body, param) in [
            (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
            (json!({"tools": [{"type": "function"}]}), "tools[0].function"),
            (function(json!({})), "tools[0].function.name"),
            (function(json!({"name": "a b"})), "tools[0].function.name"),
            (function(json!({"name": "x".repeat(65)})), "tools[0].function.name"),
            (function(json!({"name": "a", "parameters": {"type": "array"}})), "tools[0].function.parameters"),
            (function(json!({"name": "a", "parameters": []})), "tools[0].function.parameters"),
            (function(json!({"name": "a", "frobnicate": 1})), "tools[0].function.frobnicate"),
            (json!({"tools": [tool("a"), tool("a")]}), "tools"),
            (json!({"tools": many}), "tools"),
            (function(json!({"name": "a", "description": long})), "tools"),
            (json!({"tool_choice": "required"}), "tool_choice"),
            (json!({"tools": [tool("a")], "tool_choice": "some"}), "tool_choice"),
            (
                json!({"tools": [tool("a")], "tool_choice": {"type": "function", "function": {"name": "b"}}}),
                "tool_choice",
            ),
            (json!({"tools": [tool("a")], "tool_choice": {"type": "allowed_tools"}}), "tool_choice.type"),
        ] {
            assert_eq!(take(body.clone()).unwrap_err().param.as_deref(), Some(param), "{body}");
        }
    }

    #[test]
    fn calls_come_back_with_arguments_that_are_json() {
        let calls = |arguments: &str| {
            let call = json!({"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}});
            take_calls(&mut Fields::parse(&Body::new(&json!({"tool_calls": [call]}).to_string())).unwrap())
        };
        assert_eq!(calls("").unwrap()[0].function.arguments, "{}");
        assert_eq!(calls("{\"a\": 1}").unwrap()[0].function.name, "f");
        assert_eq!(calls("{").unwrap_err().param.as_deref(), Some("tool_calls[0].function.arguments"));
    }
}
