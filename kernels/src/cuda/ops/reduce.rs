//! What the ranks of a tensor-parallel group exchange, one device each: sums of what each computed, and columns side by side.
//!
//! They meet in memory that all of them reach: their own where devices reach each other, else pinned memory of the host. Where
//! devices do not and the machine has a library for that (NCCL), it carries what each holds to all others, and nothing more:
//! its own sums have an order that hangs on the number of values. In every way the ranks' parts are added in the ranks' order,
//! so the bits are the same, in graphs too.

mod carried;
mod ground;
mod reached;
mod sizes;

use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;

use crate::cuda::driver::Carrier;
use crate::cuda::{Device, DriverError, Pinned, Stream, ViewMut};
use carried::Carried;
pub use ground::Ground;
use reached::Reached;
pub use sizes::ExchangeSizes;

/// Most ranks of a group: devices that reach each other in one machine.
pub const MAX_RANKS: usize = 8;

/// Whether all ranks of a group still compute, and why not.
#[derive(Debug)]
pub struct PeerGroup {
    ranks: usize,
    /// Not zero once a rank has left: read by kernels that wait.
    left: Pinned<u32>,
    /// What carries between the ranks, unless they reach what the others hold.
    carrier: Option<Arc<dyn Carrier>>,
    why: Mutex<Option<String>>,
}

impl PeerGroup {
    fn new(devices: &[Device], ground: &Ground) -> Result<PeerGroup, DriverError> {
        let left = devices[0].pinned(1)?;
        left.set(0, 0);
        Ok(PeerGroup { ranks: devices.len(), left, carrier: ground.carrier().cloned(), why: Mutex::default() })
    }

    /// Tells all ranks that `rank` begins no more rounds: theirs end, with results that mean nothing. The first one to leave
    /// is remembered.
    pub fn leave(&self, rank: usize, why: &str) {
        let mut kept = self.why.lock().unwrap_or_else(PoisonError::into_inner);
        kept.get_or_insert_with(|| format!("rank {rank} of {} has left: {why}", self.ranks));
        self.left.set(0, 1);
        if let Some(carrier) = &self.carrier {
            carrier.abort();
        }
    }

    /// Why what is computed means nothing any more, if a rank has left or nothing is carried any more.
    pub fn why_left(&self) -> Option<String> {
        let kept = self.why.lock().unwrap_or_else(PoisonError::into_inner).clone();
        kept.or_else(|| self.carrier.as_ref().and_then(|carrier| carrier.failure()))
    }
}

/// A rank's place in a group.
///
/// All ranks begin the same rounds in the same order, each from a thread of its own where issuing may wait for the device.
/// None may be dropped while another still computes.
#[derive(Debug)]
pub struct PeerRank {
    group: Arc<PeerGroup>,
    means: Means,
}

/// How it comes to what the others hold.
#[derive(Debug)]
enum Means {
    Reached(Box<Reached>),
    Carried(Carried),
}

impl PeerRank {
    /// A group over these devices, between which `sizes.ground` is.
    ///
    /// # Panics
    /// When there are no devices, or more than [`MAX_RANKS`], or not as many widths of columns.
    pub fn group(devices: &[Device], sizes: &ExchangeSizes) -> Result<Vec<PeerRank>, DriverError> {
        let ranks = devices.len();
        assert!((1..=MAX_RANKS).contains(&ranks), "{ranks} ranks; a group has up to {MAX_RANKS}");
        assert_eq!(sizes.columns.len(), ranks, "columns of each rank");
        let group = Arc::new(PeerGroup::new(devices, &sizes.ground)?);
        let means: Vec<Means> = match &sizes.ground {
            Ground::Devices | Ground::Host(_) => {
                let boxed = |reached| Means::Reached(Box::new(reached));
                Reached::group(devices, sizes, &group)?.into_iter().map(boxed).collect()
            }
            Ground::Carried(carrier) => {
                Carried::group(devices, sizes, carrier)?.into_iter().map(Means::Carried).collect()
            }
        };
        Ok(means.into_iter().map(|means| PeerRank { group: Arc::clone(&group), means }).collect())
    }

