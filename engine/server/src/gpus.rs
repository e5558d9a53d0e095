//! What NVIDIA's management library (NVML) tells of the GPUs that the engine computes on. The library is looked up at run
//! time; where it is not there, that is said once.

mod xid;

use crate::monitor::{GpuReading, Monitor};
use nvml_wrapper::bitmasks::event::EventTypes;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;
use nvml_wrapper::enums::event::XidError;
use nvml_wrapper::error::NvmlError;
use nvml_wrapper::{Device, EventSet, Nvml};
use std::ffi::OsStr;
use std::io;
use std::sync::{Arc, Weak};
use std::thread;
use std::time::{Duration, Instant};
use tracing::{error, info};

/// The library as drivers and containers have it; the name without a version is the development package's.
const LIBRARY: &str = "libnvidia-ml.so.1";
/// Between two readings: the library itself renews its figures about as often.
const EVERY: Duration = Duration::from_secs(1);

/// Why nothing is known of the GPUs.
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// The library, or a device that it does not know.
    #[error("{0}")]
    Library(#[from] NvmlError),
    /// The system gave no thread.
    #[error("no thread: {0}")]
    Thread(#[from] io::Error),
}

/// Reads the GPUs at these places in the machine every second, on a thread of its own, as long as the monitor is there.
/// Where that cannot be, it is said once.
pub fn watch(pci_bus_ids: Vec<String>, monitor: &Arc<Monitor>) {
    if let Err(error) = watch_with(LIBRARY.as_ref(), pci_bus_ids, EVERY, monitor) {
        info!("no utilization, power and temperature of the GPUs: {error}");
    }
}

fn watch_with(
    library: &OsStr,
    pci_bus_ids: Vec<String>,
    every: Duration,
    monitor: &Arc<Monitor>,
) -> Result<(), WatchError> {
    let nvml = Nvml::builder().lib_path(library).init()?;
    devices(&nvml, &pci_bus_ids)?;
    let monitor = Arc::downgrade(monitor);
    thread::Builder::new().name("gpus".into()).spawn(move || {
        if let Err(error) = follow(&nvml, &pci_bus_ids, every, &monitor) {
            info!("no more figures of the GPUs: {error}");
        }
    })?;
    Ok(())
}

fn follow(nvml: &Nvml, pci_bus_ids: &[String], every: Duration, monitor: &Weak<Monitor>) -> Result<(), WatchError> {
    let devices = devices(nvml, pci_bus_ids)?;
    let errors = critical_errors(nvml, &devices).ok();
    let mut last = Instant::now();
    while let Some(present) = monitor.upgrade() {
        let elapsed = last.elapsed().as_secs_f64();
        last = Instant::now();
        for (gpu, device) in devices.iter().enumerate() {
            present.gpu(gpu, &read(device), elapsed);
        }
        // It may go while this waits.
        drop(present);
        if let Some((device, xid)) = next_error(errors.as_ref(), every) {
            report(&devices, &device, xid, monitor);
        }
    }
    Ok(())
}

fn devices<'a>(nvml: &'a Nvml, pci_bus_ids: &[String]) -> Result<Vec<Device<'a>>, NvmlError> {
    pci_bus_ids.iter().map(|place| nvml.device_by_pci_bus_id(place.as_str())).collect()
}

/// What a device tells; a part of one (MIG), or a virtual one, tells less.
fn read(device: &Device<'_>) -> GpuReading {
    GpuReading {
        utilization: device.utilization_rates().ok().map(|rates| f64::from(rates.gpu) / 100.0),
        memory_bytes: device.memory_info().ok().map(|memory| [memory.used, memory.total]),
        power_watts: device.power_usage().ok().map(|milliwatts| f64::from(milliwatts) / 1000.0),
        temperature_celsius: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
    }
}

/// Critical errors of all devices from now on, where they report them.
fn critical_errors<'a>(nvml: &'a Nvml, devices: &[Device<'a>]) -> Result<EventSet<'a>, NvmlError> {
    let register = |set, device: &Device<'a>| device.register_events(EventTypes::CRITICAL_XID_ERROR, set);
    devices.iter().try_fold(nvml.create_event_set()?, register).map_err(|refused| refused.error)
}

/// The next critical error within so long: of which device, and its number.
fn next_error<'a>(errors: Option<&EventSet<'a>>, within: Duration) -> Option<(Device<'a>, u64)> {
    match errors.map(|errors| errors.wait(within.as_millis() as u32)) {
        Some(Ok(event)) => match event.event_data? {
            XidError::Value(xid) => Some((event.device, xid)),
            XidError::Unknown => Some((event.device, 0)),
        },
        Some(Err(NvmlError::Timeout)) => None,
        Some(Err(_)) | None => {
            thread::sleep(within);
            None
        }
    }
}

