//! Small random models in every weight type, as GGUF files.

use half::{bf16, f16};
use windlass_checkpoint::testing::GgufBuilder;
use windlass_kernels::WeightType;

/// What to generate.
#[derive(Clone, Copy)]
pub struct Tiny {
    pub kind: WeightType,
    /// Of value and down, where it is another: files called Q4_K_M have several.
    pub other: Option<WeightType>,
    pub layers: u32,
    pub hidden: u64,
    pub feed_forward: u64,
    pub heads: u32,
    pub kv_heads: u32,
    pub longest_tokens: u32,
    pub rope_dims: u32,
    pub vocabulary: u64,
    pub tied: bool,
    pub rope_factors: bool,
    /// Of weights, beside what makes a product of the order of its inputs.
    pub spread: f32,
}

impl Tiny {
    /// Two layers of two query heads per key head, all matrices of this type.
    pub fn of(kind: WeightType) -> Tiny {
        Tiny {
            kind,
            other: None,
            layers: 2,
            hidden: 256,
            feed_forward: 512,
            heads: 4,
            kv_heads: 2,
            longest_tokens: 512,
            rope_dims: 64,
            vocabulary: 320,
            tied: true,
            rope_factors: false,
            spread: 1.0,
        }
    }

    /// The same weights for the same values.
    pub fn build(&self) -> GgufBuilder {
        let mut random = Random(0x57494e44);
        let head_dim = self.hidden / u64::from(self.heads);
        let kv = head_dim * u64::from(self.kv_heads);
        let (hidden, feed_forward) = (self.hidden, self.feed_forward);
        let mut file = self.metadata();
        file = self.matrix(file, self.kind, "token_embd.weight", [hidden, self.vocabulary], &mut random);
        for layer in 0..self.layers {
            let name = |part: &str| format!("blk.{layer}.{part}.weight");
            for (part, dims) in [
                ("attn_q", [hidden, hidden]),
                ("attn_k", [hidden, kv]),
                ("attn_v", [hidden, kv]),
                ("attn_output", [hidden, hidden]),
                ("ffn_gate", [hidden, feed_forward]),
                ("ffn_up", [hidden, feed_forward]),
                ("ffn_down", [feed_forward, hidden]),
            ] {
                let other = self.other.filter(|_| ["attn_v", "ffn_down"].contains(&part));
                file = self.matrix(file, other.unwrap_or(self.kind), &name(part), dims, &mut random);
            }
            for part in ["attn_norm", "ffn_norm"] {
                file = file.tensor_f32(&name(part), &[hidden], &random.norm(hidden));
            }
        }
        file = file.tensor_f32("output_norm.weight", &[hidden], &random.norm(hidden));
        if !self.tied {
            file = self.matrix(file, self.kind, "output.weight", [hidden, self.vocabulary], &mut random);
        }
        if self.rope_factors {
            let factors: Vec<f32> = (0..self.rope_dims / 2).map(|pair| 1.0 + pair as f32 / 4.0).collect();
            file = file.tensor_f32("rope_freqs.weight", &[factors.len() as u64], &factors);
        }
        file
    }

    fn metadata(&self) -> GgufBuilder {
        GgufBuilder::new()
            .str("general.architecture", "llama")
            .u32("llama.block_count", self.layers)
            .u32("llama.context_length", self.longest_tokens)
            .u32("llama.embedding_length", self.hidden as u32)
            .u32("llama.feed_forward_length", self.feed_forward as u32)
            .u32("llama.attention.head_count", self.heads)
            .u32("llama.attention.head_count_kv", self.kv_heads)
            .u32("llama.rope.dimension_count", self.rope_dims)
            .f32("llama.rope.freq_base", 10_000.0)
            .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    }

    fn matrix(
        &self,
        file: GgufBuilder,
        kind: WeightType,
        name: &str,
        dims: [u64; 2],
        random: &mut Random,
    ) -> GgufBuilder {
        let blocks = dims[0] * dims[1] / kind.block_elements() as u64;
        // The sum of products over a row then is of the order of its inputs.
        let scale = self.spread / (dims[0] as f32).sqrt();
        let data: Vec<u8> = (0..blocks).flat_map(|_| random.block(kind, scale)).collect();
        file.tensor(name, &dims, type_id(kind), &data)
    }
}

