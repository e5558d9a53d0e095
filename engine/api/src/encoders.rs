//! `/v1/embeddings`, `/v1/score` and `/v1/rerank`: texts to vectors, and pairs of texts to scores.

use crate::body::{Body, Raw};
use crate::error::FieldError;
use crate::fields::Fields;
use crate::prompts::{self, Prompt};
use crate::unsupported::{EMBEDDINGS, RANKING};
use crate::usage::PromptTokensDetails;
use serde::{Deserialize, Serialize};

/// Texts in one request.
pub const MAX_TEXTS: usize = 2048;

/// Texts to make vectors of.
#[derive(Clone, Debug, PartialEq)]
pub struct EmbeddingsRequest {
    /// A served name.
    pub model: String,
    /// 1 to [`MAX_TEXTS`], as text or as tokens.
    pub inputs: Vec<Prompt>,
    /// How vectors are written.
    pub encoding: Encoding,
    /// Numbers of a vector, fewer than the model gives.
    pub dimensions: Option<u32>,
    /// Only so many of a text's first tokens count.
    pub truncate_prompt_tokens: Option<i64>,
}

/// How vectors are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Encoding {
    /// As JSON numbers.
    #[default]
    Float,
    /// As 32-bit floats, lowest byte first, in base64.
    Base64,
}

/// Two texts, or one beside several, or several pairs.
#[derive(Clone, Debug, PartialEq)]
pub struct ScoreRequest {
    /// A served name.
    pub model: String,
    /// Pairs to score, in order.
    pub pairs: Vec<(String, String)>,
    /// Only so many of a pair's first tokens count.
    pub truncate_prompt_tokens: Option<i64>,
}

/// Texts to sort by how well they answer a query.
#[derive(Clone, Debug, PartialEq)]
pub struct RerankRequest {
    /// A served name.
    pub model: String,
    /// What they should answer.
    pub query: String,
    /// 1 to [`MAX_TEXTS`].
    pub documents: Vec<String>,
    /// Only so many of the best.
    pub top_n: Option<u32>,
    /// Whether the answer repeats the texts.
    pub return_documents: bool,
    /// Only so many of a pair's first tokens count.
    pub truncate_prompt_tokens: Option<i64>,
}

/// A document as Cohere's clients send it, who may send a plain string, too.
#[derive(Deserialize)]
struct Document {
    text: String,
}

/// Bytes of one text times how many it is read beside.
const MAX_REPEATED_BYTES: usize = 8 << 20;

const CUT: (&str, &str) = ("truncate_prompt_tokens", "a whole number of tokens, or -1 for what the model reads");

impl EmbeddingsRequest {
    /// Reads a body; any field it cannot honour is refused by name.
    pub fn from_body(body: &Body<'_>) -> Result<EmbeddingsRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.required("model", "the name of a served model")?;
        let cut = fields.has(CUT.0);
        let inputs = prompts::take(&mut fields, "input", MAX_TEXTS, cut)?;
        let request = EmbeddingsRequest {
            model,
            inputs,
            encoding: fields.optional("encoding_format", "float or base64")?.unwrap_or_default(),
            dimensions: fields.optional("dimensions", "a whole number")?,
            truncate_prompt_tokens: fields.optional(CUT.0, CUT.1)?,
        };
        fields.finish(&[EMBEDDINGS])?;
        Ok(request)
    }
}

impl ScoreRequest {
    /// Reads a body; any field it cannot honour is refused by name.
    pub fn from_body(body: &Body<'_>) -> Result<ScoreRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.required("model", "the name of a served model")?;
        let pairs = take_pairs(&mut fields)?;
        let truncate_prompt_tokens = fields.optional(CUT.0, CUT.1)?;
        fields.finish(&[RANKING])?;
        Ok(ScoreRequest { model, pairs, truncate_prompt_tokens })
    }
}

