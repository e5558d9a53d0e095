//! Bytes: of a model, of its KV cache, of a step, of the process; and what of a memory is left for keys and values.

use crate::cli::FitDevice;
use crate::failure::Failure;
use std::fmt;
use windlass_engine_contract::memory::{
    KvDataType, KvDemand, StepDefaults, cpu_kv_bytes, cuda_kv_bytes, kv_bytes_per_token, kv_pool_bytes,
    kv_sequence_bytes, process_bytes, rotary_bytes, workspace_bytes,
};
use windlass_engine_contract::shape::{ModelShape, WindowedLayers};

/// The flag that says how large the KV pool is.
const KV_FLAG: &str = "--kv-cache-memory-bytes";

/// What an engine is to serve, and by which flags.
#[derive(Clone, Debug)]
pub struct Demand {
    /// The model, as it is loaded.
    pub shape: ModelShape,
    /// How keys and values are held.
    pub kv: KvDataType,
    /// Size of the pool; absent for the engine's choice.
    pub kv_asked: Option<u64>,
    /// Longest sequence, tokens.
    pub longest: u32,
    /// The engine is not to serve shorter ones instead.
    pub is_longest_asked: bool,
    /// Sizes of steps and blocks.
    pub steps: StepDefaults,
    /// What computes.
    pub device: FitDevice,
}

/// What one memory holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// Its size.
    pub memory: u64,
    /// The pool that `serve` takes by these flags, or why it does not serve.
    pub served: Result<Pool, Refusal>,
    /// The largest pool that is of use and has room, where that is another.
    pub largest: Option<Pool>,
}

/// Keys and values of some size.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pool {
    bytes: u64,
    /// Tokens that it holds, in sequences at their longest.
    tokens: u64,
    /// Sequences at their longest that it holds.
    sequences: f64,
    /// Tokens of the longest sequence that is served.
    longest: u64,
}

/// Why nothing is served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// So many bytes are missing.
    Missing(u64),
    /// The pool that the engine takes of itself, of so many bytes, does not hold a longest sequence.
    Pool(u64),
}

impl Demand {
    /// What is left of a memory, by the arithmetic that the engine itself allocates by.
    pub fn fit(&self, memory: u64) -> Fit {
        let left = memory.saturating_sub(self.fixed());
        let own = self.own_pool(memory, left);
        let bytes = self.kv_asked.unwrap_or(own);
        let missing = (self.fixed() + self.least_pool()).saturating_sub(memory);
        let served = match (missing, bytes < self.least_pool()) {
            (0, false) => Ok(self.pool(bytes)),
            (0, true) => Err(Refusal::Pool(bytes)),
            _ => Err(Refusal::Missing(missing)),
        };
        let largest = left.min(self.useful());
        let is_another = missing == 0 && self.kv_asked.is_none() && largest > own;
        Fit { memory, served, largest: is_another.then(|| self.pool(largest)) }
    }

    /// Everything but keys and values.
    fn fixed(&self) -> u64 {
        self.shape.weight_bytes + self.workspace() + self.process()
    }

    fn workspace(&self) -> u64 {
        let StepDefaults { tokens, .. } = self.steps;
        workspace_bytes(&self.shape, tokens, self.steps.logit_rows()) + rotary_bytes(self.shape.head_dim, self.longest)
    }

    /// A GPU has no part in it.
    fn process(&self) -> u64 {
        match self.device {
            FitDevice::Cpu => process_bytes(self.shape.vocabulary),
            FitDevice::Cuda => 0,
        }
    }

    /// What the engine takes where nothing is said.
    fn own_pool(&self, memory: u64, left: u64) -> u64 {
        let affordable = match self.device {
            FitDevice::Cpu => cpu_kv_bytes(memory.saturating_sub(self.process()), self.shape.weight_bytes),
            FitDevice::Cuda => cuda_kv_bytes(left),
        };
        affordable.min(self.useful())
    }

    /// Smaller ones are refused: a block at least, and a longest sequence where its length was asked for.
    fn least_pool(&self) -> u64 {
        let tokens = if self.is_longest_asked { self.longest } else { self.steps.block_tokens };
        self.kv_asked.unwrap_or_default().max(kv_sequence_bytes(&self.shape, self.kv, tokens))
    }

    /// More is never used.
    fn useful(&self) -> u64 {
        let StepDefaults { sequences, tokens, block_tokens } = self.steps;
        let demand = KvDemand { sequences, longest: self.longest, step_tokens: tokens, block_tokens };
        kv_pool_bytes(&self.shape, self.kv, &demand)
    }

