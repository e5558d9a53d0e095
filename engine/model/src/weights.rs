//! The tensors that a decoder needs of a checkpoint: found and checked all together, then packed.

use std::collections::BTreeSet;

use windlass_checkpoint::{Checkpoint, ElementType, Tensor};
use windlass_kernels::{Integer, ShapeError, WeightType, floats};

use crate::backend::{Backend, Layer};
use crate::config::{DecoderConfig, Unsupported};
use crate::names::{self, Name, Naming};
use crate::packed::{PackedTensor, Scheme};
use crate::quantization::Quantization;

/// A decoder's weights on a device.
pub struct DecoderWeights<B: Backend> {
    pub(crate) embedding: B::Matrix,
    pub(crate) layers: Vec<Layer<B>>,
    pub(crate) output_norm: B::Vector,
    /// Absent where the head multiplies with the embedding.
    pub(crate) untied_output: Option<B::Matrix>,
}

impl<B: Backend> DecoderWeights<B> {
    /// The head's matrix.
    pub(crate) fn output(&self) -> &B::Matrix {
        self.untied_output.as_ref().unwrap_or(&self.embedding)
    }

    /// The matrices that every token is multiplied with.
    pub fn layer_products(&self) -> impl Iterator<Item = &B::Matrix> {
        self.layers.iter().flat_map(Layer::matrices)
    }

    /// The matrices that a token with logits is multiplied with: all but an embedding that is not the head too.
    pub fn products(&self) -> impl Iterator<Item = &B::Matrix> {
        self.layer_products().chain([self.output()])
    }

    /// Every matrix, each once.
    pub fn matrices(&self) -> impl Iterator<Item = &B::Matrix> {
        self.layer_products().chain([&self.embedding]).chain(&self.untied_output)
    }
}

/// Why a checkpoint's tensors do not make the decoder that its metadata describes.
#[derive(Debug, thiserror::Error)]
pub enum TensorError {
    /// A tensor is not there.
    #[error("tensor {name:?} is missing; it should have the dimensions {expected:?}")]
    Missing {
        /// The tensor.
        name: String,
        /// Fastest first.
        expected: Vec<u64>,
    },
    /// A tensor has other dimensions.
    #[error("tensor {name:?} has the dimensions {found:?}; it should have {expected:?}")]
    Dimensions {
        /// The tensor.
        name: String,
        /// Fastest first.
        expected: Vec<u64>,
        /// Fastest first.
        found: Vec<u64>,
    },
    /// A tensor of a type, or with a purpose, that this engine does not have.
    #[error(transparent)]
    Unsupported(#[from] Unsupported),
    /// A matrix that another tool quantized, whose parts do not make one.
    #[error("matrix {name:?}: {problem}")]
    Packed {
        /// What plain checkpoints call it.
        name: String,
        /// What is wrong.
        problem: String,
    },
    /// A tensor that the kernels do not take.
    #[error("tensor {name:?}: {source}")]
    Shape {
        /// The tensor.
        name: String,
        /// Why not.
        source: ShapeError,
    },
}

/// All tensors of a decoder, found in a file and checked. Nothing is allocated for them yet.
#[derive(Debug)]
pub(crate) struct Manifest<'a> {
    embedding: MatrixTensor<'a>,
    layers: Vec<LayerTensors<'a>>,
    output_norm: Tensor<'a>,
    output: Option<MatrixTensor<'a>>,
}

