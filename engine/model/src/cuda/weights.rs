//! A decoder's weights on a GPU, stacked as its kernels multiply: query, key and value as one, gate and up as one.

use std::sync::Arc;

use windlass_engine_contract::sharding::Stage;
use windlass_kernels::cuda::ops::GateLayout;
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{DriverError, LoadError, Matrix, Memory, Products, Upload, Uploader};
use windlass_kernels::{Pool, WeightType};

use super::CudaError;
use super::inputs::ProductChoices;
use super::packer::{FileMatrix, FilePacker};
use crate::backend::{Experts, FeedForward, Gated, Layer};
use crate::packed::Float8;
use crate::weights::Head;

/// How tensors of one input become one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stack {
    /// Of one type: [`Matrix::stack`].
    OneType,
    /// Each of its own: [`Matrix::stack_types`].
    OwnTypes,
}

impl Stack {
    fn make(self, loader: &Loader<'_>, cols: usize, tensors: &[Tensor<'_>]) -> Result<Matrix, LoadError> {
        match self {
            Stack::OneType => Matrix::stack(loader.uploader, loader.pool, cols, tensors),
            Stack::OwnTypes => Matrix::stack_types(loader.uploader, loader.pool, cols, tensors),
        }
    }

    /// Whether a gate and its up may stand by eights: as whole tiles of the kernels, and as one matrix.
    fn takes_by_eights(self, pair: &[&FileMatrix<'_>]) -> bool {
        let [gate, up] = pair else { return false };
        let is_one = self == Stack::OneType || gate.is_typed_as(up);
        is_one && gate.rows == up.rows && gate.rows.is_multiple_of(EIGHT)
    }
}

/// A type, rows and their values.
type Tensor<'a> = (WeightType, usize, &'a [u8]);

/// What is right where an order is not.
const RIGHT_ORDER: &str = "a checkpoint without desc_act, or the CPU";

/// Those of a decoder, or of a stage of it.
#[derive(Debug)]
pub(super) struct Weights {
    entry: Entry,
    pub layers: Vec<LayerWeights>,
    /// Absent where a stage comes behind.
    pub head: Option<HeadWeights>,
    /// How they are multiplied.
    pub choices: ProductChoices,
}

/// What makes logits.
#[derive(Debug)]
pub(super) struct HeadWeights {
    pub norm: Memory<f32>,
    pub output: Matrix,
}

/// What the residual stream begins with.
#[derive(Debug)]
enum Entry {
    /// Each token's row of the matrix that makes logits.
    Tied,
    /// Its row of another one.
    Embedding(Matrix),
    /// What the stage before gives.
    Activations,
}

/// Those of a layer.
#[derive(Debug)]
pub(super) struct LayerWeights {
    pub attention_norm: Memory<f32>,
    /// Query, key and value.
    pub qkv: Matrix,
    /// Of them, one after the other.
    pub biases: Option<Memory<f32>>,
    /// Of the heads of query and key.
    pub head_norms: Option<[Memory<f32>; 2]>,
    /// Whether heads turn.
    pub rotary: bool,
    pub out: Matrix,
    /// Of what the attention gives.
    pub post_attention_norm: Option<Memory<f32>>,
    pub feed_forward_norm: Memory<f32>,
    pub feed_forward: FeedForwardWeights,
    /// Of what the feed-forward block gives.
    pub post_feed_forward_norm: Option<Memory<f32>>,
}

/// A layer's feed-forward block.
#[derive(Debug)]
pub(super) enum FeedForwardWeights {
    Dense(Box<GatedWeights>),
    Experts(Box<ExpertWeights>),
}

/// A gated block, or several one after the other.
#[derive(Debug)]
pub(super) struct GatedWeights {
    /// Gate and up of each block.
    pub gate_up: Matrix,
    /// How their rows stand.
    pub layout: GateLayout,
    pub down: Matrix,
}

/// A mixture of experts.
#[derive(Debug)]
pub(super) struct ExpertWeights {
    /// A row for each expert, and at last one for the shared one.
    pub router: Matrix,
    /// Of all experts.
    pub gated: GatedWeights,
    pub shared: Option<GatedWeights>,
}

