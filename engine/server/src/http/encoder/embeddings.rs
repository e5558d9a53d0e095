//! `/v1/embeddings`.

use super::{EncoderApi, shortened};
use crate::http::auth::Admitted;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::respond::Head;
use axum::Json;
use axum::extract::State;
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use std::sync::Arc;
use windlass_engine_api::completions::Prompt;
use windlass_engine_api::encoders::{Embedding, Embeddings, EmbeddingsRequest, EncoderUsage, Encoding, Vector};
use windlass_engine_api::error::FieldError;
use windlass_engine_model::{EncoderInput, Purpose};

/// A vector for each text.
pub async fn create(
    State(api): State<Arc<EncoderApi>>,
    Admitted(lease): Admitted,
    body: JsonBody,
) -> Result<Json<Embeddings>, ApiError> {
    let (request, room) = api.door.read(body, EmbeddingsRequest::from_body).await?;
    api.door.check_model(&request.model)?;
    let dimensions = dimensions(&api, request.dimensions)?;
    let cut = api.cut(request.truncate_prompt_tokens)?;
    let texts = read(&api, request.inputs, cut).await?;
    drop(room);
    let usage = EncoderUsage::new(texts.iter().map(|text| text.len() as u32).sum());
    let vectors = api.run(&lease, "input", texts).await?;
    let embedding = |(index, vector): (u32, Vec<f32>)| Embedding {
        index,
        object: "embedding".to_owned(),
        embedding: written(cut_to(vector, dimensions), request.encoding),
    };
    let data = (0..).zip(vectors).map(embedding).collect();
    let Head { id, created, model, .. } = Head::new("embd", &lease, &api.door, request.model);
    Ok(Json(Embeddings { id, object: "list".to_owned(), created, model, data, usage }))
}

async fn read(api: &Arc<EncoderApi>, inputs: Vec<Prompt>, cut: Option<usize>) -> Result<Vec<EncoderInput>, ApiError> {
    let bytes = inputs.iter().map(|input| if let Prompt::Text(text) = input { text.len() } else { 0 }).sum();
    let encode = move |text: &crate::text::encoder_text::EncoderText| {
        let one = |input| match input {
            Prompt::Text(one) => text.one(&one).map(|text| shortened(text, cut)),
            Prompt::Tokens(tokens) => Ok(shortened(EncoderInput { tokens, types: Vec::new() }, cut)),
        };
        inputs.into_iter().map(one).collect()
    };
    api.tokenize("input", bytes, encode).await
}

/// How many numbers are wanted, if fewer than there are.
fn dimensions(api: &EncoderApi, asked: Option<u32>) -> Result<Option<usize>, FieldError> {
    let Purpose::Vectors { dimensions: own } = api.encoder.shape().purpose else {
        let message = "this model scores pairs of texts and makes no vectors; use /v1/score or /v1/rerank";
        return Err(FieldError::invalid("model", message));
    };
    match asked {
        None => Ok(None),
        Some(asked) if asked == own => Ok(None),
        Some(asked) if api.cuttable && (1..own).contains(&asked) => Ok(Some(asked as usize)),
        Some(asked) => {
            let right = if api.cuttable { format!("from 1 to {own}") } else { format!("{own}, all of this model's") };
            Err(FieldError::invalid("dimensions", format!("`dimensions` is {asked}; it must be {right}")))
        }
    }
}

/// The first numbers, as a vector of length 1.
fn cut_to(mut vector: Vec<f32>, dimensions: Option<usize>) -> Vec<f32> {
    if let Some(dimensions) = dimensions {
        vector.truncate(dimensions);
        let length = vector.iter().map(|x| x * x).sum::<f32>().sqrt().max(f32::MIN_POSITIVE);
        vector.iter_mut().for_each(|x| *x /= length);
    }
    vector
}

fn written(vector: Vec<f32>, encoding: Encoding) -> Vector {
    match encoding {
        Encoding::Float => Vector::Float(vector),
        Encoding::Base64 => {
            let bytes: Vec<u8> = vector.iter().flat_map(|x| x.to_le_bytes()).collect();
            Vector::Base64(STANDARD.encode(bytes))
        }
    }
}
