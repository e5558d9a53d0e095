//! What the ranks of a tensor-parallel group exchange, one device each, over memory that all of them reach: sums of what
//! each computed, in one shot or in two, and columns side by side.
//!
//! That memory is their own where devices reach each other, else pinned memory of the host, which all reach: the kernels are
//! the same, and so are the bits and what graphs hold. It was chosen over NCCL, which sums in an order that hangs on the
//! number of values, has to be there on the machine, and carries data by way of the host there, too.

use std::sync::{Arc, Mutex, PoisonError};

use half::bf16;

use super::word;
use crate::cuda::driver::DevicePointer;
use crate::cuda::launch::{Argument, Launch};
use crate::cuda::{Device, DriverError, Element, Kernel, Memory, Pinned, Stream, View, ViewMut};

/// Most ranks of a group: devices that reach each other in one machine.
pub const MAX_RANKS: usize = 8;
/// Blocks of a launch, always as many: each counts its rounds.
const BLOCKS: usize = 36;
/// Buffers that a rank writes by turns.
const TURNS: usize = 2;

/// Where ranks hold what the others read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ground {
    /// Each on its device.
    Devices,
    /// All in the host's memory, where devices do not reach each other.
    Host,
}

impl Ground {
    /// Lets each of these devices reach the memory of all others, if the machine can.
    pub fn between(devices: &[Device]) -> Result<Ground, DriverError> {
        let mut ground = Ground::Devices;
        for device in devices {
            let peers = devices.iter().filter(|peer| peer.facts().ordinal != device.facts().ordinal);
            for peer in peers {
                if !device.driver().reach(peer.facts())? {
                    ground = Ground::Host;
                }
            }
        }
        Ok(ground)
    }
}

/// How much the ranks of a group exchange at once, at most.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExchangeSizes {
    /// Tokens of a step.
    pub tokens: usize,
    /// Values of a token.
    pub hidden: usize,
    /// Rows of columns.
    pub rows: usize,
    /// Columns of each rank.
    pub columns: Vec<usize>,
    /// Values from which on a sum takes two shots: [`ExchangeSizes::two_shots_from`], or another number. The bits are the
    /// same.
    pub two_shots_from: usize,
    /// Where it lies.
    pub ground: Ground,
}

impl ExchangeSizes {
    /// Values from which on a sum over so many ranks is faster in two shots. vLLM goes over at 512 KiB of bf16 with 4 ranks
    /// and at 256 KiB with up to 8 (`csrc/custom_all_reduce.cuh`). Its second shot carries bf16; here it carries f32, for the
    /// bits of one shot, and saves `(ranks - 3) / (ranks - 2)` of that: so it pays at as many values more, and with up to
    /// three ranks never. No GPU has measured it.
    pub fn two_shots_from(ranks: usize) -> usize {
        match ranks {
            0..=3 => usize::MAX,
            4 => (512 << 10) / size_of::<bf16>() * 2,
            _ => (256 << 10) / size_of::<bf16>() * (ranks - 2) / (ranks - 3),
        }
    }

    /// Bytes that they take of a rank's device, but for a few flags.
    pub fn device_bytes(&self, rank: usize) -> u64 {
        match self.ground {
            Ground::Devices => self.bytes(rank),
            Ground::Host => 0,
        }
    }

    fn bytes(&self, rank: usize) -> u64 {
        let values = self.tokens * self.hidden;
        let floats = values + self.share() + self.rows * self.columns[rank];
        (values * TURNS * size_of::<bf16>() + floats * size_of::<f32>()) as u64
    }

    /// Values of a rank's share of the largest sum in two shots.
    fn share(&self) -> usize {
        match self.tokens * self.hidden {
            values if values < self.two_shots_from => 0,
            values => 8 * (values / 8).div_ceil(self.columns.len()),
        }
    }
}

/// Whether all ranks of a group still compute, and why not.
#[derive(Debug)]
pub struct PeerGroup {
    ranks: usize,
    /// Not zero once a rank has left: read by kernels that wait.
    left: Pinned<u32>,
    why: Mutex<Option<String>>,
}

impl PeerGroup {
    /// Tells all ranks that `rank` begins no more rounds: theirs end, with results that mean nothing. The first one to leave
    /// is remembered.
    pub fn leave(&self, rank: usize, why: &str) {
        let mut kept = self.why.lock().unwrap_or_else(PoisonError::into_inner);
        kept.get_or_insert_with(|| format!("rank {rank} of {} has left: {why}", self.ranks));
        self.left.set(0, 1);
    }

