//! The tensors of one quantized matrix: finds them by name and checks their shapes.

use half::{bf16, f16};
use windlass_checkpoint::{Data, Tensor};
use windlass_kernels::{WeightType, floats};

use crate::config::quantization_config::{Scheme, replace};

/// Finds the tensors of the matrix that is called `name` in checkpoints that are not quantized.
pub(super) struct Parts<'n, F> {
    pub scheme: Scheme,
    pub name: &'n str,
    pub find: F,
}

impl<'a, F: Fn(&str) -> Option<Tensor<'a>>> Parts<'_, F> {
    /// Finds the codes, of this type and these dimensions, fastest first.
    pub fn codes(&self, kind: &str, dims: [usize; 2]) -> Result<Tensor<'a>, String> {
        let name = self.scheme.codes_name(self.name);
        let codes = (self.find)(&name).ok_or_else(|| format!("{name:?} is missing"))?;
        check(codes, kind, dims)
    }

    /// Finds a tensor that may be missing.
    pub fn optional(&self, part: &str) -> Option<Tensor<'a>> {
        (self.find)(&replace(self.name, part))
    }

    /// Finds a tensor of any shape.
    pub fn any(&self, part: &str) -> Result<Tensor<'a>, String> {
        self.optional(part).ok_or_else(|| format!("{:?} is missing", replace(self.name, part)))
    }

    /// Finds a tensor of this type and these dimensions, fastest first.
    pub fn part(&self, part: &str, kind: &str, dims: [usize; 2]) -> Result<Tensor<'a>, String> {
        check(self.any(part)?, kind, dims)
    }

    /// Finds a tensor of floats of these dimensions, fastest first.
    pub fn floats(&self, part: &str, dims: [usize; 2]) -> Result<FloatPart<'a>, String> {
        let tensor = self.any(part)?;
        let kind = match tensor.kind.name() {
            "f16" => WeightType::F16,
            "bf16" => WeightType::BF16,
            "f32" => WeightType::F32,
            other => return Err(format!("{:?} is {other}; it should be floats", tensor.name)),
        };
        let Tensor { name, bytes, offset, .. } = check(tensor, tensor.kind.name(), dims)?;
        Ok(FloatPart { name, offset, kind, bytes })
    }
}

/// Floats in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct FloatPart<'a> {
    name: &'a str,
    offset: u64,
    kind: WeightType,
    bytes: Data<'a>,
}

impl FloatPart<'_> {
    /// The value at an index.
    pub fn get(&self, index: usize) -> f32 {
        let size = self.kind.block_bytes();
        let bytes = &self.bytes[index * size..][..size];
        match (self.kind, bytes) {
            (WeightType::F16, [a, b]) => f16::from_le_bytes([*a, *b]).to_f32(),
            (WeightType::BF16, [a, b]) => bf16::from_le_bytes([*a, *b]).to_f32(),
            (_, [a, b, c, d]) => f32::from_le_bytes([*a, *b, *c, *d]),
            _ => unreachable!("a float has two or four bytes"),
        }
    }

    /// Where a value is stored, for error messages.
    pub fn place(&self, index: usize) -> String {
        let offset = self.offset + (index * self.kind.block_bytes()) as u64;
        format!("value {index} of {:?}, at offset {offset}", self.name)
    }

    /// All values.
    pub fn all(&self) -> Vec<f32> {
        floats(self.kind, &self.bytes)
    }
}

/// Checks type and dimensions. A tensor of one dimension may stand for one of two with the same number of elements.
fn check<'a>(tensor: Tensor<'a>, kind: &str, dims: [usize; 2]) -> Result<Tensor<'a>, String> {
    let expected = dims.map(|dim| dim as u64);
    let count = expected[0].saturating_mul(expected[1]);
    let flat = tensor.dims.iter().product::<u64>() == count && tensor.dims.contains(&count);
    match tensor.kind.name() == kind && (tensor.dims == expected || flat || (count == 1 && tensor.dims.is_empty())) {
        true => Ok(tensor),
        false => {
            let Tensor { name, kind: found, dims, offset, .. } = tensor;
            Err(format!(
                "{name:?} is {found} {dims:?}; it should be {kind} {expected:?} (its data is at offset {offset})"
            ))
        }
    }
}
