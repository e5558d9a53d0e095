//! Products by warpgroups, from tiles that are copied beside them.

use std::ops::Range;

use half::bf16;
use windlass_kernels::cuda::launch::{Argument, Launch, TensorMap};
use windlass_kernels::cuda::ops::{self, Output};
use windlass_kernels::cuda::table::{
    GEMM_HOPPER_CLUSTER, GEMM_HOPPER_SHARE, GEMM_HOPPER_SHARED_BYTES, GEMM_HOPPER_TILE,
};
use windlass_kernels::cuda::{Device, Kernel, Matrix, Memory, Stream};

use crate::common::{Random, SEEDS, ampere, blackwell, hopper, poisoned, relative_error, same_in_any_batch};
use crate::linear::reference;

struct Shape {
    tokens: usize,
    rows: usize,
    cols: usize,
}

/// A launch into floats: of any shape, where the op's matrices have whole blocks of columns.
fn launch(shape: &Shape, weights: &Memory<bf16>, input: &Memory<bf16>, out: &mut Memory<f32>, add: bool) -> Launch {
    let Shape { tokens, rows, cols } = *shape;
    let parts = |count: usize| count.div_ceil(GEMM_HOPPER_TILE as usize) as u32;
    let tiles = |values: &Memory<bf16>, box_rows| TensorMap::new(values.view(), cols, box_rows);
    let launch = Launch::new(Kernel::GemmHopperBf16, [parts(tokens), parts(rows), 1]).shared(GEMM_HOPPER_SHARED_BYTES);
    let launch = launch.with(tiles(weights, GEMM_HOPPER_TILE)).with(tiles(input, GEMM_HOPPER_SHARE));
    let launch = launch.with(Argument::none::<bf16>()).with(out.view_mut());
    [u32::from(add), tokens as u32, rows as u32, cols as u32].into_iter().fold(launch, Launch::with)
}

/// Fewer columns than a tile has, as many as several have and eight more; one row, one token, and one more than a tile's; many
/// more tiles than stages. Blocks of a cluster give the same bits as each by itself.
#[test]
fn products_of_any_shape_match_the_reference() {
    let mut random = Random::new(40);
    let shapes = [
        (1, 1, 8),
        (129, 127, 40),
        (3, 257, 136),
        (64, 128, 64),
        (65, 33, 200),
        (128, 130, 192),
        (5, 7, 1032),
        (1, 129, 64),
        (65, 256, 264),
        (200, 500, 392),
    ];
    for (seed, (tokens, rows, cols)) in SEEDS.into_iter().cycle().zip(shapes) {
        let Some((device, stream)) = hopper(seed) else { return };
        let shape = Shape { tokens, rows, cols };
        let (weights, input) = (random.halves(rows * cols, 1.0), random.halves(tokens * cols, 2.0));
        let exact = reference(rows, cols, |row, col| weights[row * cols + col].into(), &input);
        let [weights, input] = [&weights, &input].map(|values| device.upload(values).unwrap());
        let product = |cluster: [u32; 3]| {
            let mut out = poisoned::<f32>(&device, exact.len());
            [false, true].map(|add| {
                let launch = launch(&shape, &weights, &input, &mut out, add).in_clusters(cluster);
                launch.check(device.facts()).unwrap();
                // SAFETY: it was checked, and the grid is of the shape.
                unsafe { device.driver().launch(&launch, stream.handle()) }.unwrap();
                out.read(&stream).unwrap()
            })
        };
        let alone = product([1; 3]);
        for (found, times) in alone.iter().zip([1.0, 2.0]) {
            let exact: Vec<f64> = exact.iter().map(|value| value * times).collect();
            let error = relative_error(found, &exact);
            assert!(error <= 1e-5, "{tokens} x {rows} x {cols}, {times}: {error}");
        }
        if rows.div_ceil(GEMM_HOPPER_TILE as usize).is_multiple_of(2) {
            assert_eq!(product(GEMM_HOPPER_CLUSTER), alone, "{tokens} x {rows} x {cols} in clusters");
        }
    }
}

