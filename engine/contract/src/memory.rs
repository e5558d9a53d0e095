//! Memory as arithmetic: bytes of weights, KV cache and workspace from a shape, before anything is allocated.

use std::iter::Sum;

use crate::kv_groups::KvGroups;
use crate::shape::ModelShape;

/// How the KV cache holds keys and values.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum KvDataType {
    /// Brain floats of 2 bytes.
    #[default]
    Bf16,
    /// Half-precision floats of 2 bytes.
    F16,
    /// Floats of one byte (e4m3), with a float of 4 bytes for each token and head.
    Fp8,
    /// Bytes, with a float of 4 bytes for each token and head.
    Int8,
    /// Half bytes, with a float of 4 bytes for each token and head.
    Int4,
}

impl KvDataType {
    /// Every one.
    pub const ALL: [KvDataType; 5] =
        [KvDataType::Bf16, KvDataType::F16, KvDataType::Fp8, KvDataType::Int8, KvDataType::Int4];

    /// The type of this name, as `--kv-cache-dtype` spells it, vLLM's names included.
    pub fn named(name: &str) -> Option<KvDataType> {
        match name {
            "auto" | "bf16" | "bfloat16" => Some(KvDataType::Bf16),
            "f16" | "fp16" | "float16" => Some(KvDataType::F16),
            "fp8" | "fp8_e4m3" | "fp8_per_token_head" => Some(KvDataType::Fp8),
            "int8" | "int8_per_token_head" => Some(KvDataType::Int8),
            "int4" | "int4_per_token_head" => Some(KvDataType::Int4),
            _ => None,
        }
    }

    /// Bytes of a key or value of one head.
    pub fn head_bytes(self, head_dim: u32) -> u64 {
        match self {
            KvDataType::Bf16 | KvDataType::F16 => 2 * u64::from(head_dim),
            KvDataType::Fp8 | KvDataType::Int8 => u64::from(head_dim) + 4,
            KvDataType::Int4 => u64::from(head_dim.div_ceil(2)) + 4,
        }
    }

    /// As `--kv-cache-dtype` spells it.
    pub fn name(self) -> &'static str {
        match self {
            KvDataType::Bf16 => "bf16",
            KvDataType::F16 => "f16",
            KvDataType::Fp8 => "fp8",
            KvDataType::Int8 => "int8",
            KvDataType::Int4 => "int4",
        }
    }
}

/// The ledger of one engine, or of one of its ranks, bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ledger {
    /// All weights.
    pub weights: u64,
    /// The KV pool.
    pub kv: u64,
    /// Blocks outside the pool, in memory.
    pub swap: u64,
    /// Activations and logits of the largest step.
    pub workspace: u64,
    /// What a process has beside a model's ([`process_bytes`]); in one of its ranks' alone, and on no GPU.
    pub process: u64,
}

impl Ledger {
    /// Everything together.
    pub fn total(&self) -> u64 {
        self.uses().iter().map(|(_, bytes)| bytes).sum()
    }

    /// Each use by its name, as metrics call it.
    pub fn uses(&self) -> [(&'static str, u64); 5] {
        let Ledger { weights, kv, swap, workspace, process } = *self;
        [("weights", weights), ("kv", kv), ("swap", swap), ("workspace", workspace), (PROCESS, process)]
    }
}

/// The name of what a process has beside a model's.
pub const PROCESS: &str = "process";

impl Sum for Ledger {
    fn sum<I: Iterator<Item = Ledger>>(ledgers: I) -> Ledger {
        let add = |sum: Ledger, ledger: Ledger| Ledger {
            weights: sum.weights + ledger.weights,
            kv: sum.kv + ledger.kv,
            swap: sum.swap + ledger.swap,
            workspace: sum.workspace + ledger.workspace,
            process: sum.process + ledger.process,
        };
        ledgers.fold(Ledger::default(), add)
    }
}

/// What a process that serves has whatever the vocabulary: the program's own data, threads, connections, and what the
/// allocator keeps for them.
const PROGRAM_BYTES: u64 = 40 << 20;
/// What a tokenizer keeps of a token: its text, its merges, and what finds them.
const TOKENIZER_BYTES_PER_TOKEN: u64 = 210;
/// What the tables for structured answers keep of a token.
const FORM_BYTES_PER_TOKEN: u64 = 530;

/// Bytes of a process that serves a model of so many tokens, beside what the model takes: the program, the tokenizer, and
/// the tables for structured answers. They are fitted to what three models took, not counted: `tests/memory/run`
/// holds them against what is resident.
pub fn process_bytes(vocabulary: u32) -> u64 {
    process_bytes_with(vocabulary, FORM_BYTES_PER_TOKEN * u64::from(vocabulary))
}

/// The same where it is known what the tables for structured answers take; 0 without any.
pub fn process_bytes_with(vocabulary: u32, form_bytes: u64) -> u64 {
    PROGRAM_BYTES + TOKENIZER_BYTES_PER_TOKEN * u64::from(vocabulary) + form_bytes
}

/// Bytes of K and V of one token over all layers.
pub fn kv_bytes_per_token(shape: &ModelShape, data_type: KvDataType) -> u64 {
    2 * u64::from(shape.layers) * u64::from(shape.kv_heads) * data_type.head_bytes(shape.head_dim)
}

/// Bytes of one KV block of `block_tokens` tokens over the layers of one of these groups.
pub fn kv_block_bytes(shape: &ModelShape, groups: &KvGroups, data_type: KvDataType, block_tokens: u32) -> u64 {
    let group = ModelShape { layers: groups.layers(shape), windowed: None, ..shape.clone() };
    kv_bytes_per_token(&group, data_type) * u64::from(block_tokens)
}

/// Bytes of K and V that a sequence of `tokens` tokens holds, which are in windows where layers have them.
pub fn kv_sequence_bytes(shape: &ModelShape, data_type: KvDataType, tokens: u32) -> u64 {
    let groups = KvGroups::of(shape, tokens);
    groups.sequence_tokens(tokens.into()) * kv_block_bytes(shape, &groups, data_type, 1)
}

/// What an engine is to hold at once in its KV pool.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvDemand {
    /// Sequences.
    pub sequences: u32,
    /// Tokens of each.
    pub longest: u32,
    /// Most tokens of a step.
    pub step_tokens: u32,
    /// Tokens in a block.
    pub block_tokens: u32,
}

