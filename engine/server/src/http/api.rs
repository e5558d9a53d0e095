//! The API port: every dialect's routes over one engine.

use super::door::{Door, HEALTH};
use super::error::ApiError;
use super::{native, openai, openapi, page, tgi};
use crate::answer::{Answer, PromptShare, Siblings};
use crate::cache_scopes::CacheScopes;
use crate::dialogue::Dialogue;
use crate::driver::{EngineHandle, Event, NotAccepted, RequestStream};
use crate::generation::{Choice, Client, Generation};
use crate::structure::Structures;
use crate::tenants::Lease;
use crate::text::tokenizer::Tokenizer;
use axum::Router;
use axum::extract::FromRef;
use axum::http::{Method, StatusCode};
use axum::routing::get;
use std::sync::Arc;
use windlass_engine_api::generation::GenerationFields;
use windlass_engine_core::engine::QueueLimits;
use windlass_engine_core::request::{RejectReason, TokenId};

/// A page for people, which asks for a key where it needs one.
const PAGE: &str = "/";
/// The description of this API.
const OPENAPI: &str = "/openapi.json";

/// Texts up to this are tokenized in place, longer ones on a thread that may block.
const INLINE_TEXT_BYTES: usize = 16 << 10;

/// What every route needs.
pub struct Api {
    /// The engine.
    pub engine: EngineHandle,
    /// The model's tokenizer.
    pub tokenizer: Arc<Tokenizer>,
    /// How the model converses.
    pub dialogue: Dialogue,
    /// What every request passes.
    pub door: Door,
    /// Forms of answers.
    pub structures: Arc<Structures>,
    /// Who finds whose prompts in the cache.
    pub cache_scopes: CacheScopes,
    /// How much may wait for the engine.
    pub queue: QueueLimits,
    /// Most requests in a step of the engine.
    pub places: u32,
}

impl FromRef<Arc<Api>> for Door {
    fn from_ref(api: &Arc<Api>) -> Door {
        api.door.clone()
    }
}

/// The routes.
pub fn router(api: Arc<Api>) -> Router {
    let door = api.door.clone();
    let routes = Router::new()
        .route(PAGE, get(page::show))
        .route(OPENAPI, get(openapi::show))
        .merge(openai::routes())
        .merge(native::routes())
        .merge(tgi::routes())
        .with_state(api);
    door.guard(routes)
}

/// Whether a request needs no key: it learns nothing of the model, and nothing is computed for it.
pub fn is_open(method: &Method, path: &str) -> bool {
    path == HEALTH || (*method == Method::GET && [PAGE, OPENAPI].contains(&path))
}

impl Api {
    /// Checks what the client wrote about generating.
    pub async fn generation(&self, fields: GenerationFields) -> Result<Generation, ApiError> {
        let structure = fields.structure.clone();
        let generation = Generation::validate(fields, &self.tokenizer, rand::random())?;
        let grammar = match structure {
            Some(structure) => Some(self.structures.compile(structure).await?),
            None => None,
        };
        Ok(generation.with_grammar(grammar))
    }

    /// Refuses a text that cannot fit, before time is spent on tokenizing it. `field` holds the prompt.
    pub fn check_length(&self, text: &str, field: &str) -> Result<(), ApiError> {
        if text.len() <= self.door.limits.prompt_bytes {
            return Ok(());
        }
        let limit = self.door.max_model_tokens;
        let message = format!("the prompt has {} bytes, more than {limit} tokens can hold; shorten it", text.len());
        Err(ApiError::bad_request("context_length_exceeded", message).param(field))
    }

    /// Tokenizes without holding up other requests.
    pub async fn tokenize(
        self: &Arc<Api>,
        text: String,
        encode: fn(&Tokenizer, &str) -> Result<Vec<TokenId>, crate::text::tokenizer::EncodeError>,
    ) -> Result<Vec<TokenId>, ApiError> {
        if text.len() <= INLINE_TEXT_BYTES {
            return Ok(encode(&self.tokenizer, &text)?);
        }
        let api = self.clone();
        let encoded = tokio::task::spawn_blocking(move || encode(&api.tokenizer, &text)).await;
        let failed = |_| ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", "the tokenizer failed");
        Ok(encoded.map_err(failed)??)
    }

