//! One launch of a kernel, and its check against the table.

use super::driver::{DeviceFacts, DevicePointer};
use super::memory::{Element, ElementType, View, ViewMut};
use super::table::{Kernel, Parameter};

/// Most parameters that a kernel has.
pub const MAX_PARAMETERS: usize = 24;
/// Every pointer is a multiple of this: kernels read and write 16 bytes at a time.
pub const POINTER_ALIGNMENT: u64 = 16;
/// Most blocks along x, and along y and z (CUDA C++ Programming Guide, table of compute capabilities).
const MAX_GRID: [u32; 3] = [i32::MAX as u32, 65_535, 65_535];

/// Most blocks of a cluster, on whatever chip has clusters (CUDA C++ Programming Guide, thread block clusters).
const MAX_CLUSTER: u32 = 8;

/// A kernel's argument.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Argument {
    /// Memory that the kernel may use: `bytes` from `at` on.
    Memory {
        /// Its first byte.
        at: DevicePointer,
        /// Its bytes.
        bytes: usize,
        /// Of what it consists.
        element: ElementType,
        /// Whether it may be written.
        writable: bool,
    },
    /// A matrix that the kernel copies tiles of.
    Tiles(TensorMap),
    /// A number.
    U32(u32),
    /// A number.
    U64(u64),
    /// A number.
    F32(f32),
}

/// A matrix as Hopper's copies of tiles (TMA) are told of it: row after row, read in boxes of so many rows and of the columns
/// that [`TensorMap::BOX_ROW_BYTES`] hold.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TensorMap {
    /// Its first value.
    pub at: DevicePointer,
    /// Of what it consists.
    pub element: ElementType,
    /// Its rows.
    pub rows: u32,
    /// Its columns.
    pub cols: u32,
    /// Rows of a box.
    pub box_rows: u32,
}

impl TensorMap {
    /// Bytes of a box's row, and of what is swizzled in shared memory: the most that can be.
    pub const BOX_ROW_BYTES: usize = 128;
    /// Rows begin at a multiple of this (CUDA Driver API, cuTensorMapEncodeTiled).
    const ROW_ALIGNMENT: usize = 16;
    /// Most rows of a box (as above).
    const MAX_BOX_ROWS: u32 = 256;

    /// A matrix of rows of `cols` values.
    ///
    /// # Panics
    /// When the values are no whole rows.
    pub fn new<T: Element>(values: View<'_, T>, cols: usize, box_rows: u32) -> TensorMap {
        assert!(values.len().is_multiple_of(cols), "{} values are no rows of {cols}", values.len());
        let [rows, cols] = [values.len() / cols, cols].map(|size| u32::try_from(size).unwrap_or(0));
        TensorMap { at: values.pointer(), element: T::TYPE, rows, cols, box_rows }
    }

    /// Bytes of a row.
    pub fn row_bytes(&self) -> usize {
        self.cols as usize * self.element.bytes()
    }

    /// Bytes of all rows.
    pub fn bytes(&self) -> usize {
        self.rows as usize * self.row_bytes()
    }

    /// Columns of a box.
    pub fn box_cols(&self) -> u32 {
        (TensorMap::BOX_ROW_BYTES / self.element.bytes()) as u32
    }

    /// Whether copies of tiles can read rows of so many bytes.
    pub fn reads_rows_of(bytes: usize) -> bool {
        bytes.is_multiple_of(TensorMap::ROW_ALIGNMENT)
    }

    fn check(&self) -> Result<(), &'static str> {
        match self {
            TensorMap { rows: 0, .. } | TensorMap { cols: 0, .. } => Err("has no values, or more than copies count"),
            _ if !self.at.0.is_multiple_of(POINTER_ALIGNMENT) => Err("is no multiple of 16"),
            _ if !TensorMap::reads_rows_of(self.row_bytes()) => Err("has rows of no multiple of 16 bytes"),
            TensorMap { box_rows: 1..=TensorMap::MAX_BOX_ROWS, .. } => Ok(()),
            _ => Err("has boxes of no rows, or of too many"),
        }
    }
}

