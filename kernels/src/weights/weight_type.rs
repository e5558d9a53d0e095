//! The value formats of weight tensors.

/// How a weight tensor's values are stored: GGUF's block formats, and those of other tools, whose files are brought into the
/// forms that `bnb4.rs`, `int2.rs`, `int4.rs`, `grouped.rs`, `uint8.rs` and `float8.rs` describe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the formats' own names
pub enum WeightType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q8_0,
    Q4K,
    Q6K,
    Q5_0,
    Q5_1,
    Q2K,
    Q3K,
    Q5K,
    IQ4NL,
    IQ4XS,
    MXFP4,
    NF4,
    FP4,
    I2G32,
    I2G64,
    I2G128,
    I2G256,
    I3G32,
    I3G64,
    I3G128,
    I3G256,
    I4G32,
    I4G64,
    I4G128,
    S4G64,
    S4G128,
    I8G64,
    I8G128,
    U8G32,
    U8G64,
    F8G64,
}

impl WeightType {
    /// Every type.
    pub const ALL: [WeightType; 36] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::BF16,
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q8_0,
        WeightType::Q4K,
        WeightType::Q6K,
        WeightType::Q5_0,
        WeightType::Q5_1,
        WeightType::Q2K,
        WeightType::Q3K,
        WeightType::Q5K,
        WeightType::IQ4NL,
        WeightType::IQ4XS,
        WeightType::MXFP4,
        WeightType::NF4,
        WeightType::FP4,
        WeightType::I2G32,
        WeightType::I2G64,
        WeightType::I2G128,
        WeightType::I2G256,
        WeightType::I3G32,
        WeightType::I3G64,
        WeightType::I3G128,
        WeightType::I3G256,
        WeightType::I4G32,
        WeightType::I4G64,
        WeightType::I4G128,
        WeightType::S4G64,
        WeightType::S4G128,
        WeightType::I8G64,
        WeightType::I8G128,
        WeightType::U8G32,
        WeightType::U8G64,
        WeightType::F8G64,
    ];

    /// The format's name, in small letters: GGUF's own where it has one.
    pub fn name(self) -> &'static str {
        match self {
            WeightType::F32 => "f32",
            WeightType::F16 => "f16",
            WeightType::BF16 => "bf16",
            WeightType::Q4_0 => "q4_0",
            WeightType::Q4_1 => "q4_1",
            WeightType::Q8_0 => "q8_0",
            WeightType::Q4K => "q4_k",
            WeightType::Q6K => "q6_k",
            WeightType::Q5_0 => "q5_0",
            WeightType::Q5_1 => "q5_1",
            WeightType::Q2K => "q2_k",
            WeightType::Q3K => "q3_k",
            WeightType::Q5K => "q5_k",
            WeightType::IQ4NL => "iq4_nl",
            WeightType::IQ4XS => "iq4_xs",
            WeightType::MXFP4 => "mxfp4",
            WeightType::NF4 => "nf4",
            WeightType::FP4 => "fp4",
            WeightType::I2G32 => "int2_g32",
            WeightType::I2G64 => "int2_g64",
            WeightType::I2G128 => "int2_g128",
            WeightType::I2G256 => "int2_g256",
            WeightType::I3G32 => "int3_g32",
            WeightType::I3G64 => "int3_g64",
            WeightType::I3G128 => "int3_g128",
            WeightType::I3G256 => "int3_g256",
            WeightType::I4G32 => "int4_g32",
            WeightType::I4G64 => "int4_g64",
            WeightType::I4G128 => "int4_g128",
            WeightType::S4G64 => "int4_g64_sym",
            WeightType::S4G128 => "int4_g128_sym",
            WeightType::I8G64 => "int8_g64",
            WeightType::I8G128 => "int8_g128",
            WeightType::U8G32 => "uint8_g32",
            WeightType::U8G64 => "uint8_g64",
            WeightType::F8G64 => "fp8_g64",
        }
    }

    /// Whether 256 columns share a factor, and their codes have less than 8 bits.
    pub(crate) fn is_k_quant(self) -> bool {
        matches!(self, WeightType::Q2K | WeightType::Q3K | WeightType::Q4K | WeightType::Q5K | WeightType::Q6K)
    }

    /// Values per block; a row holds whole blocks.
    pub fn block_elements(self) -> usize {
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => 1,
            WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q5_0 | WeightType::Q5_1 | WeightType::Q8_0 => 32,
            WeightType::IQ4NL | WeightType::MXFP4 => 32,
            WeightType::Q2K | WeightType::Q3K | WeightType::Q4K | WeightType::Q5K | WeightType::Q6K => 256,
            WeightType::IQ4XS | WeightType::I2G256 | WeightType::I3G256 => 256,
            WeightType::I2G32 | WeightType::I3G32 | WeightType::I4G32 | WeightType::U8G32 => 32,
            WeightType::NF4 | WeightType::FP4 | WeightType::I2G64 | WeightType::I3G64 | WeightType::I4G64 => 64,
            WeightType::S4G64 | WeightType::I8G64 | WeightType::U8G64 | WeightType::F8G64 => 64,
            WeightType::I2G128 | WeightType::I3G128 | WeightType::I4G128 | WeightType::S4G128 | WeightType::I8G128 => {
                128
            }
        }
    }

    /// Bytes per block in the file.
    pub fn block_bytes(self) -> usize {
        match self {
            WeightType::F32 => 4,
            WeightType::F16 | WeightType::BF16 => 2,
            WeightType::Q4_0 => 18,
            WeightType::Q4_1 => 20,
            WeightType::Q8_0 => 34,
            WeightType::Q4K => 144,
            WeightType::Q6K => 210,
            WeightType::Q5_0 => 22,
            WeightType::Q5_1 => 24,
            WeightType::Q2K => 84,
            WeightType::Q3K => 110,
            WeightType::Q5K => 176,
            WeightType::IQ4NL => 18,
            WeightType::IQ4XS => 136,
            WeightType::MXFP4 => 17,
            WeightType::NF4 | WeightType::FP4 => 34,
            WeightType::I2G32 => 11,
            WeightType::I2G64 => 19,
            WeightType::I2G128 => 35,
            WeightType::I2G256 => 67,
            WeightType::I3G32 => 15,
            WeightType::I3G64 => 27,
            WeightType::I3G128 => 51,
            WeightType::I3G256 => 99,
            WeightType::I4G32 => 19,
            WeightType::I4G64 => 36,
            WeightType::I4G128 => 68,
            WeightType::S4G64 => 34,
            WeightType::S4G128 => 66,
            WeightType::I8G64 => 66,
            WeightType::I8G128 => 130,
            WeightType::U8G32 => 35,
            WeightType::U8G64 | WeightType::F8G64 => 67,
        }
    }

    /// The numbers that the 4 bits of a code name, which the largest magnitude of a block multiplies, where the type is
    /// bitsandbytes'.
    pub fn numbers(self) -> Option<&'static [f32; 16]> {
        super::bnb4::numbers(self)
    }

    /// Bytes of a row of `cols` values in the file; `None` when `cols` is no whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        (cols.is_multiple_of(self.block_elements()))
            .then(|| (cols / self.block_elements()).checked_mul(self.block_bytes()))
            .flatten()
    }
}
