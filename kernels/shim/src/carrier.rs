//! What carries data between devices that do not reach each other, with NCCL's rules: each device comes to a round in its own
//! time, waits there for all others, and goes on when everybody has everything.

use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, Weak};

use windlass_kernels::cuda::driver::{Carrier, DevicePointer, StreamHandle};
use windlass_kernels::cuda::{DeviceFacts, DriverError};

use crate::driver::{HostDriver, lock};
use crate::state::refused;

const CALL: &str = "ncclAllGather";

/// The devices of a machine, by ordinal.
pub(crate) type Devices = Arc<Mutex<BTreeMap<usize, Weak<HostDriver>>>>;

/// A connected group.
#[derive(Debug)]
pub(crate) struct HostCarrier {
    /// In the order of ranks.
    devices: Vec<Weak<HostDriver>>,
    meeting: Arc<Meeting>,
}

impl HostCarrier {
    pub(crate) fn connect(machine: &Devices, ranks: &[&DeviceFacts]) -> Result<HostCarrier, DriverError> {
        let ordinals: Vec<usize> = ranks.iter().map(|facts| facts.ordinal).collect();
        let is_double = |(rank, ordinal)| ordinals[..rank].contains(ordinal);
        if ordinals.iter().enumerate().any(is_double) {
            return Err(refused("ncclCommInitRank", "two ranks have the same device"));
        }
        let machine = lock(machine);
        let device = |ordinal| machine.get(ordinal).cloned();
        let devices: Option<Vec<_>> = ordinals.iter().map(device).collect();
        let devices = devices.ok_or_else(|| refused("ncclCommInitRank", "a device is not of this machine"))?;
        // A round on one waits for the others.
        devices.iter().filter_map(Weak::upgrade).for_each(|device| device.run_by_itself());
        let meeting = Arc::new(Meeting::of(devices.len()));
        Ok(HostCarrier { devices, meeting })
    }
}

impl Carrier for HostCarrier {
    fn name(&self) -> String {
        "the shim's carrier".to_owned()
    }

    fn all_gather(
        &self,
        rank: usize,
        at: DevicePointer,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        let Some(device) = self.devices[rank].upgrade() else { return Err(refused(CALL, "the device is gone")) };
        let captured = device.is_captured(CALL, stream)?;
        self.meeting.check(rank, captured)?;
        let ranks = self.devices.len();
        device.gather(Gather { meeting: Arc::clone(&self.meeting), rank, ranks, at: at.0, bytes, captured }, stream)
    }

    fn abort(&self) {
        self.meeting.end(None);
    }

    fn failure(&self) -> Option<String> {
        lock(&self.meeting.round).broken.clone()
    }
}

/// A rank's part of a round.
#[derive(Clone, Debug)]
pub(crate) struct Gather {
    meeting: Arc<Meeting>,
    rank: usize,
    ranks: usize,
    /// Where all parts come to lie.
    at: u64,
    /// Of each part.
    bytes: usize,
    captured: bool,
}

impl Gather {
    /// The memory that it names.
    pub(crate) fn memory(&self) -> (u64, usize) {
        (self.at, self.ranks * self.bytes)
    }

    pub(crate) fn bytes(&self) -> usize {
        self.bytes
    }

    /// Comes to the round; returns once all have, or once it has ended for them.
    pub(crate) fn run(&self) {
        let mut round = self.meeting.arrive(self);
        if round.over {
            return;
        }
        if let Some(why) = round.contradiction() {
            drop(round);
            return self.meeting.end(Some(why));
        }
        for (other, theirs) in round.arrived.iter().flatten().enumerate().filter(|(other, _)| *other != self.rank) {
            let place = (other * self.bytes) as u64;
            // SAFETY: both were checked when they were issued, and nobody frees memory before its device's work is done,
            // which waits until this is.
            unsafe {
                std::ptr::copy((theirs.at + place) as *const u8, (self.at + place) as *mut u8, self.bytes);
            }
        }
        round.done += 1;
        self.meeting.leave_together(round);
    }
}

/// Where ranks meet, round after round.
#[derive(Debug)]
pub(crate) struct Meeting {
    round: Mutex<Round>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct Round {
    number: u64,
    /// By rank; all of them once the round begins.
    arrived: Vec<Option<Gather>>,
    /// Ranks that have everything.
    done: usize,
    /// By rank, whether it has been in a round.
    connected: Vec<bool>,
    /// Whether no more rounds begin.
    over: bool,
    /// What the ranks did wrong.
    broken: Option<String>,
}

impl Round {
    fn is_full(&self) -> bool {
        self.arrived.iter().all(Option::is_some)
    }

    /// What the ranks of a round that has begun do not agree on.
    fn contradiction(&self) -> Option<String> {
        let parts = || self.arrived.iter().flatten().enumerate();
        let (_, first) = parts().next()?;
        let (rank, other) = parts().find(|(_, part)| (part.bytes, part.captured) != (first.bytes, first.captured))?;
        Some(match other.bytes == first.bytes {
            false => format!("rank {rank} gathers {} bytes where rank 0 gathers {}", other.bytes, first.bytes),
            true => format!("rank {rank} gathers in a graph where rank 0 does not, or the other way round"),
        })
    }
}

impl Meeting {
    fn of(ranks: usize) -> Meeting {
        let round = Round { arrived: vec![None; ranks], connected: vec![false; ranks], ..Round::default() };
        Meeting { round: Mutex::new(round), changed: Condvar::new() }
    }

    /// Refuses what is asked for when it is over, and connecting in a capture.
    fn check(&self, rank: usize, captured: bool) -> Result<(), DriverError> {
        let round = lock(&self.round);
        match (round.over, captured && !round.connected[rank]) {
            (true, _) => Err(refused(CALL, "the group was ended (ncclCommAbort)")),
            (_, true) => Err(refused(CALL, "ranks connect in their first round, which cannot be captured")),
            _ => Ok(()),
        }
    }

    /// Waits until all ranks have come to the round, or it is over.
    fn arrive(&self, gather: &Gather) -> MutexGuard<'_, Round> {
        let mut round = lock(&self.round);
        round.arrived[gather.rank] = Some(gather.clone());
        round.connected[gather.rank] = true;
        self.changed.notify_all();
        self.wait_while(round, |round| !round.is_full() && !round.over)
    }

    /// Waits until all ranks have everything, or it is over. The last one makes way for the next round.
    fn leave_together(&self, mut round: MutexGuard<'_, Round>) {
        let number = round.number;
        if round.done == round.arrived.len() {
            round.arrived.fill(None);
            (round.done, round.number) = (0, number + 1);
            self.changed.notify_all();
        }
        drop(self.wait_while(round, |round| round.number == number && !round.over));
    }

    fn wait_while<'a>(
        &self,
        round: MutexGuard<'a, Round>,
        condition: impl Fn(&Round) -> bool,
    ) -> MutexGuard<'a, Round> {
        let waited = self.changed.wait_while(round, |round| condition(round));
        waited.unwrap_or_else(|poisoned| poisoned.into_inner())
    }

    fn end(&self, broken: Option<String>) {
        let mut round = lock(&self.round);
        round.over = true;
        round.broken = round.broken.take().or(broken);
        self.changed.notify_all();
    }
}
