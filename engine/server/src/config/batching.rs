//! Sizes of steps, sequences and the KV cache, and who goes first.

use super::{milliseconds, positive, unsupported};
use crate::cli::{SchedulingPolicy, ServeArgs};
use crate::failure::Failure;
use windlass_engine_contract::flags;
use windlass_engine_contract::memory::{KvDataType, KvDemand, StepDefaults, kv_pool_bytes};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_core::engine::{InterTokenLimit, Policy, QueueLimits};
use windlass_engine_model::{KvBudget, SwapSpace};

/// Where no flag says it. Steps vary, and what is seen at p99 is to stay within four times.
const DEFAULT_GAP: InterTokenLimit = InterTokenLimit::StepMultiple(3.0);

/// Sizes of steps and sequences.
#[derive(Clone, Debug)]
pub struct Batching {
    /// Longest sequence; `None` for the model's own.
    pub max_model_tokens: Option<u32>,
    /// Most sequences in a step; here and in the next two `None` is what suits the device ([`Batching::steps`]).
    pub max_sequences: Option<u32>,
    /// Most tokens in a step.
    pub max_step_tokens: Option<u32>,
    /// Tokens in a KV block.
    pub block_tokens: Option<u32>,
    /// How keys and values are held.
    pub kv_data_type: KvDataType,
    /// Size of the KV pool; `None` for what suits the machine.
    pub kv: Option<KvBudget>,
    /// Where blocks go that the pool gives up, if anywhere.
    pub swap: Option<SwapSpace>,
    /// How much may wait.
    pub queue: QueueLimits,
    /// Keep computed prompts for others that begin alike.
    pub prefix_cache: bool,
    /// How long those are kept that nobody uses.
    pub prefix_cache_ttl_seconds: Option<f64>,
    /// Tenants find each other's prompts.
    pub share_prefix_cache: bool,
    /// Who goes first.
    pub policy: Policy,
    /// How long prompts may make the tokens of others wait.
    pub gap: InterTokenLimit,
}

impl Batching {
    /// What the flags say of steps and blocks on a device that has these where they say nothing.
    pub fn steps(&self, defaults: StepDefaults) -> StepDefaults {
        let block_tokens = self.block_tokens.unwrap_or(defaults.block_tokens);
        StepDefaults { block_tokens, ..defaults.with(self.max_sequences, self.max_step_tokens) }
    }

    /// The most of a KV pool that is of use: what all sequences take at their longest, on such a device.
    pub fn useful_kv_bytes(&self, shape: &ModelShape, defaults: StepDefaults) -> u64 {
        let StepDefaults { sequences, tokens, block_tokens } = self.steps(defaults);
        let longest = self.max_model_tokens.unwrap_or(shape.context_tokens).min(shape.context_tokens);
        let demand = KvDemand { sequences, longest, step_tokens: tokens, block_tokens };
        kv_pool_bytes(shape, self.kv_data_type, &demand)
    }
}

/// How the KV cache is to be held.
pub fn kv_data_type(name: &str) -> Result<KvDataType, Failure> {
    KvDataType::named(name)
        .ok_or_else(|| unsupported(flags::KV_CACHE_DTYPE, name, "use auto, bf16, f16, fp8, int8 or int4"))
}

