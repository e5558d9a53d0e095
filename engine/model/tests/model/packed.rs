//! Checkpoints that other tools quantized to integers, against candle on the same weights dequantized by their definitions.

mod layouts;
pub mod mixed;

use crate::common::hub::{CHUNK, Family, config, llama_oracle, tokens};
use crate::common::oracle::{compare, our_logits, our_logits_with};
use crate::common::tiny::Random;
use half::f16;
use layouts::{Codes, write_awq, write_bytes, write_gptq, write_packed};
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_model::{ActivationType, LoadOptions, Quantization, build};

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
/// One whose codes of eight bits are in the order of inputs.
pub const BYTES: &str = "compressed-tensors 8 bits, asymmetric groups";
/// The one that has inputs in an order of their own.
pub const SORTED: &str = "gptq with desc_act";
/// The one whose zero point lies anywhere besides.
pub const SORTED_BYTES: &str = "gptq of 8 bits, any zero point";
/// One of 3 bits in groups of 128, and one by rows, which are 256 columns where others are 128.
pub const GROUPS: &str = "gptq of 3 bits, 128";
pub const ROWS: &str = "gptq of 3 bits, by row";
/// The one of the fewest bits.
pub const SORTED_CRUMBS: &str = "gptq of 2 bits, 32, with desc_act";

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
            kind: "int4_g64_sym",
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
            kind: "int4_g32",
        },
        Tool {
            name: "compressed-tensors 4 bits",
            config: packed(4, json!(128), "group", "pack-quantized"),
            group: 128,
            scattered: false,
            code: four_bits,
            zero: |_| 8,
            write: write_packed::<4, true>,
            kind: "int4_g128_sym",
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
            kind: "int8_g64",
        },
        Tool {
            name: SORTED_BYTES,
            config: gptq_bits(8),
            group: 64,
            scattered: true,
            code: |random| random.bits() as i32 & 255,
            zero: |random| 100 + (random.bits() & 63) as i32,
            write: write_gptq::<8, 1>,
            kind: "uint8_g64",
        },
        Tool {
            name: "gptq of 3 bits",
            config: gptq_bits(3),
            group: 64,
            scattered: false,
            code: |random| random.bits() as i32 & 7,
            zero: |random| random.bits() as i32 & 7,
            write: write_gptq::<3, 1>,
            kind: "int3_g64",
        },
        Tool {
            name: "gptq of 2 bits",
            config: gptq_bits(2),
            group: 64,
            scattered: false,
            code: |random| random.bits() as i32 & 3,
            zero: |random| random.bits() as i32 & 3,
            write: write_gptq::<2, 1>,
            kind: "int2_g64",
        },
        Tool {
            name: GROUPS,
            config: json!({"quant_method": "gptq", "bits": 3, "group_size": 128, "sym": true}),
            group: 128,
            scattered: false,
            code: |random| random.bits() as i32 & 7,
            zero: |_| 4,
            write: write_gptq::<3, 1>,
            kind: "int3_g128",
        },
        Tool {
            name: ROWS,
            config: json!({"quant_method": "gptq", "bits": 3, "group_size": -1, "checkpoint_format": "gptq"}),
            group: 0,
            scattered: false,
            code: |random| random.bits() as i32 & 7,
            zero: |random| random.bits() as i32 & 7,
            write: write_gptq::<3, 1>,
            // But for what goes down, which has 256 columns.
            kind: "int3_g128",
        },
        Tool {
            name: SORTED_CRUMBS,
            config: json!({"quant_method": "gptq", "bits": 2, "group_size": 32, "desc_act": true}),
            group: 32,
            scattered: true,
            code: |random| random.bits() as i32 & 3,
            zero: |random| random.bits() as i32 & 3,
            write: write_gptq::<2, 1>,
            kind: "int2_g32",
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
            kind: "int4_g32",
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
            name: BYTES,
            config: asymmetric(8, json!(64), "group", "int-quantized"),
            group: 64,
            scattered: false,
            code: |random| (random.bits() & 255) as i32 - 128,
            zero: |random| (random.bits() & 31) as i32 - 16,
            write: write_bytes::<false>,
            kind: "uint8_g64",
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

/// A Llama that a tool has quantized so.
pub fn family(quantization: &Value) -> Family {
    let more = json!({"intermediate_size": 256, "quantization_config": quantization});
    Family { config: config("llama", more), biases: false, head_norms: false, oracle: llama_oracle }
}

impl Tool {
    /// The checkpoint as the tool writes it, and the same weights in f32.
    fn files(&self) -> (Vec<u8>, Vec<u8>) {
        let [packed, plain] = self.files_but("");
        (packed, plain)
    }

    /// The same with the matrix `left` as it was.
    fn files_but(&self, left: &str) -> [Vec<u8>; 2] {
        let (mut packed, mut plain) = (SafetensorsBuilder::new(), SafetensorsBuilder::new());
        let mut random = Random(11);
        for (name, shape, values) in family(&self.config).tensors() {
            match name.strip_suffix(".weight").filter(|prefix| prefix.ends_with("_proj") && *prefix != left) {
                None => {
                    packed = packed.tensor_f32(&name, &shape, &values);
                    plain = plain.tensor_f32(&name, &shape, &values);
                }
                Some(prefix) => {
                    let codes = self.draw(shape[0] as usize, shape[1] as usize, &mut random);
                    packed = (self.write)(packed, prefix, &codes);
                    plain = plain.tensor_f32(&name, &shape, &codes.values());
                }
            }
        }
        [packed.build(), plain.build()]
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

/// A scale and a zero point for 256 columns instead of two: 40 bytes less for 16 rows.
#[test]
fn rows_by_one_scale_are_held_in_wider_groups() {
    let bytes = |name| build(&checkpoint(name), &LoadOptions::default()).unwrap().ledger().weights;
    let family = family(&Value::Null);
    let of = |key: &str| family.config[key].as_u64().unwrap();
    let tiles = of("num_hidden_layers") * of("hidden_size") / 16;
    let saved = bytes(GROUPS) - bytes(ROWS);
    assert!(saved >= 40 * tiles, "{saved} bytes of {tiles} tiles");
}

/// What is left is the rounding of scales, keys and values to f16, and of activations to 16 bits.
#[test]
fn every_tools_codes_keep_their_values() {
    let (activations, kv_data_type) = (ActivationType::Int16, KvDataType::F16);
    let options = LoadOptions { activations, kv_data_type, ..LoadOptions::default() };
    for tool in tools() {
        let (packed, plain) = tool.files();
        let family = family(&tool.config);
        let found = our_logits_with(&family.open(&packed), &tokens(), CHUNK, &options);
        let agreement = compare(&family.candle_logits(plain), &found);
        println!("{}: {agreement}", tool.name);
        assert!(agreement.relative_error() <= 2e-3, "{}: {agreement}", tool.name);
    }
}

/// auto-round names matrices that have 16 bits, or has patterns of their names.
#[test]
fn auto_rounds_matrices_may_have_16_bits() {
    let auto_round = tools().into_iter().find(|tool| tool.name == "auto-round").unwrap();
    let left = "model.layers.0.mlp.down_proj";
    let open = |extra: Value| {
        let mut config = auto_round.config.clone();
        config["extra_config"] = extra;
        let [packed, plain] = auto_round.files_but(left);
        (family(&config).open(&packed), plain)
    };
    let by_name = json!({left: {"bits": 16, "group_size": 128, "sym": true, "data_type": "float"}, "lm_head": {"bits": 16},
        "model.layers.1.mlp.down_proj": {"bits": 4, "group_size": 64, "sym": false, "data_type": "int", "act_bits": 16}});
    for extra in [by_name, json!({".*layers\\.0.*down_proj.*": {"bits": 16, "data_type": "float"}})] {
        let (checkpoint, plain) = open(extra);
        let agreement = compare(&family(&Value::Null).candle_logits(plain), &our_logits(&checkpoint, &tokens(), CHUNK));
        assert!(agreement.relative_error() <= 0.035, "{agreement}");
    }
}

/// One matrix of floats is no reason to quantize a checkpoint, nor one of codes to leave it out.
#[test]
fn checkpoints_are_quantized_where_every_layers_matrices_are_floats() {
    let gptq = &tools()[0];
    let int4 = LoadOptions { quantization: Some(Quantization::INT4), ..LoadOptions::default() };
    let [packed, plain] = gptq.files_but("model.layers.0.mlp.down_proj");
    let refusal = build(&family(&gptq.config).open(&packed), &int4).map(drop).unwrap_err().to_string();
    let expected = "q_proj.qweight\" holds int4_g128 and cannot be quantized to int4: use auto";
    assert!(refusal.contains(expected), "{refusal:?} should contain {expected:?}");
    assert_eq!(build(&family(&Value::Null).open(&plain), &int4).unwrap().weight_type, "q4_1");
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
    assert!(reordered.contains("q_proj.g_idx\" has group 1 of 1 at offset"), "{reordered}");
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
    let expected =
        ["a scale is 4096; with 4 bits they are at most 4094", "(value 0 of \"", "q_proj.scales\", at offset "];
    assert!(expected.iter().all(|words| large.contains(words)), "{large}");
    let transposed = refusal(|file, prefix, m| {
        let file = write_gptq::<4, 1>(file, prefix, m).without(&format!("{prefix}.qweight"));
        let codes = vec![0; m.rows * m.cols / 2];
        file.tensor(&format!("{prefix}.qweight"), "I32", &[m.cols as u64, m.rows as u64 / 8], &codes)
    });
    assert!(transposed.contains("it should be i32 ["), "{transposed}");
}
