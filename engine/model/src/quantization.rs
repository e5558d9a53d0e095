//! What `--quantization` makes of float weights as they are loaded.

use windlass_kernels::Integer;

/// Float weights become integers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Quantization {
    /// 8 bits, groups of 32.
    Int8,
    /// 4 bits, groups of 32; the embedding and the head, which lose more, 8 bits.
    Int4,
}

impl Quantization {
    /// All of them.
    pub const ALL: [Quantization; 2] = [Quantization::Int8, Quantization::Int4];

    /// As `--quantization` spells it.
    pub fn name(self) -> &'static str {
        match self {
            Quantization::Int8 => "int8",
            Quantization::Int4 => "int4",
        }
    }

    /// The one of this name.
    pub fn named(name: &str) -> Option<Quantization> {
        Self::ALL.into_iter().find(|quantization| quantization.name() == name)
    }

    pub(crate) fn of_layers(self) -> Integer {
        match self {
            Quantization::Int8 => Integer::Int8,
            Quantization::Int4 => Integer::Int4,
        }
    }

    pub(crate) fn of_tables(self) -> Integer {
        Integer::Int8
    }
}