#[derive(Debug)]
struct LayerTensors<'a> {
    attention_norm: Tensor<'a>,
    query: MatrixTensor<'a>,
    key: MatrixTensor<'a>,
    value: MatrixTensor<'a>,
    out: MatrixTensor<'a>,
    /// Of query, key and value.
    biases: Option<[Tensor<'a>; 3]>,
    /// Of the heads of query and key.
    head_norms: Option<[Tensor<'a>; 2]>,
    /// Whether heads turn.
    rotary: bool,
    feed_forward_norm: Tensor<'a>,
    gate: MatrixTensor<'a>,
    up: MatrixTensor<'a>,
    down: MatrixTensor<'a>,
}

#[derive(Clone, Copy, Debug)]
enum MatrixTensor<'a> {
    /// As the kernels read it, or floats.
    Plain {
        tensor: Tensor<'a>,
        kind: WeightType,
        /// What its floats become as they are packed.
        quantized: Option<Integer>,
    },
    /// As another tool quantized it.
    Packed(PackedTensor<'a>),
}

impl<'a> Manifest<'a> {
    /// Finds every tensor and refuses what is missing, misshapen, of another type, or unknown.
    pub fn read(
        checkpoint: &'a Checkpoint,
        config: &DecoderConfig,
        quantization: Option<Quantization>,
    ) -> Result<Manifest<'a>, TensorError> {
        let naming = Naming::of(checkpoint);
        let mut finder = Finder { checkpoint, naming, used: BTreeSet::new(), quantization, scheme: config.scheme };
        let [hidden, vocabulary] = [config.hidden, config.vocabulary].map(|size| size as u64);
        let embedding = finder.table(&naming.once(names::EMBEDDING), [hidden, vocabulary])?;
        // No capacity is reserved: the number of layers is the file's claim until its tensors are found.
        let mut layers = Vec::new();
        for index in 0..config.layers {
            layers.push(LayerTensors::find(&mut finder, config, index)?);
        }
        let output_norm = finder.vector(&naming.once(names::OUTPUT_NORM), hidden)?;
        let output = naming.once(names::OUTPUT);
        let output = match config.tied_output {
            true => finder.ignore(&output),
            false => Some(finder.table(&output, [hidden, vocabulary])?),
        };
        finder.refuse_unused()?;
        let manifest = Manifest { embedding, layers, output_norm, output };
        manifest.refuse_quantized_twice(quantization)?;
        Ok(manifest)
    }

    /// Quantizing again what is quantized would lose more than the user thinks.
    fn refuse_quantized_twice(&self, quantization: Option<Quantization>) -> Result<(), TensorError> {
        let Some(asked) = quantization else { return Ok(()) };
        match self.layer_matrices().any(|matrix| matrix.is_quantized_here()) {
            true => Ok(()),
            false => Err(Unsupported::QuantizedTwice { asked: asked.name(), found: self.dominant_type() }.into()),
        }
    }

    /// Bytes in the types that they are packed in, biases and norms in f32.
    pub fn bytes(&self) -> u64 {
        let matrices: u64 = self.matrices().map(|matrix| matrix.bytes()).sum();
        let vectors = self.layers.iter().flat_map(LayerTensors::vectors).chain([&self.output_norm]);
        matrices + vectors.map(|vector| 4 * vector.dims[0]).sum::<u64>()
    }

    /// The type that holds most of the layers' weights once they are packed, as `q4_1`.
    pub fn dominant_type(&self) -> &'static str {
        let bytes_of = |kind: WeightType| {
            self.layer_matrices().filter(|matrix| matrix.packed() == kind).map(|matrix| matrix.bytes()).sum::<u64>()
        };
        let kinds = self.layer_matrices().map(|matrix| matrix.packed());
        let dominant = kinds.max_by_key(|kind| bytes_of(*kind)).unwrap_or(self.embedding.packed());
        ElementType::named(&type_name(dominant)).map_or(dominant.name(), ElementType::name)
    }

    fn matrices(&self) -> impl Iterator<Item = MatrixTensor<'a>> {
        self.layer_matrices().chain([self.embedding]).chain(self.output)
    }

    fn layer_matrices(&self) -> impl Iterator<Item = MatrixTensor<'a>> {
        let of = |layer: &LayerTensors<'a>| {
            [layer.query, layer.key, layer.value, layer.out, layer.gate, layer.up, layer.down]
        };
        self.layers.iter().flat_map(of)
    }

    /// Packs every tensor for a device, a tied embedding once.
    pub fn pack<B: Backend>(&self, backend: &B) -> Result<DecoderWeights<B>, TensorError> {
        let layers = self.layers.iter().map(|layer| layer.pack(backend)).collect::<Result<_, _>>()?;
        Ok(DecoderWeights {
            embedding: self.embedding.pack(backend)?,
            layers,
            output_norm: pack_vector(backend, self.output_norm),
            untied_output: self.output.map(|output| output.pack(backend)).transpose()?,
        })
    }
}

