//! A decoder's weights on a GPU, stacked as its kernels multiply: query, key and value as one, gate and up as one.

use windlass_kernels::cuda::{Device, DriverError, LoadError, Matrix, Memory};
use windlass_kernels::{Pool, WeightType};

use super::CudaError;
use super::packer::{FileMatrix, FilePacker};
use crate::backend::{Experts, FeedForward, Gated, Layer};
use crate::weights::Head;

/// A whole decoder's.
#[derive(Debug)]
pub(super) struct Weights {
    pub embedding: Matrix,
    pub layers: Vec<LayerWeights>,
    pub norm: Memory<f32>,
    /// Absent where the head multiplies with the embedding.
    untied: Option<Matrix>,
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
    Dense(GatedWeights),
    Experts(Box<ExpertWeights>),
}

/// A gated block, or several one after the other.
#[derive(Debug)]
pub(super) struct GatedWeights {
    /// Gate and then up, of each block.
    pub gate_up: Matrix,
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
    /// What makes logits.
    pub fn output(&self) -> &Matrix {
        self.untied.as_ref().unwrap_or(&self.embedding)
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        let tables = [&self.embedding].into_iter().chain(&self.untied);
        let matrices: usize =
            tables.chain(self.layers.iter().flat_map(LayerWeights::matrices)).map(Matrix::bytes).sum();
        let vectors = self.layers.iter().flat_map(LayerWeights::vectors).chain([&self.norm]);
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
    pub device: &'a Device,
    /// Converts what the kernels do not multiply as it is.
    pub pool: &'a Pool,
}

impl Loader<'_> {
    /// A layer, which is no longer needed on the host afterwards.
    pub fn layer(&self, index: usize, layer: Layer<FilePacker<'_>>) -> Result<LayerWeights, CudaError> {
        let named = |name: &'static str| move |source| CudaError::Weights { name, layer: index, source };
        let Layer { query, key, value, biases, head_norms, feed_forward, .. } = layer;
        let optional = |norm: Option<Vec<f32>>| norm.map(|norm| self.vector(&norm)).transpose();
        check_order([&query, &key, &value, &layer.out])?;
        let biases = biases.map(|biases| self.vector(&biases.concat())).transpose()?;
        let head_norms = match head_norms {
            Some([query, key]) => Some([self.vector(&query)?, self.vector(&key)?]),
            None => None,
        };
        Ok(LayerWeights {
            attention_norm: self.vector(&layer.attention_norm)?,
            qkv: self.stack(&[&query, &key, &value]).map_err(named("query, key and value"))?,
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
            FeedForward::Dense(gated) => return Ok(FeedForwardWeights::Dense(self.gated(layer, [gated])?)),
            FeedForward::Experts(experts) => experts,
        };
        check_order([router])?;
        let gate: Vec<u8> =
            shared.iter().flat_map(|shared| &shared.gate).flat_map(|value| value.to_le_bytes()).collect();
        let rows = [(router.kind, router.rows, &router.bytes[..])];
        let rows: Vec<_> = rows.into_iter().chain(shared.iter().map(|_| (WeightType::F32, 1, &gate[..]))).collect();
        let router = Matrix::stack(self.device, self.pool, router.cols, &rows)
            .map_err(|source| CudaError::Weights { name: "router", layer, source })?;
        let shared = shared.as_ref().map(|shared| self.gated(layer, [&shared.gated])).transpose()?;
        let gated = self.gated(layer, experts)?;
        Ok(FeedForwardWeights::Experts(Box::new(ExpertWeights { router, gated, shared })))
    }

    /// Gated blocks, one after the other.
    fn gated<'m>(
        &self,
        layer: usize,
        blocks: impl IntoIterator<Item = &'m Gated<FilePacker<'m>>>,
    ) -> Result<GatedWeights, CudaError> {
        let named = |name: &'static str| move |source| CudaError::Weights { name, layer, source };
        let (gates_and_ups, downs): (Vec<_>, Vec<_>) =
            blocks.into_iter().map(|Gated { gate, up, down }| ([gate, up], down)).unzip();
        let gates_and_ups = gates_and_ups.concat();
        check_order(gates_and_ups.iter().chain(&downs).copied())?;
        Ok(GatedWeights {
            gate_up: self.stack(&gates_and_ups).map_err(named("gate and up"))?,
            down: self.stack(&downs).map_err(named("down"))?,
        })
    }

