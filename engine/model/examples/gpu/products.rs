//! Products of tokens with a weight matrix: bytes of weights a second where memory bounds them, operations where arithmetic does.

use std::sync::Arc;

use half::{bf16, f16};
use windlass_engine_model::cuda::{Device, DriverError};
use windlass_kernels::cuda::ops::{self, Output, ProductLibrary, Quantized, QuantizedMut};
use windlass_kernels::cuda::weights::{EightBits, Group, Grouped};
use windlass_kernels::cuda::{Matrix, Products, Stream, View};
use windlass_kernels::{Pool, WeightType};

use crate::finding::{Bound, Ceiling, Figure, Finding};
use crate::model::Model;
use crate::parts::Tell;
use crate::rig::Rig;
use crate::tiny::Random;
use crate::{Outcome, noise};

/// Weights, what is wanted of them by few tokens and by many.
struct Weights {
    name: &'static str,
    make: fn(&Device, [usize; 2]) -> Outcome<Matrix>,
    wanted: [Share; 2],
}

/// Of a ceiling: in words, and the least of it, percent. None where nothing is said of it.
type Share = Option<(&'static str, f64)>;

/// Whose inputs stay bf16. What is wanted is the plan's (kernels.md, 1) for its last stage.
const WEIGHTS: [Weights; 3] = [
    Weights { name: "bf16", make: in_bf16, wanted: [Some(("92 to 95 %", 92.0)), Some(("95 %", 95.0))] },
    Weights { name: "int4-g128", make: in_groups, wanted: [Some(("85 to 90 %", 85.0)), Some(("85 %", 85.0))] },
    Weights {
        name: "fp8",
        make: |device, shape| in_bytes(device, shape, EightBits::E4m3),
        wanted: [Some(("92 %", 92.0)), None],
    },
];
const OTHER_WEIGHTS: [Weights; 3] = [
    Weights {
        name: "int8",
        make: |device, shape| in_bytes(device, shape, EightBits::Int8),
        wanted: [Some(("92 %", 92.0)), None],
    },
    Weights {
        name: "Q4_K",
        make: |device, shape| of_file(device, shape, WeightType::Q4K),
        wanted: [Some(("85 %", 85.0)), None],
    },
    Weights {
        name: "Q8_0",
        make: |device, shape| of_file(device, shape, WeightType::Q8_0),
        wanted: [Some(("92 %", 92.0)), None],
    },
];

/// Of what most models are served in.
pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let rig = Rig::open(model)?;
    measure_all(&rig, &WEIGHTS, tell)?;
    if ops::multiplies(rig.device.facts(), EightBits::E4m3) {
        measure_rounded(&rig, "fp8", EightBits::E4m3, Ceiling::Fp8, tell)?;
    }
    measure_library(&rig, tell)
}

/// Of the rest.
pub fn measure_others(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let rig = Rig::open(model)?;
    measure_all(&rig, &OTHER_WEIGHTS, tell)?;
    measure_rounded(&rig, "int8", EightBits::Int8, Ceiling::Int8, tell)
}

fn measure_all(rig: &Rig, weights: &[Weights], tell: &mut Tell<'_>) -> Outcome<()> {
    for weights in weights {
        measure_weights(rig, weights, &matrices(rig, weights.make)?, tell)?;
    }
    Ok(())
}

/// As many as are not in the cache any more when their turn comes again.
fn matrices(rig: &Rig, make: impl Fn(&Device, [usize; 2]) -> Outcome<Matrix>) -> Outcome<Vec<Matrix>> {
    let first = make(&rig.device, rig.scale.matrix)?;
    let more = (1..rig.sets(first.bytes())).map(|_| make(&rig.device, rig.scale.matrix));
    [Ok(first)].into_iter().chain(more).collect()
}

/// A product of tokens with a matrix.
type Product = fn(&Stream, &Matrix, View<'_, bf16>, Output<'_>) -> Result<(), DriverError>;