impl FeedForwardWeights {
    fn matrices(&self) -> Vec<&Matrix> {
        match self {
            FeedForwardWeights::Dense(gated) => gated.matrices().to_vec(),
            FeedForwardWeights::Experts(experts) => {
                let ExpertWeights { router, gated, shared } = &**experts;
                [gated].into_iter().chain(shared).flat_map(GatedWeights::matrices).chain([router]).collect()
            }
        }
    }
}

impl GatedWeights {
    fn matrices(&self) -> [&Matrix; 2] {
        [&self.gate_up, &self.down]
    }
}

impl Weights {
    /// What embeds tokens; absent where the stage before does.
    pub fn embedding(&self) -> Option<&Matrix> {
        match &self.entry {
            Entry::Tied => self.head.as_ref().map(|head| &head.output),
            Entry::Embedding(matrix) => Some(matrix),
            Entry::Activations => None,
        }
    }

    /// Those that all tokens of a step are multiplied with.
    pub fn layer_matrices(&self) -> impl Iterator<Item = &Matrix> {
        self.layers.iter().flat_map(LayerWeights::matrices)
    }

    /// Matrices of the layers' experts.
    pub fn experts(&self) -> impl Iterator<Item = &GatedWeights> {
        self.layers.iter().filter_map(|layer| match &layer.feed_forward {
            FeedForwardWeights::Experts(experts) => Some(&experts.gated),
            FeedForwardWeights::Dense(_) => None,
        })
    }

    /// What multiplies many tokens with matrices in bf16, where there are such and that is there.
    pub fn library(&self) -> Option<&Arc<dyn Products>> {
        self.choices.library.as_ref().filter(|_| self.layer_matrices().any(Matrix::is_bf16))
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let untied = self.embedding().filter(|_| !matches!(self.entry, Entry::Tied));
        let tables = untied.into_iter().chain(self.head.iter().map(|head| &head.output));
        let matrices: usize = tables.chain(self.layer_matrices()).map(Matrix::bytes).sum();
        let vectors = self.layers.iter().flat_map(LayerWeights::vectors).chain(self.head.iter().map(|head| &head.norm));
        (matrices + vectors.map(|vector| vector.view().bytes()).sum::<usize>()) as u64
    }
}

impl LayerWeights {
    fn matrices(&self) -> impl Iterator<Item = &Matrix> {
        [&self.qkv, &self.out].into_iter().chain(self.feed_forward.matrices())
    }

    fn vectors(&self) -> impl Iterator<Item = &Memory<f32>> {
        let norms = [&self.attention_norm, &self.feed_forward_norm];
        let post_norms = self.post_attention_norm.iter().chain(&self.post_feed_forward_norm);
        norms.into_iter().chain(post_norms).chain(&self.biases).chain(self.head_norms.iter().flatten())
    }
}

/// Takes weights in.
pub(super) struct Loader<'a> {
    /// Copies what is ready while the next matrix is.
    pub uploader: &'a Uploader,
    /// Converts what the kernels do not multiply as it is.
    pub pool: &'a Pool,
}