/// Bytes of a pool in which these sequences never wait for a block: what they hold, and in windows what the steps on
/// their way compute and leave behind.
pub fn kv_pool_bytes(shape: &ModelShape, data_type: KvDataType, demand: &KvDemand) -> u64 {
    let KvDemand { sequences, longest, step_tokens, block_tokens } = *demand;
    let groups = KvGroups::of(shape, longest);
    let held = u64::from(sequences) * groups.sequence_blocks(longest.into(), block_tokens);
    // Two steps in flight, and one whose blocks return with the next.
    let on_their_way = u64::from(groups.windowed) * (3 * u64::from(step_tokens)).div_ceil(block_tokens.max(1).into());
    let whole = u64::from(sequences) * u64::from(groups.count()) * u64::from(longest.div_ceil(block_tokens.max(1)));
    (held + on_their_way).min(whole).saturating_mul(kv_block_bytes(shape, &groups, data_type, block_tokens))
}

/// Sizes of steps and blocks that an engine has where it is told nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StepDefaults {
    /// Most sequences of a step.
    pub sequences: u32,
    /// Most tokens of a step.
    pub tokens: u32,
    /// Tokens of a block of keys and values.
    pub block_tokens: u32,
}

impl StepDefaults {
    /// On a CPU, where more sequences than these, or more tokens, would make every step long and none faster.
    pub const CPU: StepDefaults = StepDefaults { sequences: 64, tokens: 512, block_tokens: 16 };
    /// On GPUs, which have to read all weights for each step. Blocks are the kernels' pages.
    pub const CUDA: StepDefaults = StepDefaults { sequences: 256, tokens: 2048, block_tokens: 64 };

    /// Rows of logits for which a step has room: there are some however few sequences run, as prompts are scored by so
    /// many tokens a step.
    pub fn logit_rows(self) -> u32 {
        const LEAST: u32 = 32;
        self.sequences.max(LEAST).min(self.tokens)
    }

    /// These, but for what is said: a step has a token for each of its sequences, so what is said of one bounds the other.
    pub fn with(self, sequences: Option<u32>, tokens: Option<u32>) -> StepDefaults {
        let sequences = sequences.unwrap_or(self.sequences.min(tokens.unwrap_or(u32::MAX)));
        StepDefaults { sequences, tokens: tokens.unwrap_or(self.tokens.max(sequences)), ..self }
    }
}

/// On a CPU, the parts of what the weights leave free of which a KV pool takes one unless it is told its size: the rest is
/// the machine's, which others use, too.
const CPU_KV_PARTS: u64 = 4;

/// The most that a KV pool takes unless told on a CPU that has `free` bytes, of which `weights` are the weights'.
pub fn cpu_kv_bytes(free: u64, weights: u64) -> u64 {
    free.saturating_sub(weights) / CPU_KV_PARTS
}

/// Free bytes of which [`cpu_kv_bytes`] are `kv`.
pub fn cpu_free_bytes(kv: u64, weights: u64) -> u64 {
    kv.saturating_mul(CPU_KV_PARTS).saturating_add(weights)
}

/// The most that a KV pool takes unless told, of what weights and workspace leave free of a GPU: the rest is for the
/// driver's own, such as graphs.
pub fn cuda_kv_bytes(left: u64) -> u64 {
    const SHARE: f64 = 0.9;
    (left as f64 * SHARE) as u64
}

