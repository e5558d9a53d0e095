//! Checkpoints of eight-bit floats and of tables' entries, against candle on the same values.

use crate::common::hub::{CHUNK, Family, tokens};
use crate::common::oracle::{compare, our_logits, our_logits_with};
use crate::common::tiny::Random;
use crate::packed::family;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_model::{ActivationType, LoadOptions, Quantization, build};

/// Values that a tool writes as floats of eight bits or as entries of a table: the values it stands for, and the file.
pub type Coded = (Vec<f32>, SafetensorsBuilder);

/// `[rows, cols]` of random e4m3 codes, none of which is no number.
fn float8(random: &mut Random, count: usize) -> (Vec<u8>, Vec<f32>) {
    let codes: Vec<u8> = (0..count).map(|_| (random.bits() % 0x50) as u8 | (random.bits() & 128) as u8).collect();
    let value = |code: &u8| reference_e4m3(*code);
    let values = codes.iter().map(value).collect();
    (codes, values)
}

/// By the table of the format's paper: sign, four bits of exponent with bias 7, three of mantissa.
fn reference_e4m3(code: u8) -> f32 {
    let sign = if code >= 128 { -1.0 } else { 1.0 };
    let (exponent, mantissa) = (i32::from(code >> 3 & 15), f32::from(code & 7) / 8.0);
    sign * if exponent == 0 { mantissa * 2_f32.powi(-6) } else { (1.0 + mantissa) * 2_f32.powi(exponent - 7) }
}

pub fn write_float8<const HIGH: usize, const WIDE: usize, const INVERSE: bool>(
    file: SafetensorsBuilder,
    name: &str,
    [rows, cols]: [usize; 2],
    random: &mut Random,
) -> Coded {
    let (high, wide) = (HIGH.min(rows), WIDE.min(cols));
    let (down, across) = (rows.div_ceil(high), cols.div_ceil(wide));
    let (codes, mut values) = float8(random, rows * cols);
    let spread = values.iter().map(|value| value * value).sum::<f32>() / values.len() as f32;
    let deviation = 1.0 / (cols as f32).sqrt() / spread.sqrt();
    let scales: Vec<f32> = (0..down * across).map(|_| deviation * (0.5 + random.uniform())).collect();
    for (i, value) in values.iter_mut().enumerate() {
        *value *= scales[i / cols / high * across + i % cols / wide];
    }
    let suffix = if INVERSE { "_scale_inv" } else { "_scale" };
    let shape = if down * across == 1 { vec![] } else { vec![down as u64, across as u64] };
    let file = file.tensor(name, "F8_E4M3", &[rows as u64, cols as u64], &codes);
    (values, file.tensor_f32(&format!("{name}{suffix}"), &shape, &scales))
}

/// The values of NF4 (Dettmers et al. 2023, appendix E), and of bitsandbytes' FP4, whose upper half is the lower one negated.
const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];
const FP4: [f32; 8] = [0.0, 0.005_208_333_5, 0.666_666_7, 1.0, 0.333_333_34, 0.5, 0.166_666_67, 0.25];