    /// What is before and behind the layers.
    pub fn weights(
        &self,
        embedding: FileMatrix,
        layers: Vec<LayerWeights>,
        head: Head<FilePacker<'_>>,
    ) -> Result<Weights, CudaError> {
        let named = |name: &'static str| move |source| CudaError::Table { name, source };
        check_order([&embedding].into_iter().chain(&head.untied))?;
        let untied = head.untied.map(|matrix| self.matrix(&matrix).map_err(named("head"))).transpose()?;
        let embedding = self.matrix(&embedding).map_err(named("token embedding"))?;
        Ok(Weights { embedding, layers, norm: self.vector(&head.norm)?, untied })
    }

    fn vector(&self, values: &[f32]) -> Result<Memory<f32>, DriverError> {
        self.device.upload(values)
    }

    fn matrix(&self, file: &FileMatrix) -> Result<Matrix, LoadError> {
        Matrix::load(self.device, self.pool, file.kind, file.rows, file.cols, &file.bytes)
    }

    /// Matrices of the same input as one, outputs after outputs.
    fn stack(&self, files: &[&FileMatrix]) -> Result<Matrix, LoadError> {
        let tensors: Vec<_> = files.iter().map(|file| (file.kind, file.rows, &file.bytes[..])).collect();
        Matrix::stack(self.device, self.pool, files[0].cols, &tensors)
    }
}

/// Refuses columns in an order of their own.
fn check_order<'m>(matrices: impl IntoIterator<Item = &'m FileMatrix>) -> Result<(), CudaError> {
    match matrices.into_iter().any(|matrix| matrix.is_ordered) {
        true => Err(CudaError::unsupported("a matrix with columns in an order of their own", "one without desc_act")),
        false => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

    use windlass_cuda_shim::{HostMachine, Kernels};
    use windlass_kernels::WeightType;

    use super::*;

    const SIDE: usize = 64;

    fn matrix(is_ordered: bool) -> FileMatrix {
        FileMatrix { kind: WeightType::BF16, rows: SIDE, cols: SIDE, bytes: vec![0; 2 * SIDE * SIDE], is_ordered }
    }

    /// A layer, of whose matrices one may be in an order of its own.
    fn layer(ordered: Option<usize>) -> Layer<FilePacker<'static>> {
        let matrix = |index| matrix(ordered == Some(index));
        Layer {
            attention_norm: vec![1.0; SIDE],
            query: matrix(0),
            key: matrix(1),
            value: matrix(2),
            out: matrix(3),
            biases: None,
            head_norms: None,
            rotary: true,
            post_attention_norm: None,
            feed_forward_norm: vec![1.0; SIDE],
            feed_forward: FeedForward::Dense(Gated { gate: matrix(4), up: matrix(5), down: matrix(6) }),
            post_feed_forward_norm: None,
        }
    }

    #[test]
    fn columns_in_an_order_of_their_own_are_refused_wherever_they_are() {
        let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 24);
        let loader = Loader { device: &device, pool: &Pool::new(1).unwrap() };
        let is_refused = |found: CudaError| found.to_string().contains("use one without desc_act");
        assert!(loader.layer(0, layer(None)).is_ok());
        assert!((0..7).all(|ordered| loader.layer(0, layer(Some(ordered))).is_err_and(is_refused)));
        let tables = |embedding, head| {
            let head = Head { norm: vec![1.0; SIDE], untied: Some(matrix(head)) };
            loader.weights(matrix(embedding), Vec::new(), head)
        };
        assert!(tables(false, false).is_ok());
        assert!(tables(true, false).is_err_and(is_refused));
        assert!(tables(false, true).is_err_and(is_refused));
    }
}
