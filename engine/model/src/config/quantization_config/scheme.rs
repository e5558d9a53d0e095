//! The quantization scheme of a matrix, and the names of its tensors.

/// The quantization scheme of matrices.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    pub layout: Layout,
    /// Number of inputs that share a scale; `None` for all inputs.
    pub group: Option<usize>,
    /// Whether inputs of the matrices are meant to be rounded to 8 bits, too (W8A8).
    pub rounds_inputs: bool,
}

/// How codes are stored in the tensors of a matrix. Bits are those of a code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Words of inputs, `[inputs · bits / 32, outputs]`.
    Gptq { bits: u32, zeros: GptqZeros },
    /// Words of eight outputs, `[inputs, outputs / 8]`.
    Awq,
    /// Words of inputs, `[outputs, inputs · bits / 32]`.
    Packed { bits: u32, symmetric: bool },
    /// Bytes, `[outputs, inputs]`.
    Bytes { symmetric: bool },
    /// Eight-bit floats (e4m3), `[outputs, inputs]`.
    Float8 { scales: Float8Scales, inverse: bool },
    /// Codes of 4 bits that index a table, the first one in the high half, with scales for blocks of the whole matrix
    /// (Dettmers et al. 2023).
    Bnb4,
    /// Bytes, with the largest magnitude of each output (Dettmers et al. 2022).
    Bnb8,
}

impl Layout {
    /// Whether codes have 8 bits, so that they can be multiplied with inputs rounded to 8 bits.
    pub fn is_of_bytes(self) -> bool {
        matches!(
            self,
            Layout::Bytes { .. }
                | Layout::Float8 { .. }
                | Layout::Gptq { bits: 8, .. }
                | Layout::Packed { bits: 8, .. }
        )
    }
}

/// The zero points of GPTQ.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GptqZeros {
    /// The middle code, whatever is stored: tools differ in what they store then (`sym`).
    Middle,
    /// The stored values (second version of the format).
    Stored,
    /// The stored values plus 1 (first version of the format).
    StoredLessOne,
}

/// The values that share a scale of eight-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float8Scales {
    Matrix,
    Outputs,
    /// Blocks of so many outputs by so many inputs.
    Blocks([usize; 2]),
}

impl Scheme {
    /// A scheme that rounds weights only.
    pub const fn of_weights(layout: Layout, group: Option<usize>) -> Scheme {
        Scheme { layout, group, rounds_inputs: false }
    }

    /// The name of the tensor of codes of the matrix `name`.
    pub fn codes_name(self, name: &str) -> String {
        match self.layout {
            Layout::Gptq { .. } | Layout::Awq => replace(name, "qweight"),
            Layout::Packed { .. } => replace(name, "weight_packed"),
            _ => name.to_owned(),
        }
    }

    /// Names of the other tensors that the matrix `name` may have.
    pub fn other_names(self, name: &str) -> Vec<String> {
        let parts: &[&str] = match self.layout {
            Layout::Gptq { .. } => &["qzeros", "scales", "g_idx"],
            Layout::Awq => &["qzeros", "scales"],
            Layout::Packed { .. } => &["weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"],
            // Inputs are scaled as they are computed, so scales measured beforehand are not needed.
            Layout::Bytes { .. } => &["weight_scale", "weight_zero_point", "input_scale", "input_zero_point"],
            Layout::Float8 { .. } => &["weight_scale", "weight_scale_inv", "input_scale", "activation_scale"],
            Layout::Bnb4 => &[
                "weight.absmax",
                "weight.quant_map",
                "weight.nested_absmax",
                "weight.nested_quant_map",
                "weight.quant_state.bitsandbytes__nf4",
                "weight.quant_state.bitsandbytes__fp4",
            ],
            Layout::Bnb8 => &["SCB", "weight_format"],
        };
        parts.iter().map(|part| replace(name, part)).collect()
    }
}

/// `…q_proj.weight` to `…q_proj.PART`.
pub(crate) fn replace(name: &str, part: &str) -> String {
    format!("{}{part}", name.strip_suffix("weight").unwrap_or(name))
}
