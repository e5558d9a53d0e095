//! The tensors of a decoder: finds all of them in a checkpoint and checks them, then loads them.

mod error;
mod finder;
mod layer;
mod loader;
mod matrix;
pub(crate) mod part;
pub(crate) mod quantization;
pub(crate) mod quantized;

use windlass_checkpoint::{Checkpoint, ElementType};
use windlass_engine_contract::sharding::{Indivisible, Shard, Stage};
use windlass_kernels::WeightType;

use crate::config::names;
use crate::config::{DecoderConfig, Unsupported};
use crate::decoder::{DecoderWeights, Head, Layer};
pub use error::{ShardError, TensorError};
use finder::Finder;
use layer::LayerTensors;
pub use loader::{FileRows, GatedFiles, WeightLoader};
use matrix::{MatrixTensor, VectorTensor};
use part::{Part, Parts};
use quantization::Quantization;

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
    /// Finds every tensor. Tensors that are missing, unknown, or of another shape or type are errors.
    pub fn read(
        checkpoint: &'a Checkpoint,
        config: &DecoderConfig,
        quantization: Option<Quantization>,
    ) -> Result<Manifest<'a>, TensorError> {
        Manifest::find(Finder::new(checkpoint, config, quantization), checkpoint, config, quantization)
    }

    /// As [`read`](Self::read), by headers alone: the data of tensors may be missing.
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
        // No capacity is reserved: the number of layers is only a claim of the file until the tensors are found.
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

    /// Fails if weights are to be quantized that are quantized already: to do so would lose more than the user expects,
    /// and to skip them would give another type than was asked for. Tables and routers are not checked; they have types
    /// of their own.
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

    /// The shards of the ranks. Devices multiply `least_columns` columns at a time, a power of two.
    pub fn shards(
        &self,
        config: &DecoderConfig,
        ranks: u32,
        expert_parallel: bool,
        least_columns: u32,
    ) -> Result<Vec<Shard>, ShardError> {
        let whole_experts = whole_experts(config, expert_parallel)?;
        if ranks == 1 {
            return Ok(vec![Shard::whole(&config.shape(0))]);
        }
        let are_whole = whole_experts.is_some();
        let down = self.layers.iter().map(|layer| layer.feed_forward_block(are_whole) as u32);
        // Block sizes are powers of two, so the largest is a multiple of the others.
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

    /// Bytes of a rank's part of a stage in packed form, with biases and norms in f32.
    pub fn bytes(&self, parts: &Parts, stage: Stage) -> u64 {
        self.bytes_by(parts, stage, MatrixTensor::bytes)
    }

    /// Bytes of a rank's part of a stage on a GPU.
    pub fn device_bytes(&self, parts: &Parts, stage: Stage) -> u64 {
        self.bytes_by(parts, stage, MatrixTensor::device_bytes)
    }

    fn bytes_by(&self, parts: &Parts, stage: Stage, of: impl Fn(&MatrixTensor<'a>, &Part) -> u64) -> u64 {
        let layers = || self.layers_of(stage).iter();
        let tables = self.tables(stage).map(|table| (table, &parts.vocabulary));
        let matrices = layers().flat_map(|layer| layer.parts(parts)).chain(tables);
        let matrices: u64 = matrices.map(|(matrix, part)| of(matrix, part)).sum();
        // Biases are counted as if each rank had all of them.
        let norm = stage.is_last().then_some(&self.output_norm);
        let vectors = layers().flat_map(LayerTensors::vectors).chain(norm);
        matrices + vectors.map(VectorTensor::bytes).sum::<u64>()
    }

    /// The packed format of most of the layers' weights, as `q4_1`.
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

    /// The embedding, if the stage embeds tokens or its head is tied to the embedding.
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

    /// Loads a rank's part of every tensor of a stage, a layer at a time, a tied embedding once. The file's memory of a
    /// layer is freed before the next one is read.
    pub fn load<L: WeightLoader<'a>>(
        &self,
        loader: &L,
        parts: &Parts,
        stage: Stage,
    ) -> Result<DecoderWeights<L::Device>, L::Error> {
        let layers = self.layers_of(stage).iter().enumerate();
        let layers = layers.map(|(index, layer)| self.load_layer(index, layer, loader, parts));
        let layers = layers.collect::<Result<_, _>>()?;
        let table = |name: &'static str, table: Option<&MatrixTensor<'a>>| {
            let read = |table: &MatrixTensor<'a>| loader.table(name, table.read(loader, &parts.vocabulary)?);
            table.map(read).transpose()
        };
        let (embedding, untied) =
            (table("token embedding", self.embedding_of(stage))?, table("head", self.output_of(stage))?);
        let head = || Ok::<_, L::Error>(Head { norm: loader.vector(self.output_norm.values(&Part::Whole))?, untied });
        let head = stage.is_last().then(head).transpose()?;
        self.tables(stage).for_each(|table| self.checkpoint.release(&table.source()));
        Ok(DecoderWeights { embedding, layers, head, embeds: stage.is_first() })
    }

    fn load_layer<L: WeightLoader<'a>>(
        &self,
        index: usize,
        layer: &LayerTensors<'a>,
        loader: &L,
        parts: &Parts,
    ) -> Result<Layer<L::Device>, L::Error> {
        let loaded = layer.load(index, loader, parts);
        layer.matrices().for_each(|matrix| self.checkpoint.release(&matrix.source()));
        loaded
    }
}

/// The number of experts, if each rank gets some whole experts; `None` if each expert is divided among ranks.
fn whole_experts(config: &DecoderConfig, expert_parallel: bool) -> Result<Option<u32>, ShardError> {
    match (&config.experts, expert_parallel) {
        (_, false) => Ok(None),
        (Some(experts), true) => Ok(Some(experts.count as u32)),
        (None, true) => Err(ShardError::NoExperts { architecture: config.architecture.clone() }),
    }
}

/// The kernels' format for an element type; `None` if they have none.
fn weight_type(kind: ElementType) -> Option<WeightType> {
    WeightType::ALL.into_iter().find(|&weight_type| weight_type.name() == kind.name())
}
