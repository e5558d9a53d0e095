//! The tensors that a decoder needs of a checkpoint: found and checked all together, then packed.

use windlass_checkpoint::{Checkpoint, ElementType, Tensor};
use windlass_engine_contract::sharding::{Indivisible, Shard, Stage};
use windlass_kernels::{ShapeError, WeightType, floats};

use crate::backend::{Layer, Packer};
use crate::config::{DecoderConfig, Unsupported};
use crate::finder::{Finder, type_name, weight_type};
use crate::matrix_tensor::MatrixTensor;
use crate::names::{self, Name};
use crate::part::{Part, Parts};
use crate::quantization::Quantization;

/// A decoder's weights on a device.
pub struct DecoderWeights<P: Packer> {
    /// Absent in a stage that neither embeds nor multiplies with it.
    pub(crate) embedding: Option<P::Matrix>,
    pub(crate) layers: Vec<Layer<P>>,
    /// In the last stage.
    pub(crate) head: Option<Head<P>>,
    embeds: bool,
}

/// What makes logits of the last layer's output.
pub(crate) struct Head<P: Packer> {
    pub norm: P::Vector,
    /// Absent where it multiplies with the embedding.
    pub untied: Option<P::Matrix>,
}

impl<P: Packer> DecoderWeights<P> {
    /// Whether these are of a stage that embeds tokens.
    pub(crate) fn embeds(&self) -> bool {
        self.embeds
    }

    /// The head's norm and matrix.
    pub(crate) fn output(&self) -> Option<(&P::Vector, &P::Matrix)> {
        let head = self.head.as_ref()?;
        Some((&head.norm, head.untied.as_ref().or(self.embedding.as_ref())?))
    }

    /// The matrices that every token is multiplied with.
    pub fn layer_products(&self) -> impl Iterator<Item = &P::Matrix> {
        self.layers.iter().flat_map(Layer::matrices)
    }

    /// The matrices that a token with logits is multiplied with: all but an embedding that is not the head too.
    pub fn products(&self) -> impl Iterator<Item = &P::Matrix> {
        self.layer_products().chain(self.output().map(|(_, matrix)| matrix))
    }

    /// Every matrix, each once.
    pub fn matrices(&self) -> impl Iterator<Item = &P::Matrix> {
        let untied = self.head.iter().flat_map(|head| &head.untied);
        self.layer_products().chain(&self.embedding).chain(untied)
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

/// Why a decoder cannot be divided among ranks.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShardError {
    /// Its sizes cannot.
    #[error(transparent)]
    Sizes(#[from] Indivisible),
    /// A matrix's columns are quantized in blocks that ranks would have to break.
    #[error(
        "a rank would hold {cols} columns of {name:?}, no whole number of {kind} blocks of {block}: use fewer ranks"
    )]
    Blocks {
        /// The tensor.
        name: String,
        /// Columns of a rank.
        cols: usize,
        /// The type's name.
        kind: &'static str,
        /// Values in a block.
        block: usize,
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

impl<'a> Manifest<'a> {
    /// Finds every tensor and refuses what is missing, misshapen, of another type, or unknown.
    pub fn read(
        checkpoint: &'a Checkpoint,
        config: &DecoderConfig,
        quantization: Option<Quantization>,
    ) -> Result<Manifest<'a>, TensorError> {
        let mut finder = Finder::new(checkpoint, quantization, config.scheme);
        let naming = finder.naming;
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

    /// What each of `ranks` ranks holds.
    pub fn shards(&self, config: &DecoderConfig, ranks: u32) -> Result<Vec<Shard>, ShardError> {
        let down = self.layers.iter().map(|layer| layer.down.packed().block_elements());
        // Blocks are powers of two: the largest is a multiple of the others.
        let shards = Shard::all(&config.shape(0), ranks, down.max().unwrap_or(1) as u32)?;
        for parts in shards.iter().map(|shard| Parts::of(shard, config)) {
            let mut layers = self.layers.iter().flat_map(|layer| layer.parts(&parts));
            layers.try_for_each(|(matrix, part)| matrix.check(part))?;
        }
        Ok(shards)
    }

    /// Bytes of a rank's parts of a stage in the types that they are packed in, biases and norms in f32.
    pub fn bytes(&self, parts: &Parts, stage: Stage) -> u64 {
        let layers = || self.layers_of(stage).iter();
        let tables = self.tables(stage).map(|table| (table, &parts.vocabulary));
        let matrices = layers().flat_map(|layer| layer.parts(parts)).chain(tables);
        let matrices: u64 = matrices.map(|(matrix, part)| matrix.bytes(part)).sum();
        // Biases are counted whole.
        let norm = stage.is_last().then_some(&self.output_norm);
        let vectors = layers().flat_map(LayerTensors::vectors).chain(norm);
        matrices + vectors.map(|vector| 4 * vector.dims[0]).sum::<u64>()
    }

    /// The type that holds most of the layers' weights once they are packed, as `q4_1`.
    pub fn dominant_type(&self) -> &'static str {
        let bytes_of = |kind: WeightType| {
            let matrices = self.layer_matrices().filter(|matrix| matrix.packed() == kind);
            matrices.map(|matrix| matrix.bytes(&Part::Whole)).sum::<u64>()
        };
        let kinds = self.layer_matrices().map(|matrix| matrix.packed());
        let dominant = kinds.max_by_key(|kind| bytes_of(*kind)).unwrap_or(self.embedding.packed());
        ElementType::named(&type_name(dominant)).map_or(dominant.name(), ElementType::name)
    }

    fn layers_of(&self, stage: Stage) -> &[LayerTensors<'a>] {
        let layers = stage.layers(self.layers.len() as u32);
        &self.layers[layers.start as usize..layers.end as usize]
    }

    /// The embedding, where a stage embeds or its head multiplies with it.
    fn embedding_of(&self, stage: Stage) -> Option<MatrixTensor<'a>> {
        let reads = stage.is_first() || stage.is_last() && self.output.is_none();
        reads.then_some(self.embedding)
    }

