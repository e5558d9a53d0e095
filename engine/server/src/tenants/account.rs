//! One tenant's use of this replica, counted against its limits.

use super::bucket::Bucket;
use super::limits::Limits;
use crate::traces::{Answered, RequestSpan};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use windlass_engine_core::request::Tenant;

/// A tenant. Streams count into it without a lock; a lock is taken when a request begins.
#[derive(Debug)]
pub struct Account {
    name: String,
    tenant: Tenant,
    running: AtomicU32,
    /// Tokens used since the last request began.
    spent: AtomicU64,
    limited: Mutex<Limited>,
}

#[derive(Debug, Default)]
struct Limited {
    limits: Limits,
    bucket: Option<Bucket>,
}

/// Why a tenant's request is not served now.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum OverLimit {
    /// A request that has too many by itself.
    #[error("the request has {answers} answers; {tenant} may have {limit} at once on this replica: ask for fewer")]
    Answers {
        /// Name of the tenant.
        tenant: String,
        /// Its limit.
        limit: u32,
        /// What was asked for.
        answers: u32,
    },
    /// Too many at once.
    #[error(
        "{tenant} may have {limit} answers at once on this replica, and as many are made; wait until one has ended"
    )]
    Concurrency {
        /// Name of the tenant.
        tenant: String,
        /// Its limit.
        limit: u32,
    },
    /// Too many tokens lately.
    #[error("{tenant} has used its {limit} tokens a minute on this replica; try again in {retry_after_seconds} s")]
    TokenRate {
        /// Name of the tenant.
        tenant: String,
        /// Its limit.
        limit: u64,
        /// When something is left again.
        retry_after_seconds: u32,
    },
}

impl OverLimit {
    /// As the metrics label and the API's `code` spell it.
    pub fn reason(&self) -> &'static str {
        match self {
            OverLimit::Answers { .. } | OverLimit::Concurrency { .. } => "tenant_concurrency",
            OverLimit::TokenRate { .. } => "tenant_token_rate",
        }
    }

    /// When another attempt makes sense.
    pub fn retry_after_seconds(&self) -> u32 {
        match self {
            OverLimit::Answers { .. } | OverLimit::Concurrency { .. } => 1,
            OverLimit::TokenRate { retry_after_seconds, .. } => *retry_after_seconds,
        }
    }
}

/// A request of a tenant, or of nobody in particular, while it is served. Clones are the same request.
#[derive(Clone, Debug, Default)]
pub struct Lease {
    request: Arc<str>,
    tenant: Tenant,
    running: Option<Arc<Running>>,
    span: Option<Arc<RequestSpan>>,
}

/// Counts as running, as many times as it has answers, until it is dropped.
#[derive(Debug)]
struct Running {
    account: Arc<Account>,
    answers: AtomicU32,
}

impl Account {
    /// A tenant without limits.
    pub fn new(name: &str, tenant: Tenant) -> Account {
        Account {
            name: name.to_owned(),
            tenant,
            running: AtomicU32::new(0),
            spent: AtomicU64::new(0),
            limited: Mutex::default(),
        }
    }

    /// The number that stands for it in the engine.
    pub fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// The name for logs and messages.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Replaces the limits; a bucket goes on from its level, within the new bound.
    pub fn set_limits(&self, limits: Limits) {
        self.limited().limits = limits;
    }

    /// Begins the request of this name at `now`, if the limits allow one more.
    pub fn begin(self: &Arc<Account>, request: Arc<str>, now: f64) -> Result<Lease, OverLimit> {
        self.check_rate(now)?;
        let running = Arc::new(Running { account: self.clone(), answers: AtomicU32::new(0) });
        running.take(1)?;
        Ok(Lease { request, tenant: self.tenant, running: Some(running), span: None })
    }

    fn check_rate(&self, now: f64) -> Result<(), OverLimit> {
        let mut limited = self.limited();
        let spent = self.spent.swap(0, Ordering::Relaxed);
        let Limited { limits, bucket } = &mut *limited;
        let Some(limit) = limits.tokens_per_minute else { return Ok(()) };
        let bucket = bucket.get_or_insert_with(|| Bucket::full(limit, now));
        bucket.spend(spent);
        match bucket.check(limit, now) {
            Ok(()) => Ok(()),
            Err(seconds) => {
                let retry_after_seconds = seconds.ceil().max(1.0) as u32;
                Err(OverLimit::TokenRate { tenant: self.name.clone(), limit, retry_after_seconds })
            }
        }
    }

