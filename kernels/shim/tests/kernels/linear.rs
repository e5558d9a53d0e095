use std::ops::Range;

use half::{bf16, f16};
use windlass_cuda_shim::{HostMachine, Issued, Kernels};
use windlass_kernels::cuda::driver::{DevicePointer, Product, ProductOutput};
use windlass_kernels::cuda::ops::{self, Output, ProductLibrary};
use windlass_kernels::cuda::weights::{EightBits, Group, Grouped, Int8, LoadError, Matrix, Superblock, Superblocks};
use windlass_kernels::cuda::{Device, DriverError, Stream};
use windlass_kernels::{NO_INPUT, PackedMatrix, Pool, WeightType};

use crate::common::{Random, SEEDS, ampere, device, in_all_forms, poisoned, relative_error, same_in_any_batch};

/// `[tokens, rows]` of a matrix of values.
pub fn reference(rows: usize, cols: usize, value: impl Fn(usize, usize) -> f64, input: &[bf16]) -> Vec<f64> {
    let dot = |token: &[bf16], row: usize| (0..cols).map(|col| value(row, col) * f64::from(token[col])).sum();
    input.chunks(cols).flat_map(|token| (0..rows).map(move |row| (token, row))).map(|(t, row)| dot(t, row)).collect()
}

/// The product in all three forms, compared.
fn check(device: &Device, stream: &Stream, matrix: &Matrix, input: &[bf16], exact: &[f64], what: &str) {
    let tokens = device.upload(input).unwrap();
    let product = |out: Output<'_>| ops::linear(stream, matrix, tokens.view(), out);
    near(in_all_forms(device, stream, exact.len(), product), exact, what);
}

/// Results in both types are what products must give.
pub fn near((halves, floats): (Vec<bf16>, Vec<f32>), exact: &[f64], what: &str) {
    let errors = [relative_error(&halves, exact), relative_error(&floats, exact)];
    assert!(errors[0] <= 3e-3 && errors[1] <= 1e-5, "{what}: {errors:?} in bf16 and in f32");
}

pub fn random_int4(random: &mut Random, rows: usize, cols: usize, group: Group, symmetric: bool) -> Grouped {
    let (codes, scales) = random_codes(random, rows, cols, group, symmetric);
    Grouped::new(rows, cols, group, codes, scales)
}

/// What [`Grouped::new`] is made of.
pub fn random_codes(
    random: &mut Random,
    rows: usize,
    cols: usize,
    group: Group,
    symmetric: bool,
) -> (Vec<u8>, Vec<(f16, f16)>) {
    let codes = (0..rows * cols).map(|_| random.below(16) as u8).collect();
    let groups = rows * cols.div_ceil(group.cols());
    let scale = |random: &mut Random| {
        let scale = f16::from_f32(random.value(0.1));
        (scale, f16::from_f32(if symmetric { -8.0 * scale.to_f32() } else { random.value(0.5) }))
    };
    (codes, (0..groups).map(|_| scale(random)).collect())
}

#[test]
fn bf16_products_match_the_reference() {
    let mut random = Random::new(4);
    for (seed, (tokens, rows, cols)) in SEEDS.into_iter().cycle().zip([
        (1, 16, 32),
        (3, 40, 576),
        (8, 17, 1056),
        (16, 33, 128),
        (29, 5, 96),
        (70, 20, 2080),
    ]) {
        let (device, stream) = device(seed);
        let (weights, input) = (random.halves(rows * cols, 1.0), random.halves(tokens * cols, 2.0));
        let matrix = Matrix::bf16(&device, rows, cols, &weights).unwrap();
        let exact = reference(rows, cols, |row, col| weights[row * cols + col].into(), &input);
        check(&device, &stream, &matrix, &input, &exact, &format!("{tokens} x {rows} x {cols}"));
    }
}

