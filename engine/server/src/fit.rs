//! `windlass-engine fit`: what fits into which memory and why, and how many replicas a peak needs.

mod memory;
mod replicas;

use crate::cli::{FitArgs, FitDevice};
use crate::config::kv_data_type;
use crate::failure::Failure;
use crate::{inspect, machine};
use memory::{Demand, Fit, bytes, parse_bytes};
use replicas::{Peak, Replica};
use windlass_engine_contract::memory::StepDefaults;

/// Prints the reckoning.
pub fn run(args: &FitArgs) -> Result<(), Failure> {
    let shape = inspect::shape(&args.model)?;
    let longest = args.max_model_len.unwrap_or(shape.context_tokens).min(shape.context_tokens);
    let demand = Demand::of(&shape, kv_data_type(&args.kv_cache_dtype)?, longest, steps(args));
    println!("{}", demand.explain(&shape));
    println!("{:<14} {:>12} {:>12} {:>10}", "memory", "left for KV", "KV tokens", "sequences");
    let memories = memories(args)?;
    for memory in &memories {
        println!("{}", demand.fit(*memory).line());
    }
    if let Some(peak) = peak(args)? {
        let replica = replica(args);
        let kv_tokens = memories.last().map_or(0, |memory| demand.fit(*memory).kv_tokens);
        println!("\n{}", peak.replicas(&replica, kv_tokens).explain());
    }
    Ok(())
}

fn steps(args: &FitArgs) -> StepDefaults {
    let defaults = match args.device {
        FitDevice::Cpu => StepDefaults::CPU,
        FitDevice::Cuda => StepDefaults::CUDA,
    };
    defaults.with(args.max_num_seqs, args.max_num_batched_tokens)
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

impl Fit {
    fn line(&self) -> String {
        match self.missing {
            0 => format!(
                "{:<14} {:>12} {:>12} {:>10.1}",
                bytes(self.memory),
                bytes(self.kv_bytes),
                self.kv_tokens,
                self.sequences
            ),
            missing => format!("{:<14} does not fit: {} more are needed", bytes(self.memory), bytes(missing)),
        }
    }
}
