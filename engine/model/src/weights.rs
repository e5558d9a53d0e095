//! The tensors that a decoder needs of a checkpoint: found and checked all together, then packed.

use std::collections::BTreeSet;

use windlass_checkpoint::{GgmlType, GgufFile, Tensor};
use windlass_kernels::{ShapeError, WeightType};

use crate::backend::{Backend, Layer};
use crate::config::{DecoderConfig, Unsupported, f32_values};

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
    feed_forward_norm: Tensor<'a>,
    gate: MatrixTensor<'a>,
    up: MatrixTensor<'a>,
    down: MatrixTensor<'a>,
}

#[derive(Clone, Copy, Debug)]
struct MatrixTensor<'a> {
    tensor: Tensor<'a>,
    kind: WeightType,
}

impl<'a> Manifest<'a> {
    /// Finds every tensor and refuses what is missing, misshapen, of another type, or unknown.
    pub fn read(file: &'a GgufFile, config: &DecoderConfig) -> Result<Manifest<'a>, TensorError> {
        let mut finder = Finder { file, used: BTreeSet::from(["rope_freqs.weight"]) };
        let [hidden, vocabulary] = [config.hidden, config.vocabulary].map(|size| size as u64);
        let embedding = finder.matrix("token_embd.weight", [hidden, vocabulary])?;
        // No capacity is reserved: the number of layers is the file's claim until its tensors are found.
        let mut layers = Vec::new();
        for index in 0..config.layers {
            layers.push(LayerTensors::find(&mut finder, config, index)?);
        }
        let output_norm = finder.vector("output_norm.weight", hidden)?;
        let output = match config.tied_output {
            true => None,
            false => Some(finder.matrix("output.weight", [hidden, vocabulary])?),
        };
        finder.refuse_unused()?;
        Ok(Manifest { embedding, layers, output_norm, output })
    }

    /// Bytes as stored.
    pub fn bytes(&self) -> u64 {
        let matrices: u64 = self.matrices().map(|matrix| matrix.tensor.bytes.len() as u64).sum();
        let norms = self.layers.iter().flat_map(|layer| [&layer.attention_norm, &layer.feed_forward_norm]);
        matrices + norms.chain([&self.output_norm]).map(|norm| norm.bytes.len() as u64).sum::<u64>()
    }

    /// The type that holds most of the layers' weights.
    pub fn dominant_type(&self) -> GgmlType {
        let bytes_of = |kind: GgmlType| {
            let of_kind = self.layer_matrices().filter(|matrix| matrix.tensor.kind == kind);
            of_kind.map(|matrix| matrix.tensor.bytes.len()).sum::<usize>()
        };
        let kinds = self.layer_matrices().map(|matrix| matrix.tensor.kind);
        kinds.max_by_key(|kind| bytes_of(*kind)).unwrap_or(self.embedding.tensor.kind)
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
        let name = |part: &str| format!("blk.{index}.{part}.weight");
        let [hidden, feed_forward, query, kv] =
            [config.hidden, config.feed_forward, config.query_width(), config.kv_width()].map(|size| size as u64);
        Ok(LayerTensors {
            attention_norm: finder.vector(&name("attn_norm"), hidden)?,
            query: finder.matrix(&name("attn_q"), [hidden, query])?,
            key: finder.matrix(&name("attn_k"), [hidden, kv])?,
            value: finder.matrix(&name("attn_v"), [hidden, kv])?,
            out: finder.matrix(&name("attn_output"), [query, hidden])?,
            feed_forward_norm: finder.vector(&name("ffn_norm"), hidden)?,
            gate: finder.matrix(&name("ffn_gate"), [hidden, feed_forward])?,
            up: finder.matrix(&name("ffn_up"), [hidden, feed_forward])?,
            down: finder.matrix(&name("ffn_down"), [feed_forward, hidden])?,
        })
    }

    fn pack<B: Backend>(&self, backend: &B) -> Result<Layer<B>, TensorError> {
        Ok(Layer {
            attention_norm: pack_vector(backend, self.attention_norm),
            query: self.query.pack(backend)?,
            key: self.key.pack(backend)?,
            value: self.value.pack(backend)?,
            out: self.out.pack(backend)?,
            feed_forward_norm: pack_vector(backend, self.feed_forward_norm),
            gate: self.gate.pack(backend)?,
            up: self.up.pack(backend)?,
            down: self.down.pack(backend)?,
        })
    }
}

impl MatrixTensor<'_> {
    fn pack<B: Backend>(&self, backend: &B) -> Result<B::Matrix, TensorError> {
        let [cols, rows] = [self.tensor.dims[0], self.tensor.dims[1]].map(|dim| dim as usize);
        let shape = |source| TensorError::Shape { name: self.tensor.name.to_owned(), source };
        backend.matrix(self.kind, rows, cols, self.tensor.bytes).map_err(shape)
    }
}

fn pack_vector<B: Backend>(backend: &B, tensor: Tensor<'_>) -> B::Vector {
    backend.vector(f32_values(tensor.bytes))
}

/// Looks tensors up and remembers which were asked for.
struct Finder<'a> {
    file: &'a GgufFile,
    used: BTreeSet<&'a str>,
}

impl<'a> Finder<'a> {
    fn find(&mut self, name: &str, expected: &[u64]) -> Result<Tensor<'a>, TensorError> {
        let Some(tensor) = self.file.tensor(name) else {
            return Err(TensorError::Missing { name: name.to_owned(), expected: expected.to_vec() });
        };
        if tensor.dims != expected {
            let (expected, found) = (expected.to_vec(), tensor.dims.to_vec());
            return Err(TensorError::Dimensions { name: name.to_owned(), expected, found });
        }
        self.used.insert(tensor.name);
        Ok(tensor)
    }

    fn matrix(&mut self, name: &str, dims: [u64; 2]) -> Result<MatrixTensor<'a>, TensorError> {
        let tensor = self.find(name, &dims)?;
        let kind = weight_type(tensor.kind);
        let kind = kind.ok_or_else(|| unsupported(&tensor, &WeightType::ALL.map(type_name)))?;
        Ok(MatrixTensor { tensor, kind })
    }

    fn vector(&mut self, name: &str, length: u64) -> Result<Tensor<'a>, TensorError> {
        let tensor = self.find(name, &[length])?;
        match weight_type(tensor.kind) {
            Some(WeightType::F32) => Ok(tensor),
            _ => Err(unsupported(&tensor, &[type_name(WeightType::F32)]).into()),
        }
    }

    fn refuse_unused(&self) -> Result<(), TensorError> {
        match self.file.tensors().find(|tensor| !self.used.contains(tensor.name)) {
            Some(tensor) => Err(Unsupported::ExtraTensor(tensor.name.to_owned()).into()),
            None => Ok(()),
        }
    }
}

fn unsupported(tensor: &Tensor<'_>, supported: &[String]) -> Unsupported {
    let (name, kind) = (tensor.name.to_owned(), tensor.kind.name());
    Unsupported::TensorType { name, kind, supported: supported.join(", ") }
}

/// The kernels' type for a file's, where they have one.
fn weight_type(kind: GgmlType) -> Option<WeightType> {
    WeightType::ALL.into_iter().find(|&weight_type| type_name(weight_type) == kind.name())
}

/// As [`GgmlType::name`] spells it.
fn type_name(weight_type: WeightType) -> String {
    weight_type.name().to_ascii_lowercase()
}