#[test]
fn int4_products_match_the_reference() {
    let mut random = Random::new(5);
    for (group, (tokens, rows, cols)) in [
        (Group::G32, (1, 16, 64)),
        (Group::G32, (3, 35, 1120)),
        (Group::G32, (10, 16, 96)),
        (Group::G64, (5, 24, 576)),
        (Group::G64, (20, 17, 192)),
        (Group::G128, (2, 40, 1280)),
        (Group::G128, (66, 16, 256)),
    ] {
        for symmetric in [false, true] {
            let (device, stream) = device(tokens as u64);
            let int4 = random_int4(&mut random, rows, cols, group, symmetric);
            let matrix = Matrix::grouped(&device, &int4).unwrap();
            let input = random.halves(tokens * cols, 2.0);
            let exact = reference(rows, cols, |row, col| int4.value(row, col), &input);
            check(&device, &stream, &matrix, &input, &exact, &format!("{group:?}, {tokens} x {rows} x {cols}"));
        }
    }
}

/// Columns of a matrix that multiply inputs in an order of their own, or none.
#[test]
fn products_with_columns_in_another_order_match_the_reference() {
    let mut random = Random::new(33);
    for (tokens, rows, cols, inputs) in [(1, 16, 64, 64), (3, 35, 1120, 1120), (66, 17, 576, 500), (2, 16, 96, 33)] {
        let (device, stream) = device(tokens as u64);
        let mut order: Vec<u32> = (0..cols as u32).map(|col| if col < inputs { col } else { NO_INPUT }).collect();
        (1..cols).for_each(|last| order.swap(last, random.below(last + 1)));
        let int4 = random_int4(&mut random, rows, cols, Group::G32, false);
        let matrix = Matrix::grouped(&device, &int4).unwrap().ordered(&device, &order).unwrap();
        let input = random.halves(tokens * inputs as usize, 2.0);
        let of = |token: &[bf16], col: u32| token.get(col as usize).copied().unwrap_or(bf16::ZERO);
        let tokens_of_input = input.chunks(inputs as usize);
        let sorted: Vec<bf16> =
            tokens_of_input.flat_map(|token| order.iter().map(move |&col| of(token, col))).collect();
        let exact = reference(rows, cols, |row, col| int4.value(row, col), &sorted);
        let (mut room, mut out) = (poisoned::<bf16>(&device, sorted.len() + 8), poisoned::<f32>(&device, exact.len()));
        let input = device.upload(&input).unwrap();
        ops::linear_ordered(&stream, &matrix, input.view(), &mut room, Output::F32(out.view_mut())).unwrap();
        let error = relative_error(&out.read(&stream).unwrap(), &exact);
        assert!(error <= 1e-5, "{tokens} x {rows} x {cols}: {error}");
        order.sort_unstable();
        order[0] = order[1];
        assert!(matrix.ordered(&device, &order).unwrap_err().to_string().contains("does not name each"));
    }
}

/// A float in e4m3 (OCP 8-bit floating point): a sign, 4 bits of exponent with a bias of 7, 3 bits of fraction.
pub fn e4m3(code: u8) -> f64 {
    let (exponent, fraction) = (i32::from(code >> 3 & 15), f64::from(code & 7));
    let size =
        if exponent == 0 { fraction / 8.0 * 2f64.powi(-6) } else { (1.0 + fraction / 8.0) * 2f64.powi(exponent - 7) };
    if code >> 7 == 0 { size } else { -size }
}

