//! Checkpoints that other tools quantized, against candle on the same weights dequantized by their definitions.

use crate::common::hub::{CHUNK, Family, config, llama_oracle, tokens};
use crate::common::oracle::{compare, our_logits, our_logits_with};
use crate::common::tiny::Random;
use half::f16;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_model::{ActivationType, LoadOptions, Quantization, build};

/// A matrix `[rows, cols]`: value = scale · (code - zero).
struct Codes {
    rows: usize,
    cols: usize,
    group: usize,
    /// The group of every column.
    groups_of: Vec<usize>,
    /// `[row][col]`.
    codes: Vec<i32>,
    /// `[row][group]`.
    zeros: Vec<i32>,
    /// `[row][group]`, exact in f16.
    scales: Vec<f32>,
}

/// A tool's layout.
struct Tool {
    name: &'static str,
    config: Value,
    /// Inputs that share a scale; 0 for all.
    group: usize,
    /// Groups lie scattered over the inputs.
    scattered: bool,
    /// Draws a code.
    code: fn(&mut Random) -> i32,
    /// Draws a zero point.
    zero: fn(&mut Random) -> i32,
    write: fn(SafetensorsBuilder, &str, &Codes) -> SafetensorsBuilder,
    /// The type it is loaded as.
    kind: &'static str,
}

/// The tool that rounds inputs, too.
pub const ROUNDED: &str = "compressed-tensors 8 bits, inputs too";
/// The one that has inputs in an order of their own.
pub const SORTED: &str = "gptq with desc_act";

fn four_bits(random: &mut Random) -> i32 {
    (random.bits() % 16) as i32
}

/// Four bits as the first version of GPTQ lays them out.
fn of_gptq(name: &'static str, config: Value, group: usize, kind: &'static str) -> Tool {
    Tool { name, config, group, scattered: false, code: four_bits, zero: four_bits, write: write_gptq::<4, 1>, kind }
}

/// Signed bytes with a scale for each output.
fn by_row(name: &'static str, config: Value) -> Tool {
    Tool {
        name,
        config,
        group: 0,
        scattered: false,
        code: |random| (random.bits() % 255) as i32 - 127,
        zero: |_| 0,
        write: write_bytes::<true>,
        kind: "int8_g128",
    }
}

/// The same, with inputs rounded to bytes by token.
fn rounding(mut config: Value) -> Value {
    config["config_groups"]["group_0"]["input_activations"] =
        json!({"num_bits": 8, "type": "int", "strategy": "token", "dynamic": true, "symmetric": true});
    config
}

