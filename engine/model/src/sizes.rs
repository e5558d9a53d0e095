//! Decides how much of everything there is, and whether it fits, before anything is allocated.

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;

use windlass_engine_contract::flags;
use windlass_engine_contract::memory::{self, KvDataType, Ledger, StepDefaults};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_core::executor::{Geometry, KvGroups};
use windlass_kernels::{ActivationType, KV_RUN_TOKENS, Kernels};

use crate::memory_share::MemoryShare;
use crate::quantization::Quantization;
use crate::tier::{FileTier, MemoryTier, Tier};

// Flags of the program that are not among those of the contract.
const ACTIVATION_DTYPE: &str = "--activation-dtype";
const DETERMINISTIC: &str = "--deterministic";
const EXPERT_PARALLEL: &str = "--enable-expert-parallel";

/// What a user chooses of an executor.
#[derive(Clone, Debug)]
pub struct LoadOptions {
    /// Threads that compute, those of all ranks together; at least one.
    pub threads: usize,
    /// Ranks that the model is divided among.
    pub tensor_parallel: u32,
    /// Whether a rank holds some of a mixture's experts whole, instead of columns of each.
    pub expert_parallel: bool,
    /// The instruction set they use.
    pub kernels: Kernels,
    /// How finely they round what multiplies quantized weights.
    pub activations: ActivationType,
    /// Whether GPUs round, to 8 bits in blocks of 32, what multiplies the integers of a GGUF file. Without, and with other weights,
    /// that is bf16.
    pub inputs_in_bytes: bool,
    /// What float weights become; absent for what they are.
    pub quantization: Option<Quantization>,
    /// Whether no token may depend on what is computed beside it. Without, many tokens are multiplied otherwise than few: on GPUs
    /// in another order of sums, on CPUs as [`Activations::varying`] says. That is faster, and equal but for rounding.
    ///
    /// [`Activations::varying`]: windlass_kernels::Activations::varying
    pub batch_invariant: bool,
    /// How keys and values are held.
    pub kv_data_type: KvDataType,
    /// Tokens in a KV block.
    pub block_tokens: u32,
    /// Size of the KV pool.
    pub kv: KvBudget,
    /// Where blocks go that the pool gives up; absent for nowhere.
    pub swap: Option<SwapSpace>,
    /// Most rows in a step.
    pub max_sequences: u32,
    /// Most tokens in a step.
    pub max_step_tokens: u32,
    /// Longest sequence; absent for the model's context, or the KV pool's tokens where those are fewer.
    pub max_model_tokens: Option<u32>,
    /// Most bytes for weights, KV and workspace together.
    pub memory_limit_bytes: Option<u64>,
    /// What the engine may take of each GPU's memory: weights, workspace, and what a KV pool of [`KvBudget::Bytes`] is reckoned of.
    pub gpu_share: MemoryShare,
}

impl Default for LoadOptions {
    /// All cores, 1 GiB of KV, and steps as a CPU has them.
    fn default() -> LoadOptions {
        let StepDefaults { sequences, tokens, block_tokens } = StepDefaults::CPU;
        LoadOptions {
            threads: std::thread::available_parallelism().map_or(1, usize::from),
            tensor_parallel: 1,
            expert_parallel: false,
            kernels: Kernels::detect(),
            activations: ActivationType::Int8,
            inputs_in_bytes: false,
            quantization: None,
            batch_invariant: true,
            kv_data_type: KvDataType::Bf16,
            block_tokens,
            kv: KvBudget::Bytes(1 << 30),
            swap: None,
            max_sequences: sequences,
            max_step_tokens: tokens,
            max_model_tokens: None,
            memory_limit_bytes: None,
            gpu_share: MemoryShare::ALL,
        }
    }
}

impl LoadOptions {
    /// What decides how a CPU rounds, by flag: stages of a pipeline must agree.
    pub(crate) fn choices_on_cpu(&self) -> BTreeMap<String, String> {
        let activations = match self.activations {
            ActivationType::Int8 => "int8",
            ActivationType::Int16 => "int16",
        };
        self.choices(activations)
    }

    /// The same on a GPU.
    pub(crate) fn choices_on_cuda(&self) -> BTreeMap<String, String> {
        let activations = if self.inputs_in_bytes { "int8" } else { "bf16" };
        self.choices(activations)
    }

    fn choices(&self, activations: &str) -> BTreeMap<String, String> {
        let choices = [
            (ACTIVATION_DTYPE, activations.to_owned()),
            (DETERMINISTIC, self.batch_invariant.to_string()),
            (flags::QUANTIZATION, self.quantization.map_or("auto", Quantization::name).to_owned()),
            (flags::KV_CACHE_DTYPE, self.kv_data_type.name().to_owned()),
            (flags::TENSOR_PARALLEL_SIZE, self.tensor_parallel.to_string()),
            (EXPERT_PARALLEL, self.expert_parallel.to_string()),
        ];
        choices.into_iter().map(|(flag, value)| (flag.to_owned(), value)).collect()
    }