/// One text goes with each of several; as many as there are go together in their order.
fn take_pairs(fields: &mut Fields<'_>) -> Result<Vec<(String, String)>, FieldError> {
    let expected = "a string or a list of strings";
    let mut take = |name| fields.texts(name, MAX_TEXTS, expected)?.ok_or_else(|| fields.missing(name, expected));
    let (first, second) = (take("text_1")?, take("text_2")?);
    check_count("text_2", second.len())?;
    match first.len() {
        1 => {
            check_repeated("text_1", &first[0], second.len())?;
            Ok(second.into_iter().map(|other| (first[0].clone(), other)).collect())
        }
        count if count == second.len() => Ok(first.into_iter().zip(second).collect()),
        _ => Err(FieldError::invalid("text_1", "`text_1` must be one text, or as many as `text_2`")),
    }
}

impl RerankRequest {
    /// Reads a body; any field it cannot honour is refused by name.
    pub fn from_body(body: &Body<'_>) -> Result<RerankRequest, FieldError> {
        let mut fields = Fields::parse(body)?;
        let model = fields.required("model", "the name of a served model")?;
        let query: String = fields.required("query", "a string")?;
        let documents = take_documents(&mut fields)?;
        check_repeated("query", &query, documents.len())?;
        let request = RerankRequest {
            model,
            query,
            documents,
            // vLLM's word for all of them.
            top_n: fields.optional("top_n", "a whole number")?.filter(|most| *most > 0),
            return_documents: fields.optional("return_documents", "true or false")?.unwrap_or(true),
            truncate_prompt_tokens: fields.optional(CUT.0, CUT.1)?,
        };
        fields.finish(&[RANKING])?;
        Ok(request)
    }
}

fn take_documents(fields: &mut Fields<'_>) -> Result<Vec<String>, FieldError> {
    const EXPECTED: &str = "a list of strings";
    let documents: Option<Vec<Raw<'_>>> = fields.list("documents", MAX_TEXTS, EXPECTED)?;
    let documents = documents.ok_or_else(|| fields.missing("documents", EXPECTED))?;
    check_count("documents", documents.len())?;
    let text = |raw: Raw<'_>| match raw.get().starts_with('{') {
        true => fields.read_as::<Document>("documents", raw, EXPECTED).map(|document| document.text),
        false => fields.read_as("documents", raw, EXPECTED),
    };
    documents.into_iter().map(text).collect()
}

/// Refuses a text that is long and read beside many.
fn check_repeated(field: &str, text: &str, times: usize) -> Result<(), FieldError> {
    if times <= 1 || text.len().saturating_mul(times) <= MAX_REPEATED_BYTES {
        return Ok(());
    }
    let message = format!(
        "`{field}` has {} bytes and is read beside each of {times} texts; at most {MAX_REPEATED_BYTES} bytes are read so",
        text.len()
    );
    Err(FieldError::invalid(field, message))
}

fn check_count(field: &str, count: usize) -> Result<(), FieldError> {
    match count {
        1..=MAX_TEXTS => Ok(()),
        _ => Err(FieldError::invalid(field, format!("`{field}` holds {count} texts; send 1 to {MAX_TEXTS}"))),
    }
}

/// Vectors of texts.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embeddings {
    /// Names the request in logs.
    pub id: String,
    /// Always `list`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The name the client used.
    pub model: String,
    /// One for each text, in order.
    pub data: Vec<Embedding>,
    /// Token counts.
    pub usage: EncoderUsage,
}

/// A text's vector.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Embedding {
    /// Which of the texts.
    pub index: u32,
    /// Always `embedding`.
    pub object: String,
    /// The vector.
    pub embedding: Vector,
}

/// A vector as it was asked for.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Vector {
    /// JSON numbers.
    Float(Vec<f32>),
    /// Bytes in base64.
    Base64(String),
}

/// Scores of pairs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Scores {
    /// Names the request in logs.
    pub id: String,
    /// Always `list`.
    pub object: String,
    /// Seconds since 1970.
    pub created: u64,
    /// The name the client used.
    pub model: String,
    /// One for each pair, in order.
    pub data: Vec<Score>,
    /// Token counts.
    pub usage: EncoderUsage,
}