    fn pool(&self, bytes: u64) -> Pool {
        let sequences = bytes as f64 / self.kv_per_sequence().max(1) as f64;
        let tokens = (sequences * f64::from(self.longest)) as u64;
        Pool { bytes, tokens, sequences, longest: tokens.min(self.longest.into()) }
    }

    fn kv_per_sequence(&self) -> u64 {
        kv_sequence_bytes(&self.shape, self.kv, self.longest)
    }

    /// Where the bytes come from.
    pub fn explain(&self) -> String {
        let ModelShape { architecture, layers, hidden, heads, kv_heads, head_dim, vocabulary, context_tokens, .. } =
            &self.shape;
        let windows = self.shape.windowed.map_or(String::new(), |WindowedLayers { layers, tokens }| {
            format!("; the last {tokens} in {layers} layers with windows")
        });
        format!(
            "{architecture}: {layers} layers of width {hidden}, {heads} heads of {head_dim}, {kv_heads} for K and V, \
             {vocabulary} tokens, context {context_tokens}\n\n\
             weights        {:>12}  as they are loaded\n\
             KV of a token  {:>12}  2 × {layers} layers × {kv_heads} heads × {} bytes ({})\n\
             KV of a sequence {:>10}  × {} tokens{windows}\n\
             workspace      {:>12}  {} tokens in a step, {} sequences\n\
             process        {:>12}  program, tokenizer, tables for structured answers\n",
            bytes(self.shape.weight_bytes),
            bytes(kv_bytes_per_token(&self.shape, self.kv)),
            self.kv.head_bytes(*head_dim),
            self.kv.name(),
            bytes(self.kv_per_sequence()),
            self.longest,
            bytes(self.workspace()),
            self.steps.tokens,
            self.steps.sequences,
            bytes(self.process()),
        )
    }
}

impl Fit {
    /// Above the lines of memories.
    pub const TITLES: &str = "memory            KV pool    KV tokens  sequences    longest";

    /// Tokens that the pool which is served with holds.
    pub fn kv_tokens(&self) -> u64 {
        self.served.map_or(0, |pool| pool.tokens)
    }
}

impl fmt::Display for Fit {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let memory = bytes(self.memory);
        match self.served {
            Ok(pool) => write!(to, "{memory:<12} {pool}")?,
            Err(Refusal::Missing(missing)) => {
                write!(to, "{memory:<12} does not fit: {} more are needed", bytes(missing))?
            }
            Err(Refusal::Pool(own)) => {
                write!(to, "{memory:<12} the KV pool of {} does not hold a longest sequence", bytes(own))?;
            }
        }
        match self.largest {
            Some(pool) => write!(to, "\n{:<12} {pool}  with {KV_FLAG} {}", "", pool.bytes),
            None => Ok(()),
        }
    }
}

impl fmt::Display for Pool {
    fn fmt(&self, to: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Pool { tokens, sequences, longest, .. } = self;
        write!(to, "{:>12} {tokens:>12} {sequences:>10.1} {longest:>10}", bytes(self.bytes))
    }
}

/// A size for people.
pub fn bytes(bytes: u64) -> String {
    const UNITS: [&str; 4] = ["KiB", "MiB", "GiB", "TiB"];
    if bytes < 1024 {
        return format!("{bytes} B");
    }
    let power = (bytes.ilog2() / 10).min(UNITS.len() as u32);
    format!("{:.1} {}", bytes as f64 / 1024_f64.powi(power as i32), UNITS[power as usize - 1])
}

/// `16Gi`, `16GiB`, `16G` (powers of 1000), or bytes.
pub fn parse_bytes(text: &str) -> Result<u64, Failure> {
    let wrong =
        || Failure::configuration(format!("--memory {text:?} is no size; write it as in 16Gi, 24G or 8589934592"));
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let number: f64 = text[..digits].parse().map_err(|_| wrong())?;
    let unit: u64 = match text[digits..].trim_end_matches('B') {
        "" => 1,
        "Ki" => 1 << 10,
        "Mi" => 1 << 20,
        "Gi" => 1 << 30,
        "Ti" => 1 << 40,
        "K" => 1000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        _ => return Err(wrong()),
    };
    Some(number * unit as f64).filter(|bytes| *bytes < 1e18).map(|bytes| bytes as u64).ok_or_else(wrong)
}

#[cfg(test)]
mod tests {
    use super::*;
    use windlass_engine_contract::fixture::llama_8b;