fn report(devices: &[Device<'_>], device: &Device<'_>, xid: u64, monitor: &Weak<Monitor>) {
    let place = |device: &Device<'_>| device.pci_info().map(|place| place.bus_id).ok();
    let Some(gpu) = devices.iter().position(|known| place(known) == place(device)) else { return };
    error!(gpu, xid, "the GPU reports a critical error (XID)");
    let Some(monitor) = monitor.upgrade() else { return };
    monitor.gpu_error(gpu, xid);
    if let Some(meaning) = xid::fatal(xid) {
        let place = place(device).unwrap_or_default();
        monitor.gpu_lost(format!("GPU {gpu} ({place}) reports a critical error: XID {xid}, {meaning}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::clock::Clock;
    use std::path::{Path, PathBuf};
    use std::process::Command;
    use windlass_engine_contract::stats::Phase;

    /// Shorter than a second, so that a test waits less.
    const EVERY: Duration = Duration::from_millis(20);

    /// The library's calls, as its header declares them, for two devices: the second one reports an error once and tells no
    /// utilization.
    const LIBRARY: &str = r#"
        #include <string.h>
        #include <unistd.h>
        typedef struct { unsigned gpu, memory; } Utilization;
        typedef struct { unsigned version; unsigned long long total, reserved, free, used; } Memory;
        typedef struct { char legacy[16]; unsigned domain, bus, device, id, subsystem; char place[32]; } Pci;
        typedef struct { int *device; unsigned long long type, data; unsigned gpu, compute; } Event;
        static int gpus[2] = {0, 1};
        static int reported;
        int nvmlInit_v2() { return 0; }
        int nvmlShutdown() { return 0; }
        int nvmlDeviceGetHandleByPciBusId_v2(const char *place, int **device) {
            if (strcmp(place, "0000:0A:00.0") == 0) return *device = &gpus[0], 0;
            if (strcmp(place, "0000:0B:00.0") == 0) return *device = &gpus[1], 0;
            return 6;
        }
        int nvmlDeviceGetPciInfo_v3(int *device, Pci *pci) {
            memset(pci, 0, sizeof *pci);
            strcpy(pci->place, *device == 0 ? "00000000:0A:00.0" : "00000000:0B:00.0");
            return 0;
        }
        int nvmlDeviceGetUtilizationRates(int *device, Utilization *rates) {
            rates->gpu = 37;
            return *device == 0 ? 0 : 3;
        }
        int nvmlDeviceGetMemoryInfo_v2(int *device, Memory *memory) {
            memory->total = 1000;
            memory->used = 400 + *device;
            return 0;
        }
        int nvmlDeviceGetPowerUsage(int *device, unsigned *milliwatts) { *milliwatts = 350500; return 0; }
        int nvmlDeviceGetTemperature(int *device, int sensor, unsigned *celsius) { *celsius = 61 + *device; return 0; }
        int nvmlEventSetCreate(int **set) { *set = &reported; return 0; }
        int nvmlEventSetFree(int *set) { return 0; }
        int nvmlDeviceRegisterEvents(int *device, unsigned long long types, int *set) { return types == 8 ? 0 : 3; }
        int nvmlEventSetWait_v2(int *set, Event *event, unsigned milliseconds) {
            if (*set) return usleep(milliseconds * 1000), 10;
            *set = 1;
            *event = (Event){&gpus[1], 8, 79, 0, 0};
            return 0;
        }
    "#;

    /// A library of these calls.
    fn library(folder: &Path) -> PathBuf {
        let [source, library] = ["nvml.c", "libnvidia-ml.so.1"].map(|name| folder.join(name));
        std::fs::write(&source, LIBRARY).unwrap();
        let built = Command::new("cc").args(["-shared", "-fPIC", "-w", "-o"]).arg(&library).arg(&source).status();
        assert!(built.unwrap().success());
        library
    }

    fn monitor() -> Arc<Monitor> {
        Arc::new(Monitor::new(Clock::start(), "m").unwrap())
    }

    /// Reads until there is what a test waits for.
    fn until(monitor: &Monitor, seen: impl Fn(&Monitor) -> bool) {
        let began = Instant::now();
        while !seen(monitor) {
            assert!(began.elapsed() < Duration::from_secs(30), "{}", monitor.exposition().unwrap());
            thread::sleep(EVERY);
        }
    }

    #[test]
    fn what_the_library_tells_of_each_gpu_is_in_metrics_and_stats() {
        let folder = tempfile::tempdir().unwrap();
        let library = library(folder.path());
        let monitor = monitor();
        assert!(!monitor.exposition().unwrap().contains("windlass:gpu_"));
        assert_eq!(monitor.stats(Phase::Ready, 0).gpus, None);
        let places = ["0000:0A:00.0", "0000:0B:00.0"].map(str::to_owned).to_vec();
        watch_with(library.as_os_str(), places, EVERY, &monitor).unwrap();
        let stats = || monitor.stats(Phase::Ready, 0);
        until(&monitor, |_| stats().gpus.is_some_and(|gpus| gpus.count == 2 && gpus.xid_errors == 1));
        let text = monitor.exposition().unwrap();
        let value = |name: &str, label: &str| {
            let line =
                text.lines().find(|line| line.starts_with(&format!("windlass:gpu_{name}{{")) && line.contains(label));
            line.map(|line| line.rsplit(' ').next().unwrap().to_owned())
        };
        let of_gpus = |name: &str| [value(name, "gpu=\"0\""), value(name, "gpu=\"1\"")].map(Option::unwrap_or_default);
        assert_eq!(of_gpus("utilization_ratio"), ["0.37", ""], "the second one does not tell: {text}");
        assert_eq!(of_gpus("memory_used_bytes"), ["400", "401"]);
        assert_eq!(of_gpus("memory_total_bytes"), ["1000", "1000"]);
        assert_eq!(of_gpus("power_watts"), ["350.5", "350.5"]);
        assert_eq!(of_gpus("temperature_celsius"), ["61", "62"]);
        assert_eq!(value("xid_errors_total", "xid=\"79\""), Some("1".into()));
        let lost = "GPU 1 (00000000:0B:00.0) reports a critical error: XID 79, it has fallen off the bus";
        until(&monitor, |monitor| monitor.lost_gpu().as_deref() == Some(lost));
        assert!(text.contains("gpu=\"1\"") && of_gpus("xid_errors_total")[0].is_empty(), "{text}");
        let gpus = stats().gpus.unwrap();
        assert_eq!((gpus.memory_used_bytes, gpus.power_watts, gpus.temperature_celsius), (801, 701.0, 62.0));
        // The mean of a minute, of which this test is a part.
        until(&monitor, |monitor| monitor.stats(Phase::Ready, 0).utilization.is_some_and(|mean| mean > 0.2));
        assert!(stats().utilization.unwrap() <= 0.38);
    }

    #[test]
    fn errors_of_a_program_end_no_engine() {
        assert_eq!([13, 31, 43, 45, 63, 68, 144, 154].map(xid::fatal), [None; 8]);
        assert!([48, 62, 74, 79, 94, 95, 109, 119, 140, 158].into_iter().all(|number| xid::fatal(number).is_some()));
    }

    #[test]
    fn without_the_library_or_a_device_that_it_knows_there_is_a_reason_and_no_figure() {
        let monitor = monitor();
        let missing = watch_with("/nowhere/libnvidia-ml.so.1".as_ref(), vec!["0000:0A:00.0".into()], EVERY, &monitor);
        assert!(missing.unwrap_err().to_string().contains("/nowhere/libnvidia-ml.so.1"));
        let folder = tempfile::tempdir().unwrap();
        let unknown = watch_with(library(folder.path()).as_os_str(), vec!["0000:FF:00.0".into()], EVERY, &monitor);
        assert!(unknown.is_err());
        watch(vec!["0000:FF:00.0".into()], &monitor);
        assert!(!monitor.exposition().unwrap().contains("windlass:gpu_"));
        assert_eq!(monitor.stats(Phase::Ready, 0).gpus, None);
    }
}
