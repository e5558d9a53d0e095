//! Checkpoints that other tools quantized, against candle on the same weights dequantized by their definitions.

#![allow(clippy::unwrap_used)] // in a test, a failed unwrap is the failure

mod common;

use common::hub::{CHUNK, Family, config, llama_oracle, tokens};
use common::oracle::{compare, our_logits};
use common::tiny::Random;
use half::f16;
use serde_json::{Value, json};
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_model::{LoadOptions, build};

/// A matrix `[rows, cols]`: value = scale · (code - zero).
struct Codes {
    rows: usize,
    cols: usize,
    group: usize,
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
    /// Draws a code.
    code: fn(&mut Random) -> i32,
    /// Draws a zero point.
    zero: fn(&mut Random) -> i32,
    write: fn(SafetensorsBuilder, &str, &Codes) -> SafetensorsBuilder,
    /// The type it is loaded as.
    kind: &'static str,
}

fn four_bits(random: &mut Random) -> i32 {
    (random.bits() % 16) as i32
}

fn tools() -> Vec<Tool> {
    let gptq = |group: i64, format: &str| json!({"quant_method": "gptq", "bits": 4, "group_size": group, "desc_act": false, "sym": false, "checkpoint_format": format});
    let packed = |bits: u32, group: Value, strategy: &str, format: &str| {
        let weights =
            json!({"num_bits": bits, "group_size": group, "strategy": strategy, "symmetric": true, "type": "int"});
        json!({"quant_method": "compressed-tensors", "format": format, "config_groups": {"group_0": {"weights": weights}}})
    };
    vec![
        Tool {
            name: "gptq 128",
            config: gptq(128, "gptq"),
            group: 128,
            code: four_bits,
            zero: |random| four_bits(random) + 1,
            write: write_gptq::<1>,
            kind: "INT4_G128",
        },
        Tool {
            name: "gptq v2, 64",
            config: gptq(64, "gptq_v2"),
            group: 64,
            code: four_bits,
            zero: four_bits,
            write: write_gptq::<0>,
            kind: "INT4_G64",
        },
        Tool {
            name: "gptq, rows",
            config: gptq(-1, "gptq"),
            group: 0,
            code: four_bits,
            zero: |random| four_bits(random) + 1,
            write: write_gptq::<1>,
            kind: "INT4_G128",
        },
        Tool {
            name: "awq 32",
            config: json!({"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": true, "version": "gemm"}),
            group: 32,
            code: four_bits,
            zero: four_bits,
            write: write_awq,
            kind: "q4_1",
        },
        Tool {
            name: "compressed-tensors 4 bits",
            config: packed(4, json!(128), "group", "pack-quantized"),
            group: 128,
            code: four_bits,
            zero: |_| 8,
            write: write_packed,
            kind: "INT4_G128",
        },
        Tool {
            name: "compressed-tensors 8 bits",
            config: packed(8, Value::Null, "channel", "int-quantized"),
            group: 0,
            code: |random| (random.bits() % 255) as i32 - 127,
            zero: |_| 0,
            write: write_bytes,
            kind: "INT8_G128",
        },
    ]
}

/// Eight nibbles to a word, the first in the lowest bits.
fn words(nibbles: impl Iterator<Item = i32>) -> Vec<u8> {
    let nibbles: Vec<i32> = nibbles.collect();
    let word = |eight: &[i32]| eight.iter().enumerate().map(|(i, nibble)| (*nibble as u32) << (4 * i)).sum::<u32>();
    nibbles.chunks_exact(8).flat_map(|eight| word(eight).to_le_bytes()).collect()
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
            let group = i / self.cols * self.groups() + i % self.cols / self.group;
            self.scales[group] * (self.codes[i] - self.zeros[group]) as f32
        };
        (0..self.rows * self.cols).map(value).collect()
    }
}