impl Loader<'_> {
    /// A layer, which is no longer needed on the host afterwards.
    pub fn layer(&self, index: usize, layer: Layer<FilePacker<'_>>) -> Result<LayerWeights, CudaError> {
        let named = |name: &'static str| move |source| CudaError::Weights { name, layer: index, source };
        let Layer { query, key, value, biases, head_norms, feed_forward, .. } = layer;
        let optional = |norm: Option<Vec<f32>>| norm.map(|norm| self.vector(&norm)).transpose();
        check_shared_order("query, key and value", &[&query, &key, &value])?;
        let biases = biases.map(|biases| self.vector(&biases.concat())).transpose()?;
        let head_norms = match head_norms {
            Some([query, key]) => Some([self.vector(&query)?, self.vector(&key)?]),
            None => None,
        };
        Ok(LayerWeights {
            attention_norm: self.vector(&layer.attention_norm)?,
            qkv: self
                .stack(&[&query, &key, &value], GateLayout::Halves, Stack::OwnTypes)
                .map_err(named("query, key and value"))?,
            biases,
            head_norms,
            rotary: layer.rotary,
            out: self.matrix(&layer.out).map_err(named("attention output"))?,
            post_attention_norm: optional(layer.post_attention_norm)?,
            feed_forward_norm: self.vector(&layer.feed_forward_norm)?,
            feed_forward: self.feed_forward(index, &feed_forward)?,
            post_feed_forward_norm: optional(layer.post_feed_forward_norm)?,
        })
    }

    fn feed_forward(&self, layer: usize, block: &FeedForward<FilePacker<'_>>) -> Result<FeedForwardWeights, CudaError> {
        let Experts { router, experts, shared } = match block {
            FeedForward::Dense(gated) => {
                let gated = self.gated(layer, [gated], Stack::OwnTypes)?;
                return Ok(FeedForwardWeights::Dense(Box::new(gated)));
            }
            FeedForward::Experts(experts) => experts,
        };
        let of_experts = experts.iter().flat_map(|Gated { gate, up, down }| [gate, up, down]);
        refuse_order("experts", of_experts.chain([router]))?;
        let gate: Vec<u8> =
            shared.iter().flat_map(|shared| &shared.gate).flat_map(|value| value.to_le_bytes()).collect();
        let (kind, bytes) = router.typed();
        let rows = [(kind, router.rows, &bytes[..])];
        let rows: Vec<_> = rows.into_iter().chain(shared.iter().map(|_| (WeightType::F32, 1, &gate[..]))).collect();
        let router = Matrix::stack(self.uploader, self.pool, router.cols, &rows)
            .map_err(|source| CudaError::Weights { name: "router", layer, source })?;
        let shared = shared.as_ref().map(|shared| self.gated(layer, [&shared.gated], Stack::OwnTypes));
        let (shared, gated) = (shared.transpose()?, self.gated(layer, experts, Stack::OneType)?);
        Ok(FeedForwardWeights::Experts(Box::new(ExpertWeights { router, gated, shared })))
    }

    /// Gated blocks, one after the other.
    fn gated<'m, 'p: 'm>(
        &self,
        layer: usize,
        blocks: impl IntoIterator<Item = &'m Gated<FilePacker<'p>>>,
        stack: Stack,
    ) -> Result<GatedWeights, CudaError> {
        let named = |name: &'static str| move |source| CudaError::Weights { name, layer, source };
        let (gates_and_ups, downs): (Vec<_>, Vec<_>) =
            blocks.into_iter().map(|Gated { gate, up, down }| ([gate, up], down)).unzip();
        let gates_and_ups = gates_and_ups.concat();
        check_shared_order("gate and up", &gates_and_ups)?;
        let by_eights = gates_and_ups.chunks(2).all(|pair| stack.takes_by_eights(pair));
        let layout = if by_eights { GateLayout::Eights } else { GateLayout::Halves };
        Ok(GatedWeights {
            gate_up: self.stack(&gates_and_ups, layout, stack).map_err(named("gate and up"))?,
            layout,
            down: self.stack(&downs, GateLayout::Halves, stack).map_err(named("down"))?,
        })
    }

    /// What is before and behind the layers of a stage.
    pub fn weights(
        &self,
        stage: Stage,
        embedding: Option<FileMatrix<'_>>,
        layers: Vec<LayerWeights>,
        head: Option<Head<FilePacker<'_>>>,
        choices: ProductChoices,
    ) -> Result<Weights, CudaError> {
        let (norm, untied) = head.map(|head| (head.norm, head.untied)).unzip();
        let untied = untied.flatten();
        refuse_order("embeddings and heads", embedding.iter().chain(&untied))?;
        let table = |name: &'static str, matrix: Option<FileMatrix<'_>>| {
            let taken_in = matrix.map(|matrix| self.matrix(&matrix)).transpose();
            taken_in.map_err(|source| CudaError::Table { name, source })
        };
        let (untied, embedding) = (table("head", untied)?, table("token embedding", embedding)?);
        let (entry, output) = match (stage.is_first(), embedding, untied) {
            (true, Some(tied), None) if stage.is_last() => (Entry::Tied, Some(tied)),
            (true, Some(embedding), untied) => (Entry::Embedding(embedding), untied),
            (false, output, None) | (false, None, output) => (Entry::Activations, output),
            _ => unreachable!("a stage has the matrices that it reads and no others"),
        };
        let norm = norm.map(|norm| self.vector(&norm)).transpose()?;
        let head = norm.zip(output).map(|(norm, output)| HeadWeights { norm, output });
        Ok(Weights { entry, layers, head, choices })
    }

    fn vector(&self, values: &[f32]) -> Result<Memory<f32>, DriverError> {
        self.uploader.upload(values)
    }

    fn matrix(&self, file: &FileMatrix<'_>) -> Result<Matrix, LoadError> {
        self.stack(&[file], GateLayout::Halves, Stack::OneType)
    }

    /// Matrices of the same input, in the same order of columns, as one: outputs after outputs, or those of two by eights.
    fn stack(&self, files: &[&FileMatrix<'_>], layout: GateLayout, stack: Stack) -> Result<Matrix, LoadError> {
        if let Some(float8) = self.stack_float8(files, layout) {
            return float8;
        }
        let typed: Vec<_> = files.iter().map(|file| file.typed()).collect();
        let bytes = typed.iter().zip(files).map(|((_, bytes), file)| (file.rows, &bytes[..]));
        let tensors: Vec<_> = pieces(layout, bytes)
            .into_iter()
            .map(|Piece { matrix, rows, values }| (typed[matrix].0, rows, values))
            .collect();
        let stacked = stack.make(self, files[0].cols, &tensors)?;
        match &files[0].order {
            None => Ok(stacked),
            Some(order) => stacked.ordered(self.uploader, order),
        }
    }

    /// The same if all are eight-bit floats that are scaled alike.
    fn stack_float8(&self, files: &[&FileMatrix<'_>], layout: GateLayout) -> Option<Result<Matrix, LoadError>> {
        let parts: Vec<&Float8> = files.iter().map(|file| file.float8()).collect::<Option<_>>()?;
        let group = parts[0].group;
        let (rows, cols) = (files.iter().map(|file| file.rows).sum(), files[0].cols);
        let codes = concat(pieces(layout, parts.iter().zip(files).map(|(part, file)| (file.rows, &part.codes[..]))));
        let scales = concat(pieces(layout, parts.iter().zip(files).map(|(part, file)| (file.rows, &part.scales[..]))));
        let stacked = || Matrix::eight_bits(self.uploader, EightBits::E4m3, [rows, cols], group, &codes, &scales);
        parts.iter().all(|part| part.group == group).then(stacked)
    }
}

/// Gates or ups that stand side by side.
const EIGHT: usize = 8;

/// Neighbouring rows of one of several matrices.
struct Piece<'v, T> {
    matrix: usize,
    rows: usize,
    values: &'v [T],
}

