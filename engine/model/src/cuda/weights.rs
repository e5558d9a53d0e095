//! The weights of a decoder on a GPU, stacked for its kernels: query, key and value are one matrix, and so are gate and
//! up.

use windlass_kernels::cuda::ops::GateLayout;
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{LoadError as MatrixError, Matrix, Memory, Upload, Uploader};
use windlass_kernels::{Integer, Pool, ShapeError, WeightType};

use super::CudaError;
use super::compute::CudaBackend;
use super::file_matrix::{FileMatrix, FileValues};
use crate::decoder::{DecoderWeights, Matrices};
use crate::error::LoadError;
use crate::weights::quantized::Float8;
use crate::weights::{FileRows, GatedFiles, WeightLoader};

/// How tensors with the same input become one matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stack {
    /// All of one type: [`Matrix::stack`].
    OneType,
    /// Each of its own type: [`Matrix::stack_types`].
    OwnTypes,
}

impl Stack {
    fn make(self, loader: &CudaLoader<'_>, cols: usize, tensors: &[Tensor<'_>]) -> Result<Matrix, MatrixError> {
        match self {
            Stack::OneType => Matrix::stack(loader.uploader, loader.pool, cols, tensors),
            Stack::OwnTypes => Matrix::stack_types(loader.uploader, loader.pool, cols, tensors),
        }
    }

    /// Whether the rows of gate and up can alternate in groups of eight: they fill whole tiles of the kernels and are
    /// one matrix.
    fn takes_by_eights(self, pair: &[&FileMatrix<'_>]) -> bool {
        let [gate, up] = pair else { return false };
        let is_one = self == Stack::OneType || gate.is_typed_as(up);
        is_one && gate.rows == up.rows && gate.rows.is_multiple_of(EIGHT)
    }
}

/// Weight format, number of rows, and values.
type Tensor<'a> = (WeightType, usize, &'a [u8]);

/// What to use if columns in another order are not supported.
const RIGHT_ORDER: &str = "a checkpoint without desc_act, or the CPU";

/// The weights of a decoder on a GPU, stacked for its kernels: query, key and value are one matrix, and so are gate and
/// up.
pub(super) type CudaWeights = DecoderWeights<CudaBackend>;

/// Bytes of weights on the device.
pub(super) fn bytes(weights: &CudaWeights) -> u64 {
    let matrices: usize = weights.matrices().map(Matrix::bytes).sum();
    (matrices + weights.vectors().map(|vector| vector.view().bytes()).sum::<usize>()) as u64
}

/// Query, key and value are one matrix.
impl Matrices<Matrix> for Matrix {
    fn matrices(&self) -> Vec<&Matrix> {
        vec![self]
    }
}

/// A gated feed-forward block, or several stacked.
#[derive(Debug)]
pub(super) struct GatedWeights {
    /// Gate and up of each block.
    pub gate_up: Matrix,
    /// The order of the rows of gate and up.
    pub layout: GateLayout,
    pub down: Matrix,
}

impl Matrices<Matrix> for GatedWeights {
    fn matrices(&self) -> Vec<&Matrix> {
        vec![&self.gate_up, &self.down]
    }
}

/// A mixture of experts.
#[derive(Debug)]
pub(super) struct ExpertWeights {
    /// A row for each expert, then one for the shared expert, if there is one.
    pub router: Matrix,
    /// The blocks of all experts, stacked.
    pub gated: GatedWeights,
    pub shared: Option<GatedWeights>,
}

impl Matrices<Matrix> for ExpertWeights {
    fn matrices(&self) -> Vec<&Matrix> {
        let ExpertWeights { router, gated, shared } = self;
        [gated].into_iter().chain(shared).flat_map(GatedWeights::matrices).chain([router]).collect()
    }
}

