//! Why a spec cannot be served, in words for its user.

use thiserror::Error;
use windlass_operator_api::MAX_NAME_CHARS;

/// Why a spec cannot be served. Display is the user's message and names the field.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
pub enum Refusal {
    /// A Service could not have this name.
    #[error(
        "metadata.name: {name:?} must be at most {MAX_NAME_CHARS} lower-case letters, digits and -, beginning with a letter"
    )]
    Name {
        /// The name.
        name: String,
    },
    /// The source is of no kind we read, or malformed.
    #[error("spec.model.source: {source_text:?} {problem}")]
    Source {
        /// As written.
        source_text: String,
        /// What is wrong and what would be right.
        problem: &'static str,
    },
    /// A field that the source's kind needs.
    #[error("{field}: required with an https:// source")]
    MissingForHttps {
        /// The field.
        field: &'static str,
    },
    /// A field that does nothing with this source.
    #[error("{field}: acts only on an https:// source")]
    ActsOnlyOnHttps {
        /// The field.
        field: &'static str,
    },
    /// A field that does nothing where nothing is fetched.
    #[error("{field}: acts only on a source that is fetched; a pvc:// source is read in place")]
    NothingIsFetched {
        /// The field.
        field: &'static str,
    },
    /// A union's member does not go with its type.
    #[error("{field}: {problem}")]
    Union {
        /// The field.
        field: &'static str,
        /// What is wrong.
        problem: &'static str,
    },
    /// A flag that a field owns.
    #[error("spec.engine.extraArgs: {problem}")]
    ManagedFlag {
        /// Which, and the field that owns it.
        problem: String,
    },
    /// A CPU replica cannot be split.
    #[error("spec.parallelism.tensor: {tensor} needs spec.accelerator.type NvidiaGPU; a CPU replica is one rank")]
    TensorOnCpu {
        /// As written.
        tensor: i32,
    },
    /// GPUs are derived.
    #[error("{field}: {resource} follows from spec.accelerator and spec.parallelism.tensor; leave it out")]
    GpuInResources {
        /// requests or limits.
        field: &'static str,
        /// The resource's name.
        resource: String,
    },
    /// Kubernetes would refuse the pods.
    #[error("spec.resources.requests: {resource} is {request}, more than the {limit} of spec.resources.limits")]
    BeyondLimit {
        /// The resource's name.
        resource: String,
        /// As written.
        request: String,
        /// As written.
        limit: String,
    },
    /// A number outside its bounds.
    #[error("{field}: {value} is not between {min} and {max}")]
    OutOfRange {
        /// The field.
        field: &'static str,
        /// As written.
        value: i64,
        /// Least allowed.
        min: i64,
        /// Most allowed.
        max: i64,
    },
    /// A revision that is not, or no longer, kept.
    #[error("spec.rollout.pinnedRevision: there is no revision {name:?}; there are: {}", known.join(", "))]
    NoSuchRevision {
        /// As written.
        name: String,
        /// Those that there are.
        known: Vec<String>,
    },
    /// A text that is no quantity.
    #[error("{field}: {value:?} is not a positive quantity such as 80Gi")]
    Quantity {
        /// The field.
        field: &'static str,
        /// As written.
        value: String,
    },
    /// Autoscaling fields that contradict each other.
    #[error("{field}: {problem}")]
    Autoscaling {
        /// The field.
        field: &'static str,
        /// What is wrong.
        problem: String,
    },
}