impl From<TensorMap> for Argument {
    fn from(map: TensorMap) -> Argument {
        Argument::Tiles(map)
    }
}

impl<T: Element> From<View<'_, T>> for Argument {
    fn from(view: View<'_, T>) -> Argument {
        Argument::Memory { at: view.pointer(), bytes: view.bytes(), element: T::TYPE, writable: false }
    }
}

impl<T: Element> From<ViewMut<'_, T>> for Argument {
    fn from(view: ViewMut<'_, T>) -> Argument {
        Argument::Memory { at: view.pointer(), bytes: view.bytes(), element: T::TYPE, writable: true }
    }
}

impl From<u32> for Argument {
    fn from(value: u32) -> Argument {
        Argument::U32(value)
    }
}

impl From<u64> for Argument {
    fn from(value: u64) -> Argument {
        Argument::U64(value)
    }
}

impl From<f32> for Argument {
    fn from(value: f32) -> Argument {
        Argument::F32(value)
    }
}

impl Argument {
    /// No memory, for a pointer that the kernel may find null.
    pub fn none<T: Element>() -> Argument {
        Argument::Memory { at: DevicePointer(0), bytes: 0, element: T::TYPE, writable: true }
    }

    /// The argument's bits, as the kernel reads them from a slot of eight bytes; of tiles where they are.
    pub fn bits(&self) -> u64 {
        match *self {
            Argument::Memory { at, .. } | Argument::Tiles(TensorMap { at, .. }) => at.0,
            Argument::U32(value) => value.into(),
            Argument::U64(value) => value,
            Argument::F32(value) => value.to_bits().into(),
        }
    }

    fn fits(&self, parameter: &Parameter) -> Result<(), &'static str> {
        match (*self, parameter) {
            (Argument::Memory { element, .. }, Parameter::In(wanted) | Parameter::Out(wanted))
                if element != *wanted =>
            {
                Err("has elements of another type")
            }
            (Argument::Memory { writable: false, .. }, Parameter::Out(_)) => Err("may only be read"),
            (Argument::Memory { at, .. }, Parameter::In(_) | Parameter::Out(_)) => {
                if at.0.is_multiple_of(POINTER_ALIGNMENT) { Ok(()) } else { Err("is no multiple of 16") }
            }
            (Argument::Tiles(map), Parameter::Tiles(element, box_rows)) => match map {
                TensorMap { element: found, .. } if found != *element => Err("has elements of another type"),
                TensorMap { box_rows: found, .. } if found != *box_rows => Err("has boxes of another size"),
                _ => map.check(),
            },
            (Argument::U32(_), Parameter::U32) | (Argument::U64(_), Parameter::U64) => Ok(()),
            (Argument::F32(_), Parameter::F32) => Ok(()),
            _ => Err("is of another kind"),
        }
    }
}

/// A kernel, how many blocks of it, and its arguments. Built on the stack: a launch allocates nothing.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Launch {
    kernel: Kernel,
    grid: [u32; 3],
    cluster: [u32; 3],
    shared_bytes: u32,
    arguments: [Argument; MAX_PARAMETERS],
    count: usize,
}

impl Launch {
    /// A launch of `grid` blocks; those have the table's number of threads.
    pub fn new(kernel: Kernel, grid: [u32; 3]) -> Launch {
        Launch {
            kernel,
            grid,
            cluster: [1; 3],
            shared_bytes: 0,
            arguments: [Argument::U32(0); MAX_PARAMETERS],
            count: 0,
        }
    }

    /// Has so many blocks along x, y and z run at the same time, and reach each other's shared memory.
    pub fn in_clusters(mut self, blocks: [u32; 3]) -> Launch {
        self.cluster = blocks;
        self
    }