/// The rows of matrices, of which `(rows, values)` are given, in the order in which they are stacked.
fn pieces<'v, T>(layout: GateLayout, matrices: impl Iterator<Item = (usize, &'v [T])>) -> Vec<Piece<'v, T>> {
    let whole = matrices.enumerate().map(|(matrix, (rows, values))| Piece { matrix, rows, values });
    match layout {
        GateLayout::Halves => whole.collect(),
        GateLayout::Eights => whole.collect::<Vec<_>>().chunks(2).flat_map(by_eights).collect(),
    }
}

/// Eight rows of each of two matrices by turns.
fn by_eights<'v, T>(pair: &[Piece<'v, T>]) -> Vec<Piece<'v, T>> {
    let eight = |matrix: &Piece<'v, T>, at: usize| {
        let length = matrix.values.len() / matrix.rows * EIGHT;
        Piece { matrix: matrix.matrix, rows: EIGHT, values: &matrix.values[at * length..][..length] }
    };
    (0..pair[0].rows / EIGHT).flat_map(|at| pair.iter().map(move |matrix| eight(matrix, at))).collect()
}

fn concat<T: Copy>(pieces: Vec<Piece<'_, T>>) -> Vec<T> {
    pieces.iter().map(|piece| piece.values).collect::<Vec<_>>().concat()
}