    /// Why what is computed means nothing any more, if a rank has left.
    pub fn why_left(&self) -> Option<String> {
        self.why.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Memory that all ranks reach.
#[derive(Debug)]
enum Shared<T: Element> {
    Device(Memory<T>),
    Host(Pinned<T>),
}

impl<T: Element> Shared<T> {
    fn new(device: &Device, ground: Ground, values: usize) -> Result<Shared<T>, DriverError> {
        match ground {
            Ground::Devices => device.allocate(values).map(Shared::Device),
            Ground::Host => device.pinned(values).map(Shared::Host),
        }
    }

    fn view(&self) -> View<'_, T> {
        match self {
            Shared::Device(memory) => memory.view(),
            Shared::Host(memory) => memory.on_device(),
        }
    }

    fn view_mut(&mut self) -> ViewMut<'_, T> {
        match self {
            Shared::Device(memory) => memory.view_mut(),
            Shared::Host(memory) => memory.on_device_mut(),
        }
    }
}

/// What a rank holds for the others to read, and where all ranks' lies.
#[derive(Debug)]
struct Exchanged<T: Element> {
    own: Shared<T>,
    addresses: Memory<DevicePointer>,
}

impl<T: Element> Exchanged<T> {
    /// For every rank, with room for so many values.
    fn group(
        devices: &[Device],
        ground: Ground,
        values: impl Fn(usize) -> usize,
    ) -> Result<Vec<Exchanged<T>>, DriverError> {
        let allocate = |(rank, device): (usize, &Device)| Shared::<T>::new(device, ground, values(rank));
        let own = devices.iter().enumerate().map(allocate).collect::<Result<Vec<_>, _>>()?;
        let addresses: Vec<DevicePointer> = own.iter().map(|own| own.view().pointer()).collect();
        let member = |(own, device): (Shared<T>, &Device)| Ok(Exchanged { own, addresses: device.upload(&addresses)? });
        own.into_iter().zip(devices).map(member).collect()
    }
}

/// A rank's place in a group.
///
/// All ranks begin the same rounds in the same order, each from a thread of its own where issuing may wait for the device.
/// None may be dropped while another still computes.
#[derive(Debug)]
pub struct PeerRank {
    rank: usize,
    group: Arc<PeerGroup>,
    /// What is to be added up, by turns.
    parts: [Exchanged<bf16>; TURNS],
    turn: usize,
    /// The rank's share of a sum in two shots.
    shares: Exchanged<f32>,
    two_shots_from: usize,
    floats: Exchanged<f32>,
    columns: Exchanged<f32>,
    /// The first column of each rank, and the end of the last.
    first_columns: Memory<u32>,
    widths: Vec<usize>,
    /// The round that each rank has begun; written by them.
    flags: Exchanged<u32>,
    /// Rounds of this rank's blocks.
    rounds: Memory<u32>,
}

impl PeerRank {
    /// A group over these devices, which reach where the ranks meet.
    ///
    /// # Panics
    /// When there are no devices, or more than [`MAX_RANKS`], or not as many widths of columns.
    pub fn group(devices: &[Device], sizes: &ExchangeSizes) -> Result<Vec<PeerRank>, DriverError> {
        let (ranks, values) = (devices.len(), sizes.tokens * sizes.hidden);
        assert!((1..=MAX_RANKS).contains(&ranks), "{ranks} ranks; a group has up to {MAX_RANKS}");
        assert_eq!(sizes.columns.len(), ranks, "columns of each rank");
        let left = devices[0].pinned(1)?;
        left.set(0, 0);
        let group = Arc::new(PeerGroup { ranks, left, why: Mutex::default() });
        let ground = sizes.ground;
        let [even, odd] = [(); TURNS].map(|()| Exchanged::group(devices, ground, |_| values));
        let (shares, floats) =
            (Exchanged::group(devices, ground, |_| sizes.share())?, Exchanged::group(devices, ground, |_| values)?);
        let columns = Exchanged::group(devices, ground, |rank| sizes.rows * sizes.columns[rank])?;
        let flags = Exchanged::<u32>::group(devices, ground, |_| MAX_RANKS)?;
        let ends = sizes.columns.iter().scan(0, |end, width| {
            *end += width;
            Some(word(*end))
        });
        let first_columns: Vec<u32> = [0].into_iter().chain(ends).collect();
        let mut buffers = even?.into_iter().zip(odd?).zip(shares).zip(floats).zip(columns).zip(flags);
        let member = |(rank, device): (usize, &Device)| -> Result<PeerRank, DriverError> {
            let Some((((((even, odd), shares), floats), columns), mut flags)) = buffers.next() else {
                unreachable!("every rank has buffers")
            };
            let stream = device.stream()?;
            stream.fill(flags.own.view_mut(), 0)?;
            stream.synchronize()?;
            Ok(PeerRank {
                rank,
                group: Arc::clone(&group),
                parts: [even, odd],
                turn: 0,
                shares,
                two_shots_from: sizes.two_shots_from,
                floats,
                columns,
                first_columns: device.upload(&first_columns)?,
                widths: sizes.columns.clone(),
                flags,
                rounds: device.upload(&[0; BLOCKS])?,
            })
        };
        devices.iter().enumerate().map(member).collect()
    }

    /// Whether the others still compute.
    pub fn peers(&self) -> &Arc<PeerGroup> {
        &self.group
    }