    /// Asks for bytes of shared memory for each block.
    pub fn shared(mut self, bytes: u32) -> Launch {
        self.shared_bytes = bytes;
        self
    }

    /// Appends an argument.
    ///
    /// # Panics
    /// When there are more than [`MAX_PARAMETERS`].
    pub fn with(mut self, argument: impl Into<Argument>) -> Launch {
        assert!(self.count < MAX_PARAMETERS, "{:?} has more than {MAX_PARAMETERS} arguments", self.kernel);
        self.arguments[self.count] = argument.into();
        self.count += 1;
        self
    }

    /// The kernel.
    pub fn kernel(&self) -> Kernel {
        self.kernel
    }

    /// Blocks along x, y and z.
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// Blocks of a cluster along x, y and z: one where none was asked for.
    pub fn cluster(&self) -> [u32; 3] {
        self.cluster
    }

    /// Bytes of shared memory for each block.
    pub fn shared_bytes(&self) -> u32 {
        self.shared_bytes
    }

    /// The arguments in the kernel's order.
    pub fn arguments(&self) -> &[Argument] {
        &self.arguments[..self.count]
    }

    /// Compares with what the table says of the kernel and with what the device has.
    pub fn check(&self, facts: &DeviceFacts) -> Result<(), LaunchError> {
        let spec = self.kernel.spec();
        let refuse = |problem: String| Err(LaunchError { kernel: spec.name, problem });
        if self.grid.iter().zip(MAX_GRID).any(|(&blocks, most)| blocks == 0 || blocks > most) {
            return refuse(format!("a grid of {:?} blocks; each must be from 1 to {MAX_GRID:?}", self.grid));
        }
        if let Some(problem) = self.misfit_of_clusters(facts) {
            return refuse(problem);
        }
        if !spec.only_on.is_empty() && !spec.only_on.contains(&facts.capability) {
            let (major, minor) = facts.capability;
            return refuse(format!("it is empty on a device of compute capability {major}.{minor}"));
        }
        let most = spec.shared_bytes.min(facts.shared_bytes_per_block);
        if self.shared_bytes > most {
            return refuse(format!("{} bytes of shared memory; at most {most} are there", self.shared_bytes));
        }
        if self.count != spec.parameters.len() {
            return refuse(format!("{} arguments; it has {} parameters", self.count, spec.parameters.len()));
        }
        let misfit = |(argument, (name, parameter)): (&Argument, &(&str, Parameter))| {
            argument.fits(parameter).err().map(|why| format!("argument {name} {why}: {argument:?} for {parameter:?}"))
        };
        match self.arguments().iter().zip(spec.parameters).find_map(misfit) {
            Some(problem) => refuse(problem),
            None => Ok(()),
        }
    }

    /// Why blocks cannot run in such clusters, if they cannot.
    fn misfit_of_clusters(&self, facts: &DeviceFacts) -> Option<String> {
        let (cluster, grid) = (self.cluster, self.grid);
        let most = self.kernel.spec().cluster.min(MAX_CLUSTER);
        let blocks = cluster.iter().try_fold(1u32, |product, &blocks| product.checked_mul(blocks));
        if !blocks.is_some_and(|blocks| (1..=most).contains(&blocks)) {
            return Some(format!("clusters of {cluster:?} blocks; they may have from 1 to {most}"));
        }
        if grid.iter().zip(cluster).any(|(blocks, own)| !blocks.is_multiple_of(own)) {
            return Some(format!("a grid of {grid:?} blocks; it must be whole clusters of {cluster:?}"));
        }
        (blocks != Some(1) && !facts.has_clusters())
            .then(|| format!("clusters of {cluster:?} blocks on a device of compute capability {:?}", facts.capability))
    }
}

/// A launch that does not fit its kernel: a bug of the op that made it.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("kernel {kernel}: {problem}")]
pub struct LaunchError {
    /// The kernel.
    pub kernel: &'static str,
    /// What does not fit, and what would.
    pub problem: String,
}
