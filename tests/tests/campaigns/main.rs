//! Long runs against a real cluster, each with it for itself: `tests/run campaigns -- NAME`.

mod argocd;
mod faults;
mod scale;