/// A pair's score.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Score {
    /// Which of the pairs.
    pub index: u32,
    /// Always `score`.
    pub object: String,
    /// From 0 to 1 by models that score, the cosine of the angle between vectors by others.
    pub score: f32,
}

/// Documents, the best first.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ranking {
    /// Names the request in logs.
    pub id: String,
    /// The name the client used.
    pub model: String,
    /// Token counts.
    pub usage: EncoderUsage,
    /// The best first.
    pub results: Vec<Ranked>,
}

/// A document's place.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Ranked {
    /// Which of the documents.
    pub index: u32,
    /// Its text, where wanted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub document: Option<RankedText>,
    /// As [`Score::score`].
    pub relevance_score: f32,
}

/// A document's text.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RankedText {
    /// The text.
    pub text: String,
}

/// What a request cost.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EncoderUsage {
    /// Tokens read.
    pub prompt_tokens: u32,
    /// The same.
    pub total_tokens: u32,
    /// Always 0.
    pub completion_tokens: u32,
    /// Nothing is kept.
    pub prompt_tokens_details: PromptTokensDetails,
}

impl EncoderUsage {
    /// Counts of a request that read so many.
    pub fn new(tokens: u32) -> EncoderUsage {
        EncoderUsage { prompt_tokens: tokens, total_tokens: tokens, ..EncoderUsage::default() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn embeddings(extra: Value) -> Result<EmbeddingsRequest, FieldError> {
        let mut body = json!({"model": "m"});
        body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
        EmbeddingsRequest::from_body(&Body::new(&body.to_string()))
    }

    #[test]
    fn every_shape_of_input_is_read() {
        let text = |text: &str| Prompt::Text(text.to_owned());
        for (input, expected) in [
            (json!("a"), vec![text("a")]),
            (json!(["a", "b"]), vec![text("a"), text("b")]),
            (json!([1, 2]), vec![Prompt::Tokens(vec![1, 2])]),
            (json!([[1], [2]]), vec![Prompt::Tokens(vec![1]), Prompt::Tokens(vec![2])]),
        ] {
            assert_eq!(embeddings(json!({"input": input})).unwrap().inputs, expected);
        }
    }

    #[test]
    fn texts_are_paired() {
        let pairs = |first: Value, second: Value| {
            let body = json!({"model": "m", "text_1": first, "text_2": second}).to_string();
            ScoreRequest::from_body(&Body::new(&body)).map(|request| request.pairs.len())
        };
        assert_eq!(pairs(json!("a"), json!(["b", "c"])), Ok(2));
        assert_eq!(pairs(json!(["a", "b"]), json!(["c", "d"])), Ok(2));
        assert_eq!(pairs(json!(["a"]), json!(["b", "c", "d"])), Ok(3));
        assert_eq!(pairs(json!(["a", "b"]), json!("c")).unwrap_err().param.as_deref(), Some("text_1"));
    }

    #[test]
    fn a_long_text_is_read_beside_few() {
        let rerank = |bytes: usize, documents: usize| {
            let body = json!({"model": "m", "query": "q".repeat(bytes), "documents": vec!["d"; documents]}).to_string();
            RerankRequest::from_body(&Body::new(&body)).map(|request| request.documents.len())
        };
        assert_eq!(rerank(4096, 2048), Ok(2048));
        assert_eq!(rerank(4097, 2048).unwrap_err().param.as_deref(), Some("query"));
    }

    #[test]
    fn what_is_wrong_is_refused_by_name() {
        for (extra, param) in [
            (json!({}), "input"),
            (json!({"input": []}), "input"),
            (json!({"input": vec!["a"; MAX_TEXTS + 1]}), "input"),
            (json!({"input": [[-1]]}), "input"),
            (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
            (json!({"input": "a", "dimensions": -1}), "dimensions"),
            (json!({"input": "a", "frobnicate": 1}), "frobnicate"),
        ] {
            assert_eq!(embeddings(extra.clone()).unwrap_err().param.as_deref(), Some(param));
        }
    }
}