/// Entries of a table as bitsandbytes writes them, with scales that are quantized themselves or not.
fn write_bnb4<const FLOAT: bool, const NESTED: bool>(
    file: SafetensorsBuilder,
    name: &str,
    [rows, cols]: [usize; 2],
    random: &mut Random,
) -> Coded {
    let (kind, table) = match FLOAT {
        true => ("fp4", [FP4, FP4.map(|value| -value)].concat()),
        false => ("nf4", NF4.to_vec()),
    };
    let count = rows * cols;
    let codes: Vec<u8> = (0..count).map(|_| (random.bits() & 15) as u8).collect();
    let packed: Vec<u8> = codes.chunks(2).map(|pair| pair[0] << 4 | pair[1]).collect();
    let deviation = 2.0 / (cols as f32).sqrt();
    let mut file = file.tensor(name, "U8", &[count as u64 / 2, 1], &packed);
    file = file.tensor_f32(&format!("{name}.quant_map"), &[16], &table);
    let blocks = count / 64;
    let mut state = json!({"quant_type": kind, "blocksize": 64, "dtype": "bfloat16", "shape": [rows, cols]});
    let scales: Vec<f32> = if NESTED {
        let nested: Vec<f32> = (0..256).map(|i| (i as f32 - 127.0) / 128.0).collect();
        let absmax: Vec<u8> = (0..blocks).map(|_| random.bits() as u8).collect();
        let largest: Vec<f32> = (0..blocks.div_ceil(256)).map(|_| deviation * (0.2 + 0.2 * random.uniform())).collect();
        state["nested_blocksize"] = 256.into();
        state["nested_offset"] = deviation.into();
        file = file
            .tensor(&format!("{name}.absmax"), "U8", &[blocks as u64], &absmax)
            .tensor_f32(&format!("{name}.nested_absmax"), &[largest.len() as u64], &largest)
            .tensor_f32(&format!("{name}.nested_quant_map"), &[256], &nested);
        (0..blocks).map(|i| nested[usize::from(absmax[i])] * largest[i / 256] + deviation).collect()
    } else {
        let scales: Vec<f32> = (0..blocks).map(|_| deviation * (0.5 + random.uniform())).collect();
        file = file.tensor_f32(&format!("{name}.absmax"), &[blocks as u64], &scales);
        scales
    };
    let state = state.to_string();
    let state_name = format!("{name}.quant_state.bitsandbytes__{kind}");
    file = file.tensor(&state_name, "U8", &[state.len() as u64], state.as_bytes());
    let value = |i: usize| table[usize::from(codes[i])] * scales[i / 64];
    ((0..count).map(value).collect(), file)
}

fn write_bnb8(file: SafetensorsBuilder, name: &str, [rows, cols]: [usize; 2], random: &mut Random) -> Coded {
    let codes: Vec<i8> = (0..rows * cols).map(|_| (random.bits() % 255) as i8).collect();
    let deviation = 127.0 / 73.0 / (cols as f32).sqrt();
    let largest: Vec<f32> = (0..rows).map(|_| deviation * (0.5 + random.uniform())).collect();
    let bytes: Vec<u8> = codes.iter().map(|code| *code as u8).collect();
    let prefix = name.strip_suffix("weight").unwrap();
    let file = file
        .tensor(name, "I8", &[rows as u64, cols as u64], &bytes)
        .tensor_f32(&format!("{prefix}SCB"), &[rows as u64], &largest)
        .tensor(&format!("{prefix}weight_format"), "U8", &[], &[0]);
    ((0..codes.len()).map(|i| f32::from(codes[i]) * largest[i / cols] / 127.0).collect(), file)
}

type WriteCoded = fn(SafetensorsBuilder, &str, [usize; 2], &mut Random) -> Coded;

/// Checkpoints of values: what each is, whether it rounds inputs to eight-bit floats, too, and the same values in f32.
pub fn checkpoints() -> impl Iterator<Item = (&'static str, bool, Checkpoint, Vec<u8>)> {
    let float = |strategy: &str, inputs: Value| {
        json!({"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": {
            "weights": {"num_bits": 8, "type": "float", "strategy": strategy, "symmetric": true},
            "input_activations": inputs}}})
    };
    let inputs = json!({"num_bits": 8, "type": "float", "strategy": "token", "dynamic": true, "symmetric": true});
    let bnb4 = |kind: &str| json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": kind});
    let block = json!({"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"});
    let with = |mut config: Value, path: &str, value: Value| {
        let (object, key) = path.rsplit_once('/').unwrap();
        config.pointer_mut(object).unwrap()[key] = value;
        config
    };
    let naive = with(float("channel", Value::Null), "/format", "naive-quantized".into());
    let blocks = with(float("block", Value::Null), "/config_groups/group_0/weights/block_structure", json!([128, 128]));
    let cases: [(&str, bool, Value, WriteCoded); 12] = [
        ("fp8 by tensor", false, json!({"quant_method": "fp8"}), write_float8::<9999, 9999, false>),
        ("fp8 by output", false, float("channel", Value::Null), write_float8::<1, 9999, false>),
        ("fp8 by output, inputs too", true, float("channel", inputs), write_float8::<1, 9999, false>),
        ("fbgemm's fp8", true, json!({"quant_method": "fbgemm_fp8"}), write_float8::<1, 9999, false>),
        ("compressed-tensors fp8 by tensor", false, float("tensor", Value::Null), write_float8::<9999, 9999, false>),
        ("compressed-tensors fp8 by output, naive", false, naive, write_float8::<1, 9999, false>),
        ("compressed-tensors fp8 by block", false, blocks, write_float8::<128, 128, false>),
        ("fp8 by block, inputs too", true, block, write_float8::<128, 128, true>),
        ("bitsandbytes nf4", false, bnb4("nf4"), write_bnb4::<false, false>),
        ("bitsandbytes nf4, nested", false, bnb4("nf4"), write_bnb4::<false, true>),
        ("bitsandbytes fp4", false, bnb4("fp4"), write_bnb4::<true, false>),
        ("bitsandbytes int8", false, json!({"quant_method": "bitsandbytes", "load_in_8bit": true}), write_bnb8),
    ];
    cases.into_iter().map(|(case, rounds, quantization, write)| {
        let family = family(&quantization);
        let (packed, plain) = files(&family, write);
        (case, rounds, family.open(&packed), plain)
    })
}

