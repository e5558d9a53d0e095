//! `/metrics` for those alone whom the cluster lets read it: a bearer token says who asks (TokenReview), and the cluster
//! whether they may get the path (SubjectAccessReview). An option: nothing of it runs without its flags.

use crate::config::GuardedMetricsConfig;
use crate::door::{Clients, Door};
use anyhow::Context;
use axum::Router;
use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, RETRY_AFTER, WWW_AUTHENTICATE};
use axum::http::{HeaderMap, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use k8s_openapi::api::authentication::v1::{TokenReview, TokenReviewSpec, UserInfo};
use k8s_openapi::api::authorization::v1::{NonResourceAttributes, SubjectAccessReview, SubjectAccessReviewSpec};
use kube::api::PostParams;
use kube::{Api, Client};
use sha2::{Digest, Sha256};
use std::collections::HashMap;
use std::convert::Infallible;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// How long a verdict counts: a reader who comes every half minute costs two reviews a minute.
const VERDICT_LIFE: Duration = Duration::from_secs(60);
/// Tokens reviewed a second, at most and on average: those of strangers cost the API server no more.
const REVIEWS: f64 = 5.0;
/// Verdicts kept at once. Tokens beyond are reviewed each time.
const VERDICTS: usize = 64;
/// Longest token that is reviewed, bytes.
const MAX_TOKEN_BYTES: usize = 16 << 10;
/// What is asked for, as roles name it.
const PATH: &str = "/metrics";

/// Serves `exposition` behind the guard, as long as it is polled.
///
/// # Errors
/// The port or its certificate cannot be had.
pub async fn serve(client: Client, config: &GuardedMetricsConfig, exposition: Router) -> anyhow::Result<Infallible> {
    let door = Door::open(config.port, &config.certificates, Clients::Anybody).await.context("guarded metrics")?;
    tracing::info!(address = %door.address(), "serving metrics to those who may read them");
    door.serve(guarded(client, exposition)).await.context("guarded metrics")
}

fn guarded(client: Client, exposition: Router) -> Router {
    let guard = Guard { client, verdicts: Arc::default(), budget: Arc::default() };
    exposition.layer(middleware::from_fn_with_state(guard, admit))
}

#[derive(Clone)]
struct Guard {
    client: Client,
    verdicts: Arc<Mutex<HashMap<TokenHash, (Instant, Verdict)>>>,
    budget: Arc<Mutex<Budget>>,
}

/// Reviews that may be asked for: a second's worth, which fills up again.
#[derive(Default)]
struct Budget {
    /// When the last one was taken, and what was left then.
    last: Option<(Instant, f64)>,
}

impl Budget {
    /// Takes one, if there is one.
    fn take(&mut self, now: Instant) -> bool {
        let left = self.last.map_or(REVIEWS, |(then, left)| left + REVIEWS * now.duration_since(then).as_secs_f64());
        let left = left.min(REVIEWS);
        let may = left >= 1.0;
        if may {
            self.last = Some((now, left - 1.0));
        }
        may
    }
}

/// Tokens themselves are not kept.
type TokenHash = [u8; 32];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Verdict {
    Allowed,
    /// Known, but it may not.
    Forbidden,
    /// The cluster does not know the token.
    Unknown,
    /// The cluster was not asked, as it has been asked too often.
    Unreviewed,
}

async fn admit(State(guard): State<Guard>, request: Request, next: Next) -> Response {
    let Some(token) = bearer(request.headers()) else { return unauthorized("a bearer token is needed") };
    match guard.verdict(token).await {
        Ok(Verdict::Allowed) => next.run(request).await,
        Ok(Verdict::Forbidden) => (StatusCode::FORBIDDEN, format!("no role allows to get {PATH}\n")).into_response(),
        Ok(Verdict::Unreviewed) => {
            let why = "too many tokens are to be reviewed; try again in a second\n";
            (StatusCode::TOO_MANY_REQUESTS, [(RETRY_AFTER, "1")], why).into_response()
        }
        Ok(Verdict::Unknown) => unauthorized("the cluster does not know this token"),
        Err(error) => {
            tracing::warn!(error = %crate::error::chain(&error), "who reads metrics cannot be reviewed");
            (StatusCode::SERVICE_UNAVAILABLE, "the API server does not answer\n").into_response()
        }
    }
}

fn unauthorized(why: &str) -> Response {
    (StatusCode::UNAUTHORIZED, [(WWW_AUTHENTICATE, "Bearer")], format!("{why}\n")).into_response()
}

fn bearer(headers: &HeaderMap) -> Option<&str> {
    let (scheme, token) = headers.get(AUTHORIZATION)?.to_str().ok()?.split_once(' ')?;
    let is_token = !token.is_empty() && token.len() <= MAX_TOKEN_BYTES;
    (scheme.eq_ignore_ascii_case("Bearer") && is_token).then_some(token)
}

impl Guard {
    async fn verdict(&self, token: &str) -> Result<Verdict, kube::Error> {
        let hash: TokenHash = Sha256::digest(token).into();
        if let Some(known) = self.known(&hash, Instant::now()) {
            return Ok(known);
        }
        if !self.may_review(&hash, Instant::now()) {
            return Ok(Verdict::Unreviewed);
        }
        let verdict = self.reviewed(token).await?;
        self.keep(hash, verdict, Instant::now());
        Ok(verdict)
    }

    /// Whether the cluster may be asked. Who was let in before is not held up by strangers.
    fn may_review(&self, hash: &TokenHash, now: Instant) -> bool {
        let verdicts = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner);
        let was_allowed = verdicts.get(hash).is_some_and(|(_, verdict)| *verdict == Verdict::Allowed);
        was_allowed || self.budget.lock().unwrap_or_else(PoisonError::into_inner).take(now)
    }

    async fn reviewed(&self, token: &str) -> Result<Verdict, kube::Error> {
        let Some(user) = self.authenticated(token).await? else { return Ok(Verdict::Unknown) };
        Ok(if self.is_allowed(user).await? { Verdict::Allowed } else { Verdict::Forbidden })
    }

    fn known(&self, hash: &TokenHash, now: Instant) -> Option<Verdict> {
        let verdicts = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner);
        verdicts.get(hash).filter(|(at, _)| now.duration_since(*at) < VERDICT_LIFE).map(|(_, verdict)| *verdict)
    }

    fn keep(&self, hash: TokenHash, verdict: Verdict, now: Instant) {
        let mut verdicts = self.verdicts.lock().unwrap_or_else(PoisonError::into_inner);
        // Who was let in is remembered for longer, so as to be reviewed first.
        let life = |verdict| if verdict == Verdict::Allowed { 10 * VERDICT_LIFE } else { VERDICT_LIFE };
        verdicts.retain(|_, (at, verdict)| now.duration_since(*at) < life(*verdict));
        if verdicts.len() < VERDICTS || verdicts.contains_key(&hash) {
            verdicts.insert(hash, (now, verdict));
        }
    }

    async fn authenticated(&self, token: &str) -> Result<Option<UserInfo>, kube::Error> {
        let spec = TokenReviewSpec { token: Some(token.to_owned()), ..TokenReviewSpec::default() };
        let review = TokenReview { spec, ..TokenReview::default() };
        let answer = Api::<TokenReview>::all(self.client.clone()).create(&PostParams::default(), &review).await?;
        let status = answer.status.filter(|status| status.authenticated == Some(true));
        Ok(status.and_then(|status| status.user))
    }

    async fn is_allowed(&self, user: UserInfo) -> Result<bool, kube::Error> {
        let asked = NonResourceAttributes { path: Some(PATH.to_owned()), verb: Some("get".to_owned()) };
        let spec = SubjectAccessReviewSpec {
            user: user.username,
            groups: user.groups,
            uid: user.uid,
            extra: user.extra,
            non_resource_attributes: Some(asked),
            resource_attributes: None,
        };
        let review = SubjectAccessReview { spec, ..SubjectAccessReview::default() };
        let api = Api::<SubjectAccessReview>::all(self.client.clone());
        let answer = api.create(&PostParams::default(), &review).await?;
        Ok(answer.status.is_some_and(|status| status.allowed))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::Json;
    use axum::body::Body;
    use axum::routing::{get, post};
    use serde_json::{Value, json};
    use std::sync::atomic::{AtomicUsize, Ordering};
    use tower::ServiceExt;

    /// A cluster that knows the tokens `reader` and `stranger`, and lets the first read metrics.
    fn cluster(reviews: Arc<AtomicUsize>) -> Client {
        let token_review = move |Json(review): Json<Value>| async move {
            reviews.fetch_add(1, Ordering::Relaxed);
            let token = review["spec"]["token"].as_str().unwrap_or_default().to_owned();
            let is_known = ["reader", "stranger"].contains(&token.as_str());
            Json(json!({"spec": {}, "status": {"authenticated": is_known, "user": {"username": token}}}))
        };
        let access_review = |Json(review): Json<Value>| async move {
            let asked = &review["spec"]["nonResourceAttributes"];
            let is_asked = *asked == json!({"path": "/metrics", "verb": "get"});
            Json(json!({"spec": {}, "status": {"allowed": is_asked && review["spec"]["user"] == "reader"}}))
        };
        let api = Router::new()
            .route("/apis/authentication.k8s.io/v1/tokenreviews", post(token_review))
            .route("/apis/authorization.k8s.io/v1/subjectaccessreviews", post(access_review));
        Client::new(api, "default")
    }

    async fn ask(metrics: &Router, authorization: Option<&str>) -> u16 {
        let request = Request::get("/metrics");
        let request = authorization.into_iter().fold(request, |request, text| request.header(AUTHORIZATION, text));
        let answer = metrics.clone().oneshot(request.body(Body::empty()).expect("a request")).await.expect("an answer");
        answer.status().as_u16()
    }

    fn metrics(client: Client) -> Router {
        guarded(client, Router::new().route("/metrics", get(|| async { "up 1\n" })))
    }

    #[tokio::test]
    async fn who_is_known_and_allowed_reads() {
        let metrics = metrics(cluster(Arc::default()));
        for (authorization, status) in [
            (None, 401),
            (Some("Basic cmVhZGVyOg=="), 401),
            (Some("Bearer "), 401),
            (Some("Bearer nobody"), 401),
            (Some("Bearer stranger"), 403),
            (Some("Bearer reader"), 200),
        ] {
            assert_eq!(ask(&metrics, authorization).await, status, "{authorization:?}");
        }
    }

    #[tokio::test]
    async fn a_verdict_is_asked_for_once_a_minute() {
        let reviews = Arc::new(AtomicUsize::new(0));
        let metrics = metrics(cluster(reviews.clone()));
        for _ in 0..3 {
            assert_eq!(ask(&metrics, Some("Bearer reader")).await, 200);
        }
        assert_eq!(reviews.load(Ordering::Relaxed), 1);
    }

    #[tokio::test]
    async fn a_verdict_runs_out_and_no_number_of_tokens_fills_the_memory() {
        let guard = Guard { client: cluster(Arc::default()), verdicts: Arc::default(), budget: Arc::default() };
        let start = Instant::now();
        (0..=255).for_each(|byte| guard.keep([byte; 32], Verdict::Allowed, start));
        assert_eq!(guard.verdicts.lock().expect("unpoisoned").len(), VERDICTS);
        assert_eq!(guard.known(&[1; 32], start), Some(Verdict::Allowed));
        assert_eq!(guard.known(&[1; 32], start + VERDICT_LIFE), None);
    }

    #[tokio::test]
    async fn strangers_cost_the_api_server_little_and_hold_up_nobody_who_was_let_in() {
        let reviews = Arc::new(AtomicUsize::new(0));
        let metrics = metrics(cluster(reviews.clone()));
        assert_eq!(ask(&metrics, Some("Bearer reader")).await, 200);
        let mut statuses = Vec::new();
        for token in 0..50 {
            statuses.push(ask(&metrics, Some(&format!("Bearer nobody-{token}"))).await);
        }
        assert!(statuses.contains(&401) && statuses.contains(&429), "{statuses:?}");
        assert!(reviews.load(Ordering::Relaxed) < 30, "{reviews:?}");
        let guard = Guard { client: cluster(Arc::default()), verdicts: Arc::default(), budget: Arc::default() };
        let start = Instant::now();
        guard.keep([1; 32], Verdict::Allowed, start);
        while guard.may_review(&[2; 32], start) {}
        assert!(guard.may_review(&[1; 32], start + VERDICT_LIFE) && guard.may_review(&[2; 32], start + VERDICT_LIFE));
    }

    #[tokio::test]
    async fn while_the_api_server_is_away_nobody_reads() {
        let away = Client::new(Router::new().fallback(|| async { StatusCode::INTERNAL_SERVER_ERROR }), "default");
        assert_eq!(ask(&metrics(away), Some("Bearer reader")).await, 503);
    }
}
