//! Where kernels are measured, and how: a graph of launches, each over operands that no cache holds any more, replayed.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_engine_model::cuda::{Device, DriverError, Nvidia, devices};
use windlass_kernels::cuda::Stream;

use crate::Outcome;
use crate::model::Model;
use crate::scale::Scale;

/// Memory of the device that stands in for a GPU.
const SHIM_BYTES: usize = 1 << 28;
/// A first start without machine code takes long, and is no part of what is measured.
const IMAGES: &str = "WINDLASS_GPU";

/// This machine's first NVIDIA GPU, or for a dry run the CPU shim.
pub fn device(model: &Model) -> Outcome<Device> {
    if model.is_dry() {
        return Ok(HostMachine::new(Kernels::Run, 7).device(0, SHIM_BYTES));
    }
    nvidia(0)
}

/// The first two, where there are two.
pub fn two_devices(model: &Model) -> Outcome<Option<[Device; 2]>> {
    if model.is_dry() {
        let machine = HostMachine::new(Kernels::Run, 7);
        return Ok(Some([0, 1].map(|index| machine.device(index, SHIM_BYTES))));
    }
    match devices()? {
        0 | 1 => Ok(None),
        _ => Ok(Some([nvidia(0)?, nvidia(1)?])),
    }
}

fn nvidia(index: usize) -> Outcome<Device> {
    let cache = std::env::var_os(IMAGES).map_or_else(std::env::temp_dir, PathBuf::from);
    Ok(Device::new(Arc::new(Nvidia::open(index, &cache)?)))
}

/// A device to measure kernels on.
pub struct Rig {
    pub device: Device,
    pub stream: Stream,
    pub scale: &'static Scale,
}

impl Rig {
    pub fn open(model: &Model) -> Outcome<Rig> {
        Rig::on(device(model)?, model)
    }

    /// On this device.
    pub fn on(device: Device, model: &Model) -> Outcome<Rig> {
        Ok(Rig { stream: device.stream()?, device, scale: Scale::of(model) })
    }

    /// Sets of operands of so many bytes each that are gone from the second-level cache when their turn comes again.
    pub fn sets(&self, bytes: usize) -> usize {
        (self.scale.cold_caches * self.device.facts().l2_bytes).div_ceil(bytes) + 1
    }

    /// Mean seconds of what `issue` launches over the operands of a set, each set in its turn.
    pub fn seconds(
        &self,
        sets: usize,
        mut issue: impl FnMut(&Stream, usize) -> Result<(), DriverError>,
    ) -> Outcome<f64> {
        // What is loaded at first use is loaded now.
        issue(&self.stream, 0)?;
        self.stream.synchronize()?;
        let graph = self.stream.capture(|| (0..sets).try_for_each(|set| issue(&self.stream, set)))?;
        let round = || self.stream.launch_graph(&graph);
        Ok(self.mean_seconds(round)? / sets as f64)
    }

    /// The same of what no graph can hold.
    pub fn seconds_without_graph(
        &self,
        sets: usize,
        mut issue: impl FnMut(&Stream, usize) -> Result<(), DriverError>,
    ) -> Outcome<f64> {
        let round = || (0..sets).try_for_each(|set| issue(&self.stream, set));
        Ok(self.mean_seconds(round)? / sets as f64)
    }

    /// Mean seconds of a round of work; as many rounds as it takes, behind a first one.
    pub fn mean_seconds(&self, mut round: impl FnMut() -> Result<(), DriverError>) -> Outcome<f64> {
        round()?;
        self.stream.synchronize()?;
        let mut rounds = 1;
        loop {
            let started = Instant::now();
            (0..rounds).try_for_each(|_| round())?;
            self.stream.synchronize()?;
            let seconds = started.elapsed().as_secs_f64();
            if seconds >= self.scale.seconds {
                return Ok(seconds / f64::from(rounds));
            }
            rounds *= 2;
        }
    }
}