/// A checkpoint as a tool writes it, and the same values in f32.
fn files(family: &Family, write: WriteCoded) -> (Vec<u8>, Vec<u8>) {
    let (mut packed, mut plain) = (SafetensorsBuilder::new(), SafetensorsBuilder::new());
    let mut random = Random(13);
    for (name, shape, values) in family.tensors() {
        if !name.ends_with("_proj.weight") {
            packed = packed.tensor_f32(&name, &shape, &values);
            plain = plain.tensor_f32(&name, &shape, &values);
            continue;
        }
        let (values, file) = write(packed, &name, [shape[0] as usize, shape[1] as usize], &mut random);
        packed = file;
        plain = plain.tensor_f32(&name, &shape, &values);
    }
    (packed.build(), plain.build())
}

/// The error left is that of int8 activations, and of floats that become integers.
#[test]
fn floats_of_eight_bits_and_other_tables_become_what_kernels_know() {
    for (case, _, checkpoint, plain) in checkpoints() {
        let found = our_logits(&checkpoint, &tokens(), CHUNK);
        let agreement = compare(&family(&Value::Null).candle_logits(plain), &found);
        println!("{case}: {agreement}");
        assert!(agreement.relative_error() <= 0.05, "{case}: {agreement}");
        let kinds = [("nf4", "nf4"), ("bitsandbytes fp4", "fp4"), ("fp8", "fp8_g64"), ("int8", "int8_g128")];
        let (_, kind) = kinds.into_iter().find(|(name, _)| case.contains(name)).unwrap();
        assert_eq!(build(&checkpoint, &LoadOptions::default()).unwrap().weight_type, kind, "{case}");
    }
}

/// Numbers are sums of two bytes, and what is left is the rounding of their largest magnitudes, and of activations, keys and
/// values, to f16 and 16 bits: 0.12 % of logits. As integers of eight bits in groups of 32 it was 2 %. Integers of eight bits stay what
/// they are.
#[test]
fn codes_of_bitsandbytes_keep_their_values() {
    let (activations, kv_data_type) = (ActivationType::Int16, KvDataType::F16);
    let options = LoadOptions { activations, kv_data_type, ..LoadOptions::default() };
    for (case, _, checkpoint, plain) in checkpoints().filter(|(case, ..)| case.contains("bitsandbytes")) {
        let found = our_logits_with(&checkpoint, &tokens(), CHUNK, &options);
        let agreement = compare(&family(&Value::Null).candle_logits(plain), &found);
        println!("{case}: {agreement}");
        assert!(agreement.relative_error() <= 2e-3, "{case}: {agreement}");
    }
}

/// A checkpoint of floats, the same made into eight-bit floats by outputs as a tool does, and those in f32.
fn made_into_float8(family: &Family) -> [Vec<u8>; 3] {
    let [mut floats, mut made, mut widened] = [(); 3].map(|()| SafetensorsBuilder::new());
    for (name, shape, values) in family.tensors() {
        floats = floats.tensor_f32(&name, &shape, &values);
        if !name.ends_with("_proj.weight") {
            made = made.tensor_f32(&name, &shape, &values);
            widened = widened.tensor_f32(&name, &shape, &values);
            continue;
        }
        let (codes, scales) = by_largest_of_rows(&values, shape[1] as usize);
        let rows = codes.chunks(shape[1] as usize).zip(&scales);
        let rounded: Vec<f32> =
            rows.flat_map(|(row, scale)| row.iter().map(move |&code| reference_e4m3(code) * scale)).collect();
        let scale = format!("{name}_scale");
        made = made.tensor(&name, "F8_E4M3", &shape, &codes).tensor_f32(&scale, &[shape[0], 1], &scales);
        widened = widened.tensor_f32(&name, &shape, &rounded);
    }
    [floats, made, widened].map(|file| file.build())
}

