//! Scaling policies by name.

use std::fmt;
use std::str::FromStr;

use windlass_operator_core::validate::Refusal;

use crate::builtin::Builtin;
use crate::peers::{ApaPolicy, HpaPolicy, KpaPolicy, PlainRule, QueuePolicy, StaticPool, WvaV1, WvaV2};
use crate::protocol::{Hello, Reply, Tick};

/// Decides how many pods there are to be.
pub trait Policy {
    /// Answers one tick.
    fn decide(&mut self, tick: &Tick) -> Reply;
}

/// The policies that can be named.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Name {
    /// The operator's own autoscaler.
    Builtin,
    /// HorizontalPodAutoscaler on GPU utilization.
    Hpa,
    /// KEDA on the number of waiting requests.
    Keda,
    /// Knative's autoscaler on concurrency.
    Kpa,
    /// AIBrix' autoscaler on KV usage.
    Apa,
    /// The workload variant autoscaler, first rule.
    WvaV1,
    /// The workload variant autoscaler, second rule.
    WvaV2,
    /// One up above 2 seconds and 80 %, one down below 30 %.
    Plain,
    /// A pool of fixed size.
    Static(i32),
}

impl Name {
    /// Those that follow the load, ours first.
    pub const ADAPTIVE: [Name; 8] =
        [Name::Builtin, Name::Hpa, Name::Keda, Name::Kpa, Name::Apa, Name::WvaV1, Name::WvaV2, Name::Plain];

    /// The policy, for what `hello` describes.
    ///
    /// # Errors
    /// Bounds or targets that the resource does not take.
    pub fn policy(self, hello: &Hello) -> Result<Box<dyn Policy>, Refusal> {
        Ok(match self {
            Name::Builtin => Box::new(Builtin::new(hello)?),
            Name::Hpa => Box::new(HpaPolicy::new(hello)),
            Name::Keda => Box::new(QueuePolicy::new(hello)),
            Name::Kpa => Box::new(KpaPolicy::new(hello)),
            Name::Apa => Box::new(ApaPolicy::new(hello)),
            Name::WvaV1 => Box::new(WvaV1::new(hello)),
            Name::WvaV2 => Box::new(WvaV2::new(hello)),
            Name::Plain => Box::new(PlainRule::new(hello)),
            Name::Static(replicas) => Box::new(StaticPool(replicas)),
        })
    }
}

impl fmt::Display for Name {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Name::Builtin => write!(formatter, "builtin"),
            Name::Hpa => write!(formatter, "hpa"),
            Name::Keda => write!(formatter, "keda"),
            Name::Kpa => write!(formatter, "kpa"),
            Name::Apa => write!(formatter, "apa"),
            Name::WvaV1 => write!(formatter, "wva-v1"),
            Name::WvaV2 => write!(formatter, "wva-v2"),
            Name::Plain => write!(formatter, "plain"),
            Name::Static(replicas) => write!(formatter, "static-{replicas}"),
        }
    }
}

/// A name that is no policy's.
#[derive(Debug, PartialEq, thiserror::Error)]
#[error("{0:?} is no policy: builtin, hpa, keda, kpa, apa, wva-v1, wva-v2, plain or static-NUMBER")]
pub struct UnknownName(String);

impl FromStr for Name {
    type Err = UnknownName;

    fn from_str(text: &str) -> Result<Self, UnknownName> {
        if let Some(count) =
            text.strip_prefix("static-").and_then(|count| count.parse().ok()).filter(|count| *count > 0)
        {
            return Ok(Name::Static(count));
        }
        let known = Name::ADAPTIVE.into_iter().find(|name| name.to_string() == text);
        known.ok_or_else(|| UnknownName(text.to_owned()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        for name in Name::ADAPTIVE.into_iter().chain([Name::Static(7)]) {
            assert_eq!(name.to_string().parse(), Ok(name));
        }
        assert!("static-0".parse::<Name>().is_err() && "best".parse::<Name>().is_err());
    }
}
