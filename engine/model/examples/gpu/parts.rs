//! What is measured, each part by a process of its own: what one breaks of the device, the next does not find.

use crate::Outcome;
use crate::finding::Finding;
use crate::generated::Format;
use crate::model::Model;
use crate::{attention, ceilings, experts, llama, products, ranks, rows, sampler, small};

/// Takes what a part finds, as soon as it does.
pub type Tell<'a> = dyn FnMut(Finding) + 'a;

/// A part.
pub struct Part {
    pub name: &'static str,
    /// The most that it may take.
    pub seconds: u64,
    pub measure: fn(&Model, &mut Tell<'_>) -> Outcome<()>,
}

/// All of them. Everything is told in shares of what the first one finds.
pub const PARTS: [Part; 12] = [
    Part { name: "ceilings", seconds: 30, measure: ceilings::measure },
    Part { name: "small-model", seconds: 90, measure: small::measure },
    Part { name: "llama-bf16", seconds: 120, measure: |model, tell| llama::measure(Format::Bf16, model, tell) },
    Part { name: "products", seconds: 50, measure: products::measure },
    Part { name: "attention", seconds: 40, measure: attention::measure },
    Part { name: "llama-int4", seconds: 120, measure: |model, tell| llama::measure(Format::Int4, model, tell) },
    Part { name: "llama-fp8", seconds: 100, measure: |model, tell| llama::measure(Format::Fp8, model, tell) },
    Part { name: "rows", seconds: 20, measure: rows::measure },
    Part { name: "sampler", seconds: 20, measure: sampler::measure },
    Part { name: "experts", seconds: 30, measure: experts::measure },
    Part { name: "llama-two-gpus", seconds: 120, measure: ranks::measure },
    Part { name: "llama-bf16-wide", seconds: 120, measure: |model, tell| llama::measure_wide(model, tell) },
];

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
