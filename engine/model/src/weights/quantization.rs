//! The formats of `--quantization`, to which float weights are quantized as they are loaded.

use windlass_kernels::{Group, Integer};

/// A format for float weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quantization {
    name: &'static str,
    layers: Narrow,
}

/// The format of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Narrow {
    /// Integers with a scale for each block of a row.
    Integer(Integer),
    /// Eight-bit floats (e4m3) with a scale for each output.
    Float8,
}

const fn int4(name: &'static str, group: Group, symmetric: bool) -> Quantization {
    Quantization { name, layers: Narrow::Integer(Integer::Int4 { group, symmetric }) }
}

impl Quantization {
    /// 8 bits in groups of 32.
    pub const INT8: Quantization = Quantization { name: "int8", layers: Narrow::Integer(Integer::Int8) };
    /// e4m3 with a scale for each output.
    pub const FP8: Quantization = Quantization { name: "fp8", layers: Narrow::Float8 };
    /// 4 bits in groups of 32 with a minimum.
    pub const INT4: Quantization = int4("int4", Group::Of32, false);

    /// All formats. The embedding and the head, which are more sensitive, always get at least 8 bits.
    pub const ALL: [Quantization; 8] = [
        Quantization::INT8,
        Quantization::FP8,
        Quantization::INT4,
        int4("int4-g64", Group::Of64, false),
        int4("int4-g128", Group::Of128, false),
        int4("int4-sym", Group::Of32, true),
        int4("int4-g64-sym", Group::Of64, true),
        int4("int4-g128-sym", Group::Of128, true),
    ];

    /// The name, as in `--quantization`.
    pub fn name(self) -> &'static str {
        self.name
    }

    /// The format of this name.
    pub fn named(name: &str) -> Option<Quantization> {
        Self::ALL.into_iter().find(|quantization| quantization.name == name)
    }

    /// All names, comma-separated.
    pub fn names() -> String {
        Self::ALL.map(Quantization::name).join(", ")
    }

    /// Whether devices that can do so round the inputs of the matrices to eight bits, too.
    pub(crate) fn rounds_inputs(self) -> bool {
        self.layers == Narrow::Float8
    }

    pub(crate) fn of_layers(self) -> Narrow {
        self.layers
    }

    pub(crate) fn of_tables(self) -> Narrow {
        Narrow::Integer(Integer::Int8)
    }
}
