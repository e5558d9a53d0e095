//! Refuses by name what is not supported on CUDA, before anything is loaded.

use windlass_engine_contract::memory::KvDataType;
use windlass_engine_core::draft::DraftTree;
use windlass_engine_core::plan::PlanRow;
use windlass_kernels::cuda::ops::{MAX_EXPERTS, MAX_HEAD_DIM, MAX_RANKS, MAX_USED_EXPERTS, PAGE_TOKENS, SEEN_KEYS};

use super::CudaError;
use super::cache::PageType;
use crate::config::{DecoderConfig, ExpertsConfig};
use crate::sizes::LoadOptions;

/// Head sizes are multiples of this: kernels read so many values at a time.
const HEAD_STEP: usize = 8;

/// A rank's part of a matrix has a multiple of this number of columns: products read so many at a time.
pub(super) const COLUMN_STEP: u32 = 32;

/// The page type for a KV data type.
pub(super) fn page_type(kind: KvDataType) -> Result<PageType, CudaError> {
    PageType::of(kind)
        .ok_or_else(|| CudaError::unsupported(format!("a KV cache in {}", kind.name()), "bf16, fp8 or int8"))
}

/// Refuses a decoder that the kernels do not support.
pub(super) fn check_config(config: &DecoderConfig, pages: PageType) -> Result<(), CudaError> {
    if let Some(experts) = &config.experts {
        check_experts(experts)?;
    }
    let dim = config.head_dim;
    if !dim.is_multiple_of(HEAD_STEP) || dim > MAX_HEAD_DIM {
        let right = format!("a model with heads of a multiple of {HEAD_STEP} up to {MAX_HEAD_DIM}, or the CPU");
        return Err(CudaError::unsupported(format!("a head of {dim} values"), right));
    }
    if pages != PageType::Bf16 && !dim.is_multiple_of(2 * HEAD_STEP) {
        return Err(CudaError::unsupported(format!("a KV cache in bytes with heads of {dim} values"), "bf16"));
    }
    Ok(())
}

/// Refuses a decoder whose parts the kernels do not support.
pub(super) fn check_divided(config: &DecoderConfig, whole_experts: bool) -> Result<(), CudaError> {
    match config.divided_widths(whole_experts).into_iter().find(|(_, width)| !width.is_multiple_of(COLUMN_STEP)) {
        Some((what, width)) => {
            let found = format!("a divided {what} of {width} columns");
            Err(CudaError::unsupported(found, format!("one rank, or a model with a multiple of {COLUMN_STEP}")))
        }
        None => Ok(()),
    }
}

fn check_experts(experts: &ExpertsConfig) -> Result<(), CudaError> {
    let (count, used) = (experts.count, experts.used);
    if count > MAX_EXPERTS || used > MAX_USED_EXPERTS {
        let right = format!("at most {MAX_EXPERTS} of which a token uses {MAX_USED_EXPERTS}, or the CPU");
        return Err(CudaError::unsupported(
            format!("a mixture of {count} experts of which a token uses {used}"),
            right,
        ));
    }
    Ok(())
}

/// Refuses options that only the CPU supports.
pub(super) fn check_options(options: &LoadOptions) -> Result<(), CudaError> {
    let refuse = |found: String, right: &str| Err(CudaError::unsupported(found, right));
    if options.tensor_parallel as usize > MAX_RANKS {
        return refuse(format!("a group of {} ranks", options.tensor_parallel), &format!("up to {MAX_RANKS}"));
    }
    check_blocks(options.block_tokens)
}

/// Refuses block sizes other than the page size of the kernels.
pub(super) fn check_blocks(tokens: u32) -> Result<(), CudaError> {
    match tokens as usize {
        PAGE_TOKENS => Ok(()),
        _ => Err(CudaError::unsupported(format!("a KV block of {tokens} tokens"), "blocks of 64")),
    }
}

/// Refuses several ranks if some layers stay on the CPU, and swap space, which can only store blocks of one device.
pub(super) fn check_undivided(options: &LoadOptions) -> Result<(), CudaError> {
    if options.swap.is_some() {
        return Err(CudaError::unsupported("swap space with layers on the CPU", "none, or all layers on one device"));
    }
    match options.tensor_parallel {
        1 => Ok(()),
        ranks => Err(CudaError::unsupported(format!("a group of {ranks} ranks with layers on the CPU"), "one rank")),
    }
}

/// Refuses a row that the kernels do not support.
pub(super) fn check_row(row: &PlanRow) -> Result<(), String> {
    match row.draft().filter(|draft| !draft.is_chain()).map(DraftTree::len) {
        Some(draft_tokens) if draft_tokens > SEEN_KEYS => {
            let right = format!("at most {SEEN_KEYS}, or guesses one after the other");
            Err(CudaError::unsupported(format!("{draft_tokens} guesses that branch"), right).to_string())
        }
        _ => Ok(()),
    }
}