    fn demand(shape: ModelShape, longest: u32) -> Demand {
        let (kv, steps, device) = (KvDataType::Bf16, StepDefaults::CPU, FitDevice::Cpu);
        Demand { shape, kv, kv_asked: None, longest, is_longest_asked: false, steps, device }
    }

    /// The pool that `serve` takes.
    fn served(demand: &Demand, memory: u64) -> Pool {
        demand.fit(memory).served.unwrap()
    }

    #[test]
    fn a_pool_is_what_serve_takes_and_a_flag_makes_it_what_is_left() {
        let demand = demand(llama_8b(), 8192);
        let Fit { served, largest, .. } = demand.fit(40 << 30);
        let (served, largest) = (served.unwrap(), largest.unwrap());
        assert_eq!(served.bytes, ((40 << 30) - process_bytes(128_256) - llama_8b().weight_bytes) / 4);
        assert_eq!(served.tokens, served.bytes / 131_072);
        assert_eq!(largest.bytes, (40 << 30) - demand.fixed());
        assert!(largest.sequences > 3.9 * served.sequences, "{served:?} {largest:?}");
        let asked = Demand { kv_asked: Some(largest.bytes), ..demand.clone() };
        assert_eq!((asked.fit(40 << 30).served, asked.fit(40 << 30).largest), (Ok(largest), None));
        let told = demand.fit(40 << 30).to_string();
        assert!(told.ends_with(&format!("with --kv-cache-memory-bytes {}", largest.bytes)), "{told}");
        let beyond_use = demand.fit(8 << 40);
        assert_eq!((beyond_use.served.unwrap().sequences, beyond_use.largest), (64.0, None));
    }

    #[test]
    fn a_gpu_gives_most_of_what_is_left_and_holds_no_process() {
        let demand = Demand { device: FitDevice::Cuda, steps: StepDefaults::CUDA, ..demand(llama_8b(), 8192) };
        let left = (80 << 30) - llama_8b().weight_bytes - demand.workspace();
        assert_eq!(served(&demand, 80 << 30).bytes, cuda_kv_bytes(left));
    }

    #[test]
    fn windows_leave_room_for_more_sequences() {
        let windowed = Some(WindowedLayers { layers: 28, tokens: 1024 });
        let windowed = demand(ModelShape { windowed, ..llama_8b() }, 65_536);
        let [some, all] = [&windowed, &demand(llama_8b(), 65_536)].map(|demand| served(demand, 80 << 30).sequences);
        assert!((7.0..8.0).contains(&(some / all)), "{some} and {all}");
        let told = windowed.explain();
        assert!(told.contains("× 65536 tokens; the last 1024 in 28 layers with windows"), "{told}");
    }

    #[test]
    fn bytes_hold_nearly_twice_the_tokens() {
        let [bf16, int8] = [KvDataType::Bf16, KvDataType::Int8].map(|kv| Demand { kv, ..demand(llama_8b(), 8192) });
        let [bf16, int8] = [bf16, int8].map(|demand| served(&demand, 80 << 30).tokens as f64);
        assert!((1.9..1.95).contains(&(int8 / bf16)), "{bf16} and {int8}");
    }

    #[test]
    fn a_memory_that_is_too_small_is_told_what_is_missing() {
        let asks = Demand { is_longest_asked: true, ..demand(llama_8b(), 8192) };
        let Err(Refusal::Missing(missing)) = asks.fit(15 << 30).served else { panic!() };
        let enough = (15 << 30) + missing;
        assert_eq!(asks.fit(enough - 1).served, Err(Refusal::Missing(1)));
        // There is room, of which the engine would not take as much.
        assert!(matches!(asks.fit(enough).served, Err(Refusal::Pool(_))));
        assert_eq!(asks.fit(enough).largest.unwrap().longest, 8192);
        let shorter = Demand { is_longest_asked: false, ..asks };
        assert!((1000..3000).contains(&served(&shorter, enough).longest), "{shorter:?}");
    }

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, expected) in [("16Gi", 16 << 30), ("1.5KiB", 1536), ("24G", 24_000_000_000), ("7", 7)] {
            assert_eq!(parse_bytes(text).unwrap(), expected);
        }
        for wrong in ["", "Gi", "-1", "16Xi", "1e99", "99999999Ti", "1.2.3"] {
            assert!(parse_bytes(wrong).is_err(), "{wrong}");
        }
        assert_eq!((bytes(1536).as_str(), bytes(5).as_str(), bytes(80 << 30).as_str()), ("1.5 KiB", "5 B", "80.0 GiB"));
    }
}
