//! Whether a device still works: memory goes there and back, and a kernel runs. Short, as it is asked after every failure.

use windlass_kernels::cuda::ops::{self, Gate, GateLayout};

use crate::finding::Finding;
use crate::model::Model;
use crate::parts::Tell;
use crate::rig::Rig;
use crate::{Outcome, noise};

/// Values of a token.
const VALUES: usize = 64;

pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let rig = Rig::open(model)?;
    let halves = noise::halves(2 * VALUES);
    let gate_up = rig.device.upload(&halves)?;
    let mut out = rig.device.upload(&halves[..VALUES])?;
    ops::gate_mul(&rig.stream, Gate::Silu, GateLayout::Halves, gate_up.view(), VALUES, out.view_mut())?;
    let works = out.read(&rig.stream)? != halves[..VALUES] && gate_up.read(&rig.stream)? == halves;
    tell(Finding::check("the device copies and computes", works));
    Ok(())
}
