//! Ranks to each of which a library carries what all of them hold.

use std::sync::Arc;

use half::bf16;

use super::super::word;
use super::{ExchangeSizes, checked, checked_rows, first_columns};
use crate::cuda::driver::Carrier;
use crate::cuda::launch::{Argument, Launch};
use crate::cuda::memory::bytes_of;
use crate::cuda::{Device, DriverError, Element, Kernel, Memory, Stream, View, ViewMut};

/// Values that a block of the kernels adds up.
const BLOCK_VALUES: usize = 8 * 256;

/// A rank. What it holds lies, of whatever type, at its place among what the others hold: nothing is written over while it is
/// carried, as that is in the stream's order.
#[derive(Debug)]
pub(super) struct Carried {
    rank: usize,
    sizes: ExchangeSizes,
    carrier: Arc<dyn Carrier>,
    /// One rank's behind the other's, as far as they are used.
    all: Memory<f32>,
    first_columns: Memory<u32>,
}

impl Carried {
    /// A group over these devices, which `carrier` connects.
    pub fn group(
        devices: &[Device],
        sizes: &ExchangeSizes,
        carrier: &Arc<dyn Carrier>,
    ) -> Result<Vec<Carried>, DriverError> {
        let member = |(rank, device): (usize, &Device)| {
            Ok(Carried {
                rank,
                sizes: sizes.clone(),
                carrier: Arc::clone(carrier),
                all: device.allocate(devices.len() * sizes.carried_floats())?,
                first_columns: device.upload(&first_columns(&sizes.columns))?,
            })
        };
        devices.iter().enumerate().map(member).collect()
    }

    /// This rank's place, where each rank has so many values.
    pub fn own<T: Element>(&mut self, values: usize) -> ViewMut<'_, T> {
        self.all.view_mut().cast().slice(self.rank * values..(self.rank + 1) * values)
    }

    pub fn columns(&mut self, rows: usize) -> ViewMut<'_, f32> {
        let (stride, width) = (self.sizes.carried_columns(rows), self.sizes.columns[self.rank]);
        self.own(stride).slice(0..rows * width)
    }

    pub fn add_reduced(&mut self, stream: &Stream, residual: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let count = residual.len();
        self.sum::<bf16>(Kernel::AddGathered, stream, residual.into(), count)
    }

    pub fn reduce(&mut self, stream: &Stream, out: ViewMut<'_, bf16>) -> Result<(), DriverError> {
        let count = out.len();
        self.sum::<bf16>(Kernel::RoundGathered, stream, out.into(), count)
    }

    pub fn reduce_floats(&mut self, stream: &Stream, out: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let count = out.len();
        self.sum::<f32>(Kernel::FloatsGathered, stream, out.into(), count)
    }

    pub fn gather_columns(&mut self, stream: &Stream, out: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let (cols, width) = (self.sizes.columns.iter().sum(), self.sizes.columns[self.rank]);
        let rows = checked_rows(out.len(), cols, width, self.sizes.rows * width);
        let (stride, blocks) = (self.sizes.carried_columns(rows), out.len().div_ceil(BLOCK_VALUES));
        let launch = Launch::new(Kernel::ColumnsGathered, [word(blocks), 1, 1]);
        let launch = launch.with(self.gather::<f32>(stream, stride)?).with(out).with(self.first_columns.view());
        let launch = launch.with(word(self.ranks())).with(word(rows)).with(word(cols)).with(word(stride));
        // SAFETY: what is carried has room for rows of the widest rank, and `out` for as many of all columns.
        unsafe { stream.launch(&launch) }
    }

    fn ranks(&self) -> usize {
        self.sizes.columns.len()
    }

    /// What all ranks hold, so many values each, once it is carried here.
    fn gather<T: Element>(&self, stream: &Stream, values: usize) -> Result<View<'_, T>, DriverError> {
        let all = self.all.view().cast::<T>().slice(0..self.ranks() * values);
        self.carrier.all_gather(self.rank, all.pointer(), bytes_of::<T>(values), stream.handle())?;
        Ok(all)
    }

    fn sum<T: Element>(&self, kernel: Kernel, stream: &Stream, out: Argument, count: usize) -> Result<(), DriverError> {
        let (values, blocks) = (checked(count, self.sizes.values()), count.div_ceil(BLOCK_VALUES));
        let launch = Launch::new(kernel, [word(blocks), 1, 1]).with(self.gather::<T>(stream, count)?);
        // SAFETY: `out` has as many values as each rank's part.
        unsafe { stream.launch(&launch.with(out).with(word(self.ranks())).with(values)) }
    }
}