/// But for the smallest of each 32, which are rounded to a step of the largest. With a step of the largest value itself,
/// which all are rounded to, logits are 2.5 % apart.
#[test]
fn floats_of_eight_bits_keep_their_values() {
    let (plain, family) = (family(&Value::Null), family(&json!({"quant_method": "fbgemm_fp8"})));
    let [_, made, widened] = made_into_float8(&plain);
    let options = LoadOptions { activations: ActivationType::Int16, ..LoadOptions::default() };
    let found = our_logits_with(&family.open(&made), &tokens(), CHUNK, &options);
    let agreement = compare(&plain.candle_logits(widened), &found);
    println!("{agreement}");
    assert!(agreement.relative_error() <= 0.02, "{agreement}");
}

/// Floats that become eight-bit floats as they are loaded compute, bit for bit, what a checkpoint of them computes; and of
/// such a checkpoint that is what it asks for, as it is.
#[test]
fn floats_become_eight_bit_floats_as_a_tool_makes_them() {
    let (plain, made) = (family(&Value::Null), family(&json!({"quant_method": "fbgemm_fp8"})));
    let [floats, eight_bits, _] = made_into_float8(&plain);
    let options = LoadOptions { quantization: Some(Quantization::FP8), ..LoadOptions::default() };
    let logits = |family: &Family, file: Vec<u8>| our_logits_with(&family.open(&file), &tokens(), CHUNK, &options);
    assert_eq!(logits(&plain, floats), logits(&made, eight_bits));
}

/// The nearest e4m3, with even codes at ties, once the largest of each row is the largest of them; and scales of rows.
fn by_largest_of_rows(values: &[f32], cols: usize) -> (Vec<u8>, Vec<f32>) {
    let nearest = |value: f32| {
        let distance = |code: &u8| ((f64::from(reference_e4m3(*code)) - f64::from(value.abs())).abs(), code & 1);
        let code = (0..0x7f).min_by(|one, other| distance(one).partial_cmp(&distance(other)).unwrap()).unwrap();
        if value < 0.0 { code | 128 } else { code }
    };
    let rows = values.chunks(cols).map(|row| {
        let largest = row.iter().fold(0_f32, |largest, value| largest.max(value.abs()));
        (row.iter().map(|value| nearest(value * (448.0 / largest))).collect::<Vec<u8>>(), largest / 448.0)
    });
    let (codes, scales): (Vec<_>, Vec<_>) = rows.unzip();
    (codes.concat(), scales)
}

/// What is quantized is not quantized again.
#[test]
fn eight_bit_floats_are_quantized_to_nothing_else() {
    let (_, _, checkpoint, _) = checkpoints().next().unwrap();
    let int8 = LoadOptions { quantization: Some(Quantization::INT8), ..LoadOptions::default() };
    let refusal = build(&checkpoint, &int8).map(drop).unwrap_err().to_string();
    assert!(refusal.contains("cannot be quantized to int8"), "{refusal}");
}

/// Largest magnitudes are kept in f16.
#[test]
fn blocks_of_four_bits_that_are_too_large_are_refused() {
    let large: WriteCoded = |file, name, shape, random| {
        let (values, file) = write_bnb4::<false, false>(file, name, shape, random);
        let (absmax, blocks) = (format!("{name}.absmax"), shape[0] * shape[1] / 64);
        (values, file.without(&absmax).tensor_f32(&absmax, &[blocks as u64], &vec![70_000.0; blocks]))
    };
    let family = family(&json!({"quant_method": "bitsandbytes", "load_in_4bit": true, "bnb_4bit_quant_type": "nf4"}));
    let checkpoint = family.open(&files(&family, large).0);
    let refusal = build(&checkpoint, &LoadOptions::default()).map(drop).unwrap_err().to_string();
    assert!(refusal.contains("the largest magnitude of a block is 70000; they are at most 65504"), "{refusal}");
}
