//! The scopes that are served now, together: what concerns services of all namespaces.

use crate::watches::Stores;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use windlass_operator_api::InferenceService;

/// Stores of every scope, none on a standby; cloning shares them.
#[derive(Clone, Default)]
pub struct Scopes(Arc<Mutex<Vec<Stores>>>);

impl Scopes {
    /// These are served from now on.
    pub fn set(&self, stores: Vec<Stores>) {
        *self.lock() = stores;
    }

    /// Kinds whose first list has not arrived in some scope.
    pub fn missing(&self) -> Vec<&'static str> {
        let mut missing: Vec<_> = self.lock().iter().flat_map(Stores::missing).collect();
        missing.dedup();
        missing
    }

    /// Every service that could be read.
    pub fn services(&self) -> Vec<InferenceService> {
        let scopes = self.lock().clone();
        scopes.iter().flat_map(Stores::services).collect()
    }

    /// The same, once every scope has told which it has.
    pub fn every_service(&self) -> Option<Vec<InferenceService>> {
        let are_listed = self.lock().iter().all(Stores::has_services);
        are_listed.then(|| self.services())
    }

    /// A panic elsewhere leaves the list whole: it is replaced in one assignment.
    fn lock(&self) -> MutexGuard<'_, Vec<Stores>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
