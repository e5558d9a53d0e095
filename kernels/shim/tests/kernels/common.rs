//! Devices, random values and comparisons.
//!
//! With `WINDLASS_GPU` set the device is this machine's first NVIDIA GPU (`tests/gpu/run`), else the shim.

use std::fmt::Debug;
use std::ops::Range;

use half::bf16;
use windlass_cuda_shim::{HostMachine, Kernels, device_under_test};
use windlass_kernels::cuda::ops::Output;
use windlass_kernels::cuda::{Device, DriverError, Element, Memory, Stream};

/// Orders of threads and blocks that every kernel is tried in.
pub const SEEDS: [u64; 3] = [1, 2, 3];

/// A device that runs the kernels in the order of `seed`; a GPU has its own.
pub fn device(seed: u64) -> (Device, Stream) {
    let device = device_under_test(seed, 1 << 30).unwrap();
    let stream = device.stream().unwrap();
    (device, stream)
}

/// The shim as an Ampere: it has nothing of what Hopper has alone.
pub fn ampere(seed: u64) -> (Device, Stream) {
    let device = HostMachine::new(Kernels::Run, seed).with_capability((8, 0)).device(0, 1 << 30);
    let stream = device.stream().unwrap();
    (device, stream)
}

/// The shim as a Blackwell: it is later than Hopper, and has nothing of what that has alone either.
pub fn blackwell(seed: u64) -> (Device, Stream) {
    let device = HostMachine::new(Kernels::Run, seed).with_capability((10, 0)).device(0, 1 << 30);
    let stream = device.stream().unwrap();
    (device, stream)
}

/// A Hopper, on which kernels run in the order of `seed`; none where a GPU is under test that is another.
pub fn hopper(seed: u64) -> Option<(Device, Stream)> {
    Some(device(seed)).filter(|(device, _)| device.facts().has_warpgroups())
}

/// What a product gives in bf16 and in f32. Added to what is there it is the latter twice.
pub fn in_all_forms(
    device: &Device,
    stream: &Stream,
    values: usize,
    product: impl Fn(Output<'_>) -> Result<(), DriverError>,
) -> (Vec<bf16>, Vec<f32>) {
    let (mut halves, mut floats) = (poisoned::<bf16>(device, values), poisoned::<f32>(device, values));
    product(Output::Bf16(halves.view_mut())).unwrap();
    product(Output::F32(floats.view_mut())).unwrap();
    let found = floats.read(stream).unwrap();
    product(Output::AddTo(floats.view_mut())).unwrap();
    assert_eq!(floats.read(stream).unwrap(), found.iter().map(|x| x + x).collect::<Vec<_>>(), "added to itself");
    (halves.read(stream).unwrap(), found)
}

/// A token's results are the same whatever tokens come with it: `product` gives `rows` of each in a range.
pub fn same_in_any_batch<T: PartialEq + Debug>(
    tokens: usize,
    rows: usize,
    product: impl Fn(Range<usize>) -> Vec<T>,
    batches: impl IntoIterator<Item = Range<usize>>,
) {
    let all = product(0..tokens);
    for batch in batches {
        assert_eq!(product(batch.clone()), all[batch.start * rows..batch.end * rows], "tokens {batch:?}");
    }
}

/// splitmix64.
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Random {
        Random(seed)
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut x = self.0;
        x = (x ^ x >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        x = (x ^ x >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        x ^ x >> 31
    }

    pub fn below(&mut self, end: usize) -> usize {
        (self.next() % end as u64) as usize
    }

    /// Evenly between `-bound` and `bound`.
    pub fn value(&mut self, bound: f32) -> f32 {
        ((self.next() >> 40) as f32 / (1u64 << 23) as f32 - 1.0) * bound
    }

    pub fn values(&mut self, count: usize, bound: f32) -> Vec<f32> {
        (0..count).map(|_| self.value(bound)).collect()
    }

    pub fn halves(&mut self, count: usize, bound: f32) -> Vec<bf16> {
        (0..count).map(|_| bf16::from_f32(self.value(bound))).collect()
    }
}

/// Memory whose contents no kernel has written: every float of it is a NaN.
pub fn poisoned<T: Element>(device: &Device, len: usize) -> Memory<T> {
    let mut memory = device.allocate(len).unwrap();
    let stream = device.stream().unwrap();
    stream.fill(memory.view_mut(), 0xff).unwrap();
    stream.synchronize().unwrap();
    memory
}

/// The largest distance in units in the last place of a bf16, of the exact values.
pub fn worst_ulps(found: &[bf16], exact: &[f64]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let distance = |(found, exact): (&bf16, &f64)| {
        let ulp = 2f64.powf(exact.abs().max(1e-30).log2().floor() - 7.0);
        let error = (f64::from(*found) - exact).abs() / ulp;
        if error.is_nan() { f64::INFINITY } else { error }
    };
    found.iter().zip(exact).map(distance).fold(0.0, f64::max)
}

/// `|found - exact| / |exact|` by the Frobenius norm.
pub fn relative_error<T: Copy + Into<f64>>(found: &[T], exact: &[f64]) -> f64 {
    assert_eq!(found.len(), exact.len());
    let squares = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>();
    let error = squares(&mut found.iter().zip(exact).map(|(&found, exact)| found.into() - exact));
    let error = (error / squares(&mut exact.iter().copied()).max(1e-300)).sqrt();
    if error.is_nan() { f64::INFINITY } else { error }
}

/// What was refused, as text.
#[track_caller]
pub fn refusal<T: Debug>(result: Result<T, DriverError>) -> String {
    result.unwrap_err().to_string()
}

#[track_caller]
pub fn refused<T: Debug>(result: Result<T, DriverError>, words: &str) {
    let text = refusal(result);
    assert!(text.contains(words), "{text:?} does not say {words:?}");
}