#[test]
fn eight_bit_products_match_the_reference() {
    let mut random = Random::new(15);
    for code in [EightBits::E4m3, EightBits::Int8] {
        for (group, (tokens, rows, cols)) in [
            (usize::MAX, (1usize, 16usize, 96usize)),
            (128, (3, 37, 576)),
            (256, (12, 17, 1184)),
            (128, (20, 16, 160)),
            (usize::MAX, (65, 16, 64)),
        ] {
            let (device, stream) = device(tokens as u64);
            // Every finite code of e4m3: its two NaNs are 0x7f and 0xff.
            let codes: Vec<u8> =
                (0..rows * cols).map(|_| (random.next() % 255) as u8).map(|x| if x == 0x7f { 0 } else { x }).collect();
            let groups = cols.div_ceil(group);
            let scales = random.values(rows * groups, 0.1);
            let matrix = Matrix::eight_bits(&device, code, [rows, cols], group, &codes, &scales).unwrap();
            let input = random.halves(tokens * cols, 2.0);
            let value = |row: usize, col: usize| {
                let code_value = match code {
                    EightBits::E4m3 => e4m3(codes[row * cols + col]),
                    EightBits::Int8 => f64::from(codes[row * cols + col] as i8),
                };
                code_value * f64::from(scales[row * groups + col / group])
            };
            let exact = reference(rows, cols, value, &input);
            check(&device, &stream, &matrix, &input, &exact, &format!("{code:?}, {tokens} x {rows} x {cols}"));
        }
    }
}

#[test]
fn q8_0_products_match_the_reference() {
    let mut random = Random::new(20);
    for (tokens, rows, cols) in [(1, 16, 32), (4, 35, 1120), (11, 16, 96), (30, 17, 192), (65, 16, 64)] {
        let (device, stream) = device(tokens as u64);
        let int8 = Int8::read(WeightType::Q8_0, rows, cols, &q8_0(&mut random, rows, cols)).unwrap().unwrap();
        let input = random.halves(tokens * cols, 2.0);
        let exact = reference(rows, cols, |row, col| int8.value(row, col), &input);
        let matrix = Matrix::int8(&device, &int8).unwrap();
        check(&device, &stream, &matrix, &input, &exact, &format!("{tokens} x {rows} x {cols}"));
    }
}

/// Types whose values are bytes by a scale have those, in half of what bf16 takes; scales that are no f16 are left to bf16.
#[test]
fn files_whose_values_are_bytes_by_a_scale_are_read_as_they_are() {
    let mut random = Random::new(23);
    let pool = Pool::new(1).unwrap();
    let (device, _) = device(1);
    let (rows, cols) = (16, 128);
    for kind in [WeightType::Q8_0, WeightType::IQ4NL, WeightType::MXFP4] {
        let block = |random: &mut Random| {
            let mut block: Vec<u8> = (0..kind.block_bytes()).map(|_| random.next() as u8).collect();
            match kind {
                WeightType::MXFP4 => block[0] = 128 - 24 + random.below(40) as u8,
                _ => block[..2].copy_from_slice(&f16::from_f32(random.value(0.1)).to_le_bytes()),
            }
            block
        };
        let mut bytes: Vec<u8> = (0..rows * cols / 32).flat_map(|_| block(&mut random)).collect();
        let read = Int8::read(kind, rows, cols, &bytes).unwrap().unwrap();
        let found: Vec<f64> = (0..rows * cols).map(|i| read.value(i / cols, i % cols)).collect();
        let exact = on_the_cpu(&pool, kind, [rows, cols], &bytes);
        let error = relative_error(&found, &exact);
        assert!(error <= 1e-7, "{}: {error}", kind.name());
        let loaded = |bytes: &[u8]| Matrix::load(&device, &pool, kind, rows, cols, bytes).unwrap().bytes();
        assert_eq!(loaded(&bytes), rows * cols * 17 / 16, "{}", kind.name());
        if kind == WeightType::MXFP4 {
            bytes[17] = 200;
            assert_eq!(loaded(&bytes), rows * cols * 2, "2^72 is no f16");
            bytes[18..34].fill(0x80);
            assert_eq!(loaded(&bytes), rows * cols * 17 / 16, "and scales nothing there");
        }
        assert!(Int8::read(kind, rows, cols, &bytes[1..]).unwrap().is_err());
    }
}

