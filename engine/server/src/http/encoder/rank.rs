//! `/v1/score` and `/v1/rerank`: by a model that reads two texts together, or by the angle between two vectors.

use super::{EncoderApi, cosine, shortened, total_bytes};
use crate::http::auth::Admitted;
use crate::http::body::JsonBody;
use crate::http::error::ApiError;
use crate::http::respond::Head;
use crate::tenants::Lease;
use axum::Json;
use axum::extract::State;
use std::sync::Arc;
use windlass_engine_api::encoders::{
    EncoderUsage, Ranked, RankedText, Ranking, RerankRequest, Score, ScoreRequest, Scores,
};
use windlass_engine_model::{EncoderInput, Purpose};

/// A score for each pair.
pub async fn score(
    State(api): State<Arc<EncoderApi>>,
    Admitted(lease): Admitted,
    body: JsonBody,
) -> Result<Json<Scores>, ApiError> {
    let (request, _room) = api.door.read(body, ScoreRequest::from_body).await?;
    api.door.check_model(&request.model)?;
    let cut = api.cut(request.truncate_prompt_tokens)?;
    let (scores, usage) = scores(&api, &lease, "text_2", request.pairs, cut).await?;
    let score = |(index, score)| Score { index, object: "score".to_owned(), score };
    let data = (0..).zip(scores).map(score).collect();
    let Head { id, created, model, .. } = Head::new("score", &lease, &api.door, request.model);
    Ok(Json(Scores { id, object: "list".to_owned(), created, model, data, usage }))
}

/// Documents, the best first.
pub async fn rerank(
    State(api): State<Arc<EncoderApi>>,
    Admitted(lease): Admitted,
    body: JsonBody,
) -> Result<Json<Ranking>, ApiError> {
    let (request, _room) = api.door.read(body, RerankRequest::from_body).await?;
    api.door.check_model(&request.model)?;
    let cut = api.cut(request.truncate_prompt_tokens)?;
    let pairs = request.documents.iter().map(|document| (request.query.clone(), document.clone())).collect();
    let (scores, usage) = scores(&api, &lease, "documents", pairs, cut).await?;
    let mut results: Vec<Ranked> =
        (0..).zip(scores).map(|(index, relevance_score)| Ranked { index, document: None, relevance_score }).collect();
    results.sort_by(|a, b| b.relevance_score.total_cmp(&a.relevance_score));
    results.truncate(request.top_n.map_or(usize::MAX, |most| most as usize));
    if request.return_documents {
        for ranked in &mut results {
            ranked.document = Some(RankedText { text: request.documents[ranked.index as usize].clone() });
        }
    }
    let Head { id, model, .. } = Head::new("rerank", &lease, &api.door, request.model);
    Ok(Json(Ranking { id, model, usage, results }))
}

/// Scores of pairs, whichever way the model gives them.
async fn scores(
    api: &Arc<EncoderApi>,
    lease: &Lease,
    field: &'static str,
    pairs: Vec<(String, String)>,
    cut: Option<usize>,
) -> Result<(Vec<f32>, EncoderUsage), ApiError> {
    let texts = match api.encoder.shape().purpose {
        Purpose::Scores => together(api, field, pairs, cut).await?,
        Purpose::Vectors { .. } => apart(api, field, pairs, cut).await?,
    };
    let usage = EncoderUsage::new(texts.iter().map(|text| text.len() as u32).sum());
    let results = api.run(lease, field, texts).await?;
    let scores = match api.encoder.shape().purpose {
        Purpose::Scores => results.iter().map(|score| score[0]).collect(),
        Purpose::Vectors { .. } => results.chunks(2).map(|pair| cosine(&pair[0], &pair[1])).collect(),
    };
    Ok((scores, usage))
}

async fn together(
    api: &Arc<EncoderApi>,
    field: &'static str,
    pairs: Vec<(String, String)>,
    cut: Option<usize>,
) -> Result<Vec<EncoderInput>, ApiError> {
    let bytes = total_bytes(pairs.iter().flat_map(|(a, b)| [a, b]));
    let encode = move |text: &crate::text::encoder_text::EncoderText| {
        pairs.iter().map(|(a, b)| text.pair(a, b).map(|pair| shortened(pair, cut))).collect()
    };
    api.tokenize(field, bytes, encode).await
}

/// The two texts of each pair, one after the other.
async fn apart(
    api: &Arc<EncoderApi>,
    field: &'static str,
    pairs: Vec<(String, String)>,
    cut: Option<usize>,
) -> Result<Vec<EncoderInput>, ApiError> {
    let bytes = total_bytes(pairs.iter().flat_map(|(a, b)| [a, b]));
    let encode = move |text: &crate::text::encoder_text::EncoderText| {
        let both = pairs.iter().flat_map(|(a, b)| [a, b]);
        both.map(|one| text.one(one).map(|text| shortened(text, cut))).collect()
    };
    api.tokenize(field, bytes, encode).await
}