    /// Where this rank's part of the next sum goes.
    pub fn part(&mut self, values: usize) -> ViewMut<'_, bf16> {
        self.parts[self.turn].own.view_mut().slice(0..values)
    }

    /// `residual += Σ over the ranks of their parts`, in the ranks' order: on all of them the same bits. The next part goes
    /// into another buffer; where launches are captured, a graph must hold an even number of sums.
    ///
    /// # Panics
    /// When there is no room for so many values, or they are no multiple of 8.
    pub fn add_reduced(&mut self, stream: &Stream, residual: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let count = self.checked(residual.len());
        self.sum([Kernel::AddReduced, Kernel::AddShares], stream, residual.into(), count)
    }

    /// `out = Σ over the ranks of their parts`, rounded; as [`PeerRank::add_reduced`].
    ///
    /// # Panics
    /// As that.
    pub fn reduce(&mut self, stream: &Stream, out: ViewMut<'_, bf16>) -> Result<(), DriverError> {
        let count = self.checked(out.len());
        self.sum([Kernel::Reduced, Kernel::RoundShares], stream, out.into(), count)
    }

    /// Where this rank's part of the next sum of floats goes. Between two of them there is at least one other round.
    pub fn floats(&mut self, values: usize) -> ViewMut<'_, f32> {
        self.floats.own.view_mut().slice(0..values)
    }

    /// `out = Σ over the ranks of their floats`, in the ranks' order.
    ///
    /// # Panics
    /// As [`PeerRank::add_reduced`].
    pub fn reduce_floats(&mut self, stream: &Stream, out: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let count = self.checked(out.len());
        let launch = launch(Kernel::ReducedFloats, &self.floats, &self.flags, &self.group, &mut self.rounds);
        let launch = launch.with(out).with(word(self.rank)).with(word(self.group.ranks)).with(count);
        // SAFETY: as in `sum`.
        unsafe { stream.launch(&launch) }
    }

    /// Where this rank's columns of so many rows go. Between two uses there is at least one other round.
    pub fn columns(&mut self, rows: usize) -> ViewMut<'_, f32> {
        self.columns.own.view_mut().slice(0..rows * self.widths[self.rank])
    }

    /// `out = the columns of all ranks side by side`.
    ///
    /// # Panics
    /// When `out` is no whole rows, or there is no room for so many.
    pub fn gather_columns(&mut self, stream: &Stream, out: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let cols = self.widths.iter().sum::<usize>();
        let rows = out.len() / cols;
        assert!(rows > 0 && out.len() == rows * cols, "{} values are no rows of {cols}", out.len());
        assert!(
            rows * self.widths[self.rank] <= self.columns.own.view().len(),
            "{rows} rows; there is no room for so many"
        );
        let launch = launch(Kernel::GatherColumns, &self.columns, &self.flags, &self.group, &mut self.rounds);
        let launch = launch.with(out).with(self.first_columns.view()).with(word(self.rank));
        let launch = launch.with(word(self.group.ranks)).with(word(rows)).with(word(cols));
        // SAFETY: as in `sum`; ranks hold as many rows, of their own width each.
        unsafe { stream.launch(&launch) }
    }

    fn checked(&self, count: usize) -> u32 {
        let room = self.floats.own.view().len();
        assert!(count > 0 && count <= room, "{count} values; there is room for {room}");
        assert!(count.is_multiple_of(8), "{count} values; kernels read 8 at a time");
        word(count)
    }

    /// By the first kernel in one shot, or by the other one as the second of two.
    fn sum(&mut self, kernels: [Kernel; 2], stream: &Stream, out: Argument, count: u32) -> Result<(), DriverError> {
        let PeerRank { rank, group, parts, turn, shares, flags, rounds, .. } = self;
        let (rank, ranks, parts) = (word(*rank), word(group.ranks), &parts[*turn]);
        *turn = (*turn + 1) % TURNS;
        let launch = if (count as usize) < self.two_shots_from {
            launch(kernels[0], parts, flags, group, rounds)
        } else {
            let first = launch(Kernel::ReducedShare, parts, flags, group, rounds).with(shares.own.view_mut());
            // SAFETY: as below, and there is room for the rank's share.
            unsafe { stream.launch(&first.with(rank).with(ranks).with(count)) }?;
            launch(kernels[1], shares, flags, group, rounds)
        };
        let launch = launch.with(out).with(rank).with(ranks).with(count);
        // SAFETY: the group's memory is reached by all its devices and outlives their work by the caller's promise; each rank
        // writes its own flags at the others, and its own result.
        unsafe { stream.launch(&launch) }
    }
}

/// A launch with what every round needs.
fn launch<T: Element>(
    kernel: Kernel,
    parts: &Exchanged<T>,
    flags: &Exchanged<u32>,
    group: &PeerGroup,
    rounds: &mut Memory<u32>,
) -> Launch {
    let launch = Launch::new(kernel, [word(BLOCKS), 1, 1]).with(parts.addresses.view());
    launch.with(flags.addresses.view()).with(group.left.on_device()).with(rounds.view_mut())
}
