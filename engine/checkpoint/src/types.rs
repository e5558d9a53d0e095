//! Element types of tensors: their number in the file, name, and block.

use std::fmt;

/// A tensor's element type: elements are stored in blocks, and a row is a whole number of them.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct ElementType(&'static Row);

#[derive(PartialEq, Eq, Hash)]
struct Row {
    id: u32,
    name: &'static str,
    block_elements: u64,
    block_bytes: u64,
}

/// Every type that `ggml` writes today (`ggml.h`, `ggml-common.h`; numbers left out were withdrawn), then those that
/// only safetensors files have.
static TYPES: &[Row] = &[
    row(0, "f32", 1, 4),
    row(1, "f16", 1, 2),
    row(2, "q4_0", 32, 18),
    row(3, "q4_1", 32, 20),
    row(6, "q5_0", 32, 22),
    row(7, "q5_1", 32, 24),
    row(8, "q8_0", 32, 34),
    row(9, "q8_1", 32, 36),
    row(10, "q2_k", 256, 84),
    row(11, "q3_k", 256, 110),
    row(12, "q4_k", 256, 144),
    row(13, "q5_k", 256, 176),
    row(14, "q6_k", 256, 210),
    row(15, "q8_k", 256, 292),
    row(16, "iq2_xxs", 256, 66),
    row(17, "iq2_xs", 256, 74),
    row(18, "iq3_xxs", 256, 98),
    row(19, "iq1_s", 256, 50),
    row(20, "iq4_nl", 32, 18),
    row(21, "iq3_s", 256, 110),
    row(22, "iq2_s", 256, 82),
    row(23, "iq4_xs", 256, 136),
    row(24, "i8", 1, 1),
    row(25, "i16", 1, 2),
    row(26, "i32", 1, 4),
    row(27, "i64", 1, 8),
    row(28, "f64", 1, 8),
    row(29, "iq1_m", 256, 56),
    row(30, "bf16", 1, 2),
    row(34, "tq1_0", 256, 54),
    row(35, "tq2_0", 256, 66),
    row(39, "mxfp4", 32, 17),
    row(NOT_IN_GGUF, "bool", 1, 1),
    row(NOT_IN_GGUF, "u8", 1, 1),
    row(NOT_IN_GGUF, "u16", 1, 2),
    row(NOT_IN_GGUF, "u32", 1, 4),
    row(NOT_IN_GGUF, "u64", 1, 8),
    row(NOT_IN_GGUF, "f8_e4m3", 1, 1),
    row(NOT_IN_GGUF, "f8_e5m2", 1, 1),
];

/// The number of types that only safetensors files have.
const NOT_IN_GGUF: u32 = u32::MAX;

const fn row(id: u32, name: &'static str, block_elements: u64, block_bytes: u64) -> Row {
    Row { id, name, block_elements, block_bytes }
}

impl ElementType {
    /// The type with this number in a file.
    pub fn from_id(id: u32) -> Option<ElementType> {
        TYPES.iter().find(|row| row.id == id && id != NOT_IN_GGUF).map(ElementType)
    }

    /// The type with this [`name`](Self::name).
    pub fn named(name: &str) -> Option<ElementType> {
        TYPES.iter().find(|row| row.name == name).map(ElementType)
    }

    /// Its number in a GGUF file.
    pub fn id(self) -> u32 {
        self.0.id
    }

    /// In lower case: `q4_1`, `bf16`.
    pub fn name(self) -> &'static str {
        self.0.name
    }

    /// Elements in a block; 1 where the type has no blocks.
    pub fn block_elements(self) -> u64 {
        self.0.block_elements
    }

    /// Bytes of a block.
    pub fn block_bytes(self) -> u64 {
        self.0.block_bytes
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl fmt::Debug for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