    /// Whether the others still compute.
    pub fn peers(&self) -> &Arc<PeerGroup> {
        &self.group
    }

    /// Where this rank's part of the next sum goes.
    pub fn part(&mut self, values: usize) -> ViewMut<'_, bf16> {
        match &mut self.means {
            Means::Reached(reached) => reached.part(values),
            Means::Carried(carried) => carried.own(values),
        }
    }

    /// `residual += Σ over the ranks of their parts`, in the ranks' order: on all of them the same bits. The next part may go
    /// into another buffer; where launches are captured, a graph must hold an even number of sums.
    ///
    /// # Panics
    /// When there is no room for so many values, or they are no multiple of 8.
    pub fn add_reduced(&mut self, stream: &Stream, residual: ViewMut<'_, f32>) -> Result<(), DriverError> {
        match &mut self.means {
            Means::Reached(reached) => reached.add_reduced(stream, residual),
            Means::Carried(carried) => carried.add_reduced(stream, residual),
        }
    }

    /// `out = Σ over the ranks of their parts`, rounded; as [`PeerRank::add_reduced`].
    ///
    /// # Panics
    /// As that.
    pub fn reduce(&mut self, stream: &Stream, out: ViewMut<'_, bf16>) -> Result<(), DriverError> {
        match &mut self.means {
            Means::Reached(reached) => reached.reduce(stream, out),
            Means::Carried(carried) => carried.reduce(stream, out),
        }
    }

    /// Where this rank's part of the next sum of floats goes. Between two of them there is at least one other round.
    pub fn floats(&mut self, values: usize) -> ViewMut<'_, f32> {
        match &mut self.means {
            Means::Reached(reached) => reached.floats(values),
            Means::Carried(carried) => carried.own(values),
        }
    }

    /// `out = Σ over the ranks of their floats`, in the ranks' order.
    ///
    /// # Panics
    /// As [`PeerRank::add_reduced`].
    pub fn reduce_floats(&mut self, stream: &Stream, out: ViewMut<'_, f32>) -> Result<(), DriverError> {
        match &mut self.means {
            Means::Reached(reached) => reached.reduce_floats(stream, out),
            Means::Carried(carried) => carried.reduce_floats(stream, out),
        }
    }

    /// Where this rank's columns of so many rows go. Between two uses there is at least one other round.
    pub fn columns(&mut self, rows: usize) -> ViewMut<'_, f32> {
        match &mut self.means {
            Means::Reached(reached) => reached.columns(rows),
            Means::Carried(carried) => carried.columns(rows),
        }
    }

    /// `out = the columns of all ranks side by side`.
    ///
    /// # Panics
    /// When `out` is no whole rows, or there is no room for so many.
    pub fn gather_columns(&mut self, stream: &Stream, out: ViewMut<'_, f32>) -> Result<(), DriverError> {
        match &mut self.means {
            Means::Reached(reached) => reached.gather_columns(stream, out),
            Means::Carried(carried) => carried.gather_columns(stream, out),
        }
    }
}

/// So many values of a sum, as kernels take it.
///
/// # Panics
/// When there is no room for so many, or they are no multiple of 8.
fn checked(count: usize, room: usize) -> u32 {
    assert!(count > 0 && count <= room, "{count} values; there is room for {room}");
    assert!(count.is_multiple_of(8), "{count} values; kernels read 8 at a time");
    super::word(count)
}

/// Rows of so many columns in all that are gathered into `values` values; each rank has room for `room` of its own `width`.
///
/// # Panics
/// When `values` are no whole rows, or there is no room for so many.
fn checked_rows(values: usize, cols: usize, width: usize, room: usize) -> usize {
    let rows = values / cols;
    assert!(rows > 0 && values == rows * cols, "{values} values are no rows of {cols}");
    assert!(rows * width <= room, "{rows} rows; there is no room for so many");
    rows
}

/// The first column of each rank, and the end of the last.
fn first_columns(widths: &[usize]) -> Vec<u32> {
    let ends = widths.iter().scan(0, |end, width| {
        *end += width;
        Some(super::word(*end))
    });
    [0].into_iter().chain(ends).collect()
}