/// bitsandbytes' codes of four bits become bytes by a scale of 32, each rounded by half a step at most.
#[test]
fn files_of_numbers_become_the_nearest_bytes() {
    let mut random = Random::new(24);
    let (pool, (device, _)) = (Pool::new(1).unwrap(), device(1));
    let (rows, cols) = (16, 128);
    for kind in [WeightType::NF4, WeightType::FP4] {
        let bytes = blocks(&mut random, kind, [(0, 0.1)].into_iter(), rows * cols);
        let read = Int8::read(kind, rows, cols, &bytes).unwrap().unwrap();
        for (i, exact) in on_the_cpu(&pool, kind, [rows, cols], &bytes).into_iter().enumerate() {
            let error = (read.value(i / cols, i % cols) - exact).abs();
            assert!(error <= 0.1 * 0.51 / 127.0, "{}: {exact} is off by {error}", kind.name());
        }
        let matrix = Matrix::load(&device, &pool, kind, rows, cols, &bytes).unwrap();
        assert_eq!(matrix.bytes(), rows * cols * 17 / 16, "{}", kind.name());
        assert!(Int8::read(kind, rows, cols, &bytes[1..]).unwrap().is_err());
    }
}

/// A file tensor of Q8_0.
pub fn q8_0(random: &mut Random, rows: usize, cols: usize) -> Vec<u8> {
    let block = |random: &mut Random| {
        let mut block = f16::from_f32(random.value(0.1)).to_le_bytes().to_vec();
        block.extend((0..32).map(|_| random.next() as u8));
        block
    };
    (0..rows * cols / 32).flat_map(|_| block(random)).collect()
}

/// A file tensor of Q5_0 or Q5_1.
pub fn five_bits(random: &mut Random, kind: WeightType, rows: usize, cols: usize) -> Vec<u8> {
    let factors = if kind == WeightType::Q5_0 { 0..1 } else { 0..2 };
    blocks(random, kind, factors.map(|index| (2 * index, 0.1)), rows * cols)
}

/// One of superblocks.
pub fn superblocks(random: &mut Random, kind: Superblock, rows: usize, cols: usize) -> Vec<u8> {
    let factors: &[usize] = match kind {
        Superblock::Q2K => &[80, 82],
        Superblock::Q3K => &[108],
        Superblock::Q4K | Superblock::Q5K => &[0, 2],
        Superblock::Q6K => &[208],
        Superblock::IQ4XS => &[0],
    };
    blocks(random, kind.weight_type(), factors.iter().map(|&at| (at, 0.01)), rows * cols)
}

/// Blocks of a file for so many values: random bytes, and at these places f16s of such a size.
fn blocks(
    random: &mut Random,
    kind: WeightType,
    factors: impl Iterator<Item = (usize, f32)> + Clone,
    values: usize,
) -> Vec<u8> {
    let block = |random: &mut Random| {
        let mut block: Vec<u8> = (0..kind.block_bytes()).map(|_| random.next() as u8).collect();
        for (at, size) in factors.clone() {
            block[at..at + 2].copy_from_slice(&f16::from_f32(random.value(size)).to_le_bytes());
        }
        block
    };
    (0..values / kind.block_elements()).flat_map(|_| block(random)).collect()
}

#[test]
fn products_with_codes_of_five_bits_match_the_reference() {
    let mut random = Random::new(24);
    for kind in [WeightType::Q5_0, WeightType::Q5_1] {
        for (tokens, rows, cols) in [(1, 16, 32), (4, 35, 1120), (11, 16, 96), (30, 17, 192), (65, 16, 256)] {
            let (device, stream) = device(tokens as u64);
            let bytes = five_bits(&mut random, kind, rows, cols);
            let grouped = Grouped::read(kind, rows, cols, &bytes).unwrap().unwrap();
            let input = random.halves(tokens * cols, 2.0);
            let exact = reference(rows, cols, |row, col| grouped.value(row, col), &input);
            let matrix = Matrix::grouped(&device, &grouped).unwrap();
            check(&device, &stream, &matrix, &input, &exact, &format!("{}, {tokens} x {rows} x {cols}", kind.name()));
            let whole = rows.next_multiple_of(16) * (cols.next_multiple_of(64) * 5 / 8 + cols / 8);
            assert_eq!(matrix.bytes(), whole, "six bits, of whole blocks of 16 rows and 64 columns");
        }
    }
}

