//! Finds tensors by name, checks their shapes, and records which were asked for.

use std::collections::BTreeSet;

use windlass_checkpoint::{Checkpoint, ElementType, Tensor};
use windlass_kernels::WeightType;

use super::matrix::{MatrixTensor, PlainTensor, VectorTensor};
use super::{TensorError, weight_type};
use crate::config::names::{self, Name, Naming};
use crate::config::quantization_config::{Scheme, Schemes};
use crate::config::{DecoderConfig, Unsupported};
use crate::weights::quantization::{Narrow, Quantization};
use crate::weights::quantized::PackedTensor;

/// The element types of vectors.
const FLOATS: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::BF16];

/// Finds tensors and records which were asked for.
#[derive(Debug)]
pub(super) struct Finder<'a> {
    checkpoint: &'a Checkpoint,
    pub naming: Naming,
    used: BTreeSet<&'a str>,
    quantization: Option<Quantization>,
    /// The schemes of matrices that are stored as codes; `None` if there are none.
    schemes: Option<Schemes>,
    /// Added to the weights of norms (Gemma stores them minus 1).
    norm_offset: f32,
    /// Whether the data of tensors is there, and not only headers.
    has_data: bool,
}

impl<'a> Finder<'a> {
    pub fn new(checkpoint: &'a Checkpoint, config: &DecoderConfig, quantization: Option<Quantization>) -> Finder<'a> {
        let (naming, schemes, norm_offset) = (config.naming, config.schemes.clone(), config.norm_offset);
        Finder { checkpoint, naming, used: BTreeSet::new(), quantization, schemes, norm_offset, has_data: true }
    }

    /// A finder for a checkpoint of which only headers are there. The order of inputs (`g_idx`) stays unknown.
    pub fn of_headers(self) -> Finder<'a> {
        Finder { has_data: false, ..self }
    }