    fn output_of(&self, stage: Stage) -> Option<MatrixTensor<'a>> {
        self.output.filter(|_| stage.is_last())
    }

    fn tables(&self, stage: Stage) -> impl Iterator<Item = MatrixTensor<'a>> {
        self.embedding_of(stage).into_iter().chain(self.output_of(stage))
    }

    fn layer_matrices(&self) -> impl Iterator<Item = MatrixTensor<'a>> {
        self.layers.iter().flat_map(LayerTensors::matrices)
    }

    /// Packs a rank's part of every tensor of a stage for its device, a tied embedding once.
    pub fn pack<P: Packer>(&self, packer: &P, parts: &Parts, stage: Stage) -> Result<DecoderWeights<P>, TensorError> {
        Ok(DecoderWeights {
            layers: self.pack_layers(packer, parts, stage).collect::<Result<_, _>>()?,
            embedding: self.pack_embedding(packer, parts, stage)?,
            head: self.pack_head(packer, parts, stage)?,
            embeds: stage.is_first(),
        })
    }

    /// A rank's part of a stage's layers, one at a time.
    pub fn pack_layers<'s, P: Packer>(
        &'s self,
        packer: &'s P,
        parts: &'s Parts,
        stage: Stage,
    ) -> impl Iterator<Item = Result<Layer<P>, TensorError>> + 's {
        self.layers_of(stage).iter().map(|layer| layer.pack(packer, parts))
    }

    /// A rank's part of the embedding, in a stage that reads it.
    pub fn pack_embedding<P: Packer>(
        &self,
        packer: &P,
        parts: &Parts,
        stage: Stage,
    ) -> Result<Option<P::Matrix>, TensorError> {
        self.embedding_of(stage).map(|table| table.pack(packer, &parts.vocabulary)).transpose()
    }

    /// A rank's part of the head, in the last stage.
    pub fn pack_head<P: Packer>(
        &self,
        packer: &P,
        parts: &Parts,
        stage: Stage,
    ) -> Result<Option<Head<P>>, TensorError> {
        let untied = self.output_of(stage).map(|table| table.pack(packer, &parts.vocabulary)).transpose()?;
        let head = || Head { norm: pack_vector(packer, self.output_norm, &Part::Whole), untied };
        Ok(stage.is_last().then(head))
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

    fn matrices(&self) -> [MatrixTensor<'a>; 7] {
        [self.query, self.key, self.value, self.out, self.gate, self.up, self.down]
    }

    fn parts<'p>(&self, parts: &'p Parts) -> impl Iterator<Item = (MatrixTensor<'a>, &'p Part)> {
        let Parts { query, key, out, gate, down, .. } = parts;
        self.matrices().into_iter().zip([query, key, key, out, gate, gate, down])
    }

    fn pack<P: Packer>(&self, packer: &P, parts: &Parts) -> Result<Layer<P>, TensorError> {
        let [query, key] = [&parts.query, &parts.key];
        let vector = |tensor: Tensor<'_>| pack_vector(packer, tensor, &Part::Whole);
        let biases = |[of_query, of_key, of_value]: [Tensor<'_>; 3]| {
            [(of_query, query), (of_key, key), (of_value, key)].map(|(bias, part)| pack_vector(packer, bias, part))
        };
        Ok(Layer {
            attention_norm: vector(self.attention_norm),
            query: self.query.pack(packer, query)?,
            key: self.key.pack(packer, key)?,
            value: self.value.pack(packer, key)?,
            out: self.out.pack(packer, &parts.out)?,
            biases: self.biases.map(biases),
            head_norms: self.head_norms.map(|norms| norms.map(vector)),
            rotary: self.rotary,
            feed_forward_norm: vector(self.feed_forward_norm),
            gate: self.gate.pack(packer, &parts.gate)?,
            up: self.up.pack(packer, &parts.gate)?,
            down: self.down.pack(packer, &parts.down)?,
        })
    }
}

/// Takes in a part of a vector that [`Finder::vector`] found.
fn pack_vector<P: Packer>(packer: &P, tensor: Tensor<'_>, part: &Part) -> P::Vector {
    let kind = weight_type(tensor.kind).unwrap_or(WeightType::F32);
    packer.vector(part.of_outputs(floats(kind, tensor.bytes)))
}
