//! A real text's logits, on the GPU and by the CPU's executor: teacher-forced, with the bars of kernels.md, 4.

use std::sync::Arc;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, InputToken, PlanRow, ScoreRow, StepPlan};
use windlass_engine_core::request::RequestId;
use windlass_engine_model::cuda::CudaExecutor;
use windlass_engine_model::{ActivationType, Agreement, LoadOptions, Reader};

use crate::Outcome;
use crate::finding::{Figure, Finding};
use crate::parts::Tell;

/// Least share of positions with the same likeliest token, percent.
const LEAST_TOP_1: f64 = 99.0;

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
    let mut step = |first: usize, tokens: &[u32], score: Option<ScoreRow>| -> Outcome<Vec<f32>> {
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
        let score = ScoreRow { targets: tokens.to_vec(), top: 0 };
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
    let mut agreement = Agreement::default();
    let rows = reference.chunks_exact(vocabulary).zip(found.chunks_exact(vocabulary));
    rows.for_each(|(reference, found)| agreement.add(reference, found));
    let (kl, top_1) = (agreement.mean_kl(), 100.0 * agreement.top_1());
    let (kl_bar, top_1_bar) = (format!("at most {most_kl:e}"), format!("at least {LEAST_TOP_1}"));
    tell(Figure::new(format!("{name}: mean KL from the CPU's"), kl.max(0.0), "nats").wanted(&kl_bar).into());
    tell(Figure::new(format!("{name}: the same first choice"), top_1, "%").wanted(&top_1_bar).into());
    if is_trained {
        let within = kl <= most_kl && top_1 >= LEAST_TOP_1;
        tell(Finding::check(format!("{name}: logits are the CPU's, as near as that"), within));
    }
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
        let near = [[1e-3, 0.0], [1.0, 0.0], [1.0, 0.0]].concat();
        let other = [[0.0, 1e-3], [1.0, 0.0], [1.0, 0.0]].concat();
        assert_eq!(checks(&near, &other, true), [false], "another choice, though it is near");
        assert!(checks(&reference, &[9.0, 0.0, 9.0, 0.0], false).is_empty());
    }
}
