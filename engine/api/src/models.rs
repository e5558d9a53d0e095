//! `/v1/models`.

use serde::{Deserialize, Serialize};

/// Every name the server answers to.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// Always `list`.
    pub object: String,
    /// One entry per served name.
    pub data: Vec<Model>,
}

/// One served name.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Model {
    /// The name requests give as `model`.
    pub id: String,
    /// Always `model`.
    pub object: String,
    /// Seconds since 1970 when the server started.
    pub created: u64,
    /// Always `windlass`.
    pub owned_by: String,
    /// Longest sequence in tokens, prompt and answer together (vLLM's extension).
    pub max_model_len: u32,
}

impl ModelList {
    /// A list of models.
    pub fn new(data: Vec<Model>) -> ModelList {
        ModelList { object: "list".to_owned(), data }
    }
}

impl Model {
    /// One entry.
    pub fn new(id: &str, created: u64, max_model_len: u32) -> Model {
        Model { id: id.to_owned(), object: "model".to_owned(), created, owned_by: "windlass".to_owned(), max_model_len }
    }
}