    /// Sizes of steps and blocks.
    fn steps(&self) -> StepDefaults {
        let LoadOptions { max_sequences: sequences, max_step_tokens: tokens, block_tokens, .. } = *self;
        StepDefaults { sequences, tokens, block_tokens }
    }

    /// The groups of layers that take least for the longest sequence.
    pub(crate) fn kv_groups(&self, shape: &ModelShape) -> KvGroups {
        let longest = self.max_model_tokens.unwrap_or(shape.context_tokens);
        KvGroups::of(shape, longest.min(shape.context_tokens))
    }

    /// The same with something else in memory too, which takes this much.
    pub fn beside(self, other: Ledger) -> LoadOptions {
        let memory_limit_bytes = self.memory_limit_bytes.map(|limit| limit.saturating_sub(other.total()));
        LoadOptions { memory_limit_bytes, ..self }
    }
}

/// Room for blocks outside the KV pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SwapSpace {
    /// How much.
    pub bytes: u64,
    /// Folder for a file that holds them; absent for memory.
    pub folder: Option<PathBuf>,
}

impl SwapSpace {
    fn slots(&self, block_bytes: u64) -> u32 {
        u32::try_from(self.bytes / block_bytes.max(1)).unwrap_or(u32::MAX)
    }

    /// Makes the places.
    pub(crate) fn tier(&self, shape: &ModelShape, geometry: &Geometry, kv: KvDataType) -> io::Result<Box<dyn Tier>> {
        let (slots, block) =
            (geometry.swap_slots, memory::kv_block_bytes(shape, &geometry.groups, kv, geometry.block_tokens));
        match &self.folder {
            None => Ok(Box::new(MemoryTier::new(slots as usize))),
            Some(folder) => Ok(Box::new(FileTier::create(folder, slots.into(), block)?)),
        }
    }
}

/// Size of the KV pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum KvBudget {
    /// This many blocks.
    Blocks(u32),
    /// As many blocks as fit into these bytes.
    Bytes(u64),
}

/// Why sizes do not work out, with the numbers.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SizeError {
    /// Something must be positive.
    #[error("{0} must be at least 1")]
    Zero(&'static str),
    /// A block that attention cannot read in whole vectors.
    #[error("a KV block of {0} tokens: blocks are multiples of 16")]
    Block(u32),
    /// A step could not give every sequence a token.
    #[error("{max_sequences} sequences need at least as many tokens in a step, which has {max_step_tokens}")]
    StepTooSmall {
        /// Most rows in a step.
        max_sequences: u32,
        /// Most tokens in a step.
        max_step_tokens: u32,
    },
    /// Longer than the model was trained for.
    #[error("the longest sequence cannot be {asked} tokens: the model's context is {context}")]
    BeyondContext {
        /// Tokens asked for.
        asked: u32,
        /// Tokens of the model's context.
        context: u32,
    },
    /// One sequence of the longest length would not fit, even alone.
    #[error(
        "the KV cache holds {held} tokens in {blocks} blocks, fewer than the longest sequence of {asked}; \
         give it more memory or lower the maximum"
    )]
    KvTooSmall {
        /// Tokens of the longest sequence that the pool holds.
        held: u64,
        /// Blocks of the pool.
        blocks: u32,
        /// Tokens of the longest sequence.
        asked: u32,
    },
    /// Not even one block.
    #[error("{budget} bytes of KV cache hold no block: one takes {block}")]
    NoBlock {
        /// Bytes given.
        budget: u64,
        /// Bytes of one block.
        block: u64,
    },
    /// More memory than there may be.
    #[error(
        "the model needs {} bytes, {limit} are allowed: weights {}, KV cache {}, swap space {}, workspace {}",
        ledger.total(), ledger.weights, ledger.kv, ledger.swap, ledger.workspace
    )]
    Memory {
        /// What is needed.
        ledger: Ledger,
        /// What is allowed.
        limit: u64,
    },
}

/// Sizes that work out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Sizes {
    pub geometry: Geometry,
    /// What each rank takes.
    pub ranks: Vec<Ledger>,
}

