//! Where the ranks of a group meet: what their devices, and the machine, allow.

use std::panic::resume_unwind;
use std::sync::Arc;
use std::thread;

use crate::cuda::driver::Carrier;
use crate::cuda::{Device, DriverError, Memory, Pinned, Stream};

/// Numbers of a rank in the round that a carrier is tried with.
const TRIED: usize = 16;

/// How the devices of a group come to what the others hold.
#[derive(Clone, Debug)]
pub enum Ground {
    /// It lies on each device, and all reach it there.
    Devices,
    /// Devices do not reach each other, and this brings it to all of them.
    Carried(Arc<dyn Carrier>),
    /// It lies in the host's memory, which all reach: devices do not reach each other, and nothing carries between them, for
    /// this reason.
    Host(String),
}

impl Ground {
    /// Lets each of these devices reach the memory of all others, if the machine can; else connects them, if the machine can.
    pub fn between(devices: &[Device]) -> Result<Ground, DriverError> {
        if reach_each_other(devices)? {
            return Ok(Ground::Devices);
        }
        let connected = connect(devices).map(Ground::Carried);
        Ok(connected.unwrap_or_else(|error| Ground::Host(error.to_string())))
    }

    /// What carries, where that is needed and there.
    pub fn carrier(&self) -> Option<&Arc<dyn Carrier>> {
        match self {
            Ground::Carried(carrier) => Some(carrier),
            Ground::Devices | Ground::Host(_) => None,
        }
    }
}

fn reach_each_other(devices: &[Device]) -> Result<bool, DriverError> {
    let mut all = true;
    for device in devices {
        for peer in devices.iter().filter(|peer| peer.facts().ordinal != device.facts().ordinal) {
            all &= device.driver().reach(peer.facts())?;
        }
    }
    Ok(all)
}

/// What carries between these devices, once it has: ranks connect in the first round, which may not be captured.
fn connect(devices: &[Device]) -> Result<Arc<dyn Carrier>, DriverError> {
    let facts: Vec<_> = devices.iter().map(Device::facts).collect();
    let carrier = devices[0].driver().connect(&facts)?;
    // All of it before anybody waits for another: who allocates may have to wait for what runs.
    let trials = (0..devices.len()).map(|rank| Trial::new(devices, rank)).collect::<Result<Vec<_>, _>>()?;
    thread::scope(|scope| {
        let carrier = &*carrier;
        let threads: Vec<_> = trials.iter().map(|trial| scope.spawn(move || trial.run(carrier))).collect();
        let mut ended = threads.into_iter().map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)));
        ended.try_for_each(|tried| tried)
    })?;
    Ok(carrier)
}

/// A rank's part of the first round.
struct Trial {
    rank: usize,
    ranks: usize,
    stream: Stream,
    memory: Memory<u32>,
    found: Pinned<u32>,
}

impl Trial {
    fn new(devices: &[Device], rank: usize) -> Result<Trial, DriverError> {
        let (device, ranks) = (&devices[rank], devices.len());
        let numbers: Vec<u32> =
            (0..ranks * TRIED).map(|at| if at / TRIED == rank { at as u32 + 1 } else { 0 }).collect();
        let (stream, memory) = (device.stream()?, device.upload(&numbers)?);
        Ok(Trial { rank, ranks, stream, memory, found: device.pinned(ranks * TRIED)? })
    }

    /// A rank that fails ends the round for all.
    fn run(&self, carrier: &dyn Carrier) -> Result<(), DriverError> {
        let tried = self.round(carrier);
        if tried.is_err() {
            carrier.abort();
        }
        tried
    }

    fn round(&self, carrier: &dyn Carrier) -> Result<(), DriverError> {
        let at = self.memory.view().pointer();
        carrier.all_gather(self.rank, at, TRIED * size_of::<u32>(), self.stream.handle())?;
        self.stream.copy_to_host(&self.found, 0, self.memory.view())?;
        self.stream.synchronize()?;
        let found = self.found.read(0..self.ranks * TRIED);
        match found.iter().enumerate().all(|(at, &number)| number == at as u32 + 1) {
            true => Ok(()),
            false => Err(DriverError::refused("a first round", format!("{} carried other numbers", carrier.name()))),
        }
    }
}