/// What chips run, what the kernel is made for, and whole ones.
#[test]
fn clusters_are_checked_against_table_grid_and_chip() {
    let refusal = |device: &Device, kernel: Kernel, grid: [u32; 3], cluster: [u32; 3]| {
        let launch = Launch::new(kernel, grid).in_clusters(cluster);
        launch.check(device.facts()).map_or_else(|error| error.to_string(), |()| "sound".into())
    };
    let Some((device, _)) = hopper(1) else { return };
    let (older, gemm) = (ampere(1).0, Kernel::GemmHopperBf16);
    for (found, expected) in [
        (refusal(&device, gemm, [1, 4, 1], [1, 2, 1]), "0 arguments"),
        (
            refusal(&device, gemm, [1, 3, 1], [1, 2, 1]),
            "a grid of [1, 3, 1] blocks; it must be whole clusters of [1, 2, 1]",
        ),
        (refusal(&device, gemm, [1, 4, 1], [1, 4, 1]), "clusters of [1, 4, 1] blocks; they may have from 1 to 2"),
        (refusal(&device, gemm, [1, 4, 1], [1, 0, 1]), "clusters of [1, 0, 1] blocks"),
        (refusal(&device, gemm, [1, 4, 1], [1 << 16, 1 << 16, 1]), "they may have from 1 to 2"),
        (
            refusal(&older, gemm, [1, 4, 1], [1, 2, 1]),
            "clusters of [1, 2, 1] blocks on a device of compute capability (8, 0)",
        ),
        (refusal(&device, Kernel::RmsNorm, [2, 1, 1], [2, 1, 1]), "they may have from 1 to 1"),
    ] {
        assert!(found.contains(expected), "{found:?} does not say {expected:?}");
    }
}

#[test]
fn a_token_gives_the_same_whatever_tokens_come_with_it() {
    let mut random = Random::new(41);
    let (rows, cols) = (72, 224);
    let Some((device, stream)) = hopper(3) else { return };
    let matrix = Matrix::bf16(&device, rows, cols, &random.halves(rows * cols, 1.0)).unwrap();
    same_by_wide_products((&device, &stream), &matrix, &mut random);
}

/// More tokens than a block has, and some of them.
pub fn same_by_wide_products((device, stream): (&Device, &Stream), matrix: &Matrix, random: &mut Random) {
    let (tokens, rows, cols) = (150, matrix.rows(), matrix.cols());
    let input = device.upload(&random.halves(tokens * cols, 2.0)).unwrap();
    let product = |tokens: Range<usize>| {
        let mut out = poisoned::<bf16>(device, tokens.len() * rows);
        let input = input.slice(tokens.start * cols..tokens.end * cols);
        ops::linear_wide(stream, matrix, input, Output::Bf16(out.view_mut())).unwrap();
        out.read(stream).unwrap()
    };
    same_in_any_batch(tokens, rows, product, [140..141, 140..150, 70..150]);
}

/// What is compiled for Hopper itself is empty in the PTX that a later chip's driver compiles.
#[test]
fn later_chips_are_given_nothing_that_hopper_has_alone() {
    let (later, _) = blackwell(1);
    let theirs: Vec<_> = Kernel::ALL.iter().filter(|kernel| !kernel.spec().only_on.is_empty()).collect();
    assert!(theirs.len() > 10, "{theirs:?}");
    for &&kernel in &theirs {
        let refused = Launch::new(kernel, [1, 1, 1]).check(later.facts()).unwrap_err().to_string();
        assert!(refused.contains("empty on a device of compute capability 10.0"), "{refused}");
    }
}

/// Rows that do not begin at a multiple of 16 bytes, boxes of another size, and chips that have no warpgroups.
#[test]
fn what_tile_copies_cannot_read_and_other_chips_have_not_is_refused() {
    let refusal = |device: &Device, shape: Shape, change: fn(TensorMap) -> TensorMap| {
        let [weights, input] = [shape.rows, shape.tokens].map(|rows| device.allocate(rows * shape.cols).unwrap());
        let mut out = device.allocate(shape.rows * shape.tokens).unwrap();
        let sound = launch(&shape, &weights, &input, &mut out, false);
        let tiles = change(TensorMap::new(weights.view(), shape.cols, GEMM_HOPPER_TILE));
        let launch = Launch::new(Kernel::GemmHopperBf16, sound.grid()).with(tiles);
        let launch = sound.arguments()[1..].iter().fold(launch, |launch, &argument| launch.with(argument));
        launch.check(device.facts()).map_or_else(|error| error.to_string(), |()| "sound".into())
    };
    let shape = |cols: usize| Shape { tokens: 8, rows: 8, cols };
    let Some((device, _)) = hopper(1) else { return };
    let older = ampere(1).0;
    for (found, expected) in [
        (refusal(&device, shape(64), |tiles| tiles), "sound"),
        (refusal(&older, shape(64), |tiles| tiles), "empty on a device of compute capability 8.0"),
        (refusal(&device, shape(12), |tiles| tiles), "weights has rows of no multiple of 16 bytes"),
        (refusal(&device, shape(64), |tiles| TensorMap { box_rows: 64, ..tiles }), "weights has boxes of another size"),
        (refusal(&device, shape(64), |tiles| TensorMap { rows: 0, ..tiles }), "weights has no values"),
    ] {
        assert!(found.contains(expected), "{found:?} does not say {expected:?}");
    }
}
