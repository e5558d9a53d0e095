//! Prompts as clients write them: texts or tokens, one or several, none longer than the server can use.

use crate::body::Raw;
use crate::error::FieldError;
use crate::fields::Fields;

/// What to continue, or to read.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Prompt {
    /// Text for the tokenizer.
    Text(String),
    /// Tokens as they are.
    Tokens(Vec<u32>),
}

const EXPECTED: &str = "a string, a list of strings, a list of token ids, or a list of such lists";
/// Tokens of a prompt of which the server is to use only some.
const MAX_CUT_TOKENS: usize = 1 << 20;
/// Most bytes of JSON for a byte of text: `\u0000`.
const ESCAPED_BYTES: usize = 6;

/// Takes the prompts that `name` holds, at most `most`; of each the server will use all, or only a part of it.
pub(crate) fn take(fields: &mut Fields<'_>, name: &str, most: usize, cut: bool) -> Result<Vec<Prompt>, FieldError> {
    let raw = fields.raw(name).ok_or_else(|| fields.missing(name, EXPECTED))?;
    let longest = if cut { MAX_CUT_TOKENS.max(fields.limits().prompt_tokens) } else { fields.limits().prompt_tokens };
    let text = |raw| read_text(fields, name, raw, EXPECTED).map(Prompt::Text);
    let tokens = |raw| read_tokens(fields, name, raw, longest).map(Prompt::Tokens);
    let several = || {
        fields.check_count(name, raw, most, EXPECTED)?;
        fields.read_as::<Vec<Raw<'_>>>(name, raw, EXPECTED)
    };
    match first_of_list(raw) {
        None => Ok(vec![text(raw)?]),
        Some(b']') => {
            Err(FieldError::invalid(fields.param(name), format!("`{name}` is empty; send 1 to {most} prompts")))
        }
        Some(b'"') => several()?.into_iter().map(text).collect(),
        Some(b'[') => several()?.into_iter().map(tokens).collect(),
        Some(_) => Ok(vec![tokens(raw)?]),
    }
}

/// Takes the text that `name` holds.
pub(crate) fn take_text(fields: &mut Fields<'_>, name: &str) -> Result<Option<String>, FieldError> {
    let Some(raw) = fields.raw(name) else { return Ok(None) };
    read_text(fields, name, raw, "a string").map(Some)
}

/// Takes the tokens that `name` holds, of which there may be many.
pub(crate) fn take_tokens(fields: &mut Fields<'_>, name: &str) -> Result<Vec<u32>, FieldError> {
    const EXPECTED: &str = "a list of token ids";
    let tokens = fields.list(name, MAX_CUT_TOKENS, EXPECTED)?;
    tokens.ok_or_else(|| fields.missing(name, EXPECTED))
}

/// A text that the server can use, as far as its length tells before it is read.
pub(crate) fn read_text<'a>(
    fields: &Fields<'a>,
    name: &str,
    raw: Raw<'a>,
    expected: &str,
) -> Result<String, FieldError> {
    let most = fields.limits().prompt_bytes;
    if raw.get().starts_with('"') && raw.get().len() / ESCAPED_BYTES > most {
        return Err(too_long(fields, name, format!("more than {most} bytes")));
    }
    fields.read_as(name, raw, expected)
}

fn read_tokens<'a>(fields: &Fields<'a>, name: &str, raw: Raw<'a>, most: usize) -> Result<Vec<u32>, FieldError> {
    let count = fields.count(name, raw, EXPECTED)?;
    if count > most {
        return Err(too_long(fields, name, format!("{count} tokens, more than {most}")));
    }
    fields.read_as(name, raw, EXPECTED)
}

/// The complaint about a prompt that has more than fits.
pub(crate) fn too_long(fields: &Fields<'_>, name: &str, found: String) -> FieldError {
    let param = fields.param(name);
    let message = format!("`{param}` has {found}, which is all that the context can hold; shorten it");
    FieldError { param: Some(param), message, code: "context_length_exceeded" }
}

/// What the first item of a list begins with, or the list's end; `None` where it is no list.
fn first_of_list(raw: Raw<'_>) -> Option<u8> {
    raw.get().strip_prefix('[')?.trim_start().bytes().next()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::body::{Body, Limits};

    fn prompts(json: &str, cut: bool) -> Result<Vec<Prompt>, FieldError> {
        let text = format!("{{\"p\":{json}}}");
        let limits = Limits { prompt_tokens: 3, prompt_bytes: 4, ..Limits::default() };
        let body = Body::new(&text).within(limits);
        take(&mut Fields::parse(&body)?, "p", 2, cut)
    }

    #[test]
    fn a_prompt_has_four_shapes() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        assert_eq!(prompts(r#""a""#, false).unwrap(), [text("a")]);
        assert_eq!(prompts(r#"[ "a","b"]"#, false).unwrap(), [text("a"), text("b")]);
        assert_eq!(prompts("[1,2]", false).unwrap(), [Prompt::Tokens(vec![1, 2])]);
        assert_eq!(prompts("[[1],[]]", false).unwrap(), [Prompt::Tokens(vec![1]), Prompt::Tokens(vec![])]);
    }

    #[test]
    fn what_cannot_fit_is_refused_before_it_is_read() {
        // That they are no tokens is not looked at.
        for (long, code) in [
            (r#"["a","b","c"]"#, "invalid_value"),
            ("[]", "invalid_value"),
            ("[0.5,0,0,0]", "context_length_exceeded"),
            ("[[0.5,0,0,0]]", "context_length_exceeded"),
            (r#""\ud800567890123456789012345678""#, "context_length_exceeded"),
            ("[0.5]", "invalid_type"),
            ("7", "invalid_type"),
        ] {
            let error = prompts(long, false).unwrap_err();
            assert_eq!((error.param.as_deref(), error.code), (Some("p"), code), "{long}");
        }
        assert_eq!(prompts("[0,0,0,0]", true).unwrap(), [Prompt::Tokens(vec![0; 4])], "some of it is used");
    }
}
