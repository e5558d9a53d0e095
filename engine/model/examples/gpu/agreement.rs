//! A real text's logits, on the GPU and by the CPU's executor: teacher-forced, with the bars of kernels.md, 4.
//!
//! Those are the mean KL, and 99 % of first choices. SmolLM2's first two choices are often as near as activations in bf16 are
//! coarse: on the shim 62 of 64 were the same at a mean KL of 2.1e-4, and the CPU thought its own at most 0.05 nats better. So the
//! share is told, and what is demanded is that another choice is about as good to the CPU as its own.

use std::sync::Arc;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, InputToken, PlanRow, PromptLogprobsRow, StepPlan};
use windlass_engine_core::request::RequestId;
use windlass_engine_model::cuda::CudaExecutor;
use windlass_engine_model::{ActivationType, Agreement, LoadOptions, Reader};

use crate::Outcome;
use crate::finding::{Bound, Figure, Finding};
use crate::parts::Tell;

/// Share of positions with the same likeliest token that is wanted, percent.
const WANTED_TOP_1: f64 = 99.0;

/// Log probability that the CPU may give its own first choice more than another one that was made, where the mean KL may be so
/// large: errors of logits with a variance v give a mean KL of v / 2 at most, so that the difference of two has a deviation of
/// twice its root. This is three of those.
fn most_regret(most_kl: f64) -> f64 {
    6.0 * most_kl.sqrt()
}

/// The first tokens of a real text under SmolLM2's tokenizer, within a vocabulary.
pub fn text(tokens: usize, vocabulary: u32) -> Vec<u32> {
    let ids = include_str!("../../tests/model/data/harbour.ids").split_whitespace();
    ids.filter_map(|id| id.parse::<u32>().ok()).map(|id| id % vocabulary).take(tokens).collect()
}

/// Logits behind each of a text's tokens, `[tokens, vocabulary]`, as finely as the CPU computes them.
pub fn on_cpu(checkpoint: &Checkpoint, text: &[u32]) -> Outcome<Vec<f32>> {
    let options =
        LoadOptions { activations: ActivationType::Int16, kv_data_type: KvDataType::F16, ..LoadOptions::default() };
    let mut reader = Reader::load(checkpoint, text.len(), &options)?;
    let steps = text.chunks(Reader::STEP_TOKENS).enumerate();
    Ok(steps.flat_map(|(index, step)| reader.read(step, index * Reader::STEP_TOKENS)).collect())
}

/// The same by a GPU, behind each token but the first `ahead`, which go in one step: the others in steps of as many tokens as
/// there is room for logits.
pub fn on_gpu(executor: &mut CudaExecutor, text: &[u32], ahead: usize) -> Outcome<Vec<f32>> {
    let geometry = executor.geometry();
    let blocks: Arc<[BlockId]> = (0..(text.len() as u32).div_ceil(geometry.block_tokens)).map(BlockId).collect();
    let mut step = |first: usize, tokens: &[u32], score: Option<PromptLogprobsRow>| -> Outcome<Vec<f32>> {
        let (blocks, count) = (Arc::clone(&blocks), score.as_ref().map_or(0, |score| score.targets.len()));
        let tokens = tokens.iter().map(|&token| InputToken::Known(token)).collect();
        let row = PlanRow { request: RequestId(0), tokens, first_position: first as u32, blocks, sample: None, score };
        let ticket = executor.submit(StepPlan { rows: vec![row], ..StepPlan::default() })?;
        executor.collect(ticket)?;
        Ok(executor.decoder().logits(count)?)
    };
    if ahead > 0 {
        step(0, &text[..ahead], None)?;
    }
    let room = geometry.max_step_logits.min(geometry.max_step_tokens) as usize;
    let mut logits = Vec::new();
    for (index, tokens) in text[ahead..].chunks(room).enumerate() {
        let score = PromptLogprobsRow { targets: tokens.to_vec(), top: 0 };
        logits.extend(step(ahead + index * room, tokens, Some(score))?);
    }
    Ok(logits)
}

/// Tells how far logits are apart, and where the model was trained whether that is within what is allowed.
pub fn tell_agreement(
    (name, most_kl): (&str, f64),
    [reference, found]: [&[f32]; 2],
    vocabulary: usize,
    is_trained: bool,
    tell: &mut Tell<'_>,
) {
    let (mut agreement, mut largest) = (Agreement::default(), 0.0_f32);
    for (reference, found) in reference.chunks_exact(vocabulary).zip(found.chunks_exact(vocabulary)) {
        agreement.add(reference, found);
        largest = largest.max(regret(reference, found));
    }
    let (kl, top_1, most_regret) = (agreement.mean_kl(), 100.0 * agreement.top_1(), most_regret(most_kl));
    let mut figure = |what: &str, value: f64, unit: &str, wanted: String, bound: Bound| {
        tell(Figure::new(format!("{name}: {what}"), value, unit).wanted(&wanted, bound).into());
    };
    figure("mean KL from the CPU's", kl.max(0.0), "nats", format!("at most {most_kl:e}"), Bound::Most(most_kl));
    figure("the same first choice", top_1, "%", format!("at least {WANTED_TOP_1}"), Bound::Least(WANTED_TOP_1));
    let (wanted, bound) = (format!("at most {most_regret:.2}"), Bound::Most(most_regret));
    figure("what the CPU's choice has more than another", largest.into(), "nats", wanted, bound);
    if is_trained {
        let within = kl <= most_kl && f64::from(largest) <= most_regret;
        tell(Finding::check(format!("{name}: logits are the CPU's, as near as that"), within));
    }
}

/// Log probability that a choice by `found` lacks to the one by `reference`.
fn regret(reference: &[f32], found: &[f32]) -> f32 {
    let choice = |logits: &[f32]| (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b])).unwrap_or(0);
    reference[choice(reference)] - reference[choice(found)]
}

#[cfg(test)]
mod tests {
    use super::*;

    fn checks(reference: &[f32], found: &[f32], is_trained: bool) -> Vec<bool> {
        let mut findings = Vec::new();
        tell_agreement(("text", 1e-3), [reference, found], 2, is_trained, &mut |finding| findings.push(finding));
        let check = |finding: &Finding| match finding {
            Finding::Check { passed, .. } => Some(*passed),
            _ => None,
        };
        findings.iter().filter_map(check).collect()
    }

    #[test]
    fn logits_that_are_apart_fail_where_the_model_has_a_meaning() {
        let reference = [1.0, 0.0, 0.0, 2.0];
        assert_eq!(checks(&reference, &reference, true), [true]);
        assert_eq!(
            checks(&reference, &[1.0, 0.5, 0.0, 2.0], true),
            [false],
            "too far, though the choices are the same"
        );
        let beside = |own: [f32; 2]| [&own[..], &[9.0, -9.0].repeat(99)].concat();
        assert_eq!(
            checks(&beside([0.02, 0.0]), &beside([0.0, 0.02]), true),
            [true],
            "another choice, which is as good"
        );
        assert_eq!(checks(&beside([0.2, 0.0]), &beside([0.0, 0.1]), true), [false], "another choice, which is not");
        assert!(checks(&reference, &[9.0, 0.0, 9.0, 0.0], false).is_empty());
    }
}