    /// Submits prompts, each once for each of its answers, and waits until all are admitted. Where one is refused, the
    /// others end. `default_max_tokens` counts where the client gave no limit and is cut to what fits; `field` holds the
    /// prompts.
    pub async fn submit(
        &self,
        lease: &Lease,
        prompts: Vec<Vec<TokenId>>,
        generation: &Generation,
        default_max_tokens: u32,
        field: &str,
    ) -> Result<Vec<Answer>, ApiError> {
        let prompts: Vec<Vec<TokenId>> = prompts.into_iter().map(|prompt| generation.cut(prompt)).collect();
        let (requests, tokens) = generation.backlog(&prompts);
        let together = self.queue.admit_together(requests, tokens, self.places);
        together.map_err(|reason| ApiError::rejected(&reason, 0, field))?;
        lease
            .answers(prompts.len() as u32 * generation.choices.generated)
            .map_err(|over| self.door.over_limit(over))?;
        let mut answers = Vec::with_capacity(requests as usize);
        for prompt in prompts {
            answers.extend(self.submit_prompt(lease, prompt, generation, default_max_tokens, field).await?);
        }
        Ok(answers)
    }

    async fn submit_prompt(
        &self,
        lease: &Lease,
        prompt: Vec<TokenId>,
        generation: &Generation,
        default_max_tokens: u32,
        field: &str,
    ) -> Result<Vec<Answer>, ApiError> {
        let room = self.room(&prompt, generation).map_err(|reason| ApiError::rejected(&reason, 0, field))?;
        let most = default_max_tokens.min(room);
        self.door.text_log.prompt(lease.request(), || self.tokenizer.decode(&prompt));
        let streams = self.submit_choices(lease, &prompt, generation, most)?;
        self.door.monitor.asked(generation.choices.generated, generation.max_tokens);
        let siblings = Siblings::new(self.door.monitor.clone());
        let mut answers = Vec::with_capacity(streams.len());
        for mut stream in streams {
            admitted(&mut stream, field).await?;
            let share = self.share(&prompt, generation, answers.is_empty());
            lease.spend(share.tokens);
            let (tokenizer, written) = (self.tokenizer.clone(), self.door.text_log.answer());
            let answer = Answer::new(stream, tokenizer, generation, share, lease.clone(), siblings.clone());
            answers.push(answer.written_into(written));
        }
        Ok(answers)
    }

    /// The same for a dialect whose requests have one answer.
    pub async fn submit_one(
        &self,
        lease: &Lease,
        prompt: Vec<TokenId>,
        generation: &Generation,
        default_max_tokens: u32,
        field: &str,
    ) -> Result<Answer, ApiError> {
        let mut answers = self.submit(lease, vec![prompt], generation, default_max_tokens, field).await?;
        answers.pop().ok_or_else(|| NotAccepted::Gone.into())
    }

    /// Most tokens that may follow a prompt.
    fn room(&self, prompt: &[TokenId], generation: &Generation) -> Result<u32, RejectReason> {
        let prompt_tokens = prompt.len() as u32;
        match self.door.max_model_tokens.checked_sub(prompt_tokens) {
            Some(0) if generation.max_tokens == Some(0) => Ok(0),
            Some(room) if room > 0 => Ok(room),
            _ => {
                let max_tokens = generation.max_tokens.unwrap_or(1);
                Err(RejectReason::TooLong { prompt_tokens, max_tokens, limit_tokens: self.door.max_model_tokens })
            }
        }
    }

    /// One request for each answer; the later ones share the first one's prompt.
    fn submit_choices(
        &self,
        lease: &Lease,
        prompt: &[TokenId],
        generation: &Generation,
        most: u32,
    ) -> Result<Vec<RequestStream>, NotAccepted> {
        let ends = &self.tokenizer.special().ends;
        let tenant = lease.tenant();
        let client = Client { tenant, cache_scope: self.cache_scopes.of(tenant, generation.cache_salt()) };
        let mut leader = None;
        let submit = |index| {
            self.engine.submit(|id| {
                let choice = Choice { index, leader };
                leader.get_or_insert(id);
                generation.request(id, client, prompt.to_vec(), most, ends, choice)
            })
        };
        (0..generation.choices.generated).map(submit).collect()
    }

    /// What an answer has of its prompt, which counts for the first one only.
    fn share(&self, prompt: &[TokenId], generation: &Generation, first: bool) -> PromptShare {
        PromptShare {
            first: prompt.first().copied().unwrap_or_default(),
            tokens: if first { prompt.len() as u32 } else { 0 },
            text: if generation.shows.prompt { self.tokenizer.decode(prompt) } else { String::new() },
        }
    }
}

/// Waits until a request is admitted; `field` holds the prompt.
async fn admitted(stream: &mut RequestStream, field: &str) -> Result<(), ApiError> {
    match stream.next().await {
        Some(Event::Admitted) => Ok(()),
        Some(Event::Rejected { reason, retry_after_seconds }) => {
            Err(ApiError::rejected(&reason, retry_after_seconds, field))
        }
        Some(Event::Update(_) | Event::GivenUp(_)) | None => Err(NotAccepted::Gone.into()),
    }
}
