//! What the device is, and the most that a copy and products reach: what everything else is told in shares of. A library's
//! products may reach more (`torch_peer.py`); the most that anything reached counts.

use half::bf16;
use windlass_engine_model::cuda::DeviceFacts;
use windlass_kernels::cuda::Matrix;
use windlass_kernels::cuda::ops::{self, Output, Quantized};
use windlass_kernels::cuda::weights::EightBits;

use crate::finding::{Ceiling, Finding};
use crate::model::Model;
use crate::parts::Tell;
use crate::rig::Rig;
use crate::{Outcome, noise};

pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let rig = Rig::open(model)?;
    tell(device(rig.device.facts()));
    tell(Finding::Ceiling { of: Ceiling::Copy, rate: Ceiling::Copy.rate(copy(&rig)?), by: "a copy".into() });
    tell(ceiling(&rig, Ceiling::Bf16, halves(&rig)?));
    for (of, code) in [(Ceiling::Fp8, EightBits::E4m3), (Ceiling::Int8, EightBits::Int8)] {
        if ops::multiplies(rig.device.facts(), code) {
            tell(ceiling(&rig, of, eight_bits(&rig, code)?));
        }
    }
    Ok(())
}

fn device(facts: &DeviceFacts) -> Finding {
    let DeviceFacts { name, driver, multiprocessors, .. } = facts;
    let ((major, minor), gibibytes, cache) = (facts.capability, facts.memory_bytes >> 30, facts.l2_bytes >> 20);
    Finding::Device {
        name: format!("{name}, sm_{major}{minor}"),
        about: format!("{multiprocessors} SMs, {gibibytes} GiB, a second-level cache of {cache} MiB. Driver {driver}."),
    }
}

/// What a product of so many seconds makes of a ceiling.
fn ceiling(rig: &Rig, of: Ceiling, seconds: f64) -> Finding {
    let side = rig.scale.ceiling_side;
    let operations = 2.0 * (side as f64).powi(3);
    Finding::Ceiling { of, rate: of.rate(operations / seconds), by: format!("our product of {side}³") }
}

/// Bytes read and written a second.
fn copy(rig: &Rig) -> Outcome<f64> {
    let bytes = rig.scale.copy_bytes;
    let from = noise::memory(&rig.device, &rig.stream, bytes, &noise::bytes(1 << 20))?;
    let mut to = rig.device.allocate::<u8>(bytes)?;
    let seconds = rig.mean_seconds(|| rig.stream.copy(to.view_mut(), from.view()))?;
    Ok(2.0 * bytes as f64 / seconds)
}

/// Seconds of a product in bf16.
fn halves(rig: &Rig) -> Outcome<f64> {
    let side = rig.scale.ceiling_side;
    let values = noise::halves(side * side);
    let (matrix, input) = (Matrix::bf16(&rig.device, side, side, &values)?, rig.device.upload(&values)?);
    let mut out = rig.device.allocate::<bf16>(side * side)?;
    rig.mean_seconds(|| ops::linear_wide(&rig.stream, &matrix, input.view(), Output::Bf16(out.view_mut())))
}

/// The same of weights and tokens in 8 bits.
fn eight_bits(rig: &Rig, code: EightBits) -> Outcome<f64> {
    let side = rig.scale.ceiling_side;
    let (codes, scales) = (noise::codes(code, side * side), vec![0.01; side]);
    let matrix = Matrix::eight_bits(&rig.device, code, [side, side], side, &codes, &scales)?;
    let (codes, scales) = (rig.device.upload(&codes)?, rig.device.upload(&scales)?);
    let mut out = rig.device.allocate::<bf16>(side * side)?;
    rig.mean_seconds(|| {
        let input = Quantized { codes: codes.view(), scales: scales.view() };
        ops::linear_w8a8_wide(&rig.stream, &matrix, &input, Output::Bf16(out.view_mut()))
    })
}