fn tools() -> Vec<Tool> {
    let gptq = |group: i64, format: &str| json!({"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": false, "sym": false, "checkpoint_format": format});
    let packed = |bits: u32, group: Value, strategy: &str, format: &str| {
        let weights =
            json!({"num_bits": bits, "group_size": group, "strategy": strategy, "symmetric": true, "type": "int"});
        json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}})
    };
    vec![
        of_gptq("gptq 128", gptq(128, "gptq"), 128, "int4_g128"),
        of_gptq(
            "auto-round",
            json!({"quant_method": "auto-round", "bits": 4, "group_size": 64, "sym": false, "data_type": "int", "packing_format": "auto_round:auto_gptq"}),
            64,
            "int4_g64",
        ),
        Tool {
            name: "gptq v2, 64",
            config: gptq(64, "gptq_v2"),
            group: 64,
            scattered: false,
            code: four_bits,
            zero: four_bits,
            write: write_gptq::<4, 0>,
            kind: "int4_g64",
        },
        // Symmetric, and not all tools store that less one.
        Tool {
            name: "gptq, symmetric",
            config: json!({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": true, "checkpoint_format": "gptq"}),
            group: 64,
            scattered: false,
            code: four_bits,
            zero: |_| 8,
            write: write_gptq::<4, 0>,
            kind: "int4_g64",
        },
        of_gptq("gptq, rows", gptq(-1, "gptq"), 0, "int4_g128"),
        Tool {
            name: "awq 32",
            config: json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm"}),
            group: 32,
            scattered: false,
            code: four_bits,
            zero: four_bits,
            write: write_awq,
            kind: "q4_1",
        },
        Tool {
            name: "compressed-tensors 4 bits",
            config: packed(4, json!(128), "group", "pack-quantized"),
            group: 128,
            scattered: false,
            code: four_bits,
            zero: |_| 8,
            write: write_packed::<4, true>,
            kind: "int4_g128",
        },
        by_row("compressed-tensors 8 bits", packed(8, Value::Null, "channel", "int-quantized")),
        by_row(ROUNDED, rounding(packed(8, Value::Null, "channel", "int-quantized"))),
        Tool {
            name: "gptq of 8 bits",
            config: gptq_bits(8),
            group: 64,
            scattered: false,
            code: |random| random.bits() as i32 & 255,
            zero: |_| 128,
            write: write_gptq::<8, 1>,
            kind: "q8_0",
        },
        Tool {
            name: "gptq of 8 bits, any zero point",
            config: gptq_bits(8),
            group: 64,
            scattered: true,
            code: |random| random.bits() as i32 & 255,
            zero: |random| 100 + (random.bits() & 63) as i32,
            write: write_gptq::<8, 1>,
            kind: "q8_0",
        },
        Tool {
            name: "gptq of 3 bits",
            config: gptq_bits(3),
            group: 64,
            scattered: false,
            code: |random| random.bits() as i32 & 7,
            zero: |random| random.bits() as i32 & 7,
            write: write_gptq::<3, 1>,
            kind: "int4_g64",
        },
        Tool {
            name: "gptq of 2 bits",
            config: gptq_bits(2),
            group: 64,
            scattered: false,
            code: |random| random.bits() as i32 & 3,
            zero: |random| random.bits() as i32 & 3,
            write: write_gptq::<2, 1>,
            kind: "int4_g64",
        },
        Tool {
            name: SORTED,
            config: gptq(64, "gptq"),
            group: 64,
            scattered: true,
            code: four_bits,
            zero: four_bits,
            write: write_gptq::<4, 1>,
            kind: "int4_g64",
        },
        Tool {
            name: "compressed-tensors 4 bits, asymmetric",
            config: asymmetric(4, json!(32), "group", "pack-quantized"),
            group: 32,
            scattered: false,
            code: four_bits,
            zero: four_bits,
            write: write_packed::<4, false>,
            kind: "q4_1",
        },
        Tool {
            name: "compressed-tensors packed 8 bits",
            config: packed(8, json!(128), "group", "pack-quantized"),
            group: 128,
            scattered: false,
            code: |random| random.bits() as i32 & 255,
            zero: |_| 128,
            write: write_packed::<8, true>,
            kind: "int8_g128",
        },
        Tool {
            name: "compressed-tensors 8 bits, asymmetric groups",
            config: asymmetric(8, json!(64), "group", "int-quantized"),
            group: 64,
            scattered: false,
            code: |random| (random.bits() & 255) as i32 - 128,
            zero: |random| (random.bits() & 31) as i32 - 16,
            write: write_bytes::<false>,
            kind: "q8_0",
        },
    ]
}

fn gptq_bits(bits: u32) -> Value {
    json!({"quant_method": "gptq", "bits": bits, "group_size": 64, "desc_act": true, "checkpoint_format": "gptq"})
}

fn asymmetric(bits: u32, group: Value, strategy: &str, format: &str) -> Value {
    let weights =
        json!({"num_bits": bits, "group_size": group, "strategy": strategy, "symmetric": false, "type": "int"});
    json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}})
}

/// Values that a tool writes as floats of eight bits or as entries of a table: the values it stands for, and the file.
type Coded = (Vec<f32>, SafetensorsBuilder);

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

fn write_float8<const HIGH: usize, const WIDE: usize, const INVERSE: bool>(
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
pub fn coded_checkpoints() -> impl Iterator<Item = (&'static str, bool, Checkpoint, Vec<u8>)> {
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
        let (packed, plain) = coded_files(&family, write);
        (case, rounds, family.open(&packed), plain)
    })
}

