//! Draws from rows of logits.

use windlass_kernels::cuda::ops::{self, Samplers};

use crate::finding::{Bound, Ceiling, Figure};
use crate::model::Model;
use crate::parts::Tell;
use crate::rig::Rig;
use crate::{Outcome, noise};

/// How rows are drawn from: temperature, top-k and top-p.
const WAYS: [(&str, f32, u32, f32); 4] =
    [("greedy", 0.0, 0, 1.0), ("temperature", 0.8, 0, 1.0), ("top-p", 0.8, 0, 0.95), ("top-k and top-p", 0.8, 50, 0.9)];
/// Logits spread so far, about as a model's.
const SPREAD: f32 = 10.0;

pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let rig = Rig::open(model)?;
    for &rows in rig.scale.draws {
        for (name, temperature, top_k, top_p) in WAYS {
            let (bytes, seconds) = draw(&rig, rows, temperature, top_k, top_p)?;
            let figure = Figure::new(format!("{name}, {rows} rows"), seconds * 1e6, "µs");
            tell(
                figure
                    .reaching(Ceiling::Copy, bytes as f64 / seconds)
                    .wanted("3 passes at most: 33 %", Bound::LeastShare(33.0))
                    .into(),
            );
        }
    }
    Ok(())
}

/// Bytes of the logits, which are to be read once, and seconds.
fn draw(rig: &Rig, rows: usize, temperature: f32, top_k: u32, top_p: f32) -> Outcome<(usize, f64)> {
    let (device, values) = (&rig.device, rows * rig.scale.vocabulary);
    let (bytes, spread) = (4 * values, noise::floats(1 << 20).iter().map(|value| value * SPREAD).collect::<Vec<_>>());
    let sets = rig.sets(bytes);
    let logits = noise::memory(device, &rig.stream, sets * values, &spread)?;
    let all = |value: f32| device.upload(&vec![value; rows]);
    let (temperatures, top_ps, floors) = (all(temperature)?, all(top_p)?, all(f32::NEG_INFINITY)?);
    let (top_ks, positions) = (device.upload(&vec![top_k; rows])?, device.upload(&vec![5_u32; rows])?);
    let seeds = device.upload(&(0..rows as u64).collect::<Vec<_>>())?;
    let mut out = device.allocate::<u32>(rows)?;
    let seconds = rig.seconds(sets, |stream, set| {
        let samplers = Samplers {
            temperatures: temperatures.view(),
            top_ks: top_ks.view(),
            top_ps: top_ps.view(),
            floors: floors.view(),
            seeds: seeds.view(),
            positions: positions.view(),
        };
        let logits = logits.slice(set * values..(set + 1) * values);
        ops::sample(stream, samplers, logits, rig.scale.vocabulary, out.view_mut())
    })?;
    Ok((bytes, seconds))
}
