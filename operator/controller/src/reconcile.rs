//! One service, from observation to status, and what happens when that fails.

use crate::apply::Applier;
use crate::error::{Error, chain};
use crate::metrics::Metrics;
use crate::observe::Observer;
use crate::watches::Guarded;
use crate::written::ServiceKey;
use futures::FutureExt;
use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::controller::Action;
use std::collections::HashMap;
use std::panic::AssertUnwindSafe;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use windlass_operator_api::InferenceService;
use windlass_operator_core::observed::Defaults;
use windlass_operator_core::plan::Plan;
use windlass_operator_core::status::{Outcome, StatusChange};
use windlass_operator_core::{plan, status};

/// A reconcile is a handful of requests; one that takes this long waits for a server that does not answer.
const LIMIT: Duration = Duration::from_secs(60);
/// First and longest delay before a failed reconcile is tried again.
const BACKOFF: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(60));

/// What every reconcile of one scope shares.
pub struct Context {
    /// The reads.
    pub observer: Observer,
    /// The writes.
    pub applier: Applier,
    /// What the operator's configuration gives to every service.
    pub defaults: Defaults,
    /// Counters.
    pub metrics: Metrics,
    /// Consecutive failures by service.
    pub failures: Failures,
    /// Services whose namespace is being deleted.
    pub endings: Endings,
}

/// Reconciles one service: contained, limited in time, counted.
///
/// # Errors
/// See [`Error`]; [`after_error`] decides what follows.
pub async fn reconcile(guarded: Arc<Guarded>, context: Arc<Context>) -> Result<Action, Error> {
    let (key, started) = (key_of(guarded.as_ref()), Instant::now());
    let limited = tokio::time::timeout(LIMIT, contained(&guarded, &key, &context));
    let result = limited.await.unwrap_or(Err(Error::Timeout(LIMIT)));
    context.metrics.reconciled(result.as_ref().err().map(Error::category), started.elapsed());
    result
}

/// When to try again after `error`.
pub fn after_error(guarded: Arc<Guarded>, error: &Error, context: Arc<Context>) -> Action {
    let key = key_of(guarded.as_ref());
    let delay = context.failures.next_delay(&key);
    tracing::warn!(
        namespace = key.0, service = key.1, category = error.category(), error = %chain(error), ?delay, "failed"
    );
    Action::requeue(delay)
}

async fn contained(guarded: &Guarded, key: &ServiceKey, context: &Context) -> Result<Action, Error> {
    let service = match &guarded.0 {
        Ok(service) if context.endings.has(key, service) => return Ok(Action::await_change()),
        Ok(service) if service.metadata.deletion_timestamp.is_none() => Arc::new(service.clone()),
        Ok(_deleted) => return Ok(Action::await_change()),
        Err(invalid) => {
            tracing::error!(namespace = key.0, service = key.1, error = %invalid, "the object cannot be read");
            context.applier.tell_unreadable(guarded, &invalid.error).await;
            return Ok(Action::await_change());
        }
    };
    match AssertUnwindSafe(steps(service, key, context)).catch_unwind().await {
        Ok(result) => result,
        Err(panic) => Err(Error::Panicked(panic_text(panic.as_ref()))),
    }
}

/// Observe, plan, apply, status.
async fn steps(service: Arc<InferenceService>, key: &ServiceKey, context: &Context) -> Result<Action, Error> {
    let mut seen = context.observer.observe(service, key).await?;
    let mut wanted = plan(&seen.service, &seen.observed, &context.defaults, Timestamp::now());
    if context.observer.find_strangers(key, &wanted, &mut seen.observed).await? {
        wanted = plan(&seen.service, &seen.observed, &context.defaults, Timestamp::now());
    }
    let applied = context.applier.apply(key, &seen.observed, &wanted.steps).await;
    let again = seen.look_again.map_or(wanted.requeue_after, |soon| soon.min(wanted.requeue_after));
    if applied.as_ref().is_err_and(Error::is_of_ending_namespace) {
        return Ok(end(&seen.service, key, &wanted, context).await);
    }
    let mut published = Ok(());
    if let Some(outcome) = applied.as_ref().map_or_else(Error::outcome, |()| Some(Outcome::Applied)) {
        let change = status::compute(&seen.service, &wanted, &outcome, Timestamp::now());
        published = context.applier.publish(&seen.service, change).await;
        context.observer.remember(key, wanted.remembered(&seen.observed.memory, &outcome));
    }
    applied.and(published)?;
    context.failures.clear(key);
    Ok(Action::requeue(again))
}

/// Says that the namespace is being deleted, where that can still be said, and does nothing for the service any more.
async fn end(service: &InferenceService, key: &ServiceKey, wanted: &Plan, context: &Context) -> Action {
    context.endings.note(key, service);
    context.failures.clear(key);
    let change = status::compute(service, wanted, &Outcome::NamespaceEnds, Timestamp::now());
    // No event: it could not be made.
    let told = context.applier.publish(service, StatusChange { events: Vec::new(), ..change }).await;
    tracing::info!(namespace = key.0, service = key.1, is_told = told.is_ok(), "the namespace is being deleted");
    Action::await_change()
}

fn key_of(service: &Guarded) -> ServiceKey {
    (service.namespace().unwrap_or_default(), service.name_any())
}

fn panic_text(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
    text.or_else(|| panic.downcast_ref::<String>().cloned()).unwrap_or_else(|| "without a message".to_owned())
}

/// Services whose namespace is being deleted, which nothing takes back. One that is made anew, in a namespace of the same
/// name, has another UID.
#[derive(Default)]
pub struct Endings(Mutex<HashMap<ServiceKey, Option<String>>>);

impl Endings {
    fn note(&self, key: &ServiceKey, service: &InferenceService) {
        self.lock().insert(key.clone(), service.metadata.uid.clone());
    }

    fn has(&self, key: &ServiceKey, service: &InferenceService) -> bool {
        self.lock().get(key).is_some_and(|uid| *uid == service.metadata.uid)
    }

    /// Forgets a service that was deleted.
    pub fn forget(&self, key: &ServiceKey) {
        self.lock().remove(key);
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<ServiceKey, Option<String>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Consecutive failures by service.
#[derive(Default)]
pub struct Failures(Mutex<HashMap<ServiceKey, u32>>);

impl Failures {
    /// Counts a failure; the delay doubles with each, to its bound.
    fn next_delay(&self, key: &ServiceKey) -> Duration {
        let mut failures = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let count = failures.entry(key.clone()).or_insert(0);
        let delay = backoff(*count);
        *count = count.saturating_add(1);
        delay
    }

    /// Forgets the failures of a service that went well, or was deleted.
    pub fn clear(&self, key: &ServiceKey) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).remove(key);
    }
}

/// Delay after `failures` earlier failures in a row.
fn backoff(failures: u32) -> Duration {
    let (first, longest) = BACKOFF;
    first.saturating_mul(2_u32.saturating_pow(failures)).min(longest)
}

#[cfg(test)]
mod tests;
