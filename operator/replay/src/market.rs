//! Spot nodes as the world offers them: when there are some, when some are taken back, and at what price.

use std::str::FromStr;

/// Of an on-demand hour, what one on spot costs.
pub const SPOT_PRICE: f64 = 0.35;

/// Spot nodes over time. Times are seconds since the start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Market {
    /// Spans without a spot node for a new pod.
    pub absences: Vec<Span>,
    /// Nodes that are taken back, in the order of time.
    pub interruptions: Vec<Interruption>,
    /// Between the notice and the end of a node.
    pub notice: f64,
}

/// A time, with its beginning and without its end.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Span {
    /// When it begins.
    pub from: f64,
    /// When it ends.
    pub to: f64,
}

/// Spot nodes that are taken back together.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Interruption {
    /// When the notice is given.
    pub at: f64,
    /// Nodes: of those that there are, the oldest.
    pub nodes: usize,
}

impl Market {
    /// Whether a new pod finds a spot node.
    pub fn is_open(&self, now: f64) -> bool {
        !self.absences.iter().any(|span| (span.from..span.to).contains(&now))
    }

    /// Nodes that are given notice after `before`, to `now`.
    pub fn noticed(&self, before: f64, now: f64) -> usize {
        let due = self.interruptions.iter().filter(|one| before < one.at && one.at <= now);
        due.map(|one| one.nodes).sum()
    }
}

/// Text that is no [`Span`], or no [`Interruption`].
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{text:?}: {expected} is expected, in seconds from 0")]
pub struct Unreadable {
    text: String,
    expected: &'static str,
}

impl FromStr for Span {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let parts = text.split_once('-').and_then(|(from, to)| Some((seconds(from)?, seconds(to)?)));
        let span = parts.filter(|(from, to)| from < to).map(|(from, to)| Span { from, to });
        span.ok_or_else(|| Unreadable { text: text.to_owned(), expected: "FROM-TO" })
    }
}

impl FromStr for Interruption {
    type Err = Unreadable;

    fn from_str(text: &str) -> Result<Self, Unreadable> {
        let parts = text.split_once('=').and_then(|(at, nodes)| Some((seconds(at)?, nodes.parse().ok()?)));
        let interruption = parts.map(|(at, nodes)| Interruption { at, nodes });
        interruption.ok_or_else(|| Unreadable { text: text.to_owned(), expected: "AT=NODES" })
    }
}

fn seconds(text: &str) -> Option<f64> {
    text.parse().ok().filter(|seconds: &f64| seconds.is_finite() && *seconds >= 0.0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_span_holds_its_beginning_and_not_its_end() {
        let market = Market {
            absences: vec![Span { from: 10.0, to: 20.0 }, Span { from: 30.0, to: 40.0 }],
            ..Market::default()
        };
        let open = [5.0, 10.0, 19.0, 20.0, 35.0, 40.0].map(|now| market.is_open(now));
        assert_eq!(open, [true, false, false, true, false, true]);
    }

    #[test]
    fn a_notice_is_given_once() {
        let one = |at, nodes| Interruption { at, nodes };
        let market = Market { interruptions: vec![one(10.0, 1), one(10.0, 2), one(15.0, 4)], ..Market::default() };
        assert_eq!([(5.0, 10.0), (10.0, 15.0), (15.0, 20.0)].map(|(from, to)| market.noticed(from, to)), [3, 4, 0]);
    }

    #[test]
    fn spans_and_interruptions_are_read_and_what_is_none_is_named() {
        assert_eq!("600-1200.5".parse(), Ok(Span { from: 600.0, to: 1200.5 }));
        assert_eq!("300=2".parse(), Ok(Interruption { at: 300.0, nodes: 2 }));
        for text in ["", "600", "-600", "700-600", "6-inf", "6--7"] {
            let error = text.parse::<Span>().expect_err(text).to_string();
            assert!(error.contains("FROM-TO") && error.contains(text), "{error}");
        }
        for text in ["300", "=2", "300=-1", "300=", "nan=1"] {
            assert!(text.parse::<Interruption>().is_err(), "{text}");
        }
    }
}
