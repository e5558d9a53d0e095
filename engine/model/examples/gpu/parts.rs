//! What is measured, each part by a process of its own: what one breaks of the device, the next does not find.

use crate::Outcome;
use crate::finding::Finding;
use crate::generated::Format;
use crate::model::Model;
use crate::stage::Kind;
use crate::{attention, ceilings, experts, llama, probe, products, ranks, rows, sampler, small};

/// Takes what a part finds, as soon as it does.
pub type Tell<'a> = dyn FnMut(Finding) + 'a;

/// A part.
pub struct Part {
    pub name: &'static str,
    /// The most that it may take.
    pub seconds: u64,
    pub kind: Kind,
    pub measure: fn(&Model, &mut Tell<'_>) -> Outcome<()>,
}

/// All of them. Everything is told in shares of what the first one finds.
pub const PARTS: [Part; 17] = [
    part("ceilings", 30, ceilings::measure),
    part("probe", 15, probe::measure),
    model("llama-int4", 60, |model, tell| llama::measure(Format::Int4, model, tell)),
    model("llama-bf16", 60, |model, tell| llama::measure(Format::Bf16, model, tell)),
    model("llama-fp8", 60, |model, tell| llama::measure(Format::Fp8, model, tell)),
    model("decode-int4", 40, |model, tell| llama::measure_decode(Format::Int4, model, tell)),
    model("small-model", 60, small::measure),
    part("products", 40, products::measure),
    part("other-products", 40, products::measure_others),
    part("attention", 40, attention::measure),
    part("rows", 20, rows::measure),
    part("sampler", 20, sampler::measure),
    part("experts", 30, experts::measure),
    part("layers", 60, llama::measure_layers),
    model("llama-bf16-wide", 60, llama::measure_wide),
    model("sleep", 90, llama::measure_sleep),
    model("llama-two-gpus", 120, ranks::measure),
];

type Measure = fn(&Model, &mut Tell<'_>) -> Outcome<()>;

const fn part(name: &'static str, seconds: u64, measure: Measure) -> Part {
    Part { name, seconds, kind: Kind::Measurement, measure }
}

/// A part of which a whole model is measured.
const fn model(name: &'static str, seconds: u64, measure: Measure) -> Part {
    Part { name, seconds, kind: Kind::Model, measure }
}

impl Part {
    pub fn named(name: &str) -> Option<Part> {
        PARTS.into_iter().find(|part| part.name == name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_finds_something_on_the_shim() {
        for part in PARTS {
            let mut findings = Vec::new();
            (part.measure)(&Model::Dry, &mut |finding| findings.push(finding)).unwrap();
            let failed = |finding: &&Finding| matches!(finding, Finding::Check { passed: false, .. });
            assert_eq!(findings.iter().filter(failed).count(), 0, "{}: {findings:?}", part.name);
            let has_no_number = |finding: &&Finding| match finding {
                Finding::Figure(figure) => !(figure.value.is_finite() && figure.value >= 0.0),
                _ => false,
            };
            assert_eq!(findings.iter().find(has_no_number), None, "{}", part.name);
            assert!(!findings.is_empty(), "{}", part.name);
        }
    }
}