/// The type's number in a file.
pub fn type_id(kind: WeightType) -> u32 {
    match kind {
        WeightType::F32 => 0,
        WeightType::F16 => 1,
        WeightType::Q4_0 => 2,
        WeightType::Q4_1 => 3,
        WeightType::Q5_0 => 6,
        WeightType::Q5_1 => 7,
        WeightType::Q8_0 => 8,
        WeightType::Q2K => 10,
        WeightType::Q3K => 11,
        WeightType::Q4K => 12,
        WeightType::Q5K => 13,
        WeightType::Q6K => 14,
        WeightType::IQ4NL => 20,
        WeightType::IQ4XS => 23,
        WeightType::BF16 => 30,
        WeightType::MXFP4 => 39,
        other => panic!("{} is no type of GGUF files", other.name()),
    }
}

/// SplitMix64 (Steele et al. 2014).
pub struct Random(pub u64);

impl Random {
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    /// In [0, 1).
    pub fn uniform(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1u64 << 24) as f32
    }

    /// With mean 0 and variance 1, near enough to normal.
    pub fn normal(&mut self) -> f32 {
        (0..12).map(|_| self.uniform()).sum::<f32>() - 6.0
    }

    fn norm(&mut self, length: u64) -> Vec<f32> {
        (0..length).map(|_| 0.5 + self.uniform()).collect()
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.bits() as u8).collect()
    }

    /// A block whose values have about this standard deviation.
    pub fn block(&mut self, kind: WeightType, deviation: f32) -> Vec<u8> {
        let half = |value: f32| f16::from_f32(value).to_le_bytes();
        // Codes are uniform: of 16 values they have a standard deviation of 4.6, of 256 of 74, of 64 of 18, of 32 of
        // 9.2, of 8 of 2.3, of 4 of 1.1; IQ4's values one of 67, MXFP4's one of 2.9.
        let near = |random: &mut Random, value: f32| value * (0.5 + random.uniform());
        match kind {
            WeightType::F32 => (self.normal() * deviation).to_le_bytes().to_vec(),
            WeightType::F16 => half(self.normal() * deviation).to_vec(),
            WeightType::BF16 => bf16::from_f32(self.normal() * deviation).to_le_bytes().to_vec(),
            WeightType::Q4_0 => [&half(near(self, deviation / 4.6))[..], &self.bytes(16)].concat(),
            WeightType::Q4_1 => {
                let scale = near(self, deviation / 4.6);
                [&half(scale)[..], &half(-7.5 * scale), &self.bytes(16)].concat()
            }
            WeightType::Q5_0 => [&half(near(self, deviation / 9.2))[..], &self.bytes(20)].concat(),
            WeightType::Q5_1 => {
                let scale = near(self, deviation / 9.2);
                [&half(scale)[..], &half(-15.5 * scale), &self.bytes(20)].concat()
            }
            WeightType::Q2K => {
                // Scales and minimums of 4 bits, uniform: the minimum of a group is about 1.5 of its scales.
                let scale = near(self, deviation / 1.1 / 8.8 / 1.5);
                [&self.bytes(16 + 64)[..], &half(scale), &half(1.5 * scale)].concat()
            }
            WeightType::Q3K => {
                let scale = near(self, deviation / 2.3 / 18.0);
                [&self.bytes(32 + 64 + 12)[..], &half(scale)].concat()
            }
            WeightType::Q5K => {
                let scale = near(self, deviation / 9.2 / 32.0);
                [&half(scale)[..], &half(15.5 * scale), &self.bytes(12 + 32 + 128)].concat()
            }
            WeightType::IQ4NL => [&half(near(self, deviation / 67.0))[..], &self.bytes(16)].concat(),
            WeightType::IQ4XS => [&half(near(self, deviation / 67.0 / 18.0))[..], &self.bytes(6 + 128)].concat(),
            WeightType::MXFP4 => [&[(127.0 + (deviation / 2.9).log2().round()) as u8][..], &self.bytes(16)].concat(),
            WeightType::Q8_0 => [&half(near(self, deviation / 74.0))[..], &self.bytes(32)].concat(),
            WeightType::Q4K => {
                // Scales and minimums of 6 bits, uniform: the minimum of a sub-block is about 7.5 of its scales.
                let scale = near(self, deviation / 4.6 / 32.0);
                [&half(scale)[..], &half(7.5 * scale), &self.bytes(12 + 128)].concat()
            }
            WeightType::Q6K => {
                let scale = near(self, deviation / 18.0 / 74.0);
                [&self.bytes(128 + 64 + 16)[..], &half(scale)].concat()
            }
            other => panic!("{} is no type of GGUF files", other.name()),
        }
    }
}