#[test]
fn products_with_superblocks_match_the_reference() {
    let mut random = Random::new(21);
    for kind in Superblock::ALL {
        for (tokens, rows, cols) in [(1, 16, 256), (4, 35, 1280), (11, 16, 2304), (30, 17, 512), (65, 16, 768)] {
            let (device, stream) = device(tokens as u64);
            let bytes = superblocks(&mut random, kind, rows, cols);
            let superblocks = Superblocks::read(kind, rows, cols, &bytes).unwrap();
            let input = random.halves(tokens * cols, 2.0);
            let exact = reference(rows, cols, |row, col| superblocks.value(row, col), &input);
            let matrix = Matrix::superblocks(&device, &superblocks).unwrap();
            check(&device, &stream, &matrix, &input, &exact, &format!("{kind:?}, {tokens} x {rows} x {cols}"));
            // The file's 2.625, 3.4375, 4.5, 5.5, 6.5625 and 4.25 bits, and of its last 16 rows those that there are not.
            let whole = bytes.len() / rows * rows.next_multiple_of(16);
            let most = if kind == Superblock::Q3K { whole * 106 / 100 } else { whole * 103 / 100 };
            assert!((whole..=most).contains(&matrix.bytes()), "{kind:?}: {} of {whole}", matrix.bytes());
        }
    }
}

#[test]
fn products_of_many_tokens_match_the_reference() {
    let mut random = Random::new(16);
    let shapes = [(130, 70, 96), (5, 129, 224), (64, 128, 32)];
    let devices = SEEDS.into_iter().flat_map(|seed| [ampere(seed), device(seed)]);
    for ((device, stream), (tokens, rows, cols)) in devices.zip(shapes.into_iter().flat_map(|shape| [shape; 2])) {
        let (weights, input) = (random.halves(rows * cols, 1.0), random.halves(tokens * cols, 2.0));
        let matrix = Matrix::bf16(&device, rows, cols, &weights).unwrap();
        let exact = reference(rows, cols, |row, col| weights[row * cols + col].into(), &input);
        let memory = device.upload(&input).unwrap();
        let product = |out: Output<'_>| ops::linear_wide(&stream, &matrix, memory.view(), out);
        near(in_all_forms(&device, &stream, exact.len(), product), &exact, &format!("{tokens} x {rows} x {cols}"));
    }
}

#[test]
fn a_library_multiplies_what_it_is_for_and_nothing_else() {
    const FROM: usize = 4;
    let driver = HostMachine::new(Kernels::Run, 8).with_products().driver(0, 1 << 24);
    let (device, mut random) = (driver.device(), Random::new(18));
    let stream = device.stream().unwrap();
    let mut library = ProductLibrary::new(&device, &device.driver().products().unwrap(), FROM).unwrap();
    let (tokens, rows, cols) = (6, 24, 64);
    let (weights, values) = (random.halves(rows * cols, 1.0), random.halves(tokens * cols, 2.0));
    let matrix = Matrix::bf16(&device, rows, cols, &weights).unwrap();
    let exact = reference(rows, cols, |row, col| weights[row * cols + col].into(), &values);
    let input = device.upload(&values).unwrap();
    let found = std::cell::RefCell::new(&mut library);
    let multiply = |out: Output<'_>| {
        let mut library = found.borrow_mut();
        assert!(library.multiplies(&stream, &matrix, input.view(), &out)?);
        library.linear(&stream, &matrix, input.view(), out)
    };
    near(in_all_forms(&device, &stream, exact.len(), multiply), &exact, "by the library");
    assert_eq!(driver.issued().iter().filter(|work| **work == Issued::Multiply).count(), 3);
    let mut out = poisoned::<f32>(&device, 8 * tokens * rows);
    let mut asked = |matrix: &Matrix, first: usize, tokens: usize| {
        let input = input.slice(0..tokens * matrix.cols());
        let out = Output::F32(out.slice_mut(first..first + tokens * matrix.rows()));
        library.multiplies(&stream, matrix, input, &out).unwrap()
    };
    assert!(asked(&matrix, 0, FROM) && !asked(&matrix, 0, FROM - 1));
    assert!(asked(&matrix, 4, FROM) && !asked(&matrix, 3, FROM), "results begin at 16 bytes");
    let odd = Matrix::bf16(&device, 12, cols, &weights[..12 * cols]).unwrap();
    assert!(!asked(&odd, 0, FROM), "rows of results begin at 16 bytes");
    let int4 = Matrix::grouped(&device, &random_int4(&mut random, rows, cols, Group::G64, true)).unwrap();
    assert!(!asked(&int4, 0, FROM));
    // Planned before or not, a graph holds kernels of ours alone.
    let graph = stream.capture(|| {
        assert!(!asked(&matrix, 0, FROM) && !asked(&matrix, 0, FROM + 1));
        Ok(())
    });
    graph.unwrap();
    assert!(asked(&matrix, 0, FROM + 1));
}