fn measure_weights(rig: &Rig, weights: &Weights, matrices: &[Matrix], tell: &mut Tell<'_>) -> Outcome<()> {
    let Weights { name, wanted: [of_few, of_many], .. } = weights;
    for &tokens in rig.scale.few {
        let rate = matrices[0].bytes() as f64 / seconds(rig, matrices, tokens, ops::linear)?;
        tell(of(Figure::rate(format!("{name}, {tokens} tokens"), Ceiling::Copy, rate), *of_few).into());
    }
    for &tokens in rig.scale.many {
        let mut products: Vec<(&str, Product)> = vec![("the same in any batch", ops::linear)];
        if ops::multiplies_widely(rig.device.facts(), &matrices[0], tokens) {
            products.push(("--no-deterministic", ops::linear_wide));
        }
        for (mode, product) in products {
            let rate = operations(&matrices[0], tokens) / seconds(rig, matrices, tokens, product)?;
            tell(of(Figure::rate(format!("{name}, {tokens} tokens, {mode}"), Ceiling::Bf16, rate), *of_many).into());
        }
    }
    Ok(())
}

/// A figure with what is wanted of it.
fn of(figure: Figure, share: Share) -> Figure {
    match share {
        Some((words, least)) => figure.wanted(words, Bound::LeastShare(least)),
        None => figure,
    }
}

fn operations(matrix: &Matrix, tokens: usize) -> f64 {
    2.0 * (tokens * matrix.rows() * matrix.cols()) as f64
}

/// Of a product of so many tokens with one matrix.
fn seconds(rig: &Rig, matrices: &[Matrix], tokens: usize, product: Product) -> Outcome<f64> {
    let [rows, cols] = rig.scale.matrix;
    let input = rig.device.upload(&noise::halves(tokens * cols))?;
    let mut out = rig.device.allocate::<bf16>(tokens * rows)?;
    rig.seconds(matrices.len(), |stream, set| {
        product(stream, &matrices[set], input.view(), Output::Bf16(out.view_mut()))
    })
}

/// What the machine's library makes of bf16 beside ours, where it is there: it multiplies elsewhere than in graphs.
fn measure_library(rig: &Rig, tell: &mut Tell<'_>) -> Outcome<()> {
    let products = match rig.device.driver().products() {
        Ok(products) => products,
        Err(why) => {
            tell(Finding::Absent { name: "bf16 by a library".to_owned(), why: why.to_string() });
            return Ok(());
        }
    };
    let matrices = matrices(rig, in_bf16)?;
    for &tokens in rig.scale.many {
        tell(by_library(rig, &products, &matrices, tokens)?);
    }
    Ok(())
}

fn by_library(rig: &Rig, products: &Arc<dyn Products>, matrices: &[Matrix], tokens: usize) -> Outcome<Finding> {
    let name = format!("bf16, {tokens} tokens, {}", products.name());
    let mut library = ProductLibrary::new(&rig.device, products, tokens)?;
    let input = rig.device.upload(&noise::halves(tokens * matrices[0].cols()))?;
    let mut out = rig.device.allocate::<bf16>(tokens * matrices[0].rows())?;
    if !library.multiplies(&rig.stream, &matrices[0], input.view(), &Output::Bf16(out.view_mut()))? {
        return Ok(Finding::Absent { name, why: "it has no way for these sizes".to_owned() });
    }
    let seconds = rig.seconds_without_graph(matrices.len(), |stream, set| {
        library.linear(stream, &matrices[set], input.view(), Output::Bf16(out.view_mut()))
    })?;
    Ok(Figure::rate(name, Ceiling::Bf16, operations(&matrices[0], tokens) / seconds).into())
}

