//! What goes through each token by itself between products: norms, gates, heads on their way to the cache. Memory bounds it.

use half::bf16;
use windlass_kernels::cuda::ops::{self, Gate, GateLayout, PagesMut, Placement, Places, Rotation};
use windlass_kernels::ops::RopePairing;

use crate::finding::{Bound, Ceiling, Figure, Finding};
use crate::model::Model;
use crate::parts::Tell;
use crate::rig::Rig;
use crate::{Outcome, noise};

pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let rig = Rig::open(model)?;
    for &tokens in rig.scale.tokens {
        for (name, measured) in [("residual and norm", norm(&rig, tokens)?), ("gate", gate(&rig, tokens)?)] {
            tell(figure(name, tokens, measured));
        }
        tell(figure("heads to the cache", tokens, heads(&rig, tokens)?));
    }
    Ok(())
}

/// Bytes that something reads and writes, and its seconds.
type Measured = (usize, f64);

fn figure(name: &str, tokens: usize, (bytes, seconds): Measured) -> Finding {
    let bound = (tokens >= 512).then_some(Bound::LeastShare(85.0));
    let figure = Figure::new(format!("{name}, {tokens} tokens"), seconds * 1e6, "µs");
    figure.reaching(Ceiling::Copy, bytes as f64 / seconds).wanted("85 % from 512 tokens on", bound).into()
}

fn norm(rig: &Rig, tokens: usize) -> Outcome<Measured> {
    let [cols, _] = rig.scale.widths;
    let values = tokens * cols;
    // Read and written, read, written.
    let bytes = values * (4 + 4 + 2 + 2);
    let sets = rig.sets(bytes);
    let mut residual = noise::memory(&rig.device, &rig.stream, sets * values, &noise::floats(1 << 20))?;
    let addend = noise::memory(&rig.device, &rig.stream, sets * values, &noise::halves(1 << 20))?;
    let weight = rig.device.upload(&noise::floats(cols))?;
    let mut out = rig.device.allocate::<bf16>(sets * values)?;
    let seconds = rig.seconds(sets, |stream, set| {
        let place = || set * values..(set + 1) * values;
        let (residual, addend) = (residual.slice_mut(place()), addend.slice(place()));
        ops::add_rms_norm(stream, residual, addend, weight.view(), 1e-5, out.slice_mut(place()))
    })?;
    Ok((bytes, seconds))
}

fn gate(rig: &Rig, tokens: usize) -> Outcome<Measured> {
    let [_, cols] = rig.scale.widths;
    let values = tokens * cols;
    let bytes = values * 2 * (2 + 1);
    let sets = rig.sets(bytes);
    let gate_up = noise::memory(&rig.device, &rig.stream, sets * 2 * values, &noise::halves(1 << 20))?;
    let mut out = rig.device.allocate::<bf16>(sets * values)?;
    let seconds = rig.seconds(sets, |stream, set| {
        let gate_up = gate_up.slice(2 * set * values..2 * (set + 1) * values);
        ops::gate_mul(
            stream,
            Gate::Silu,
            GateLayout::Halves,
            gate_up,
            cols,
            out.slice_mut(set * values..(set + 1) * values),
        )
    })?;
    Ok((bytes, seconds))
}

fn heads(rig: &Rig, tokens: usize) -> Outcome<Measured> {
    let (heads, device) = (rig.scale.heads, &rig.device);
    let (width, queries) = (tokens * heads.projected_width(), tokens * heads.query_width());
    let bytes = 2 * 2 * width;
    let sets = rig.sets(bytes);
    let projected = noise::memory(device, &rig.stream, sets * width, &noise::halves(1 << 20))?;
    let (mut query, pages) =
        (device.allocate::<bf16>(sets * queries)?, (sets * tokens.next_multiple_of(4)).div_ceil(ops::PAGE_TOKENS));
    let mut cache = device.allocate::<bf16>(pages * heads.page_values())?;
    let counted = |count: usize| device.upload(&(0..count as u32).collect::<Vec<_>>());
    // A set's slots begin where kernels read several at once.
    let stride = tokens.next_multiple_of(4);
    let (positions, slots) = (counted(tokens)?, counted(sets * stride)?);
    let table = device.upload(&ops::rope_table(heads.dim / 2, tokens, 500_000.0, None, 1.0))?;
    let rotation = Rotation { table: table.view(), pairs: heads.dim / 2, pairing: RopePairing::HalfSplit };
    let placement = Placement { bias: None, norms: None, epsilon: 1e-5, rotation: Some(rotation) };
    let seconds = rig.seconds(sets, |stream, set| {
        let slots = slots.slice(set * stride..set * stride + tokens);
        let places = Places { positions: positions.view(), slots };
        let projected = projected.slice(set * width..(set + 1) * width);
        let query = query.slice_mut(set * queries..(set + 1) * queries);
        ops::place_heads(stream, heads, placement, projected, places, query, PagesMut::Bf16(cache.view_mut()))
    })?;
    Ok((bytes, seconds))
}