impl<'a> LayerTensors<'a> {
    fn find(finder: &mut Finder<'a>, config: &DecoderConfig, index: usize) -> Result<LayerTensors<'a>, TensorError> {
        let naming = finder.naming;
        let name = |part: Name| naming.weight(index, part);
        let [hidden, feed_forward, query, kv] =
            [config.hidden, config.feed_forward, config.query_width(), config.kv_width()].map(|size| size as u64);
        Ok(LayerTensors {
            attention_norm: finder.vector(&name(names::ATTENTION_NORM), hidden)?,
            query: finder.matrix(&name(names::QUERY), [hidden, query])?,
            key: finder.matrix(&name(names::KEY), [hidden, kv])?,
            value: finder.matrix(&name(names::VALUE), [hidden, kv])?,
            out: finder.matrix(&name(names::OUT), [query, hidden])?,
            biases: config.biases.then(|| finder.biases(index, query, kv)).transpose()?,
            head_norms: config.head_norms.then(|| finder.head_norms(index, config.head_dim as u64)).transpose()?,
            rotary: config.rope.layers.contain(index),
            feed_forward_norm: finder.vector(&name(names::FEED_FORWARD_NORM), hidden)?,
            gate: finder.matrix(&name(names::GATE), [hidden, feed_forward])?,
            up: finder.matrix(&name(names::UP), [hidden, feed_forward])?,
            down: finder.matrix(&name(names::DOWN), [feed_forward, hidden])?,
        })
    }

    fn vectors(&self) -> impl Iterator<Item = &Tensor<'a>> {
        let norms = [&self.attention_norm, &self.feed_forward_norm];
        norms.into_iter().chain(self.biases.iter().flatten()).chain(self.head_norms.iter().flatten())
    }

    fn pack<B: Backend>(&self, backend: &B) -> Result<Layer<B>, TensorError> {
        Ok(Layer {
            attention_norm: pack_vector(backend, self.attention_norm),
            query: self.query.pack(backend)?,
            key: self.key.pack(backend)?,
            value: self.value.pack(backend)?,
            out: self.out.pack(backend)?,
            biases: self.biases.map(|biases| biases.map(|bias| pack_vector(backend, bias))),
            head_norms: self.head_norms.map(|norms| norms.map(|norm| pack_vector(backend, norm))),
            rotary: self.rotary,
            feed_forward_norm: pack_vector(backend, self.feed_forward_norm),
            gate: self.gate.pack(backend)?,
            up: self.up.pack(backend)?,
            down: self.down.pack(backend)?,
        })
    }
}

