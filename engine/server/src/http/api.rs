//! The API port: OpenAI's routes over one engine.

use super::auth;
use super::error::ApiError;
use super::{chat, completions, cors, lenient, models, native, openapi, page, request_name, tgi};
use crate::answer::{Answer, PromptShare};
use crate::cache_scopes::CacheScopes;
use crate::config::Patience;
use crate::driver::{EngineHandle, Event, NotAccepted, RequestStream};
use crate::generation::{Choice, Client, Generation};
use crate::lifecycle::{Lifecycle, Stage};
use crate::monitor::Monitor;
use crate::structure::Structures;
use crate::tenants::{Lease, Tenants};
use crate::text::chat_template::ChatTemplate;
use crate::text::tokenizer::Tokenizer;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, Method, StatusCode, Uri};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use std::any::Any;
use std::sync::Arc;
use tower::util::option_layer;
use tower_http::catch_panic::CatchPanicLayer;
use windlass_engine_api::error::FieldError;
use windlass_engine_api::generation::GenerationFields;
use windlass_engine_core::request::{RejectReason, TokenId};

/// What load balancers ask.
const HEALTH: &str = "/health";
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
    /// The model's chat template, if it has one.
    pub template: Option<ChatTemplate>,
    /// Names the API answers to.
    pub served_names: Vec<String>,
    /// Longest sequence.
    pub max_model_tokens: u32,
    /// Seconds since 1970 when the server started.
    pub created: u64,
    /// Forms of answers.
    pub structures: Arc<Structures>,
    /// Who finds whose prompts in the cache.
    pub cache_scopes: CacheScopes,
    /// Who may ask; without any tenants, everybody.
    pub tenants: Option<Tenants>,
    /// Where refusals are counted.
    pub monitor: Arc<Monitor>,
    /// Where the server is in its life.
    pub lifecycle: Lifecycle,
    /// Origins whose pages may ask; none by default.
    pub allowed_origins: Vec<HeaderValue>,
    /// Fields that nobody knows are taken out of requests instead of refused.
    pub ignore_unknown_fields: bool,
    /// How patient it is with clients.
    pub patience: Patience,
}

/// The routes.
pub fn router(api: Arc<Api>) -> Router {
    Router::new()
        .route(HEALTH, get(async || StatusCode::OK))
        .route("/v1/models", get(models::list))
        .route("/v1/models/{*name}", get(models::show))
        .route("/v1/chat/completions", post(chat::create))
        .route("/v1/completions", post(completions::create))
        .route(PAGE, get(page::show))
        .route(OPENAPI, get(openapi::show))
        .merge(native::routes())
        .merge(tgi::routes())
        .fallback(no_such_route)
        .method_not_allowed_fallback(wrong_method)
        .layer(middleware::from_fn_with_state(api.clone(), auth::authenticate))
        .layer(option_layer((!api.allowed_origins.is_empty()).then(|| cors::layer(&api.allowed_origins))))
        .layer(middleware::from_fn_with_state(api.clone(), refuse_when_closed))
        .layer(CatchPanicLayer::custom(panicked))
        .layer(middleware::from_fn(request_name::name))
        .with_state(api)
}

async fn no_such_route(method: Method, uri: Uri) -> ApiError {
    ApiError::new(StatusCode::NOT_FOUND, "not_found", format!("there is no {method} {}", uri.path()))
}

async fn wrong_method(method: Method, uri: Uri) -> ApiError {
    let message = format!("{method} is not the way to use {}", uri.path());
    ApiError::new(StatusCode::METHOD_NOT_ALLOWED, "method_not_allowed", message)
}

async fn refuse_when_closed(State(api): State<Arc<Api>>, request: Request, next: Next) -> Response {
    match api.lifecycle.stage() {
        Stage::Refusing => ApiError::shutting_down().into_response(),
        _ => next.run(request).await,
    }
}

/// A defect ends one request; its text goes to the log by the panic hook, not to the client.
fn panicked(_: Box<dyn Any + Send>) -> Response {
    let message = "the server failed on this request";
    ApiError::new(StatusCode::INTERNAL_SERVER_ERROR, "internal_error", message).into_response()
}

/// Whether a request needs no key: it learns nothing of the model, and nothing is computed for it.
pub fn is_open(method: &Method, path: &str) -> bool {
    path == HEALTH || (*method == Method::GET && [PAGE, OPENAPI].contains(&path))
}

impl Api {
    /// Reads a request body by `parse`, which is strict; `--unknown-fields` may make it less so.
    pub fn read<T>(&self, body: &[u8], parse: fn(&[u8]) -> Result<T, FieldError>) -> Result<T, ApiError> {
        Ok(if self.ignore_unknown_fields { lenient::read(body, parse) } else { parse(body) }?)
    }

    /// The model that a request names, or the first one served where it need not name any.
    pub fn model_or_first(&self, model: Option<String>) -> Result<String, ApiError> {
        let model = model.unwrap_or_else(|| self.served_names[0].clone());
        self.check_model(&model)?;
        Ok(model)
    }

    /// Refuses a model that is not served.
    pub fn check_model(&self, model: &str) -> Result<(), ApiError> {
        if self.served_names.iter().any(|name| name == model) {
            return Ok(());
        }
        let message = format!("the model {model:?} is not served here; served are {:?}", self.served_names);
        Err(ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message).param("model"))
    }

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
        let longest = self.max_model_tokens as usize * self.tokenizer.vocabulary().longest_piece();
        if text.len() <= longest {
            return Ok(());
        }
        let limit = self.max_model_tokens;
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

    /// Submits a prompt, once for each answer, and waits until all are admitted. Where one is refused, the others end.
    /// `default_max_tokens` counts where the client gave no limit and is cut to what fits; `field` holds the prompt.
    pub async fn submit(
        &self,
        lease: &Lease,
        prompt: Vec<TokenId>,
        generation: &Generation,
        default_max_tokens: u32,
        field: &str,
    ) -> Result<Vec<Answer>, ApiError> {
        let prompt = generation.cut(prompt);
        let room = self.room(&prompt, generation).map_err(|reason| ApiError::rejected(&reason, 0, field))?;
        let most = default_max_tokens.min(room);
        let streams = self.submit_choices(lease, &prompt, generation, most)?;
        let mut answers = Vec::with_capacity(streams.len());
        for mut stream in streams {
            admitted(&mut stream, field).await?;
            let share = self.share(&prompt, generation, answers.is_empty());
            lease.spend(share.tokens);
            answers.push(Answer::new(stream, self.tokenizer.clone(), generation, share, lease.clone()));
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
        let mut answers = self.submit(lease, prompt, generation, default_max_tokens, field).await?;
        answers.pop().ok_or_else(|| NotAccepted::Gone.into())
    }

    /// Most tokens that may follow a prompt.
    fn room(&self, prompt: &[TokenId], generation: &Generation) -> Result<u32, RejectReason> {
        let prompt_tokens = prompt.len() as u32;
        match self.max_model_tokens.checked_sub(prompt_tokens) {
            Some(0) if generation.max_tokens == Some(0) => Ok(0),
            Some(room) if room > 0 => Ok(room),
            _ => {
                let max_tokens = generation.max_tokens.unwrap_or(1);
                Err(RejectReason::TooLong { prompt_tokens, max_tokens, limit_tokens: self.max_model_tokens })
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
        Some(Event::Update(_)) | None => Err(NotAccepted::Gone.into()),
    }
}
