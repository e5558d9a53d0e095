//! What a stage finds, a line of its output each.

use std::fmt;

use serde::{Deserialize, Serialize};

/// What a line with a finding begins with. Other lines are for people.
const MARK: &str = "finding ";

/// What was found.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "camelCase")]
pub enum Finding {
    /// What is measured on.
    Device {
        name: String,
        about: String,
    },
    /// The most that something reached, in [`Ceiling::unit`].
    Ceiling {
        of: Ceiling,
        rate: f64,
        by: String,
    },
    Figure(Figure),
    Check {
        name: String,
        passed: bool,
    },
    /// What could not be measured here, and why.
    Absent {
        name: String,
        why: String,
    },
}

/// What bounds a rate.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Ceiling {
    /// Bytes that a copy reads and writes.
    Copy,
    /// Products of these.
    Bf16,
    Fp8,
    Int8,
}

impl Ceiling {
    pub fn name(self) -> &'static str {
        match self {
            Ceiling::Copy => "copy",
            Ceiling::Bf16 => "products in bf16",
            Ceiling::Fp8 => "products in fp8",
            Ceiling::Int8 => "products in int8",
        }
    }

    /// What rates are told in.
    pub fn unit(self) -> &'static str {
        if self == Ceiling::Copy { "GB/s" } else { "TFLOP/s" }
    }

    /// A number of bytes, or of operations, a second in that.
    pub fn rate(self, a_second: f64) -> f64 {
        a_second / if self == Ceiling::Copy { 1e9 } else { 1e12 }
    }
}

/// A number.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Figure {
    pub name: String,
    pub value: f64,
    pub unit: String,
    /// What it makes of a ceiling, in that one's unit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reaches: Option<(Ceiling, f64)>,
    /// What is wanted of it, or of its share, for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub wanted: Option<String>,
    /// What of that is a number.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bound: Option<Bound>,
}

/// A number that a figure is held against.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Bound {
    /// Its share of its ceiling is no less, percent.
    LeastShare(f64),
    /// It is no less.
    Least(f64),
    /// It is no more.
    Most(f64),
}

impl Bound {
    /// On which side of it a value is that misses it, given the value's share of its ceiling as far as that is known.
    pub fn missed(self, value: f64, share: Option<f64>) -> Option<&'static str> {
        match self {
            Bound::LeastShare(least) => share.filter(|share| *share < least).map(|_| "below"),
            Bound::Least(least) => (value < least).then_some("below"),
            Bound::Most(most) => (value > most).then_some("above"),
        }
    }
}

impl Figure {
    pub fn new(name: impl Into<String>, value: f64, unit: &str) -> Figure {
        Figure { name: name.into(), value, unit: unit.to_owned(), reaches: None, wanted: None, bound: None }
    }

    /// So many bytes, or operations, a second.
    pub fn rate(name: impl Into<String>, of: Ceiling, a_second: f64) -> Figure {
        Figure::new(name, of.rate(a_second), of.unit()).reaching(of, a_second)
    }

    pub fn reaching(self, of: Ceiling, a_second: f64) -> Figure {
        Figure { reaches: Some((of, of.rate(a_second))), ..self }
    }

    /// In words, and as far as it is a number for this figure.
    pub fn wanted(self, what: &str, bound: impl Into<Option<Bound>>) -> Figure {
        Figure { wanted: Some(what.to_owned()), bound: bound.into(), ..self }
    }
}

impl From<Figure> for Finding {
    fn from(figure: Figure) -> Finding {
        Finding::Figure(figure)
    }
}

impl Finding {
    pub fn check(name: impl Into<String>, passed: bool) -> Finding {
        Finding::Check { name: name.into(), passed }
    }

    /// What a line says, if it holds a finding.
    pub fn read(line: &str) -> Option<Finding> {
        line.strip_prefix(MARK).and_then(|json| serde_json::from_str(json).ok())
    }

    /// The line that [`Finding::read`] reads.
    pub fn line(&self) -> String {
        format!("{MARK}{}", serde_json::to_string(self).unwrap_or_default())
    }
}

/// For people.
impl fmt::Display for Finding {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Finding::Device { name, about } => write!(f, "{name}. {about}"),
            Finding::Ceiling { of, rate, by } => write!(f, "{}: {} {} by {by}", of.name(), short(*rate), of.unit()),
            Finding::Figure(Figure { name, value, unit, .. }) => write!(f, "{name}: {} {unit}", short(*value)),
            Finding::Absent { name, why } => write!(f, "{name}: not here ({why})"),
            Finding::Check { name, passed } => write!(f, "{name}: {}", if *passed { "yes" } else { "NO" }),
        }
    }
}

/// A number with three digits or more, as many as say something.
pub fn short(value: f64) -> String {
    match value.abs() {
        0.0 => "0".to_owned(),
        magnitude if magnitude >= 100.0 => format!("{value:.0}"),
        magnitude if magnitude >= 10.0 => format!("{value:.1}"),
        magnitude if magnitude >= 0.1 => format!("{value:.2}"),
        _ => format!("{value:.2e}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_gives_back_what_was_found() {
        for finding in [
            Finding::Device { name: "a GPU".into(), about: "of a maker".into() },
            Finding::Ceiling { of: Ceiling::Copy, rate: 4300.5, by: "a copy".into() },
            Figure::new("start", 0.25, "s").into(),
            Figure::rate("decode", Ceiling::Fp8, 9e14).wanted("all of it", Bound::LeastShare(99.5)).into(),
            Finding::check("the same", false),
            Finding::Absent { name: "a library".into(), why: "nobody brought it".into() },
        ] {
            assert_eq!(Finding::read(&finding.line()), Some(finding));
        }
        let of_a_peer = r#"finding {"kind": "figure", "name": "f", "value": 1, "unit": "s", "reaches": ["bf16", 1.5]}"#;
        let expected = Figure { reaches: Some((Ceiling::Bf16, 1.5)), ..Figure::new("f", 1.0, "s") };
        assert_eq!(Finding::read(of_a_peer), Some(expected.into()));
        assert_eq!(Finding::read("running 3 tests"), None);
        assert_eq!(Finding::read("finding { nothing"), None);
    }

    #[test]
    fn rates_are_told_in_the_unit_of_their_ceiling() {
        let figure = Figure::rate("decode", Ceiling::Bf16, 7.9e14);
        assert_eq!((figure.value, figure.unit.as_str()), (790.0, "TFLOP/s"));
        assert_eq!(figure.reaches, Some((Ceiling::Bf16, 790.0)));
        assert_eq!([4321.0, 43.21, 0.4321, 0.0004321].map(short), ["4321", "43.2", "0.43", "4.32e-4"]);
    }
}
