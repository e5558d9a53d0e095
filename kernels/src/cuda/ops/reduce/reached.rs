//! Ranks that meet in memory which all of them reach.

use std::sync::Arc;

use half::bf16;

use super::super::word;
use super::{ExchangeSizes, Ground, MAX_RANKS, PeerGroup, checked, checked_rows, first_columns};
use crate::cuda::driver::DevicePointer;
use crate::cuda::launch::{Argument, Launch};
use crate::cuda::{Device, DriverError, Element, Kernel, Memory, Pinned, Stream, View, ViewMut};

/// Blocks of a launch, always as many: each counts its rounds.
const BLOCKS: usize = 36;
/// Buffers that a rank writes by turns.
pub(super) const TURNS: usize = 2;

/// Memory that all ranks reach.
#[derive(Debug)]
enum Shared<T: Element> {
    Device(Memory<T>),
    Host(Pinned<T>),
}

impl<T: Element> Shared<T> {
    fn new(device: &Device, ground: &Ground, values: usize) -> Result<Shared<T>, DriverError> {
        match ground {
            Ground::Devices => device.allocate(values).map(Shared::Device),
            Ground::Carried(_) | Ground::Host(_) => device.pinned(values).map(Shared::Host),
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
        ground: &Ground,
        values: impl Fn(usize) -> usize,
    ) -> Result<Vec<Exchanged<T>>, DriverError> {
        let allocate = |(rank, device): (usize, &Device)| Shared::<T>::new(device, ground, values(rank));
        let own = devices.iter().enumerate().map(allocate).collect::<Result<Vec<_>, _>>()?;
        let addresses: Vec<DevicePointer> = own.iter().map(|own| own.view().pointer()).collect();
        let member = |(own, device): (Shared<T>, &Device)| Ok(Exchanged { own, addresses: device.upload(&addresses)? });
        own.into_iter().zip(devices).map(member).collect()
    }
}

/// A rank.
#[derive(Debug)]
pub(super) struct Reached {
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

impl Reached {
    /// A group over these devices.
    pub fn group(
        devices: &[Device],
        sizes: &ExchangeSizes,
        group: &Arc<PeerGroup>,
    ) -> Result<Vec<Reached>, DriverError> {
        let values = sizes.values();
        let ground = &sizes.ground;
        let [even, odd] = [(); TURNS].map(|()| Exchanged::group(devices, ground, |_| values));
        let (shares, floats) =
            (Exchanged::group(devices, ground, |_| sizes.share())?, Exchanged::group(devices, ground, |_| values)?);
        let columns = Exchanged::group(devices, ground, |rank| sizes.rows * sizes.columns[rank])?;
        let flags = Exchanged::<u32>::group(devices, ground, |_| MAX_RANKS)?;
        let first_columns = first_columns(&sizes.columns);
        let mut buffers = even?.into_iter().zip(odd?).zip(shares).zip(floats).zip(columns).zip(flags);
        let member = |(rank, device): (usize, &Device)| -> Result<Reached, DriverError> {
            let Some((((((even, odd), shares), floats), columns), mut flags)) = buffers.next() else {
                unreachable!("every rank has buffers")
            };
            let stream = device.stream()?;
            stream.fill(flags.own.view_mut(), 0)?;
            stream.synchronize()?;
            Ok(Reached {
                rank,
                group: Arc::clone(group),
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

    pub fn part(&mut self, values: usize) -> ViewMut<'_, bf16> {
        self.parts[self.turn].own.view_mut().slice(0..values)
    }

    pub fn add_reduced(&mut self, stream: &Stream, residual: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let count = self.checked(residual.len());
        self.sum([Kernel::AddReduced, Kernel::AddShares], stream, residual.into(), count)
    }

    pub fn reduce(&mut self, stream: &Stream, out: ViewMut<'_, bf16>) -> Result<(), DriverError> {
        let count = self.checked(out.len());
        self.sum([Kernel::Reduced, Kernel::RoundShares], stream, out.into(), count)
    }

    pub fn floats(&mut self, values: usize) -> ViewMut<'_, f32> {
        self.floats.own.view_mut().slice(0..values)
    }

    pub fn reduce_floats(&mut self, stream: &Stream, out: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let count = self.checked(out.len());
        let launch = launch(Kernel::ReducedFloats, &self.floats, &self.flags, &self.group, &mut self.rounds);
        let launch = launch.with(out).with(word(self.rank)).with(word(self.group.ranks)).with(count);
        // SAFETY: as in `sum`.
        unsafe { stream.launch(&launch) }
    }

    pub fn columns(&mut self, rows: usize) -> ViewMut<'_, f32> {
        self.columns.own.view_mut().slice(0..rows * self.widths[self.rank])
    }

    pub fn gather_columns(&mut self, stream: &Stream, out: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let cols = self.widths.iter().sum::<usize>();
        let rows = checked_rows(out.len(), cols, self.widths[self.rank], self.columns.own.view().len());
        let launch = launch(Kernel::GatherColumns, &self.columns, &self.flags, &self.group, &mut self.rounds);
        let launch = launch.with(out).with(self.first_columns.view()).with(word(self.rank));
        let launch = launch.with(word(self.group.ranks)).with(word(rows)).with(word(cols));
        // SAFETY: as in `sum`; ranks hold as many rows, of their own width each.
        unsafe { stream.launch(&launch) }
    }

    fn checked(&self, count: usize) -> u32 {
        checked(count, self.floats.own.view().len())
    }

    /// By the first kernel in one shot, or by the other one as the second of two.
    fn sum(&mut self, kernels: [Kernel; 2], stream: &Stream, out: Argument, count: u32) -> Result<(), DriverError> {
        let Reached { rank, group, parts, turn, shares, flags, rounds, .. } = self;
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