/// A checkpoint as a tool writes it, and the same values in f32.
fn coded_files(family: &Family, write: WriteCoded) -> (Vec<u8>, Vec<u8>) {
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

/// What is converted as it is loaded: the error left is that of int8 weights and activations.
#[test]
fn floats_of_eight_bits_and_tables_become_integers() {
    for (case, _, checkpoint, plain) in coded_checkpoints() {
        let found = our_logits(&checkpoint, &tokens(), CHUNK);
        let agreement = compare(&family(&Value::Null).candle_logits(plain), &found);
        println!("{case}: {agreement}");
        assert!(agreement.relative_error() <= 0.05, "{case}: {agreement}");
        assert_eq!(build(&checkpoint, &LoadOptions::default()).unwrap().weight_type, "q8_0", "{case}");
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
    let (_, _, checkpoint, _) = coded_checkpoints().next().unwrap();
    let int8 = LoadOptions { quantization: Some(Quantization::INT8), ..LoadOptions::default() };
    let refusal = build(&checkpoint, &int8).map(drop).unwrap_err().to_string();
    assert!(refusal.contains("cannot be quantized to int8"), "{refusal}");
}

/// A stream of codes, each of so many bits, in little-endian words.
fn stream(bits: usize, codes: impl Iterator<Item = i32>) -> Vec<u8> {
    let mut bytes = Vec::new();
    let (mut pending, mut count) = (0_u64, 0);
    for code in codes {
        pending |= (code as u64 & ((1 << bits) - 1)) << count;
        count += bits;
        while count >= 8 {
            bytes.push(pending as u8);
            pending >>= 8;
            count -= 8;
        }
    }
    assert_eq!(count, 0, "whole words");
    bytes
}

/// Eight nibbles to a word, the first in the lowest bits.
fn words(nibbles: impl Iterator<Item = i32>) -> Vec<u8> {
    stream(4, nibbles)
}

/// Words less a number: places of 0 borrow from those above.
fn less(number: u32, words: &[u8]) -> Vec<u8> {
    let less = |word: &[u8; 4]| u32::from_le_bytes(*word).wrapping_sub(number).to_le_bytes();
    words.as_chunks().0.iter().flat_map(less).collect()
}

/// Rows of words to columns of them: `[rows][words]` to `[words][rows]`.
fn transposed(rows: usize, words: &[u8]) -> Vec<u8> {
    let per_row = words.len() / 4 / rows;
    let word = |row: usize, at: usize| &words[4 * (row * per_row + at)..][..4];
    (0..per_row).flat_map(|at| (0..rows).flat_map(move |row| word(row, at).to_vec())).collect()
}

impl Codes {
    fn groups(&self) -> usize {
        self.cols / self.group
    }

    /// `[group][row]` in f16, as GPTQ and AWQ have them.
    fn scales_by_group(&self) -> Vec<u8> {
        let order = (0..self.groups()).flat_map(|group| (0..self.rows).map(move |row| (row, group)));
        order.flat_map(|(row, group)| f16::from_f32(self.scales[row * self.groups() + group]).to_le_bytes()).collect()
    }

    fn values(&self) -> Vec<f32> {
        let value = |i: usize| {
            let group = i / self.cols * self.groups() + self.groups_of[i % self.cols];
            self.scales[group] * (self.codes[i] - self.zeros[group]) as f32
        };
        (0..self.rows * self.cols).map(value).collect()
    }
}

fn write_gptq<const BITS: usize, const ZERO_OFFSET: u32>(
    file: SafetensorsBuilder,
    prefix: &str,
    m: &Codes,
) -> SafetensorsBuilder {
    let (rows, cols, groups) = (m.rows, m.cols, m.groups());
    let codes = transposed(rows, &stream(BITS, m.codes.iter().copied()));
    let zeros = (0..groups).flat_map(|group| (0..rows).map(move |row| (row, group)));
    let zeros = zeros.map(|(row, group)| m.zeros[row * groups + group]);
    let zeros = match BITS {
        3 => stream(BITS, zeros.map(|zero| zero - ZERO_OFFSET as i32)),
        _ => less(ZERO_OFFSET * (u32::MAX / ((1 << BITS) - 1)), &stream(BITS, zeros)),
    };
    let order: Vec<u8> = m.groups_of.iter().flat_map(|group| (*group as i32).to_le_bytes()).collect();
    let [rows, cols, groups, bits] = [rows, cols, groups, BITS].map(|size| size as u64);
    // Its first tool wrote biases of zeros, too.
    file.tensor(&format!("{prefix}.bias"), "F16", &[rows], &vec![0; 2 * m.rows])
        .tensor(&format!("{prefix}.qweight"), "I32", &[cols * bits / 32, rows], &codes)
        .tensor(&format!("{prefix}.qzeros"), "I32", &[groups, rows * bits / 32], &zeros)
        .tensor(&format!("{prefix}.scales"), "F16", &[groups, rows], &m.scales_by_group())
        .tensor(&format!("{prefix}.g_idx"), "I32", &[cols], &order)
}

fn write_awq(file: SafetensorsBuilder, prefix: &str, m: &Codes) -> SafetensorsBuilder {
    const ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];
    let (rows, cols, groups) = (m.rows, m.cols, m.groups());
    let outputs = || (0..rows / 8).flat_map(|word| ORDER.map(|i| 8 * word + i));
    let codes = words(
        (0..cols).flat_map(|col| outputs().map(move |row| (row, col))).map(|(row, col)| m.codes[row * cols + col]),
    );
    let zeros = (0..groups).flat_map(|group| outputs().map(move |row| (row, group)));
    let zeros = words(zeros.map(|(row, group)| m.zeros[row * groups + group]));
    let [rows, cols, groups] = [rows, cols, groups].map(|size| size as u64);
    file.tensor(&format!("{prefix}.qweight"), "I32", &[cols, rows / 8], &codes)
        .tensor(&format!("{prefix}.qzeros"), "I32", &[groups, rows / 8], &zeros)
        .tensor(&format!("{prefix}.scales"), "F16", &[groups, rows], &m.scales_by_group())
}

fn write_packed<const BITS: usize, const SYMMETRIC: bool>(
    file: SafetensorsBuilder,
    prefix: &str,
    m: &Codes,
) -> SafetensorsBuilder {
    let scales: Vec<u8> = m.scales.iter().flat_map(|scale| f16::from_f32(*scale).to_le_bytes()).collect();
    let groups = m.groups();
    let by_group = (0..groups).flat_map(|group| (0..m.rows).map(move |row| (row, group)));
    let zeros = stream(BITS, by_group.map(|(row, group)| m.zeros[row * groups + group]));
    let zeros = transposed(groups, &zeros);
    let [rows, cols, groups, bits] = [m.rows, m.cols, groups, BITS].map(|size| size as u64);
    let shape: Vec<u8> = [rows, cols].iter().flat_map(|size| size.to_le_bytes()).collect();
    let codes = stream(BITS, m.codes.iter().copied());
    let file = file
        .tensor(&format!("{prefix}.weight_packed"), "I32", &[rows, cols * bits / 32], &codes)
        .tensor(&format!("{prefix}.weight_scale"), "F16", &[rows, groups], &scales)
        .tensor(&format!("{prefix}.weight_shape"), "I64", &[2], &shape);
    match SYMMETRIC {
        true => file,
        false => file.tensor(&format!("{prefix}.weight_zero_point"), "I32", &[rows * bits / 32, groups], &zeros),
    }
}

fn write_bytes<const SYMMETRIC: bool>(file: SafetensorsBuilder, prefix: &str, m: &Codes) -> SafetensorsBuilder {
    let bytes = |codes: &[i32]| codes.iter().map(|code| *code as i8 as u8).collect::<Vec<u8>>();
    let [rows, cols, groups] = [m.rows, m.cols, m.groups()].map(|size| size as u64);
    let file = file
        .tensor(&format!("{prefix}.weight"), "I8", &[rows, cols], &bytes(&m.codes))
        .tensor_f32(&format!("{prefix}.weight_scale"), &[rows, groups], &m.scales)
        .tensor_f32(&format!("{prefix}.input_scale"), &[1], &[0.25]);
    match SYMMETRIC {
        true => file,
        false => file.tensor(&format!("{prefix}.weight_zero_point"), "I8", &[rows, groups], &bytes(&m.zeros)),
    }
}

fn family(quantization: &Value) -> Family {
    let more = json!({"intermediate_size": 256, "quantization_config": quantization});
    Family { config: config("llama", more), biases: false, head_norms: false, oracle: llama_oracle }
}

impl Tool {
    /// The checkpoint as the tool writes it, and the same weights in f32.
    fn files(&self) -> (Vec<u8>, Vec<u8>) {
        let (mut packed, mut plain) = (SafetensorsBuilder::new(), SafetensorsBuilder::new());
        let mut random = Random(11);
        for (name, shape, values) in family(&self.config).tensors() {
            match name.strip_suffix("_proj.weight") {
                None => {
                    packed = packed.tensor_f32(&name, &shape, &values);
                    plain = plain.tensor_f32(&name, &shape, &values);
                }
                Some(prefix) => {
                    let codes = self.draw(shape[0] as usize, shape[1] as usize, &mut random);
                    packed = (self.write)(packed, &format!("{prefix}_proj"), &codes);
                    plain = plain.tensor_f32(&name, &shape, &codes.values());
                }
            }
        }
        (packed.build(), plain.build())
    }

    fn draw(&self, rows: usize, cols: usize, random: &mut Random) -> Codes {
        let group = if self.group == 0 { cols } else { self.group };
        let groups = rows * cols / group;
        let codes: Vec<i32> = (0..rows * cols).map(|_| (self.code)(random)).collect();
        let spread = codes.iter().map(|code| f64::from(*code).powi(2)).sum::<f64>() / codes.len() as f64;
        let deviation = 1.0 / (cols as f32).sqrt() / spread.sqrt() as f32;
        let scale = |random: &mut Random| f16::from_f32(deviation * (0.5 + random.uniform())).to_f32();
        let scales = (0..groups).map(|_| scale(random)).collect();
        let per_row = cols / group;
        let groups_of = (0..cols).map(|col| if self.scattered { col % per_row } else { col / group }).collect();
        let zeros = (0..groups).map(|_| (self.zero)(random)).collect();
        Codes { rows, cols, group, groups_of, codes, zeros, scales }
    }
}

/// A checkpoint of every tool, with what it is.
pub fn checkpoints() -> impl Iterator<Item = (&'static str, Checkpoint)> {
    tools().into_iter().map(|tool| (tool.name, family(&tool.config).open(&tool.files().0)))
}

/// That of the tool of this name.
pub fn checkpoint(name: &str) -> Checkpoint {
    checkpoints().find(|(of, _)| *of == name).unwrap().1
}

/// The error left is that of int8 activations.
#[test]
fn every_tools_checkpoint_computes_its_values() {
    for tool in tools() {
        let (packed, plain) = tool.files();
        let family = family(&tool.config);
        let checkpoint = family.open(&packed);
        let agreement = compare(&family.candle_logits(plain), &our_logits(&checkpoint, &tokens(), CHUNK));
        println!("{}: {agreement}", tool.name);
        assert!(agreement.relative_error() <= 0.035, "{}: {agreement}", tool.name);
        assert_eq!(build(&checkpoint, &LoadOptions::default()).unwrap().weight_type, tool.kind, "{}", tool.name);
    }
}

#[test]
fn scales_that_were_measured_for_a_cache_are_not_needed() {
    let family = family(&Value::Null);
    let scaled = ["k_scale", "v_scale"].iter().fold(SafetensorsBuilder::new(), |file, part| {
        file.tensor_f32(&format!("model.layers.0.self_attn.{part}"), &[1], &[0.5])
    });
    let file = family
        .tensors()
        .into_iter()
        .fold(scaled, |file, (name, shape, values)| file.tensor_f32(&name, &shape, &values));
    build(&family.open(&file.build()), &LoadOptions::default()).unwrap();
}

#[test]
fn parts_that_do_not_make_a_matrix_are_refused_by_name() {
    let gptq = &tools()[0];
    let family = family(&gptq.config);
    let refusal = |change: fn(SafetensorsBuilder, &str, &Codes) -> SafetensorsBuilder| {
        let tool = Tool { write: change, config: gptq.config.clone(), ..tools().remove(0) };
        build(&family.open(&tool.files().0), &LoadOptions::default()).map(drop).unwrap_err().to_string()
    };
    let no_zeros = refusal(|file, prefix, m| {
        let codes = vec![0; m.rows * m.cols / 2];
        file.tensor(&format!("{prefix}.qweight"), "I32", &[m.cols as u64 / 8, m.rows as u64], &codes)
    });
    assert!(no_zeros.contains("qzeros\" is missing"), "{no_zeros}");
    let reordered = refusal(|file, prefix, m| {
        let file = write_gptq::<4, 1>(file, prefix, m).without(&format!("{prefix}.g_idx"));
        let order: Vec<u8> = (0..m.cols).flat_map(|col| i32::from(col % 3 == 1).to_le_bytes()).collect();
        file.tensor(&format!("{prefix}.g_idx"), "I32", &[m.cols as u64], &order)
    });
    assert!(reordered.contains("does not give every group 128 inputs"), "{reordered}");
    let biased = refusal(|file, prefix, m| {
        let bias = [vec![0; 2 * m.rows - 1], vec![1]].concat();
        write_gptq::<4, 1>(file, prefix, m).without(&format!("{prefix}.bias")).tensor(
            &format!("{prefix}.bias"),
            "F16",
            &[m.rows as u64],
            &bias,
        )
    });
    assert!(biased.contains("_proj.bias\" belongs to no supported decoder"), "{biased}");
    let large = refusal(|file, prefix, m| {
        let scales = [f16::from_f32(4096.0), f16::ONE].into_iter().cycle().take(m.rows * m.groups());
        let scales: Vec<u8> = scales.flat_map(f16::to_le_bytes).collect();
        let name = format!("{prefix}.scales");
        let shape = [m.groups() as u64, m.rows as u64];
        write_gptq::<4, 1>(file, prefix, m).without(&name).tensor(&name, "F16", &shape, &scales)
    });
    assert!(large.contains("a scale is 4096; with 4 bits they are at most 4094"), "{large}");
    let transposed = refusal(|file, prefix, m| {
        let file = write_gptq::<4, 1>(file, prefix, m).without(&format!("{prefix}.qweight"));
        let codes = vec![0; m.rows * m.cols / 2];
        file.tensor(&format!("{prefix}.qweight"), "I32", &[m.cols as u64, m.rows as u64 / 8], &codes)
    });
    assert!(transposed.contains("it should be i32 ["), "{transposed}");
}
