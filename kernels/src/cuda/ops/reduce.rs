//! The sum over the ranks of a tensor-parallel group, one device each, over memory that all of them reach.

use half::bf16;

use super::word;
use crate::cuda::launch::Launch;
use crate::cuda::{Device, DriverError, Kernel, Memory, Stream, ViewMut};

/// Most ranks of a group: devices that reach each other in one machine.
pub const MAX_RANKS: usize = 8;
/// Blocks of a launch, always as many: each counts its rounds.
const BLOCKS: usize = 36;
/// Buffers that a rank writes by turns.
const TURNS: usize = 2;

/// A rank's place in a group: what it holds, and where all ranks' lies.
///
/// All ranks compute the same sums in the same order, each from a thread of its own where issuing may wait for the device.
/// None may be dropped while another still computes.
#[derive(Debug)]
pub struct PeerRank {
    rank: usize,
    ranks: usize,
    /// What this rank holds, by turns.
    parts: [Memory<bf16>; TURNS],
    /// Where all ranks' are.
    part_addresses: [Memory<u64>; TURNS],
    /// The round that each rank has begun; written by them.
    _flags: Memory<u32>,
    flag_addresses: Memory<u64>,
    /// Rounds of this rank's blocks.
    rounds: Memory<u32>,
    turn: usize,
}

impl PeerRank {
    /// A group over these devices, for sums of up to `values` values.
    ///
    /// # Panics
    /// When there are no devices, or more than [`MAX_RANKS`].
    pub fn group(devices: &[Device], values: usize) -> Result<Vec<PeerRank>, DriverError> {
        let ranks = devices.len();
        assert!((1..=MAX_RANKS).contains(&ranks), "{ranks} ranks; a group has up to {MAX_RANKS}");
        for device in devices {
            let mut peers = devices.iter().filter(|peer| peer.facts().ordinal != device.facts().ordinal);
            peers.try_for_each(|peer| device.driver().reach(peer.facts()))?;
        }
        let room = |device: &Device| -> Result<_, DriverError> {
            Ok(([device.allocate::<bf16>(values)?, device.allocate(values)?], zeroed(device, MAX_RANKS)?))
        };
        let rooms = devices.iter().map(room).collect::<Result<Vec<_>, _>>()?;
        let parts = |turn: usize| rooms.iter().map(|(parts, _)| parts[turn].view().pointer().0).collect::<Vec<u64>>();
        let (even, odd) = (parts(0), parts(1));
        let flags: Vec<u64> = rooms.iter().map(|(_, flags)| flags.view().pointer().0).collect();
        let member = |((rank, device), (parts, own_flags)): ((usize, &Device), _)| -> Result<PeerRank, DriverError> {
            Ok(PeerRank {
                rank,
                ranks,
                parts,
                part_addresses: [device.upload(&even)?, device.upload(&odd)?],
                _flags: own_flags,
                flag_addresses: device.upload(&flags)?,
                rounds: zeroed(device, BLOCKS)?,
                turn: 0,
            })
        };
        devices.iter().enumerate().zip(rooms).map(member).collect()
    }

    /// Where this rank's part of the next sum goes.
    pub fn part(&mut self, values: usize) -> ViewMut<'_, bf16> {
        self.parts[self.turn].slice_mut(0..values)
    }

    /// `residual += Σ over the ranks of their parts`, in the ranks' order: on all of them the same bits. The next part goes
    /// into another buffer; where launches are captured, a graph must hold an even number of sums.
    ///
    /// # Panics
    /// When there is no room for so many values, or they are no multiple of 8.
    pub fn add_reduced(&mut self, stream: &Stream, residual: ViewMut<'_, f32>) -> Result<(), DriverError> {
        let count = residual.len();
        assert!(count > 0 && count <= self.parts[0].len(), "{count} values; there is room for {}", self.parts[0].len());
        assert!(count.is_multiple_of(8), "{count} values; kernels read 8 at a time");
        let launch = Launch::new(Kernel::AddReduced, [word(BLOCKS), 1, 1]);
        let launch = launch.with(self.part_addresses[self.turn].view()).with(self.flag_addresses.view());
        let launch = launch.with(self.rounds.view_mut()).with(residual);
        let launch = launch.with(word(self.rank)).with(word(self.ranks)).with(word(count));
        self.turn = (self.turn + 1) % TURNS;
        // SAFETY: the group's memory is reached by all its devices and outlives their work by the caller's promise; each rank
        // writes its own flags at the others, and its own residual.
        unsafe { stream.launch(&launch) }
    }
}

fn zeroed(device: &Device, len: usize) -> Result<Memory<u32>, DriverError> {
    device.upload(&vec![0; len])
}