impl Sizes {
    /// Decides the KV pool and the longest sequence, and checks the memory that all ranks take together. `ranks` are
    /// their parts of the decoder, whose layers are in these groups; `rope_dims` sizes the rotary table.
    pub fn decide(
        ranks: &[ModelShape],
        rope_dims: usize,
        groups: KvGroups,
        options: &LoadOptions,
    ) -> Result<Sizes, SizeError> {
        let [shape, ..] = ranks else { return Err(SizeError::Zero("the number of ranks")) };
        check_positive(options)?;
        let blocks = blocks(ranks, &groups, options)?;
        let max_sequence_tokens = max_sequence_tokens(shape, &groups, options, blocks)?;
        let geometry = Geometry {
            block_tokens: options.block_tokens,
            blocks,
            swap_slots: swap_slots(shape, &groups, options),
            max_sequence_tokens,
            max_step_rows: options.max_sequences,
            max_step_tokens: options.max_step_tokens,
            max_step_logits: options.steps().logit_rows(),
            vocabulary: shape.vocabulary,
            groups,
        };
        Sizes::check(ranks, rope_dims, geometry, options)
    }

    /// Checks the memory that ranks of these sizes take together.
    pub fn check(
        ranks: &[ModelShape],
        rope_dims: usize,
        geometry: Geometry,
        options: &LoadOptions,
    ) -> Result<Sizes, SizeError> {
        let ranks: Vec<Ledger> = ranks.iter().map(|rank| ledger(rank, rope_dims, &geometry, options)).collect();
        let ledger = ranks.iter().copied().sum::<Ledger>();
        match options.memory_limit_bytes {
            Some(limit) if ledger.total() > limit => Err(SizeError::Memory { ledger, limit }),
            _ => Ok(Sizes { geometry, ranks }),
        }
    }
}

fn check_positive(options: &LoadOptions) -> Result<(), SizeError> {
    let LoadOptions { threads, block_tokens, max_sequences, max_step_tokens, max_model_tokens, .. } = *options;
    let sizes = [
        ("the number of threads", threads as u64),
        ("the number of tokens in a block", block_tokens.into()),
        ("the number of sequences", max_sequences.into()),
        ("the number of tokens in a step", max_step_tokens.into()),
        ("the longest sequence", max_model_tokens.unwrap_or(1).into()),
    ];
    if let Some((name, _)) = sizes.into_iter().find(|(_, size)| *size == 0) {
        return Err(SizeError::Zero(name));
    }
    if !(block_tokens as usize).is_multiple_of(KV_RUN_TOKENS) {
        return Err(SizeError::Block(block_tokens));
    }
    match max_sequences > max_step_tokens {
        true => Err(SizeError::StepTooSmall { max_sequences, max_step_tokens }),
        false => Ok(()),
    }
}

fn blocks(ranks: &[ModelShape], groups: &KvGroups, options: &LoadOptions) -> Result<u32, SizeError> {
    let block = |rank: &ModelShape| memory::kv_block_bytes(rank, groups, options.kv_data_type, options.block_tokens);
    let block = ranks.iter().map(block).sum();
    match options.kv {
        KvBudget::Blocks(0) => Err(SizeError::Zero("the number of KV blocks")),
        KvBudget::Blocks(blocks) => Ok(blocks),
        KvBudget::Bytes(budget) if budget < block => Err(SizeError::NoBlock { budget, block }),
        KvBudget::Bytes(budget) => Ok(u32::try_from(budget / block).unwrap_or(u32::MAX)),
    }
}

fn swap_slots(shape: &ModelShape, groups: &KvGroups, options: &LoadOptions) -> u32 {
    let block = memory::kv_block_bytes(shape, groups, options.kv_data_type, options.block_tokens);
    options.swap.as_ref().map_or(0, |swap| swap.slots(block))
}

fn max_sequence_tokens(
    shape: &ModelShape,
    groups: &KvGroups,
    options: &LoadOptions,
    blocks: u32,
) -> Result<u32, SizeError> {
    let (held, context) = (groups.longest_tokens(blocks.into(), options.block_tokens), shape.context_tokens);
    match options.max_model_tokens {
        None => Ok(u32::try_from(held).unwrap_or(u32::MAX).min(context)),
        Some(asked) if asked > context => Err(SizeError::BeyondContext { asked, context }),
        Some(asked) if u64::from(asked) > held => Err(SizeError::KvTooSmall { held, blocks, asked }),
        Some(asked) => Ok(asked),
    }
}

fn ledger(shape: &ModelShape, rope_dims: usize, geometry: &Geometry, options: &LoadOptions) -> Ledger {
    let block = memory::kv_block_bytes(shape, &geometry.groups, options.kv_data_type, geometry.block_tokens);
    let in_memory = options.swap.as_ref().is_some_and(|swap| swap.folder.is_none());
    let slots = if in_memory { geometry.swap_slots } else { 0 };
    let rope = memory::rotary_bytes(rope_dims as u32, geometry.max_sequence_tokens);
    Ledger {
        weights: shape.weight_bytes,
        kv: u64::from(geometry.blocks) * block,
        swap: u64::from(slots) * block,
        workspace: memory::workspace_bytes(shape, geometry.max_step_tokens, geometry.max_step_logits) + rope,
        process: 0,
    }
}
