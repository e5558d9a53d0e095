//! Bytes: of a model, of its KV cache, of a step; and what is left of a memory.

use crate::failure::Failure;
use windlass_engine_contract::memory::{
    KvDataType, StepDefaults, kv_bytes_per_token, kv_sequence_bytes, workspace_bytes,
};
use windlass_engine_contract::shape::{ModelShape, WindowedLayers};

/// What an engine takes, by use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Demand {
    weights: u64,
    workspace: u64,
    kv: KvDataType,
    kv_per_token: u64,
    /// Of a sequence at its longest.
    kv_per_sequence: u64,
    longest: u32,
    step_tokens: u32,
    sequences: u32,
}

/// What one memory holds.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Fit {
    /// Its size.
    pub memory: u64,
    /// Left for KV.
    pub kv_bytes: u64,
    /// Tokens that these hold, in sequences at their longest.
    pub kv_tokens: u64,
    /// Sequences at their longest that these hold.
    pub sequences: f64,
    /// Bytes that are missing for a single sequence at its longest; 0 if it fits.
    pub missing: u64,
}

impl Demand {
    /// By the arithmetic that the engine itself allocates by.
    pub fn of(shape: &ModelShape, kv: KvDataType, longest: u32, steps: StepDefaults) -> Demand {
        let StepDefaults { sequences, tokens: step_tokens, .. } = steps;
        Demand {
            weights: shape.weight_bytes,
            workspace: workspace_bytes(shape, step_tokens, sequences),
            kv,
            kv_per_token: kv_bytes_per_token(shape, kv),
            kv_per_sequence: kv_sequence_bytes(shape, kv, longest),
            longest,
            step_tokens,
            sequences,
        }
    }

    /// What is left of a memory.
    pub fn fit(&self, memory: u64) -> Fit {
        let fixed = self.weights + self.workspace;
        let kv_bytes = memory.saturating_sub(fixed);
        let sequences = kv_bytes as f64 / self.kv_per_sequence.max(1) as f64;
        let kv_tokens = (sequences * f64::from(self.longest)) as u64;
        Fit { memory, kv_bytes, kv_tokens, sequences, missing: (fixed + self.kv_per_sequence).saturating_sub(memory) }
    }

    /// Where the bytes come from.
    pub fn explain(&self, shape: &ModelShape) -> String {
        let ModelShape { architecture, layers, hidden, heads, kv_heads, head_dim, vocabulary, context_tokens, .. } =
            shape;
        let windows = shape.windowed.map_or(String::new(), |WindowedLayers { layers, tokens }| {
            format!("; the last {tokens} in {layers} layers with windows")
        });
        format!(
            "{architecture}: {layers} layers of width {hidden}, {heads} heads of {head_dim}, {kv_heads} for K and V, \
             {vocabulary} tokens, context {context_tokens}\n\n\
             weights        {:>12}  as stored\n\
             KV of a token  {:>12}  2 × {layers} layers × {kv_heads} heads × {} bytes ({})\n\
             KV of a sequence {:>10}  × {} tokens{windows}\n\
             workspace      {:>12}  {} tokens in a step, {} rows of logits\n",
            bytes(self.weights),
            bytes(self.kv_per_token),
            self.kv.head_bytes(*head_dim),
            self.kv.name(),
            bytes(self.kv_per_sequence),
            self.longest,
            bytes(self.workspace),
            self.step_tokens,
            self.sequences,
        )
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

    #[test]
    fn what_is_left_holds_tokens_of_128_kib() {
        let demand = Demand::of(&llama_8b(), KvDataType::Bf16, 8192, StepDefaults::CPU);
        let fit = demand.fit(80 << 30);
        assert_eq!(fit.missing, 0);
        assert_eq!(fit.kv_tokens, fit.kv_bytes / 131_072);
        assert!((60.0..66.0).contains(&fit.sequences), "{fit:?}");
    }

    #[test]
    fn windows_leave_room_for_more_sequences() {
        let windowed = Some(WindowedLayers { layers: 28, tokens: 1024 });
        let shape = ModelShape { windowed, ..llama_8b() };
        let demand = Demand::of(&shape, KvDataType::Bf16, 65_536, StepDefaults::CPU);
        let [some, all] = [demand, Demand::of(&llama_8b(), KvDataType::Bf16, 65_536, StepDefaults::CPU)]
            .map(|demand| demand.fit(80 << 30).sequences);
        assert!((7.0..8.0).contains(&(some / all)), "{some} and {all}");
        let told = demand.explain(&shape);
        assert!(told.contains("× 65536 tokens; the last 1024 in 28 layers with windows"), "{told}");
    }

    #[test]
    fn bytes_hold_nearly_twice_the_tokens() {
        let [bf16, int8] = [KvDataType::Bf16, KvDataType::Int8]
            .map(|kv| Demand::of(&llama_8b(), kv, 8192, StepDefaults::CPU).fit(80 << 30).kv_tokens as f64);
        assert!((1.9..1.95).contains(&(int8 / bf16)), "{bf16} and {int8}");
    }

    #[test]
    fn a_memory_that_is_too_small_is_told_what_is_missing() {
        let demand = Demand::of(&llama_8b(), KvDataType::Bf16, 8192, StepDefaults::CPU);
        let short = demand.fit(16 << 30);
        assert_eq!(demand.fit((16 << 30) + short.missing).missing, 0);
        assert!(demand.fit((16 << 30) + short.missing - 1).missing > 0);
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
