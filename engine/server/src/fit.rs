//! `windlass-engine fit`: what fits into which memory and why, and how many replicas a peak needs.

mod memory;
mod replicas;

use crate::cli::{FitArgs, FitDevice};
use crate::config::kv_data_type;
use crate::failure::Failure;
use crate::{inspect, machine};
use memory::{Demand, Fit, parse_bytes};
use replicas::{Peak, Replica};
use windlass_engine_contract::memory::StepDefaults;

/// Prints the reckoning.
pub fn run(args: &FitArgs) -> Result<(), Failure> {
    let demand = demand(args)?;
    println!("{}", demand.explain());
    println!("{}", Fit::TITLES);
    let memories = memories(args)?;
    for memory in &memories {
        println!("{}", demand.fit(*memory));
    }
    if let Some(peak) = peak(args)? {
        let kv_tokens = memories.last().map_or(0, |memory| demand.fit(*memory).kv_tokens());
        println!("\n{}", peak.replicas(&replica(args), kv_tokens).explain());
    }
    Ok(())
}

/// What `serve` takes with these flags.
fn demand(args: &FitArgs) -> Result<Demand, Failure> {
    let shape = inspect::shape(&args.model, args.quantization.as_deref(), args.device)?;
    let defaults = match args.device {
        FitDevice::Cpu => StepDefaults::CPU,
        FitDevice::Cuda => StepDefaults::CUDA,
    };
    Ok(Demand {
        kv: kv_data_type(&args.kv_cache_dtype)?,
        kv_asked: args.kv_cache_memory_bytes,
        longest: args.max_model_len.unwrap_or(shape.context_tokens).min(shape.context_tokens),
        is_longest_asked: args.max_model_len.is_some(),
        steps: defaults.with(args.max_num_seqs, args.max_num_batched_tokens),
        device: args.device,
        shape,
    })
}

fn memories(args: &FitArgs) -> Result<Vec<u64>, Failure> {
    if !args.memory.is_empty() {
        return args.memory.iter().map(|text| parse_bytes(text)).collect();
    }
    let free = machine::free_memory_bytes();
    Ok(vec![free.ok_or_else(|| Failure::configuration("the free memory cannot be read; give --memory"))?])
}

fn peak(args: &FitArgs) -> Result<Option<Peak>, Failure> {
    let Some(requests_per_second) = args.requests_per_second else { return Ok(None) };
    let positive = [
        ("--requests-per-second", requests_per_second),
        ("--prefill-tokens-per-second", args.prefill_tokens_per_second.unwrap_or(0.0)),
        ("--decode-tokens-per-second", args.decode_tokens_per_second.unwrap_or(0.0)),
        ("--inter-token-ms", args.inter_token_ms),
    ];
    if let Some((flag, value)) = positive.iter().find(|(_, value)| !(*value > 0.0 && value.is_finite())) {
        return Err(Failure::configuration(format!("{flag} is {value}; it must be greater than 0")));
    }
    if !(args.utilization > 0.0 && args.utilization <= 1.0) {
        let message = format!("--utilization is {}; it must be greater than 0 and at most 1", args.utilization);
        return Err(Failure::configuration(message));
    }
    let (prompt_tokens, answer_tokens) = (f64::from(args.prompt_tokens), f64::from(args.answer_tokens));
    Ok(Some(Peak { requests_per_second, prompt_tokens, answer_tokens, utilization: args.utilization }))
}

fn replica(args: &FitArgs) -> Replica {
    Replica {
        prefill_tokens_per_second: args.prefill_tokens_per_second.unwrap_or(1.0),
        decode_tokens_per_second: args.decode_tokens_per_second.unwrap_or(1.0),
        inter_token_seconds: args.inter_token_ms / 1000.0,
    }
}