/// Refuses matrices of one input whose columns have different orders.
fn check_shared_order(what: &str, matrices: &[&FileMatrix<'_>]) -> Result<(), CudaError> {
    match matrices.iter().all(|matrix| matrix.order == matrices[0].order) {
        true => Ok(()),
        false => Err(CudaError::unsupported(format!("{what} with inputs in different orders"), RIGHT_ORDER)),
    }
}

/// Refuses columns in an order of their own.
fn refuse_order<'m>(what: &str, matrices: impl IntoIterator<Item = &'m FileMatrix<'m>>) -> Result<(), CudaError> {
    match matrices.into_iter().all(|matrix| matrix.order.is_none()) {
        true => Ok(()),
        false => Err(CudaError::unsupported(format!("{what} with inputs in an order of their own"), RIGHT_ORDER)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

    use windlass_cuda_shim::{HostMachine, Kernels};
    use windlass_kernels::WeightType;

    use super::*;
    use crate::cuda::packer::FileValues;

    const SIDE: usize = 64;

    fn matrix(is_ordered: bool) -> FileMatrix<'static> {
        let order = is_ordered.then(|| (0..SIDE as u32).rev().collect());
        let values = FileValues::Typed(WeightType::BF16, vec![0; 2 * SIDE * SIDE].into());
        FileMatrix { rows: SIDE, cols: SIDE, values, order }
    }

    fn gated(ordered: [bool; 3]) -> Gated<FilePacker<'static>> {
        let [gate, up, down] = ordered.map(matrix);
        Gated { gate, up, down }
    }

    /// A layer of query, key, value, output and then this block; some have an order of their own.
    fn layer(ordered: [bool; 4], feed_forward: FeedForward<FilePacker<'static>>) -> Layer<FilePacker<'static>> {
        let [query, key, value, out] = ordered.map(matrix);
        Layer {
            attention_norm: vec![1.0; SIDE],
            query,
            key,
            value,
            out,
            biases: None,
            head_norms: None,
            rotary: true,
            post_attention_norm: None,
            feed_forward_norm: vec![1.0; SIDE],
            feed_forward,
            post_feed_forward_norm: None,
        }
    }

    #[test]
    fn an_order_of_columns_is_taken_where_an_input_has_one_alone_and_refused_elsewhere() {
        let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 24);
        let uploader = Uploader::new(&device, 1 << 12).unwrap();
        let loader = Loader { uploader: &uploader, pool: &Pool::new(1).unwrap() };
        let is_refused = |found: CudaError| found.to_string().contains("use a checkpoint without desc_act");
        let dense = |attention: u32, block: u32| {
            let of = |bits: u32, index: u32| bits >> index & 1 == 1;
            let block = FeedForward::Dense(gated([0, 1, 2].map(|index| of(block, index))));
            loader.layer(0, layer([0, 1, 2, 3].map(|index| of(attention, index)), block))
        };
        for (attention, block) in (0..16).flat_map(|attention| (0..8).map(move |block| (attention, block))) {
            let shares = [0, 7].contains(&(attention & 7)) && [0, 3].contains(&(block & 3));
            match dense(attention, block) {
                Ok(layer) => {
                    let ordered = layer.matrices().map(|matrix| matrix.order().is_some()).collect::<Vec<_>>();
                    let expected = [attention & 1, attention >> 3, block & 1, block >> 2].map(|bit| bit == 1);
                    assert!(shares && ordered == expected, "{attention:b} {block:b}: {ordered:?}");
                }
                Err(why) => assert!(!shares && is_refused(why), "{attention:b} {block:b}"),
            }
        }
        for ordered in 0..4 {
            let experts = vec![gated([0, 1, 2].map(|index| index == ordered))];
            let mixture = FeedForward::Experts(Experts { router: matrix(ordered == 3), experts, shared: None });
            assert!(loader.layer(0, layer([false; 4], mixture)).is_err_and(is_refused));
        }
        let tables = |embedding, head| {
            let head = Head { norm: vec![1.0; SIDE], untied: Some(matrix(head)) };
            loader.weights(Stage::WHOLE, Some(matrix(embedding)), Vec::new(), Some(head), ProductChoices::default())
        };
        assert!(tables(false, false).is_ok());
        assert!(tables(true, false).is_err_and(is_refused));
        assert!(tables(false, true).is_err_and(is_refused));
    }
}
