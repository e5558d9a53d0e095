//! The tensors that a decoder needs of a checkpoint: found and checked all together, then packed.

mod error;
mod finder;
mod layer;
mod matrix;

use windlass_checkpoint::{Checkpoint, ElementType};
use windlass_engine_contract::sharding::{Indivisible, Shard, Stage};
use windlass_kernels::WeightType;

use crate::backend::{Layer, Packer, Storage};
use crate::config::{DecoderConfig, Unsupported};
use crate::names;
use crate::part::{Part, Parts};
use crate::quantization::Quantization;
use crate::sizes::LoadOptions;
pub use error::{ShardError, TensorError};
use finder::Finder;
use layer::LayerTensors;
use matrix::{MatrixTensor, VectorTensor};

/// A decoder's weights on a device.
pub struct DecoderWeights<P: Storage> {
    /// Absent in a stage that neither embeds nor multiplies with it.
    pub(crate) embedding: Option<P::Matrix>,
    pub(crate) layers: Vec<Layer<P>>,
    /// In the last stage.
    pub(crate) head: Option<Head<P>>,
    embeds: bool,
}

/// What makes logits of the last layer's output.
pub(crate) struct Head<P: Storage> {
    pub norm: P::Vector,
    /// Absent where it multiplies with the embedding.
    pub untied: Option<P::Matrix>,
}

impl<P: Storage> DecoderWeights<P> {
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

/// All tensors of a decoder, found in a file and checked. Nothing is allocated for them yet.
#[derive(Debug)]
pub(crate) struct Manifest<'a> {
    checkpoint: &'a Checkpoint,
    embedding: MatrixTensor<'a>,
    layers: Vec<LayerTensors<'a>>,
    output_norm: VectorTensor<'a>,
    output: Option<MatrixTensor<'a>>,
}