/// The shim's, as cuBLASLt's own.
#[test]
fn a_library_refuses_what_was_not_planned_and_what_a_graph_cannot_hold() {
    let device = HostMachine::new(Kernels::Run, 8).with_products().device(0, 1 << 20);
    let (stream, products) = (device.stream().unwrap(), device.driver().products().unwrap());
    let memory = device.upload(&[0.0_f32; 1024]).unwrap();
    let at = memory.view().pointer();
    let product = Product { tokens: 4, rows: 8, cols: 32, out: ProductOutput::F32 };
    let multiply = |out: DevicePointer| products.multiply(&product, [at, at.plus(1024), out], at, stream.handle());
    let refused = |result: Result<(), DriverError>, why: &str| {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(why), "{error}");
    };
    refused(multiply(at.plus(2048)), "nothing was planned");
    refused(stream.capture(|| products.plan(&product).map(drop)).map(drop), "while a stream is captured");
    assert!(products.plan(&product).unwrap());
    refused(multiply(at.plus(2056)), "aligned to 16 bytes");
    refused(stream.capture(|| multiply(at.plus(2048))).map(drop), "while a stream is captured");
    let none = HostMachine::new(Kernels::Run, 8).device(0, 1 << 20);
    refused(none.driver().products().map(drop), "no library for products");
}

#[test]
fn a_token_gives_the_same_in_any_batch() {
    let mut random = Random::new(6);
    let (device, stream) = device(1);
    let (rows, cols) = (40, 640);
    let matrices = [
        Matrix::bf16(&device, rows, cols, &random.halves(rows * cols, 1.0)).unwrap(),
        Matrix::grouped(&device, &random_int4(&mut random, rows, cols, Group::G64, false)).unwrap(),
        Matrix::eight_bits(
            &device,
            EightBits::Int8,
            [rows, cols],
            128,
            &vec![77; rows * cols],
            &random.values(rows * 5, 1.0),
        )
        .unwrap(),
    ];
    for matrix in &matrices {
        gives_a_token_the_same_in_any_batch(&device, &stream, matrix, &mut random);
    }
    let (kind, cols) = (WeightType::Q5_1, 640);
    let five = Grouped::read(kind, rows, cols, &five_bits(&mut random, kind, rows, cols)).unwrap().unwrap();
    let five = Matrix::grouped(&device, &five).unwrap();
    gives_a_token_the_same_in_any_batch(&device, &stream, &five, &mut random);
    for kind in Superblock::ALL {
        let (rows, cols) = (24, 2560);
        let matrix = Superblocks::read(kind, rows, cols, &superblocks(&mut random, kind, rows, cols)).unwrap();
        let matrix = Matrix::superblocks(&device, &matrix).unwrap();
        gives_a_token_the_same_in_any_batch(&device, &stream, &matrix, &mut random);
    }
}