/// Bytes of activations for a step of `step_tokens`, of which `logit_rows` rows are sampled.
///
/// Residual, its norm and what is added to it, q, k, v and attention output, gate, up and their product, and logits, all
/// in f32; one int8 copy of the widest input.
pub fn workspace_bytes(shape: &ModelShape, step_tokens: u32, logit_rows: u32) -> u64 {
    let [hidden, ffn, vocabulary] = [shape.hidden, shape.feed_forward, shape.vocabulary].map(u64::from);
    let query = u64::from(shape.heads) * u64::from(shape.head_dim);
    let kv = u64::from(shape.kv_heads) * u64::from(shape.head_dim);
    let per_token = 4 * (3 * hidden + 2 * query + 2 * kv + 3 * ffn) + 2 * hidden.max(ffn);
    u64::from(step_tokens) * per_token + u64::from(logit_rows) * vocabulary * 4
}

/// Bytes of the table of cosines and sines, in f32, for each pair of `rotated` elements of a head and each position.
pub fn rotary_bytes(rotated: u32, positions: u32) -> u64 {
    4 * u64::from(rotated) * u64::from(positions)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fixture::llama_8b;
    use crate::shape::WindowedLayers;

    /// Llama-3.1-8B: 128 KiB of bf16 KV per token, the figure published for it.
    #[test]
    fn kv_of_llama_8b_is_128_kib_per_token() {
        let shape = llama_8b();
        assert_eq!(kv_bytes_per_token(&shape, KvDataType::Bf16), 131_072);
        assert_eq!(kv_block_bytes(&shape, &KvGroups::ONE, KvDataType::Bf16, 16), 2 << 20);
        assert_eq!(kv_sequence_bytes(&shape, KvDataType::Bf16, 1000), 131_072 * 1000);
        assert_eq!(kv_bytes_per_token(&shape, KvDataType::Int8), 131_072 / 2 + 2 * 32 * 8 * 4);
        assert_eq!(kv_bytes_per_token(&shape, KvDataType::Int4), 131_072 / 4 + 2 * 32 * 8 * 4);
        let names: Vec<&str> = KvDataType::ALL.map(KvDataType::name).to_vec();
        assert_eq!(names, ["bf16", "f16", "fp8", "int8", "int4"]);
        assert!(KvDataType::ALL.iter().all(|kind| KvDataType::named(kind.name()) == Some(*kind)));
    }

    /// SmolLM2's 49,152 tokens: 75 MiB were resident beside its ledger, 25 of them tables.
    #[test]
    fn a_process_takes_what_was_resident_and_a_ledger_has_it() {
        assert_eq!(process_bytes(49_152) >> 20, 74);
        assert_eq!((process_bytes(49_152) - process_bytes_with(49_152, 0)) >> 20, 24);
        let ledger = Ledger { weights: 1, kv: 2, swap: 4, workspace: 8, process: 16 };
        assert_eq!((ledger.total(), [ledger, ledger].into_iter().sum::<Ledger>().process), (31, 32));
    }

    #[test]
    fn a_pool_on_a_cpu_is_a_quarter_of_what_the_weights_leave() {
        for (free, weights, kv) in [(20 << 30, 16 << 30, 1 << 30), (1003, 1000, 0), (1004, 1000, 1), (10, 1000, 0)] {
            assert_eq!(cpu_kv_bytes(free, weights), kv, "{free} {weights}");
            let least = cpu_free_bytes(kv.max(1), weights);
            assert_eq!((cpu_kv_bytes(least, weights), cpu_kv_bytes(least - 1, weights)), (kv.max(1), kv.max(1) - 1));
        }
    }

    /// Gemma 3 4B, 34 layers of which 29 see 1024 keys: 16 GiB of bf16 KV for 128 Ki tokens without windows, and what
    /// five full layers and 30 windows of 1087 tokens hold with them.
    #[test]
    fn windows_of_gemma_3_hold_no_more_than_they_read() {
        let windowed = Some(WindowedLayers { layers: 29, tokens: 1024 });
        let shape = ModelShape { layers: 34, kv_heads: 4, head_dim: 256, windowed, ..llama_8b() };
        let layer = 2 * 4 * 512;
        assert_eq!(kv_bytes_per_token(&shape, KvDataType::Bf16), 34 * layer);
        assert_eq!(kv_sequence_bytes(&shape, KvDataType::Bf16, 131_072), (5 * 131_072 + 30 * 1087) * layer);
        assert_eq!(kv_sequence_bytes(&shape, KvDataType::Bf16, 1000), 34 * 1000 * layer);
        let demand = KvDemand { sequences: 2, longest: 131_072, step_tokens: 512, block_tokens: 16 };
        let blocks = 2 * (8192 + 6 * 69) + 6 * 96;
        assert_eq!(kv_pool_bytes(&shape, KvDataType::Bf16, &demand), blocks * 5 * 16 * layer);
        let short = KvDemand { longest: 1000, ..demand };
        assert_eq!(kv_pool_bytes(&shape, KvDataType::Bf16, &short), 2 * 63 * 34 * 16 * layer);
    }
}