/// Loads weights to a GPU.
pub(super) struct CudaLoader<'u> {
    /// Copies a matrix while the next one is prepared.
    pub uploader: &'u Uploader,
    /// Converts weights that the kernels do not read as they are.
    pub pool: &'u Pool,
}

impl<'a> WeightLoader<'a> for CudaLoader<'_> {
    type Device = CudaBackend;
    type File = FileMatrix<'a>;
    type Error = LoadError;

    fn file(
        &self,
        kind: WeightType,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
        order: Option<&[u32]>,
    ) -> Result<FileMatrix<'a>, ShapeError> {
        let values = FileValues::Typed(kind, source.get(0..rows));
        Ok(FileMatrix { rows, cols, values, order: order.map(<[u32]>::to_vec) })
    }

    fn quantized(
        &self,
        from: WeightType,
        to: Integer,
        rows: usize,
        cols: usize,
        source: &impl FileRows<'a>,
    ) -> Result<FileMatrix<'a>, ShapeError> {
        let quantized = to.quantize(self.pool, from, rows, cols, &source.get(0..rows))?;
        let values = FileValues::Typed(to.weight_type(), quantized.into());
        Ok(FileMatrix { rows, cols, values, order: None })
    }

    fn float8(&self, rows: usize, cols: usize, values: impl FnOnce() -> Option<Float8>) -> Option<FileMatrix<'a>> {
        values().map(|float8| FileMatrix { rows, cols, values: FileValues::Float8(float8), order: None })
    }

    fn vector(&self, values: Vec<f32>) -> Result<Memory<f32>, LoadError> {
        Ok(self.uploader.upload(&values).map_err(CudaError::from)?)
    }

    fn table(&self, name: &'static str, file: FileMatrix<'a>) -> Result<Matrix, LoadError> {
        refuse_order("embeddings and heads", [&file])?;
        Ok(self.matrix(&file).map_err(|source| CudaError::Table { name, source })?)
    }

    fn qkv(&self, layer: usize, files: [FileMatrix<'a>; 3]) -> Result<Matrix, LoadError> {
        let files = files.each_ref();
        check_shared_order("query, key and value", &files)?;
        let stacked = self.stack(&files, GateLayout::Halves, Stack::OwnTypes);
        Ok(stacked.map_err(of_layer("query, key and value", layer))?)
    }

    fn out(&self, layer: usize, file: FileMatrix<'a>) -> Result<Matrix, LoadError> {
        Ok(self.matrix(&file).map_err(of_layer("attention output", layer))?)
    }

    fn gated(&self, layer: usize, files: GatedFiles<FileMatrix<'a>>) -> Result<GatedWeights, LoadError> {
        Ok(self.stack_gated(layer, &[files], Stack::OwnTypes)?)
    }

    fn experts(
        &self,
        layer: usize,
        router: FileMatrix<'a>,
        experts: Vec<GatedFiles<FileMatrix<'a>>>,
        shared: Option<(GatedFiles<FileMatrix<'a>>, Vec<f32>)>,
    ) -> Result<ExpertWeights, LoadError> {
        refuse_order("experts", experts.iter().flatten().chain([&router]))?;
        let (shared, gate) = shared.unzip();
        let gate = gate.map(|gate: Vec<f32>| gate.into_iter().flat_map(f32::to_le_bytes).collect::<Vec<u8>>());
        let (kind, bytes) = router.typed();
        let rows = [(kind, router.rows, &bytes[..])].into_iter();
        let rows: Vec<_> = rows.chain(gate.iter().map(|gate| (WeightType::F32, 1, &gate[..]))).collect();
        let router = Matrix::stack(self.uploader, self.pool, router.cols, &rows).map_err(of_layer("router", layer))?;
        let shared = shared.map(|files| self.stack_gated(layer, &[files], Stack::OwnTypes)).transpose()?;
        Ok(ExpertWeights { router, gated: self.stack_gated(layer, &experts, Stack::OneType)?, shared })
    }
}

/// Says which matrix of which layer is wrong.
fn of_layer(name: &'static str, layer: usize) -> impl Fn(MatrixError) -> CudaError {
    move |source| CudaError::Weights { name, layer, source }
}

impl CudaLoader<'_> {
    /// Gated blocks, one after the other.
    fn stack_gated(
        &self,
        layer: usize,
        blocks: &[GatedFiles<FileMatrix<'_>>],
        stack: Stack,
    ) -> Result<GatedWeights, CudaError> {
        let gates_and_ups: Vec<_> = blocks.iter().flat_map(|[gate, up, _]| [gate, up]).collect();
        let downs: Vec<_> = blocks.iter().map(|[_, _, down]| down).collect();
        check_shared_order("gate and up", &gates_and_ups)?;
        let by_eights = gates_and_ups.chunks(2).all(|pair| stack.takes_by_eights(pair));
        let layout = if by_eights { GateLayout::Eights } else { GateLayout::Halves };
        Ok(GatedWeights {
            gate_up: self.stack(&gates_and_ups, layout, stack).map_err(of_layer("gate and up", layer))?,
            layout,
            down: self.stack(&downs, GateLayout::Halves, stack).map_err(of_layer("down", layer))?,
        })
    }

    fn matrix(&self, file: &FileMatrix<'_>) -> Result<Matrix, MatrixError> {
        self.stack(&[file], GateLayout::Halves, Stack::OneType)
    }

    /// Stacks matrices of the same input and order of columns: one below the other, or two with their rows alternating
    /// in groups of eight.
    fn stack(&self, files: &[&FileMatrix<'_>], layout: GateLayout, stack: Stack) -> Result<Matrix, MatrixError> {
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

    /// As [`stack`](Self::stack), if all are eight-bit floats with scales of the same shape; else `None`.
    fn stack_float8(&self, files: &[&FileMatrix<'_>], layout: GateLayout) -> Option<Result<Matrix, MatrixError>> {
        let parts: Vec<&Float8> = files.iter().map(|file| file.float8()).collect::<Option<_>>()?;
        let group = parts[0].group;
        let (rows, cols) = (files.iter().map(|file| file.rows).sum(), files[0].cols);
        let codes = concat(pieces(layout, parts.iter().zip(files).map(|(part, file)| (file.rows, &part.codes[..]))));
        let scales = concat(pieces(layout, parts.iter().zip(files).map(|(part, file)| (file.rows, &part.scales[..]))));
        let stacked = || Matrix::eight_bits(self.uploader, EightBits::E4m3, [rows, cols], group, &codes, &scales);
        parts.iter().all(|part| part.group == group).then(stacked)
    }
}

/// Rows of gate or up that are neighbours.
const EIGHT: usize = 8;

/// Consecutive rows of one of several matrices.
struct Piece<'v, T> {
    matrix: usize,
    rows: usize,
    values: &'v [T],
}

/// The rows of matrices, given as `(rows, values)`, in the order in which they are stacked.
fn pieces<'v, T>(layout: GateLayout, matrices: impl Iterator<Item = (usize, &'v [T])>) -> Vec<Piece<'v, T>> {
    let whole = matrices.enumerate().map(|(matrix, (rows, values))| Piece { matrix, rows, values });
    match layout {
        GateLayout::Halves => whole.collect(),
        GateLayout::Eights => whole.collect::<Vec<_>>().chunks(2).flat_map(by_eights).collect(),
    }
}

