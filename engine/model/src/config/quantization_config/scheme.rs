//! How a matrix was quantized, and what its parts are called.

/// How a checkpoint's matrices were quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    pub layout: Layout,
    /// Inputs that share a scale; absent for all of them.
    pub group: Option<usize>,
    /// What the matrices multiply was meant to be rounded to 8 bits, too (W8A8).
    pub rounds_inputs: bool,
}

/// How values lie in a matrix's tensors. Bits are those of a code.
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
    /// Nibbles that name entries of a table, the first in the high half; scales in blocks of the whole matrix
    /// (Dettmers et al. 2023).
    Bnb4,
    /// Bytes with a largest magnitude for each output (Dettmers et al. 2022).
    Bnb8,
}

impl Layout {
    /// Whether codes have 8 bits, as those have that multiply what was rounded to as many.
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

/// Where GPTQ's zero points are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GptqZeros {
    /// In the middle of the codes, whatever is stored: not all tools agree on that (`sym`).
    Middle,
    /// As they are stored, in the second version.
    Stored,
    /// One above what is stored, in the first.
    StoredLessOne,
}

/// What shares a scale of eight-bit floats.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Float8Scales {
    Matrix,
    Outputs,
    /// So many outputs by so many inputs.
    Blocks([usize; 2]),
}

impl Scheme {
    /// Of weights alone.
    pub const fn of_weights(layout: Layout, group: Option<usize>) -> Scheme {
        Scheme { layout, group, rounds_inputs: false }
    }

    /// What the checkpoint calls the codes of the matrix `name`.
    pub fn codes_name(self, name: &str) -> String {
        match self.layout {
            Layout::Gptq { .. } | Layout::Awq => replace(name, "qweight"),
            Layout::Packed { .. } => replace(name, "weight_packed"),
            _ => name.to_owned(),
        }
    }

    /// Names of the other tensors of the matrix `name`, which may be there.
    pub fn other_names(self, name: &str) -> Vec<String> {
        let parts: &[&str] = match self.layout {
            Layout::Gptq { .. } => &["qzeros", "scales", "g_idx"],
            Layout::Awq => &["qzeros", "scales"],
            Layout::Packed { .. } => &["weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"],
            // Activations are rounded as they come: scales that were measured for them beforehand are not needed.
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