    fn find(&mut self, name: &str, expected: &[u64]) -> Result<Tensor<'a>, TensorError> {
        let Some(tensor) = self.checkpoint.tensor(name) else {
            return Err(TensorError::Missing { name: name.to_owned(), expected: expected.to_vec() });
        };
        if tensor.dims != expected {
            let (expected, found, offset) = (expected.to_vec(), tensor.dims.to_vec(), tensor.offset);
            return Err(TensorError::Dimensions { name: name.to_owned(), expected, found, offset });
        }
        self.used.insert(tensor.name);
        Ok(tensor)
    }

    /// Finds a matrix of a layer.
    pub fn matrix(&mut self, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
        let quantized = self.quantization.map(Quantization::of_layers);
        self.typed(name, dims, quantized)
    }

    /// Finds the embedding or the head.
    pub fn table(&mut self, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
        let quantized = self.quantization.map(Quantization::of_tables);
        self.typed(name, dims, quantized)
    }

    /// Finds a matrix, whose floats are to be quantized to `quantized`.
    fn typed(
        &mut self,
        name: &str,
        dims: [u64; 2],
        quantized: Option<Narrow>,
    ) -> Result<MatrixTensor<'a>, TensorError> {
        let scheme = self.schemes.as_ref().and_then(|schemes| schemes.of(name));
        if let Some(scheme) = scheme.filter(|scheme| self.is_packed(*scheme, name)) {
            return self.packed(scheme, name, dims);
        }
        let tensor = self.find(name, &dims)?;
        self.plain(tensor, dims.map(|dim| dim as usize), quantized)
    }

    /// Finds a matrix of floats or of a kernel format.
    fn plain(
        &self,
        tensor: Tensor<'a>,
        [cols, rows]: [usize; 2],
        quantized: Option<Narrow>,
    ) -> Result<MatrixTensor<'a>, TensorError> {
        let kind = weight_type(tensor.kind).ok_or_else(|| unsupported(&tensor, &file_types()))?;
        let quantized = match quantized.filter(|_| FLOATS.contains(&kind)) {
            Some(Narrow::Float8) => return rounded(tensor, kind, [cols, rows]),
            Some(Narrow::Integer(integer)) => Some(integer),
            None => None,
        };
        let (checkpoint, Tensor { name, bytes, .. }) = (self.checkpoint, tensor);
        Ok(MatrixTensor::Plain(PlainTensor { checkpoint, name, rows, cols, bytes, kind, quantized }))
    }

    /// Whether the matrix is stored as codes. Tools do not quantize the head and the modules that their users exclude.
    fn is_packed(&self, scheme: Scheme, name: &str) -> bool {
        let codes = self.checkpoint.tensor(&scheme.codes_name(name));
        codes.is_some_and(|codes| weight_type(codes.kind).is_none())
    }

    fn packed(&mut self, scheme: Scheme, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
        let (checkpoint, has_data) = (self.checkpoint, self.has_data);
        let find = |name: &str| checkpoint.tensor(name).filter(|tensor| has_data || !tensor.name.ends_with("g_idx"));
        let packed = PackedTensor::find(scheme, name, dims.map(|dim| dim as usize), find)
            .map_err(|problem| TensorError::Packed { name: name.to_owned(), problem })?;
        let names = scheme.other_names(name).into_iter().chain([scheme.codes_name(name)]);
        self.used.extend(names.filter_map(|name| checkpoint.tensor(&name)).map(|tensor| tensor.name));
        Ok(packed.into())
    }

    /// Finds the weights of a norm.
    pub fn norm(&mut self, name: &str, length: u64) -> Result<VectorTensor<'a>, TensorError> {
        let offset = self.norm_offset;
        self.floats(name, &[length]).map(|norm| norm.plus(offset))
    }

    /// Finds a tensor of floats.
    pub fn floats(&mut self, name: &str, dims: &[u64]) -> Result<VectorTensor<'a>, TensorError> {
        let tensor = self.find(name, dims)?;
        match weight_type(tensor.kind) {
            Some(kind) if FLOATS.contains(&kind) => Ok(VectorTensor::of(tensor)),
            _ => Err(unsupported(&tensor, &FLOATS.map(WeightType::name)).into()),
        }
    }

    pub fn biases(&mut self, layer: usize, query: u64, kv: u64) -> Result<[VectorTensor<'a>; 3], TensorError> {
        let naming = self.naming;
        let mut bias = |part: Name, length: u64| self.floats(&naming.bias(layer, part), &[length]);
        Ok([bias(names::QUERY, query)?, bias(names::KEY, kv)?, bias(names::VALUE, kv)?])
    }

    pub fn head_norms(&mut self, layer: usize, head_dim: u64) -> Result<[VectorTensor<'a>; 2], TensorError> {
        let naming = self.naming;
        let mut norm = |part: Name| self.norm(&naming.weight(layer, part), head_dim);
        Ok([norm(names::QUERY_NORM)?, norm(names::KEY_NORM)?])
    }

    /// Finds the floats of one output: a matrix of one row in Hugging Face checkpoints, a vector in GGUF files.
    pub fn row(&mut self, name: &str, length: u64) -> Result<VectorTensor<'a>, TensorError> {
        match self.naming {
            Naming::Hub(_) => self.floats(name, &[length, 1]),
            Naming::Gguf => self.floats(name, &[length]),
        }
    }

    /// Finds a router, which is never quantized.
    pub fn router(&mut self, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
        self.typed(name, dims, None)
    }

    /// Finds a matrix of every expert: one tensor in GGUF files, a tensor each in Hugging Face checkpoints.
    pub fn experts(
        &mut self,
        layer: usize,
        part: Name,
        dims: [u64; 2],
        count: usize,
    ) -> Result<Vec<MatrixTensor<'a>>, TensorError> {
        let name = self.naming.weight(layer, part);
        if let Naming::Hub(_) = self.naming {
            return (0..count).map(|expert| self.matrix(&name.replace("{}", &expert.to_string()), dims)).collect();
        }
        let stack = self.find(&name, &[dims[0], dims[1], count as u64])?;
        let quantized = self.quantization.map(Quantization::of_layers);
        let rows = dims[1] as usize;
        let all = self.plain(stack, [dims[0] as usize, rows * count], quantized)?;
        Ok((0..count).map(|expert| all.rows(expert * rows..(expert + 1) * rows)).collect())
    }

    /// Marks a tensor as used that another one replaces.
    pub fn ignore(&mut self, name: &str) -> Option<MatrixTensor<'a>> {
        self.used.extend(self.checkpoint.tensor(name).map(|tensor| tensor.name));
        None
    }

    pub fn refuse_unused(&self) -> Result<(), TensorError> {
        let needless = |tensor: &Tensor<'_>| {
            self.naming.is_no_weight(tensor.name) || self.schemes.is_some() && is_zero_bias(tensor)
        };
        let unused = |tensor: &Tensor<'_>| !self.used.contains(tensor.name) && !needless(tensor);
        match self.checkpoint.tensors().find(unused) {
            Some(tensor) => Err(Unsupported::ExtraTensor(tensor.name.to_owned()).into()),
            None => Ok(()),
        }
    }
}

/// Whether a tensor is a bias of zeros: some tools write biases beside all codes, though the model has none.
fn is_zero_bias(tensor: &Tensor<'_>) -> bool {
    tensor.name.ends_with(".bias") && tensor.bytes.iter().all(|byte| *byte == 0)
}

/// A matrix of floats to be rounded to eight-bit floats.
fn rounded<'a>(tensor: Tensor<'a>, kind: WeightType, size: [usize; 2]) -> Result<MatrixTensor<'a>, TensorError> {
    let rounded = PackedTensor::rounded(tensor, kind, size);
    rounded.map(MatrixTensor::from).map_err(|problem| TensorError::Packed { name: tensor.name.to_owned(), problem })
}

fn unsupported(tensor: &Tensor<'_>, supported: &[&str]) -> Unsupported {
    let (name, kind) = (tensor.name.to_owned(), tensor.kind.name());
    Unsupported::TensorType { name, kind, supported: supported.join(", ") }
}

/// Names of all supported element types.
fn file_types() -> Vec<&'static str> {
    WeightType::ALL.map(WeightType::name).into_iter().filter(|name| ElementType::named(name).is_some()).collect()
}