/// What the flags say of sizes.
pub(super) fn from_args(args: &ServeArgs) -> Result<Batching, Failure> {
    let sizes = [
        (flags::MAX_MODEL_LEN, args.max_model_len.unwrap_or(1)),
        (flags::MAX_NUM_SEQS, args.max_num_seqs.unwrap_or(1)),
        ("--max-num-batched-tokens", args.max_num_batched_tokens.unwrap_or(1)),
        ("--block-size", args.block_size.unwrap_or(1)),
        ("--num-gpu-blocks-override", args.num_gpu_blocks_override.unwrap_or(1)),
    ];
    if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return Err(Failure::configuration(format!("{flag} must be at least 1")));
    }
    if let (Some(tokens), Some(sequences)) = (args.max_num_batched_tokens, args.max_num_seqs)
        && tokens < sequences
    {
        return Err(Failure::configuration(format!(
            "--max-num-batched-tokens is {tokens} and {} is {sequences}: a step must have a token for each sequence",
            flags::MAX_NUM_SEQS,
        )));
    }
    let bytes = args.kv_cache_memory_bytes.map(KvBudget::Bytes);
    Ok(Batching {
        max_model_tokens: args.max_model_len,
        max_sequences: args.max_num_seqs,
        max_step_tokens: args.max_num_batched_tokens,
        block_tokens: args.block_size,
        kv_data_type: kv_data_type(&args.kv_cache_dtype)?,
        kv: args.num_gpu_blocks_override.map(KvBudget::Blocks).or(bytes),
        swap: swap(args)?,
        queue: QueueLimits {
            max_waiting_requests: args.max_queue_requests,
            max_queued_prompt_tokens: args.max_queue_tokens,
            max_predicted_ttft_seconds: milliseconds("--max-predicted-ttft-ms", args.max_predicted_ttft_ms)?,
        },
        prefix_cache: !args.no_enable_prefix_caching,
        prefix_cache_ttl_seconds: positive("--prefix-cache-ttl", args.prefix_cache_ttl)?,
        share_prefix_cache: args.share_prefix_cache,
        policy: policy(args),
        gap: milliseconds("--target-inter-token-ms", args.target_inter_token_ms)?
            .map_or(DEFAULT_GAP, InterTokenLimit::Seconds),
    })
}

/// Room outside the KV pool, which only cached prompts use.
fn swap(args: &ServeArgs) -> Result<Option<SwapSpace>, Failure> {
    const GIB: f64 = (1u64 << 30) as f64;
    if !(0.0..=1e6).contains(&args.swap_space) {
        return Err(Failure::configuration(format!(
            "--swap-space is {}; it must be from 0 to 1e6 GiB",
            args.swap_space
        )));
    }
    match (args.swap_space > 0.0, &args.swap_dir) {
        (false, Some(_)) => Err(Failure::configuration("--swap-dir needs --swap-space, the size of its file")),
        (true, _) if args.no_enable_prefix_caching => {
            Err(Failure::configuration("--swap-space keeps cached prompts, and --no-enable-prefix-caching caches none"))
        }
        (true, folder) => Ok(Some(SwapSpace { bytes: (args.swap_space * GIB) as u64, folder: folder.clone() })),
        (false, None) => Ok(None),
    }
}

fn policy(args: &ServeArgs) -> Policy {
    match args.scheduling_policy {
        SchedulingPolicy::Fcfs => Policy::Fcfs,
        SchedulingPolicy::Priority => Policy::Priority { preemption_threshold: args.priority_preemption_threshold },
        SchedulingPolicy::Fair => Policy::Fair,
        SchedulingPolicy::LongestPrefix => Policy::LongestPrefix,
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;
    use crate::cli::{Cli, Command};

    fn steps(flags: &str, defaults: StepDefaults) -> [u32; 2] {
        let line = format!("windlass-engine serve m {flags}");
        let Command::Serve(args) = Cli::parse_from(line.split_whitespace()).command else { panic!("{line}") };
        let StepDefaults { sequences, tokens, .. } = from_args(&args).unwrap().steps(defaults);
        [sequences, tokens]
    }

    #[test]
    fn a_step_has_what_suits_the_device_and_a_token_for_each_sequence() {
        for (flags, on_cpu, on_cuda) in [
            ("", [64, 512], [256, 2048]),
            ("--max-num-seqs 600", [600, 600], [600, 2048]),
            ("--max-num-batched-tokens 32", [32, 32], [32, 32]),
            ("--max-num-seqs 8 --max-num-batched-tokens 100", [8, 100], [8, 100]),
        ] {
            let found = [StepDefaults::CPU, StepDefaults::CUDA].map(|defaults| steps(flags, defaults));
            assert_eq!(found, [on_cpu, on_cuda], "{flags}");
        }
    }
}
