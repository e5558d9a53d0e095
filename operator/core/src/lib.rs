//! Decides what an InferenceService becomes: plan, autoscaler, status. Pure: no client, no clock.
//!
//! [`plan`] goes from spec, observed objects, load window and time to an ordered list of writes; [`status::compute`]
//! folds the outcome of those writes into `status` and events. Whoever calls them decides nothing.

pub mod autoscale;
pub mod names;
pub mod observed;
pub mod plan;
pub mod status;
pub mod window;

use jiff::Timestamp;
use windlass_operator_api::InferenceService;

use observed::{Defaults, Observed};
use plan::Plan;

/// What is to be done for `service`, given what was read at `now`.
///
/// A spec that cannot be served is no error: its refusal is in [`Plan::assessment`], and children stay as they are.
pub fn plan(service: &InferenceService, observed: &Observed, defaults: &Defaults, now: Timestamp) -> Plan {
    let (_, _, _) = (service, defaults, now);
    Plan {
        steps: Vec::new(),
        memory: observed.memory.clone(),
        assessment: status::Assessment::default(),
        requeue_after: std::time::Duration::from_secs(30),
    }
}