fn gives_a_token_the_same_in_any_batch(device: &Device, stream: &Stream, matrix: &Matrix, random: &mut Random) {
    let (tokens, rows, cols) = (70, matrix.rows(), matrix.cols());
    let input = device.upload(&random.halves(tokens * cols, 2.0)).unwrap();
    let product = |tokens: Range<usize>| {
        let mut out = poisoned::<f32>(device, tokens.len() * rows);
        let input = input.slice(tokens.start * cols..tokens.end * cols);
        ops::linear(stream, matrix, input, Output::F32(out.view_mut())).unwrap();
        out.read(stream).unwrap()
    };
    same_in_any_batch(tokens, rows, product, [37..38, 37..42, 30..38, 25..38, 20..50]);
}

#[test]
fn files_of_two_to_five_bits_keep_their_values() {
    let mut random = Random::new(7);
    let pool = Pool::new(1).unwrap();
    let (rows, cols) = (3, 512);
    use WeightType::{
        I2G32, I2G64, I2G128, I3G32, I3G64, I3G128, I4G64, I4G128, Q4_0, Q4_1, Q5_0, Q5_1, S4G64, S4G128,
    };
    for kind in [I2G32, I2G64, I2G128, I3G32, I3G64, I3G128, Q4_0, Q4_1, I4G64, I4G128, S4G64, S4G128, Q5_0, Q5_1] {
        let blocks = rows * cols / kind.block_elements();
        let mut bytes = Vec::new();
        for _ in 0..blocks {
            let mut block: Vec<u8> = (0..kind.block_bytes()).map(|_| random.next() as u8).collect();
            block[..2].copy_from_slice(&f16::from_f32(random.value(0.1)).to_le_bytes());
            block[2..4].copy_from_slice(&f16::from_f32(random.value(0.1)).to_le_bytes());
            bytes.extend(block);
        }
        let int4 = Grouped::read(kind, rows, cols, &bytes).unwrap().unwrap();
        let exact = on_the_cpu(&pool, kind, [rows, cols], &bytes);
        let found: Vec<f64> = (0..rows * cols).map(|i| int4.value(i / cols, i % cols)).collect();
        let error = relative_error(&found, &exact);
        assert!(error <= 1e-7, "{}: {error}", kind.name());
    }
}

/// A file tensor's values as the CPU's kernels have them.
fn on_the_cpu(pool: &Pool, kind: WeightType, [rows, cols]: [usize; 2], bytes: &[u8]) -> Vec<f64> {
    let packed = PackedMatrix::pack(pool, kind, rows, cols, bytes).unwrap();
    let (mut exact, mut row) = (Vec::new(), vec![0.0; cols]);
    for index in 0..rows {
        packed.dequantize_row(index, &mut row);
        exact.extend(row.iter().map(|&value| f64::from(value)));
    }
    exact
}

#[test]
fn files_of_superblocks_are_read_as_they_are() {
    let mut random = Random::new(9);
    let pool = Pool::new(1).unwrap();
    let (rows, cols) = (3, 512);
    for kind in Superblock::ALL {
        let bytes = superblocks(&mut random, kind, rows, cols);
        let read = Superblocks::read(kind, rows, cols, &bytes).unwrap();
        let found: Vec<f64> = (0..rows * cols).map(|i| read.value(i / cols, i % cols)).collect();
        let error = relative_error(&found, &on_the_cpu(&pool, kind.weight_type(), [rows, cols], &bytes));
        assert!(error <= 1e-6, "{kind:?}: {error}");
        assert_eq!(Superblock::of(kind.weight_type()), Some(kind));
        assert!(Superblocks::read(kind, rows, cols, &bytes[1..]).is_err());
        assert!(Superblocks::read(kind, 2 * rows, cols / 2 + 128, &bytes).is_err());
    }
}