impl MatrixTensor<'_> {
    fn name(&self) -> &str {
        match self {
            MatrixTensor::Plain { tensor, .. } => tensor.name,
            MatrixTensor::Packed(packed) => packed.name,
        }
    }

    /// The type it is packed in.
    fn packed(&self) -> WeightType {
        match self {
            MatrixTensor::Plain { kind, quantized, .. } => quantized.map_or(*kind, Integer::weight_type),
            MatrixTensor::Packed(packed) => packed.kind,
        }
    }

    /// Whether its floats become integers.
    fn is_quantized_here(&self) -> bool {
        matches!(self, MatrixTensor::Plain { quantized: Some(_), .. })
    }

    /// Bytes of the type it is packed in.
    fn bytes(&self) -> u64 {
        let [cols, rows] = self.shape();
        self.packed().row_bytes(cols).map_or(0, |row| row as u64 * rows as u64)
    }

    /// Columns and rows, which the file's length bounds.
    fn shape(&self) -> [usize; 2] {
        match self {
            MatrixTensor::Plain { tensor, .. } => [tensor.dims[0], tensor.dims[1]].map(|dim| dim as usize),
            MatrixTensor::Packed(packed) => [packed.cols, packed.rows],
        }
    }

    fn pack<B: Backend>(&self, backend: &B) -> Result<B::Matrix, TensorError> {
        let [cols, rows] = self.shape();
        let packed = match self {
            MatrixTensor::Plain { tensor, kind, quantized: None } => backend.matrix(*kind, rows, cols, tensor.bytes),
            MatrixTensor::Plain { tensor, kind, quantized: Some(to) } => {
                backend.quantized_matrix(*kind, *to, rows, cols, tensor.bytes)
            }
            MatrixTensor::Packed(packed) => backend.matrix(packed.kind, rows, cols, &packed.file_rows()),
        };
        packed.map_err(|source| TensorError::Shape { name: self.name().to_owned(), source })
    }
}

/// Takes in a vector that [`Finder::vector`] found.
fn pack_vector<B: Backend>(backend: &B, tensor: Tensor<'_>) -> B::Vector {
    let kind = weight_type(tensor.kind).unwrap_or(WeightType::F32);
    backend.vector(floats(kind, tensor.bytes))
}

/// Types of vectors.
const FLOATS: [WeightType; 3] = [WeightType::F32, WeightType::F16, WeightType::BF16];

/// Looks tensors up and remembers which were asked for.
struct Finder<'a> {
    checkpoint: &'a Checkpoint,
    naming: Naming,
    used: BTreeSet<&'a str>,
    quantization: Option<Quantization>,
    /// How matrices were quantized that are not there as plain ones.
    scheme: Option<Scheme>,
}

impl<'a> Finder<'a> {
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
    fn matrix(&mut self, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
        let quantized = self.quantization.map(Quantization::of_layers);
        self.typed(name, dims, quantized)
    }

    /// The embedding or the head.
    fn table(&mut self, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
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

    fn vector(&mut self, name: &str, length: u64) -> Result<Tensor<'a>, TensorError> {
        let tensor = self.find(name, &[length])?;
        match weight_type(tensor.kind) {
            Some(kind) if FLOATS.contains(&kind) => Ok(tensor),
            _ => Err(unsupported(&tensor, &FLOATS.map(type_name)).into()),
        }
    }

    fn biases(&mut self, layer: usize, query: u64, kv: u64) -> Result<[Tensor<'a>; 3], TensorError> {
        let naming = self.naming;
        let mut bias = |part: Name, length: u64| self.vector(&naming.bias(layer, part), length);
        Ok([bias(names::QUERY, query)?, bias(names::KEY, kv)?, bias(names::VALUE, kv)?])
    }

    fn head_norms(&mut self, layer: usize, head_dim: u64) -> Result<[Tensor<'a>; 2], TensorError> {
        let naming = self.naming;
        let mut norm = |part: Name| self.vector(&naming.weight(layer, part), head_dim);
        Ok([norm(names::QUERY_NORM)?, norm(names::KEY_NORM)?])
    }

    /// Leaves a tensor out where another stands for it.
    fn ignore(&mut self, name: &str) -> Option<MatrixTensor<'a>> {
        self.used.extend(self.checkpoint.tensor(name).map(|tensor| tensor.name));
        None
    }

    fn refuse_unused(&self) -> Result<(), TensorError> {
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
fn weight_type(kind: ElementType) -> Option<WeightType> {
    WeightType::ALL.into_iter().find(|&weight_type| type_name(weight_type) == kind.name())
}

/// As [`ElementType::name`] spells it.
fn type_name(weight_type: WeightType) -> String {
    weight_type.name().to_ascii_lowercase()
}