/// Weights and tokens in 8 bits: with the tokens' own rounding where they are few, and by itself where they are many.
fn measure_rounded(rig: &Rig, name: &str, code: EightBits, of: Ceiling, tell: &mut Tell<'_>) -> Outcome<()> {
    let [rows, cols] = rig.scale.matrix;
    let matrices = matrices(rig, |device, shape| in_bytes(device, shape, code))?;
    for &tokens in rig.scale.few.iter().chain(rig.scale.many) {
        let input = rig.device.upload(&noise::halves(tokens * cols))?;
        let mut codes = rig.device.allocate::<u8>(tokens * cols)?;
        let mut scales = rig.device.allocate::<f32>(tokens)?;
        let mut out = rig.device.allocate::<bf16>(tokens * rows)?;
        let seconds = rig.seconds(matrices.len(), |stream, set| {
            let room = QuantizedMut { code, codes: codes.view_mut(), scales: scales.view_mut() };
            ops::quantize_tokens(stream, input.view(), room)?;
            let input = Quantized { codes: codes.view(), scales: scales.view() };
            ops::linear_w8a8_wide(stream, &matrices[set], &input, Output::Bf16(out.view_mut()))
        })?;
        let what = format!("{name} by {name}, {tokens} tokens, with their rounding");
        let figure = match rig.scale.few.contains(&tokens) {
            true => Figure::rate(what, Ceiling::Copy, matrices[0].bytes() as f64 / seconds)
                .wanted("92 %", Bound::LeastShare(92.0)),
            false => Figure::rate(what, of, operations(&matrices[0], tokens) / seconds),
        };
        tell(figure.into());
    }
    Ok(())
}

fn in_bf16(device: &Device, [rows, cols]: [usize; 2]) -> Outcome<Matrix> {
    Ok(Matrix::bf16(device, rows, cols, &noise::halves(rows * cols))?)
}

/// With a scale for each row.
fn in_bytes(device: &Device, [rows, cols]: [usize; 2], code: EightBits) -> Outcome<Matrix> {
    let codes = noise::codes(code, rows * cols);
    Ok(Matrix::eight_bits(device, code, [rows, cols], cols, &codes, &vec![0.01; rows])?)
}

/// As GPTQ groups them, around zero.
fn in_groups(device: &Device, [rows, cols]: [usize; 2]) -> Outcome<Matrix> {
    let (group, scale) = (Group::G128, (f16::from_f32(0.01), f16::from_f32(-0.08)));
    let codes = noise::bytes(rows * cols).into_iter().map(|byte| byte & 15).collect();
    let scales = vec![scale; rows * cols.div_ceil(group.cols())];
    Ok(Matrix::grouped(device, &Grouped::new(rows, cols, group, codes, scales))?)
}

/// As a GGUF file has them.
fn of_file(device: &Device, [rows, cols]: [usize; 2], kind: WeightType) -> Outcome<Matrix> {
    let (mut random, count) = (Random(9), rows * cols / kind.block_elements());
    let blocks: Vec<u8> = (0..count.min(4096)).flat_map(|_| random.block(kind, 0.01)).collect();
    let bytes = noise::repeated_from(count * kind.block_bytes(), &blocks);
    Ok(Matrix::load(device, &Pool::new(1)?, kind, rows, cols, &bytes)?)
}

#[cfg(test)]
mod tests {
    use windlass_cuda_shim::{HostMachine, Kernels};

    use super::*;

    #[test]
    fn a_library_is_measured_where_the_machine_has_one() {
        let machine = HostMachine::new(Kernels::Run, 7);
        for (machine, is_there) in [(machine.clone().with_products(), true), (machine, false)] {
            let rig = Rig::on(machine.device(0, 1 << 28), &Model::Dry).unwrap();
            let mut found = Vec::new();
            measure_library(&rig, &mut |finding| found.push(finding)).unwrap();
            let [found] = &found[..] else { panic!("{found:?}") };
            let says_so = match found {
                Finding::Figure(figure) => {
                    is_there && figure.name.contains("the shim's products") && figure.value > 0.0
                }
                Finding::Absent { .. } => !is_there,
                _ => false,
            };
            assert!(says_so, "{found:?}");
        }
    }
}