impl<'a> Manifest<'a> {
    /// Finds every tensor and refuses what is missing, misshapen, of another type, or unknown.
    pub fn read(
        checkpoint: &'a Checkpoint,
        config: &DecoderConfig,
        quantization: Option<Quantization>,
    ) -> Result<Manifest<'a>, TensorError> {
        Manifest::find(Finder::new(checkpoint, config, quantization), checkpoint, config, quantization)
    }

    /// The same by headers alone: what tensors hold may be missing.
    pub fn read_headers(
        checkpoint: &'a Checkpoint,
        config: &DecoderConfig,
        quantization: Option<Quantization>,
    ) -> Result<Manifest<'a>, TensorError> {
        let finder = Finder::new(checkpoint, config, quantization).of_headers();
        Manifest::find(finder, checkpoint, config, quantization)
    }

    fn find(
        mut finder: Finder<'a>,
        checkpoint: &'a Checkpoint,
        config: &DecoderConfig,
        quantization: Option<Quantization>,
    ) -> Result<Manifest<'a>, TensorError> {
        let naming = finder.naming;
        let [hidden, vocabulary] = [config.hidden, config.vocabulary].map(|size| size as u64);
        let embedding = finder.table(&naming.once(names::EMBEDDING), [hidden, vocabulary])?;
        // No capacity is reserved: the number of layers is the file's claim until its tensors are found.
        let mut layers = Vec::new();
        for index in 0..config.layers {
            layers.push(LayerTensors::find(&mut finder, config, index)?);
        }
        let output_norm = finder.norm(&naming.once(names::OUTPUT_NORM), hidden)?;
        let output = naming.once(names::OUTPUT);
        let output = match config.tied_output {
            true => finder.ignore(&output),
            false => Some(finder.table(&output, [hidden, vocabulary])?),
        };
        finder.refuse_unused()?;
        let manifest = Manifest { checkpoint, embedding, layers, output_norm, output };
        manifest.refuse_quantized_twice(quantization)?;
        Ok(manifest)
    }

    /// Quantizing again what is quantized would lose more than the user thinks, and leaving it as it is would be another
    /// type than was asked for. Tables and routers have types of their own anyway.
    fn refuse_quantized_twice(&self, quantization: Option<Quantization>) -> Result<(), TensorError> {
        let Some(asked) = quantization else { return Ok(()) };
        let mut matrices = self.layers.iter().flat_map(LayerTensors::products);
        match matrices.find(|matrix| !matrix.is_quantized(asked)) {
            None => Ok(()),
            Some(matrix) => {
                let (name, found) = (matrix.name().to_owned(), matrix.packed().name());
                Err(Unsupported::QuantizedTwice { name, asked: asked.name(), found }.into())
            }
        }
    }

    /// What each rank holds, whose devices multiply `least_columns` columns at a time: a power of two.
    pub fn shards(
        &self,
        config: &DecoderConfig,
        options: &LoadOptions,
        least_columns: u32,
    ) -> Result<Vec<Shard>, ShardError> {
        let (ranks, whole_experts) = (options.tensor_parallel, whole_experts(config, options)?);
        if ranks == 1 {
            return Ok(vec![Shard::whole(&config.shape(0))]);
        }
        let are_whole = whole_experts.is_some();
        let down = self.layers.iter().map(|layer| layer.feed_forward_block(are_whole) as u32);
        // Blocks are powers of two: the largest is a multiple of the others.
        let shards = Shard::all(&config.shape(0), ranks, down.fold(least_columns, u32::max), whole_experts)?;
        let block = shards[0].feed_forward_unit;
        for (what, width) in config.divided_widths(are_whole).into_iter().filter(|(_, width)| *width > 0) {
            if !width.is_multiple_of(block) {
                return Err(ShardError::Columns { what, width, block });
            }
            if shards.iter().any(|shard| shard.columns(width).is_empty()) {
                let parts = width / block;
                return Err(Indivisible::Parts { what: "blocks of an expert's columns", parts, ranks }.into());
            }
        }
        for parts in shards.iter().map(|shard| Parts::of(shard, config)) {
            let mut layers = self.layers.iter().flat_map(|layer| layer.parts(&parts));
            layers.try_for_each(|(matrix, part)| matrix.check(part))?;
        }
        Ok(shards)
    }

    /// Bytes of a rank's parts of a stage in the types that they are packed in, biases and norms in f32.
    pub fn bytes(&self, parts: &Parts, stage: Stage) -> u64 {
        self.bytes_by(parts, stage, MatrixTensor::bytes)
    }

    /// The same on a GPU.
    pub fn device_bytes(&self, parts: &Parts, stage: Stage) -> u64 {
        self.bytes_by(parts, stage, MatrixTensor::device_bytes)
    }

    fn bytes_by(&self, parts: &Parts, stage: Stage, of: impl Fn(&MatrixTensor<'a>, &Part) -> u64) -> u64 {
        let layers = || self.layers_of(stage).iter();
        let tables = self.tables(stage).map(|table| (table, &parts.vocabulary));
        let matrices = layers().flat_map(|layer| layer.parts(parts)).chain(tables);
        let matrices: u64 = matrices.map(|(matrix, part)| of(matrix, part)).sum();
        // Biases are counted whole.
        let norm = stage.is_last().then_some(&self.output_norm);
        let vectors = layers().flat_map(LayerTensors::vectors).chain(norm);
        matrices + vectors.map(VectorTensor::bytes).sum::<u64>()
    }

    /// The type that holds most of the layers' weights once they are packed, as `q4_1`.
    pub fn dominant_type(&self) -> &'static str {
        let bytes_of = |kind: WeightType| {
            let matrices = self.layer_matrices().filter(|matrix| matrix.packed() == kind);
            matrices.map(|matrix| matrix.bytes(&Part::Whole)).sum::<u64>()
        };
        let kinds = self.layer_matrices().map(|matrix| matrix.packed());
        let dominant = kinds.max_by_key(|kind| bytes_of(*kind)).unwrap_or(self.embedding.packed());
        dominant.name()
    }

    fn layers_of(&self, stage: Stage) -> &[LayerTensors<'a>] {
        let layers = stage.layers(self.layers.len() as u32);
        &self.layers[layers.start as usize..layers.end as usize]
    }

    /// The embedding, where a stage embeds or its head multiplies with it.
    fn embedding_of(&self, stage: Stage) -> Option<&MatrixTensor<'a>> {
        let reads = stage.is_first() || stage.is_last() && self.output.is_none();
        reads.then_some(&self.embedding)
    }

    fn output_of(&self, stage: Stage) -> Option<&MatrixTensor<'a>> {
        self.output.as_ref().filter(|_| stage.is_last())
    }

    fn tables(&self, stage: Stage) -> impl Iterator<Item = &MatrixTensor<'a>> {
        self.embedding_of(stage).into_iter().chain(self.output_of(stage))
    }

    fn layer_matrices(&self) -> impl Iterator<Item = &MatrixTensor<'a>> {
        self.layers.iter().flat_map(LayerTensors::matrices)
    }

    /// Packs a rank's part of every tensor of a stage for its device, a tied embedding once.
    pub fn pack<P: Packer<'a>>(
        &self,
        packer: &P,
        parts: &Parts,
        stage: Stage,
    ) -> Result<DecoderWeights<P>, TensorError> {
        let layers = self.pack_layers(packer, parts, stage, |_, layer| Ok::<_, TensorError>(layer))?;
        self.pack_tables(packer, parts, stage, |embedding, head| {
            Ok(DecoderWeights { embedding, layers, head, embeds: stage.is_first() })
        })
    }

    /// Has `take` take in a rank's part of each of a stage's layers, by its number within the stage. The memory behind is given
    /// back then, before the next one is packed.
    pub fn pack_layers<P: Packer<'a>, T, E: From<TensorError>>(
        &self,
        packer: &P,
        parts: &Parts,
        stage: Stage,
        mut take: impl FnMut(usize, Layer<P>) -> Result<T, E>,
    ) -> Result<Vec<T>, E> {
        let each = self.layers_of(stage).iter().enumerate();
        let take = |(index, layer): (usize, &LayerTensors<'a>)| {
            let taken = take(index, layer.pack(packer, parts)?);
            layer.matrices().for_each(|matrix| self.checkpoint.release(&matrix.source()));
            taken
        };
        each.map(take).collect()
    }

    /// The same of the embedding, in a stage that reads it, and of the head, in the last one.
    pub fn pack_tables<P: Packer<'a>, T, E: From<TensorError>>(
        &self,
        packer: &P,
        parts: &Parts,
        stage: Stage,
        take: impl FnOnce(Option<P::Matrix>, Option<Head<P>>) -> Result<T, E>,
    ) -> Result<T, E> {
        let pack = |table: Option<&MatrixTensor<'a>>| {
            table.map(|table| table.pack(packer, &parts.vocabulary)).transpose().map_err(E::from)
        };
        let (embedding, untied) = (pack(self.embedding_of(stage))?, pack(self.output_of(stage))?);
        let head = || Head { norm: self.output_norm.pack(packer, &Part::Whole), untied };
        let taken = take(embedding, stage.is_last().then(head));
        self.tables(stage).for_each(|table| self.checkpoint.release(&table.source()));
        taken
    }
}

/// How many experts ranks are to hold whole, each some of them; absent where they divide each.
fn whole_experts(config: &DecoderConfig, options: &LoadOptions) -> Result<Option<u32>, ShardError> {
    match (&config.experts, options.expert_parallel) {
        (_, false) => Ok(None),
        (Some(experts), true) => Ok(Some(experts.count as u32)),
        (None, true) => Err(ShardError::NoExperts { architecture: config.architecture.clone() }),
    }
}

/// The kernels' type for a file's, where they have one.
fn weight_type(kind: ElementType) -> Option<WeightType> {
    WeightType::ALL.into_iter().find(|&weight_type| weight_type.name() == kind.name())
}
