//! URL paths of the admin port and file paths inside an engine pod.

/// Alive: the step loop makes progress while work is queued.
pub const LIVEZ: &str = "/livez";
/// Ready: a token was generated since start, not draining, not stalled.
pub const READYZ: &str = "/readyz";
/// Prometheus text exposition.
pub const METRICS: &str = "/metrics";
/// The operator's view of the engine, JSON of at most 2 KiB: [`crate::stats::Stats`].
pub const STATS: &str = "/stats";
/// POST: start draining, exactly as SIGTERM does; with the query `timeout_seconds=N`, within so many seconds.
pub const DRAIN: &str = "/drain";
/// The query of [`DRAIN`] by which a drain is to end sooner than configured.
pub const DRAIN_TIMEOUT_QUERY: &str = "timeout_seconds";
/// POST: give memory back and refuse requests until [`WAKE`]. `?level=1` keeps the weights, `?level=2` does not.
pub const SLEEP: &str = "/sleep";
/// POST: take memory again and serve.
pub const WAKE: &str = "/wake_up";
/// Whether the engine sleeps, as JSON.
pub const IS_SLEEPING: &str = "/is_sleeping";

/// Where a pod's model cache is mounted (emptyDir or claim of `model.cache`).
pub const CACHE_DIR: &str = "/var/cache/windlass";
/// Where the claim of a `pvc://` source is mounted, read-only.
pub const MODEL_DIR: &str = "/models";
/// Where Secrets with API keys are mounted; every file in it is one key.
pub const API_KEYS_DIR: &str = "/etc/windlass/api-keys";
/// Where the Secret of `model.secretRef` is mounted.
pub const MODEL_SECRET_DIR: &str = "/etc/windlass/model-secret";
/// Where the ConfigMap with a private certificate authority (`ca.crt`) is mounted.
pub const MODEL_CA_DIR: &str = "/etc/windlass/model-ca";
/// Kubernetes' default termination message file.
pub const TERMINATION_LOG: &str = "/dev/termination-log";
