//! The GPUs that the engine computes on: gauges of each, and all together for `/stats`. Nothing appears of what their
//! library does not tell.

use super::busy::BusyWindow;
use super::metrics::Registrar;
use prometheus::{GaugeVec, IntCounterVec};
use std::sync::{Mutex, MutexGuard, PoisonError};
use windlass_engine_contract::metrics as names;
use windlass_engine_contract::stats::GpuStats;

/// What a GPU's management library says of it at one moment; absent where it does not know.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct GpuReading {
    /// Share of the time since shortly before in which kernels ran, 0 to 1.
    pub utilization: Option<f64>,
    /// Bytes of its memory that are taken, and all there are.
    pub memory_bytes: Option<[u64; 2]>,
    /// What it draws, watts.
    pub power_watts: Option<f64>,
    /// Degrees Celsius.
    pub temperature_celsius: Option<f64>,
}

/// All GPUs, written by one thread.
pub(super) struct Gpus {
    utilization: GaugeVec,
    memory_used: GaugeVec,
    memory_total: GaugeVec,
    power: GaugeVec,
    temperature: GaugeVec,
    xid_errors: IntCounterVec,
    /// By number.
    each: Mutex<Vec<Gpu>>,
}

#[derive(Default)]
struct Gpu {
    last: GpuReading,
    busy: BusyWindow,
    tells_utilization: bool,
    errors: u64,
}

impl Gpus {
    pub fn new(add: &Registrar<'_>) -> prometheus::Result<Gpus> {
        let gauge = |name, help| add.gauges(name, help, &["gpu"]);
        let errors = add.options(names::GPU_XID_ERRORS, "Critical errors of a GPU, by NVIDIA's number");
        Ok(Gpus {
            utilization: gauge(names::GPU_UTILIZATION, "Share of the last second in which a GPU computed")?,
            memory_used: gauge(names::GPU_MEMORY_USED, "Bytes of a GPU's memory that are taken")?,
            memory_total: gauge(names::GPU_MEMORY_TOTAL, "Bytes of a GPU's memory")?,
            power: gauge(names::GPU_POWER, "What a GPU draws")?,
            temperature: gauge(names::GPU_TEMPERATURE, "How hot a GPU is")?,
            xid_errors: add.add(IntCounterVec::new(errors, &["gpu", "xid"]))?,
            each: Mutex::default(),
        })
    }

    /// `elapsed` seconds have passed since the reading before.
    pub fn record(&self, gpu: usize, reading: &GpuReading, elapsed: f64, now: f64) {
        let label = gpu.to_string();
        let [used, total] = reading.memory_bytes.map_or([None; 2], |bytes| bytes.map(|bytes| Some(bytes as f64)));
        for (gauge, value) in [
            (&self.utilization, reading.utilization),
            (&self.memory_used, used),
            (&self.memory_total, total),
            (&self.power, reading.power_watts),
            (&self.temperature, reading.temperature_celsius),
        ] {
            if let Some(value) = value {
                gauge.with_label_values(&[&label]).set(value);
            }
        }
        let mut each = self.each(gpu);
        each[gpu].last = *reading;
        if let Some(utilization) = reading.utilization {
            each[gpu].tells_utilization = true;
            each[gpu].busy.end(now - utilization * elapsed, now);
        }
    }

    pub fn failed(&self, gpu: usize, xid: u64) {
        self.xid_errors.with_label_values(&[&gpu.to_string(), &xid.to_string()]).inc();
        self.each(gpu)[gpu].errors += 1;
    }

    /// Mean of the last minute and of all GPUs, 0 to 1, if they tell.
    pub fn utilization(&self, now: f64) -> Option<f64> {
        let each = self.lock();
        let shares = each.iter().filter(|gpu| gpu.tells_utilization).filter_map(|gpu| gpu.busy.share(now));
        let shares: Vec<f64> = shares.collect();
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
    }

    pub fn stats(&self) -> Option<GpuStats> {
        let each = self.lock();
        let last = || each.iter().map(|gpu| gpu.last);
        (!each.is_empty()).then(|| GpuStats {
            count: each.len() as u32,
            memory_used_bytes: last().filter_map(|gpu| gpu.memory_bytes).map(|[used, _]| used).sum(),
            power_watts: last().filter_map(|gpu| gpu.power_watts).sum(),
            temperature_celsius: last().filter_map(|gpu| gpu.temperature_celsius).fold(0.0, f64::max),
            xid_errors: each.iter().map(|gpu| gpu.errors).sum(),
        })
    }

    /// All, of which there is at least the one with this number.
    fn each(&self, gpu: usize) -> MutexGuard<'_, Vec<Gpu>> {
        let mut each = self.lock();
        if each.len() <= gpu {
            each.resize_with(gpu + 1, Gpu::default);
        }
        each
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Gpu>> {
        self.each.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
