//! Finds a decoder's tensors in a checkpoint by name, checks their sizes and types, and remembers which were asked for.

use std::collections::BTreeSet;

use windlass_checkpoint::{Checkpoint, ElementType, Tensor};
use windlass_kernels::{Integer, WeightType};

use crate::config::Unsupported;
use crate::matrix_tensor::MatrixTensor;
use crate::names::{self, Name, Naming};
use crate::packed::{PackedTensor, Scheme};
use crate::quantization::Quantization;
use crate::weights::TensorError;

/// Types of vectors.
const FLOATS: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::BF16];

/// Looks tensors up and remembers which were asked for.
pub(crate) struct Finder<'a> {
    checkpoint: &'a Checkpoint,
    pub naming: Naming,
    used: BTreeSet<&'a str>,
    quantization: Option<Quantization>,
    /// How matrices were quantized that are not there as plain ones.
    scheme: Option<Scheme>,
}

impl<'a> Finder<'a> {
    pub fn new(checkpoint: &'a Checkpoint, quantization: Option<Quantization>, scheme: Option<Scheme>) -> Finder<'a> {
        Finder { checkpoint, naming: Naming::of(checkpoint), used: BTreeSet::new(), quantization, scheme }
    }

    fn find(&mut self, name: &str, expected: &[u64]) -> Result<Tensor<'a>, TensorError> {
        let Some(tensor) = self.checkpoint.tensor(name) else {
            return Err(TensorError::Missing { name: name.to_owned(), expected: expected.to_vec() });
        };
        if tensor.dims != expected {
            let (expected, found) = (expected.to_vec(), tensor.dims.to_vec());
            return Err(TensorError::Dimensions { name: name.to_owned(), expected, found });
        }
        self.used.insert(tensor.name);
        Ok(tensor)
    }

    /// A layer's matrix.
    pub fn matrix(&mut self, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
        let quantized = self.quantization.map(Quantization::of_layers);
        self.typed(name, dims, quantized)
    }

    /// The embedding or the head.
    pub fn table(&mut self, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
        let quantized = self.quantization.map(Quantization::of_tables);
        self.typed(name, dims, quantized)
    }

    /// A matrix, whose floats become `quantized`.
    fn typed(
        &mut self,
        name: &str,
        dims: [u64; 2],
        quantized: Option<Integer>,
    ) -> Result<MatrixTensor<'a>, TensorError> {
        if let Some(scheme) = self.scheme.filter(|scheme| self.is_packed(*scheme, name)) {
            return self.packed(scheme, name, dims);
        }
        let tensor = self.find(name, &dims)?;
        let kind = weight_type(tensor.kind);
        let kind = kind.ok_or_else(|| unsupported(&tensor, &file_types()))?;
        Ok(MatrixTensor::Plain { tensor, kind, quantized: quantized.filter(|_| FLOATS.contains(&kind)) })
    }

    /// Whether the matrix is there as codes. Tools leave the head, and what a user names, as it was.
    fn is_packed(&self, scheme: Scheme, name: &str) -> bool {
        let codes = self.checkpoint.tensor(&scheme.codes_name(name));
        codes.is_some_and(|codes| weight_type(codes.kind).is_none())
    }

    fn packed(&mut self, scheme: Scheme, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
        let checkpoint = self.checkpoint;
        let find = |name: &str| checkpoint.tensor(name);
        let packed = PackedTensor::find(scheme, name, dims.map(|dim| dim as usize), find)
            .map_err(|problem| TensorError::Packed { name: name.to_owned(), problem })?;
        let names = scheme.other_names(name).into_iter().chain([scheme.codes_name(name)]);
        self.used.extend(names.filter_map(|name| checkpoint.tensor(&name)).map(|tensor| tensor.name));
        Ok(MatrixTensor::Packed(packed))
    }

    pub fn vector(&mut self, name: &str, length: u64) -> Result<Tensor<'a>, TensorError> {
        let tensor = self.find(name, &[length])?;
        match weight_type(tensor.kind) {
            Some(kind) if FLOATS.contains(&kind) => Ok(tensor),
            _ => Err(unsupported(&tensor, &FLOATS.map(type_name)).into()),
        }
    }

    pub fn biases(&mut self, layer: usize, query: u64, kv: u64) -> Result<[Tensor<'a>; 3], TensorError> {
        let naming = self.naming;
        let mut bias = |part: Name, length: u64| self.vector(&naming.bias(layer, part), length);
        Ok([bias(names::QUERY, query)?, bias(names::KEY, kv)?, bias(names::VALUE, kv)?])
    }

    pub fn head_norms(&mut self, layer: usize, head_dim: u64) -> Result<[Tensor<'a>; 2], TensorError> {
        let naming = self.naming;
        let mut norm = |part: Name| self.vector(&naming.weight(layer, part), head_dim);
        Ok([norm(names::QUERY_NORM)?, norm(names::KEY_NORM)?])
    }

    /// Leaves a tensor out where another stands for it.
    pub fn ignore(&mut self, name: &str) -> Option<MatrixTensor<'a>> {
        self.used.extend(self.checkpoint.tensor(name).map(|tensor| tensor.name));
        None
    }

    pub fn refuse_unused(&self) -> Result<(), TensorError> {
        let unused = |tensor: &Tensor<'_>| !self.used.contains(tensor.name) && !self.naming.is_no_weight(tensor.name);
        match self.checkpoint.tensors().find(unused) {
            Some(tensor) => Err(Unsupported::ExtraTensor(tensor.name.to_owned()).into()),
            None => Ok(()),
        }
    }
}

fn unsupported(tensor: &Tensor<'_>, supported: &[String]) -> Unsupported {
    let (name, kind) = (tensor.name.to_owned(), tensor.kind.name());
    Unsupported::TensorType { name, kind, supported: supported.join(", ") }
}

/// Every type of a file that can be computed on.
fn file_types() -> Vec<String> {
    WeightType::ALL.map(type_name).into_iter().filter(|name| ElementType::named(name).is_some()).collect()
}

/// The kernels' type for a file's, where they have one.
pub(crate) fn weight_type(kind: ElementType) -> Option<WeightType> {
    WeightType::ALL.into_iter().find(|&weight_type| type_name(weight_type) == kind.name())
}

/// As [`ElementType::name`] spells it.
pub(crate) fn type_name(weight_type: WeightType) -> String {
    weight_type.name().to_ascii_lowercase()
}