    fn limited(&self) -> MutexGuard<'_, Limited> {
        self.limited.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Lease {
    /// A request on a server without tenants.
    pub fn of_nobody(request: Arc<str>) -> Lease {
        Lease { request, ..Lease::default() }
    }

    /// The same request, traced until its last lease is dropped.
    pub fn traced(self, span: Option<RequestSpan>) -> Lease {
        Lease { span: span.map(Arc::new), ..self }
    }

    /// One of the request's answers ended.
    pub fn answered(&self, answer: Answered) {
        if let Some(span) = &self.span {
            span.answered(answer);
        }
    }

    /// What the request is called.
    pub fn request(&self) -> &str {
        &self.request
    }

    /// Name of the tenant, if there are any.
    pub fn tenant_name(&self) -> Option<&str> {
        self.running.as_ref().map(|running| running.account.name())
    }

    /// The request has so many answers, of which one was counted when it began.
    pub fn answers(&self, answers: u32) -> Result<(), OverLimit> {
        self.running.as_ref().map_or(Ok(()), |running| running.take(answers.saturating_sub(1)))
    }

    /// Whose request it is.
    pub fn tenant(&self) -> Tenant {
        self.tenant
    }

    /// Counts tokens of a prompt or an answer.
    pub fn spend(&self, tokens: u32) {
        if let Some(Running { account, .. }) = self.running.as_deref() {
            account.spent.fetch_add(tokens.into(), Ordering::Relaxed);
        }
    }
}

impl Running {
    /// Counts so many answers, if the tenant may have them beside those that it has.
    fn take(&self, answers: u32) -> Result<(), OverLimit> {
        let limit = self.account.limited().limits.max_concurrent_requests.unwrap_or(u32::MAX);
        let more = |running: u32| running.checked_add(answers).filter(|sum| *sum <= limit);
        if self.account.running.fetch_update(Ordering::Relaxed, Ordering::Relaxed, more).is_ok() {
            self.answers.fetch_add(answers, Ordering::Relaxed);
            return Ok(());
        }
        let (tenant, all) = (self.account.name.clone(), self.answers.load(Ordering::Relaxed).saturating_add(answers));
        Err(match all > limit {
            true => OverLimit::Answers { tenant, limit, answers: all },
            false => OverLimit::Concurrency { tenant, limit },
        })
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        self.account.running.fetch_sub(*self.answers.get_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn account(limits: Limits) -> Arc<Account> {
        let account = Arc::new(Account::new("alice", Tenant(1)));
        account.set_limits(limits);
        account
    }

    #[test]
    fn a_request_runs_until_its_last_lease_is_dropped() {
        let alice = account(Limits { max_concurrent_requests: Some(1), tokens_per_minute: None });
        let first = alice.begin("r".into(), 0.0).unwrap();
        let second_answer = first.clone();
        drop(first);
        let refused = alice.begin("r".into(), 0.0).unwrap_err();
        assert_eq!(refused, OverLimit::Concurrency { tenant: "alice".to_owned(), limit: 1 });
        drop(second_answer);
        alice.begin("r".into(), 0.0).unwrap();
    }

    #[test]
    fn answers_count_and_not_the_requests_that_have_them() {
        let alice = account(Limits { max_concurrent_requests: Some(4), tokens_per_minute: None });
        let begin = || alice.begin("r".into(), 0.0);
        let first = begin().unwrap();
        first.answers(3).unwrap();
        let second = begin().unwrap();
        assert_eq!(second.answers(2).unwrap_err(), OverLimit::Concurrency { tenant: "alice".to_owned(), limit: 4 });
        assert_eq!(
            second.answers(5).unwrap_err().to_string(),
            "the request has 5 answers; alice may have 4 at once on this replica: ask for fewer"
        );
        assert!(begin().is_err());
        drop(first);
        second.answers(4).unwrap();
        drop(second);
        assert_eq!(alice.running.load(Ordering::Relaxed), 0);
    }

    #[test]
    fn tokens_of_requests_that_run_count_against_the_next() {
        let alice = account(Limits { max_concurrent_requests: None, tokens_per_minute: Some(60) });
        let running = alice.begin("r".into(), 0.0).unwrap();
        running.spend(69);
        let refused = alice.begin("r".into(), 0.0).unwrap_err();
        assert_eq!(refused.retry_after_seconds(), 10);
        assert!(refused.to_string().contains("60 tokens a minute"), "{refused}");
        alice.begin("r".into(), 10.0).unwrap();
    }
}
