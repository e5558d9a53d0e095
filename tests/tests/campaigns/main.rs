//! Long runs against a real cluster, each with it for itself: `tests/run campaigns -- NAME`.

mod argocd;
mod away;
mod faults;
mod monitoring;
mod others;
mod scale;
mod spot;