fn write_gptq<const ZERO_OFFSET: i32>(file: SafetensorsBuilder, prefix: &str, m: &Codes) -> SafetensorsBuilder {
    let (rows, cols, groups) = (m.rows, m.cols, m.groups());
    let codes = (0..cols / 8).flat_map(|word| (0..rows).flat_map(move |row| (0..8).map(move |i| (row, 8 * word + i))));
    let codes = words(codes.map(|(row, col)| m.codes[row * cols + col]));
    let zeros = (0..groups).flat_map(|group| (0..rows).map(move |row| (row, group)));
    let zeros = words(zeros.map(|(row, group)| m.zeros[row * groups + group] - ZERO_OFFSET));
    let order: Vec<u8> = (0..cols).flat_map(|col| ((col / m.group) as i32).to_le_bytes()).collect();
    let [rows, cols, groups] = [rows, cols, groups].map(|size| size as u64);
    file.tensor(&format!("{prefix}.qweight"), "I32", &[cols / 8, rows], &codes)
        .tensor(&format!("{prefix}.qzeros"), "I32", &[groups, rows / 8], &zeros)
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

fn write_packed(file: SafetensorsBuilder, prefix: &str, m: &Codes) -> SafetensorsBuilder {
    let scales: Vec<u8> = m.scales.iter().flat_map(|scale| f16::from_f32(*scale).to_le_bytes()).collect();
    let [rows, cols, groups] = [m.rows, m.cols, m.groups()].map(|size| size as u64);
    let shape: Vec<u8> = [rows, cols].iter().flat_map(|size| size.to_le_bytes()).collect();
    file.tensor(&format!("{prefix}.weight_packed"), "I32", &[rows, cols / 8], &words(m.codes.iter().copied()))
        .tensor(&format!("{prefix}.weight_scale"), "F16", &[rows, groups], &scales)
        .tensor(&format!("{prefix}.weight_shape"), "I64", &[2], &shape)
}

fn write_bytes(file: SafetensorsBuilder, prefix: &str, m: &Codes) -> SafetensorsBuilder {
    let codes: Vec<u8> = m.codes.iter().map(|code| *code as i8 as u8).collect();
    let [rows, cols] = [m.rows, m.cols].map(|size| size as u64);
    file.tensor(&format!("{prefix}.weight"), "I8", &[rows, cols], &codes).tensor_f32(
        &format!("{prefix}.weight_scale"),
        &[rows, 1],
        &m.scales,
    )
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
        let zeros = (0..groups).map(|_| (self.zero)(random)).collect();
        Codes { rows, cols, group, codes, zeros, scales }
    }
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
fn parts_that_do_not_make_a_matrix_are_refused_by_name() {
    let gptq = &tools()[0];
    let family = family(&gptq.config);
    let refusal = |change: fn(SafetensorsBuilder, &str, &Codes) -> SafetensorsBuilder| {
        let tool = Tool { write: change, config: gptq.config.clone(), ..tools().remove(0) };
        build(&family.open(&tool.files().0), &LoadOptions::default()).map(drop).unwrap_err().to_string()
    };
    let no_scales = refusal(|file, prefix, m| {
        let codes = vec![0; m.rows * m.cols / 2];
        file.tensor(&format!("{prefix}.qweight"), "I32", &[m.cols as u64 / 8, m.rows as u64], &codes)
    });
    assert!(no_scales.contains("scales\" is missing"), "{no_scales}");
    let reordered = refusal(|file, prefix, m| {
        let file = write_gptq::<1>(file, prefix, m).without(&format!("{prefix}.g_idx"));
        let order: Vec<u8> = (0..m.cols).flat_map(|col| i32::from(col % 2 == 1).to_le_bytes()).collect();
        file.tensor(&format!("{prefix}.g_idx"), "I32", &[m.cols as u64], &order)
    });
    assert!(reordered.contains("reorders the inputs (desc_act), which is not supported"), "{reordered}");
    let transposed = refusal(|file, prefix, m| {
        let file = write_gptq::<1>(file, prefix, m).without(&format!("{prefix}.qweight"));
        let codes = vec![0; m.rows * m.cols / 2];
        file.tensor(&format!("{prefix}.qweight"), "I32", &[m.cols as u64, m.rows as u64 / 8], &codes)
    });
    assert!(transposed.contains("it should be i32 ["), "{transposed}");
}