/// The rows of two matrices, alternating in groups of eight.
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

/// Refuses matrices of the same input whose columns have different orders.
fn check_shared_order(what: &str, matrices: &[&FileMatrix<'_>]) -> Result<(), CudaError> {
    match matrices.iter().all(|matrix| matrix.order == matrices[0].order) {
        true => Ok(()),
        false => Err(CudaError::unsupported(format!("{what} with inputs in different orders"), RIGHT_ORDER)),
    }
}

/// Refuses matrices whose columns are not in the order of inputs.
fn refuse_order<'m>(what: &str, matrices: impl IntoIterator<Item = &'m FileMatrix<'m>>) -> Result<(), CudaError> {
    match matrices.into_iter().all(|matrix| matrix.order.is_none()) {
        true => Ok(()),
        false => Err(CudaError::unsupported(format!("{what} with inputs in an order of their own"), RIGHT_ORDER)),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

    use std::borrow::Cow;
    use std::ops::Range;

    use windlass_cuda_shim::{HostMachine, Kernels};

    use super::*;

    const SIDE: usize = 64;

    fn matrix(is_ordered: bool) -> FileMatrix<'static> {
        let order = is_ordered.then(|| (0..SIDE as u32).rev().collect());
        let values = FileValues::Typed(WeightType::BF16, vec![0; 2 * SIDE * SIDE].into());
        FileMatrix { rows: SIDE, cols: SIDE, values, order }
    }

    #[test]
    fn an_order_of_columns_is_taken_where_an_input_has_one_alone_and_refused_elsewhere() {
        let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 24);
        let uploader = Uploader::new(&device, 1 << 12).unwrap();
        let loader = CudaLoader { uploader: &uploader, pool: &Pool::new(1).unwrap() };
        let is_refused = |found: LoadError| found.to_string().contains("use a checkpoint without desc_act");
        let three = |bits: u32| [0, 1, 2].map(|index| matrix(bits >> index & 1 == 1));
        for bits in 0..8 {
            match loader.qkv(0, three(bits)) {
                Ok(qkv) => assert!([0, 7].contains(&bits) && qkv.order().is_some() == (bits == 7), "{bits:b}"),
                Err(why) => assert!(![0, 7].contains(&bits) && is_refused(why), "{bits:b}"),
            }
            match loader.gated(0, three(bits)) {
                Ok(GatedWeights { gate_up, down, .. }) => {
                    let ordered = [gate_up, down].map(|matrix| matrix.order().is_some());
                    assert!([0, 3].contains(&(bits & 3)), "{bits:b}");
                    assert_eq!(ordered, [bits & 1, bits >> 2].map(|bit| bit == 1), "{bits:b}");
                }
                Err(why) => assert!(![0, 3].contains(&(bits & 3)) && is_refused(why), "{bits:b}"),
            }
        }
        assert!([false, true].map(|order| loader.out(0, matrix(order)).unwrap().order().is_some()) == [false, true]);
        for ordered in 0..4 {
            let experts = vec![[0, 1, 2].map(|index| matrix(index == ordered))];
            assert!(loader.experts(0, matrix(ordered == 3), experts, None).is_err_and(is_refused));
        }
        assert!(loader.table("head", matrix(false)).is_ok());
        assert!(loader.table("head", matrix(true)).is_err_and(is_refused));
    }
    /// Rows of two bytes in a file.
    struct InFile<'a>(&'a [u8]);

    impl<'a> FileRows<'a> for InFile<'a> {
        fn get(&self, rows: Range<usize>) -> Cow<'a, [u8]> {
            self.0[2 * rows.start..2 * rows.end].into()
        }

        fn release(&self, rows: Range<usize>) {
            panic!("rows {rows:?} are still to be read");
        }
    }

    #[test]
    fn a_matrix_stays_in_its_file_until_the_device_takes_it_in() {
        let device = HostMachine::new(Kernels::Record, 7).device(0, 1 << 24);
        let (uploader, file) = (Uploader::new(&device, 1 << 12).unwrap(), vec![0; 8]);
        let loader = CudaLoader { uploader: &uploader, pool: &Pool::new(1).unwrap() };
        let matrix = loader.file(WeightType::BF16, 4, 1, &InFile(&file), None).unwrap();
        let (_, values) = matrix.typed();
        assert_eq!((values.as_ptr(), values.len()), (file.as_ptr(), file.len()));
    }
}
