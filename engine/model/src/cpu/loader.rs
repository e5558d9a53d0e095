//! Packs weights for a CPU, some rows at a time.

use std::borrow::Cow;

use windlass_kernels::{Integer, PackedMatrix, Pool, ShapeError, WeightType};

use super::CpuBackend;
use crate::decoder::Matrices;
use crate::weights::TensorError;
use crate::weights::{FileRows, GatedFiles, WeightLoader};

/// The projections of query, key and value.
#[allow(missing_docs)] // the field's own names
pub struct CpuQkv {
    pub query: PackedMatrix,
    pub key: PackedMatrix,
    pub value: PackedMatrix,
}

/// A gated feed-forward block: `down · (activation(gate · x) · (up · x))`.
#[allow(missing_docs)] // the field's own names
pub struct CpuGated {
    pub gate: PackedMatrix,
    pub up: PackedMatrix,
    pub down: PackedMatrix,
}

/// A mixture of experts.
pub struct CpuExperts {
    /// The router, which computes a score for each token and expert.
    pub router: PackedMatrix,
    /// The experts, in the order of their scores.
    pub experts: Vec<CpuGated>,
    /// The shared expert, which every token goes through. Its weight is the logistic function of the product of the
    /// vector and the token.
    pub shared: Option<(CpuGated, Vec<f32>)>,
}

impl Matrices<PackedMatrix> for CpuQkv {
    fn matrices(&self) -> Vec<&PackedMatrix> {
        vec![&self.query, &self.key, &self.value]
    }
}

impl Matrices<PackedMatrix> for CpuGated {
    fn matrices(&self) -> Vec<&PackedMatrix> {
        vec![&self.gate, &self.up, &self.down]
    }
}

impl Matrices<PackedMatrix> for CpuExperts {
    fn matrices(&self) -> Vec<&PackedMatrix> {
        let shared = self.shared.iter().map(|(gated, _)| gated);
        self.experts.iter().chain(shared).flat_map(CpuGated::matrices).chain([&self.router]).collect()
    }
}

/// Packs weights with the threads that will compute.
#[derive(Debug)]
pub(crate) struct CpuLoader<'p> {
    /// The threads.
    pub pool: &'p Pool,
}

impl CpuLoader<'_> {
    /// Packs rows of type `from`, from which `make` makes rows of type `to`, some at a time. The memory of packed rows
    /// is freed.
    fn pack_strips<'a>(
        &self,
        (from, to): (WeightType, WeightType),
        [rows, cols]: [usize; 2],
        source: &impl FileRows<'a>,
        make: impl Fn(Cow<'a, [u8]>) -> Result<Cow<'a, [u8]>, ShapeError>,
    ) -> Result<PackedMatrix, ShapeError> {
        let mut packed = PackedMatrix::zeroed(to, rows, cols)?;
        for strip in PackedMatrix::strips(rows, from.row_bytes(cols).unwrap_or(0)) {
            packed.fill(self.pool, strip.clone(), &make(source.get(strip.clone()))?)?;
            source.release(strip);
        }
        Ok(packed)
    }
}

impl<'a> WeightLoader<'a> for CpuLoader<'_> {
    type Device = CpuBackend;
    type File = PackedMatrix;
    type Error = TensorError;

    fn file(
        &self,
        kind: WeightType,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
        order: Option<&[u32]>,
    ) -> Result<PackedMatrix, ShapeError> {
        let packed = self.pack_strips((kind, kind), [rows, cols], source, Ok)?;
        match order {
            None => Ok(packed),
            Some(order) => packed.ordered(order),
        }
    }

    fn quantized(
        &self,
        from: WeightType,
        to: Integer,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
    ) -> Result<PackedMatrix, ShapeError> {
        let quantize = |floats: Cow<'a, [u8]>| {
            let rows = floats.len() / from.row_bytes(cols).unwrap_or(1);
            to.quantize(self.pool, from, rows, cols, &floats).map(Cow::Owned)
        };
        self.pack_strips((from, to.weight_type()), [rows, cols], source, quantize)
    }

    fn vector(&self, values: Vec<f32>) -> Result<Vec<f32>, TensorError> {
        Ok(values)
    }

    fn table(&self, _name: &'static str, file: PackedMatrix) -> Result<PackedMatrix, TensorError> {
        Ok(file)
    }

    fn qkv(&self, _layer: usize, [query, key, value]: [PackedMatrix; 3]) -> Result<CpuQkv, TensorError> {
        Ok(CpuQkv { query, key, value })
    }

    fn out(&self, _layer: usize, file: PackedMatrix) -> Result<PackedMatrix, TensorError> {
        Ok(file)
    }

    fn gated(&self, _layer: usize, files: GatedFiles<PackedMatrix>) -> Result<CpuGated, TensorError> {
        Ok(gated(files))
    }

    fn experts(
        &self,
        _layer: usize,
        router: PackedMatrix,
        experts: Vec<GatedFiles<PackedMatrix>>,
        shared: Option<(GatedFiles<PackedMatrix>, Vec<f32>)>,
    ) -> Result<CpuExperts, TensorError> {
        let experts = experts.into_iter().map(gated).collect();
        Ok(CpuExperts { router, experts, shared: shared.map(|(files, gate)| (gated(files), gate)) })
    }
}

fn gated([gate, up, down]: GatedFiles<PackedMatrix>) -> CpuGated {
    CpuGated { gate, up, down }
}