#[test]
fn any_file_type_becomes_a_matrix() {
    let mut random = Random::new(8);
    let pool = Pool::new(1).unwrap();
    let (device, stream) = device(2);
    let (rows, cols) = (9, 256);
    for kind in WeightType::ALL {
        let blocks = rows * cols / kind.block_elements();
        let mut bytes = Vec::new();
        for _ in 0..blocks {
            let mut block: Vec<u8> = (0..kind.block_bytes()).map(|_| random.next() as u8 & 0x3f).collect();
            if kind == WeightType::MXFP4 {
                block[0] = 127;
            }
            bytes.extend(block);
        }
        let packed = PackedMatrix::pack(&pool, kind, rows, cols, &bytes).unwrap();
        let mut values = vec![0.0; rows * cols];
        values.chunks_mut(cols).enumerate().for_each(|(row, out)| packed.dequantize_row(row, out));
        let matrix = Matrix::load(&device, &pool, kind, rows, cols, &bytes).unwrap();
        assert_eq!(matrix.bytes() as u64, Matrix::bytes_of(kind, rows, cols), "{}", kind.name());
        let input = random.halves(cols, 1.0);
        let mut out = poisoned::<f32>(&device, rows);
        ops::linear(&stream, &matrix, device.upload(&input).unwrap().view(), Output::F32(out.view_mut())).unwrap();
        let exact = reference(rows, cols, |row, col| values[row * cols + col].into(), &input);
        let error = relative_error(&out.read(&stream).unwrap(), &exact);
        // Of values that become bytes, half a step of which is 0.4 % of the largest.
        let are_rounded = kind.numbers().is_some() || matches!(kind, WeightType::U8G32 | WeightType::U8G64);
        let bound = if are_rounded { 1e-2 } else { 6e-3 };
        assert!(error <= bound, "{}: {error}", kind.name());
    }
}

/// What neighbours of one type, or of several, give is what each gives, side by side.
#[test]
fn matrices_of_several_types_are_multiplied_as_one() {
    let mut random = Random::new(22);
    let pool = Pool::new(1).unwrap();
    let (device, stream) = device(3);
    let cols = 512;
    let q8_0 = |random: &mut Random, rows: usize| (WeightType::Q8_0, rows, q8_0(random, rows, cols));
    let q6k = |random: &mut Random, rows| (WeightType::Q6K, rows, superblocks(random, Superblock::Q6K, rows, cols));
    for (tokens, tensors, stays) in [
        (1, vec![q8_0(&mut random, 24), q8_0(&mut random, 16), q6k(&mut random, 40)], true),
        (5, vec![q6k(&mut random, 8), q8_0(&mut random, 17 + 7), q6k(&mut random, 16)], true),
        (70, vec![q6k(&mut random, 16), q8_0(&mut random, 64)], true),
        (3, vec![q8_0(&mut random, 20), q6k(&mut random, 16)], false),
    ] {
        let views: Vec<_> = tensors.iter().map(|(kind, rows, bytes)| (*kind, *rows, &bytes[..])).collect();
        let matrix = Matrix::stack_types(&device, &pool, cols, &views).unwrap();
        let exact: Vec<f64> =
            views.iter().flat_map(|&(kind, rows, bytes)| on_the_cpu(&pool, kind, [rows, cols], bytes)).collect();
        assert_eq!((matrix.rows(), matrix.bytes() < 2 * exact.len()), (exact.len() / cols, stays));
        if stays {
            let input = random.halves(tokens * cols, 2.0);
            let exact = reference(matrix.rows(), cols, |row, col| exact[row * cols + col], &input);
            check(&device, &stream, &matrix, &input, &exact, &format!("{tokens} tokens"));
        }
    }
}

#[test]
fn a_matrix_of_odd_columns_is_refused() {
    let (device, _) = device(0);
    let refused = Matrix::bf16(&device, 1, 40, &[bf16::ZERO; 40]).unwrap_err();
    assert!(matches!(refused, LoadError::Columns { cols: 40 }), "{refused}");
}
