//! Checkpoints of which some matrices were quantized otherwise than others, or not at all.

use super::{Tool, family, tools};
use crate::coded::write_float8;
use crate::common::hub::{CHUNK, tokens};
use crate::common::oracle::{compare, our_logits};
use crate::common::tiny::Random;
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_model::{DecoderConfig, LoadOptions, build};

/// How a matrix is written.
#[derive(Clone, Copy, PartialEq)]
enum Way {
    Left,
    Float8,
    /// By the tool of this name.
    By(&'static str),
}

/// A checkpoint whose matrices are written as their modules' names say, and the same weights in f32.
fn mixed(quantization: &Value, way: impl Fn(&str) -> Way) -> (Checkpoint, Vec<u8>) {
    let (mut packed, mut plain) = (SafetensorsBuilder::new(), SafetensorsBuilder::new());
    let (family, tools) = (family(quantization), tools());
    let mut random = Random(17);
    for (name, shape, mut values) in family.tensors() {
        let size = || [shape[0] as usize, shape[1] as usize];
        let prefix = name.strip_suffix(".weight").filter(|prefix| prefix.ends_with("_proj"));
        packed = match prefix.map(|prefix| (prefix, way(prefix))) {
            None | Some((_, Way::Left)) => packed.tensor_f32(&name, &shape, &values),
            Some((_, Way::Float8)) => {
                let (of_codes, file) = write_float8::<1, 9999, false>(packed, &name, size(), &mut random);
                values = of_codes;
                file
            }
            Some((prefix, Way::By(tool))) => {
                let tool: &Tool = tools.iter().find(|each| each.name == tool).unwrap();
                let codes = tool.draw(size()[0], size()[1], &mut random);
                values = codes.values();
                (tool.write)(packed, prefix, &codes)
            }
        };
        plain = plain.tensor_f32(&name, &shape, &values);
    }
    (family.open(&packed.build()), plain.build())
}

fn agrees(quantization: &Value, way: impl Fn(&str) -> Way) {
    let (checkpoint, plain) = mixed(quantization, way);
    let agreement = compare(&family(&Value::Null).candle_logits(plain), &our_logits(&checkpoint, &tokens(), CHUNK));
    assert!(agreement.relative_error() <= 0.05, "{quantization}: {agreement}");
}

fn refusal(quantization: &Value) -> String {
    let (checkpoint, _) = mixed(quantization, |_| Way::Left);
    DecoderConfig::read(&checkpoint).unwrap_err().to_string()
}

const FOUR_BITS: Way = Way::By("compressed-tensors 4 bits");
const EIGHT_BITS: Way = Way::By("compressed-tensors packed 8 bits");

fn float8(targets: Value) -> Value {
    json!({"targets": targets, "format": "float-quantized", "input_activations": null,
        "weights": {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": true}})
}

fn packed(bits: u32, targets: Value) -> Value {
    json!({"targets": targets, "format": "pack-quantized", "input_activations": null, "weights":
        {"num_bits": bits, "type": "int", "strategy": "group", "group_size": 128, "symmetric": true}})
}

fn groups(groups: Vec<Value>, ignore: Value) -> Value {
    let named = groups.into_iter().enumerate().map(|(index, group)| (format!("group_{index}"), group));
    json!({"quant_method": "compressed-tensors", "format": "mixed-precision", "ignore": ignore,
        "config_groups": named.collect::<serde_json::Map<_, _>>()})
}

/// One whose attention is in FP8 and whose feed-forward layers are in 4 bits, but for one in 8.
pub fn checkpoint() -> Checkpoint {
    let one = "model.layers.1.mlp.down_proj";
    let all = vec![packed(4, json!(["Linear"])), float8(json!(["re:.*self_attn\\..*"])), packed(8, json!([one]))];
    let way = |module: &str| match module {
        _ if module.contains("self_attn") => Way::Float8,
        _ if module == one => EIGHT_BITS,
        _ => FOUR_BITS,
    };
    mixed(&groups(all, json!(["lm_head"])), way).0
}

/// Names come before patterns and those before classes, whatever the order of groups; what is ignored is plain.
#[test]
fn every_matrix_is_read_by_the_group_whose_target_it_is() {
    let one = "model.layers.1.mlp.down_proj";
    let mixture = groups(
        vec![packed(4, json!(["Linear"])), float8(json!(["re:.*self_attn\\..*", "lm_head"])), packed(8, json!([one]))],
        json!(["lm_head", "re:model\\.layers\\.2\\.", "model.layers.0.self_attn.k_proj"]),
    );
    agrees(&mixture, |module| match module {
        "model.layers.0.self_attn.k_proj" => Way::Left,
        _ if module.starts_with("model.layers.2.") => Way::Left,
        _ if module.contains("self_attn") => Way::Float8,
        _ if module == one => EIGHT_BITS,
        _ => FOUR_BITS,
    });
    // Of patterns the first by its letters, of the same target the last group's.
    let patterns = vec![
        packed(4, json!(["re:.*proj", "re:model\\.layers\\.3.*"])),
        packed(8, json!(["re:.*down_proj", "re:.*gate_proj"])),
        packed(4, json!(["re:.*gate_proj"])),
    ];
    agrees(&groups(patterns, Value::Null), |module| match module {
        _ if module.contains("down_proj") => EIGHT_BITS,
        _ => FOUR_BITS,
    });
}

/// A matrix that no target knows was left, and one whose tensors are another group's is not read as theirs.
#[test]
fn tensors_that_are_not_those_of_their_group_are_refused_by_name() {
    let refusal = |targets: &str, way: fn(&str) -> Way| {
        let mixture = groups(vec![packed(4, json!(["re:.*mlp.*"])), packed(8, json!([targets]))], Value::Null);
        build(&mixed(&mixture, way).0, &LoadOptions::default()).map(drop).map_err(|error| error.to_string())
    };
    let eight_outside = |module: &str| if module.contains("mlp") { FOUR_BITS } else { EIGHT_BITS };
    assert_eq!(refusal("re:.*self_attn.*", eight_outside), Ok(()));
    let other = refusal("re:.*self_attn.*", |_| FOUR_BITS).unwrap_err();
    assert!(other.contains("q_proj.weight_packed\" is i32 [16, 128]; it should be i32 [32, 128]"), "{other}");
    let unknown = refusal("re:.*q_proj", eight_outside).unwrap_err();
    assert!(unknown.contains("\"model.layers.0.self_attn.k_proj.weight\" is missing"), "{unknown}");
}

#[test]
fn groups_that_cannot_be_are_refused_by_name() {
    let of = |targets: Value| groups(vec![packed(4, json!(["Linear"])), packed(8, targets)], Value::Null);
    let with = |path: &str, value: Value| {
        let mut config = of(json!(["re:.*mlp.*"]));
        let (object, key) = path.rsplit_once('/').unwrap();
        config.pointer_mut(object).unwrap()[key] = value;
        refusal(&config)
    };
    let group = "quantization_config.config_groups.group_1";
    let many: Vec<String> = (0..1024).map(|index| format!("re:{index}")).collect();
    for (message, expected) in [
        (refusal(&of(json!("Linear"))), format!("{group}.targets\" is \"Linear\": what is no list of names is not")),
        (refusal(&of(json!([3]))), format!("{group}.targets\" is [3]: what is no list of names is not")),
        (refusal(&of(json!(["re:("]))), format!("{group}.targets\" is \"(\": what is no regular expression, too")),
        (refusal(&of(json!(["re:(?!a)b"]))), format!("{group}.targets\" is \"(?!a)b\": what is no regular expression")),
        (refusal(&of(json!(["re:((a{99}){99}){99}"]))), format!("{group}.targets\" is \"((a{{99}}){{99}}){{99}}\"")),
        (refusal(&of(json!(many))), "config_groups\" is 1028 names of groups and patterns; it must be at most".into()),
        (with("/config_groups/group_1/format", json!("nvfp4")), format!("{group}.format\" is \"nvfp4\": this layout")),
        (with("/config_groups/group_1/format", Value::Null), "config.format\" is \"mixed-precision\": this".into()),
        (with("/config_groups/group_1/weights", Value::Null), format!("{group}.weights.type\" is null: a checkpoint")),
        (with("/config_groups/group_1/weights/num_bits", json!(3)), format!("{group}.weights.num_bits\" is 3")),
        (with("/ignore", json!({})), "quantization_config.ignore\" is {}: what is no list of names".into()),
        (with("/config_groups", json!([])), "config_groups\" is []: what is no object of groups is not".into()),
    ] {
        assert!(message.contains(&expected), "{message:?} should contain {expected:?}");
    }
}

fn gptq(dynamic: Value) -> Value {
    json!({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": false, "sym": false,
        "checkpoint_format": "gptq", "dynamic": dynamic})
}

/// The first pattern that knows a module says how it was quantized, by values of its own and the common ones.
#[test]
fn patterns_of_gptq_say_of_other_bits_groups_zeros_and_of_none() {
    let dynamic = json!({
        "-:.*\\.0\\.mlp\\.down": {},
        "+:.*down": {"bits": 8, "group_size": 64, "desc_act": true},
        ".*(down|up)_proj": {"bits": 3, "group_size": 64, "mse": 2.4},
        "+:model\\.layers\\.1\\..*[qk]_proj": {"sym": true, "group_size": 64, "bits": null},
        "proj": {"bits": 2},
    });
    agrees(&gptq(dynamic), |module| match module {
        "model.layers.0.mlp.down_proj" => Way::Left,
        _ if module.ends_with("down_proj") => Way::By("gptq of 8 bits"),
        _ if module.ends_with("up_proj") => Way::By("gptq of 3 bits"),
        "model.layers.1.self_attn.q_proj" | "model.layers.1.self_attn.k_proj" => Way::By("gptq, symmetric"),
        _ => Way::By("gptq 128"),
    });
}

#[test]
fn overrides_of_gptq_that_cannot_be_are_refused_by_pattern_and_field() {
    let many: serde_json::Map<_, _> = (0..1025).map(|index| (format!("-:{index}"), json!({}))).collect();
    let long = format!("-:{}", "a".repeat(1 << 16));
    for (dynamic, expected) in [
        (json!({"+:.*down": {"bits": 5}}), "quantization_config.dynamic[+:.*down].bits\" is 5: a checkpoint quantized"),
        (json!({".*": {"group_size": 48}}), "dynamic[.*].group_size\" is 48: a group that is no multiple of 32"),
        (json!({".*": {"checkpoint_format": "gptq_v2"}}), "dynamic[.*].checkpoint_format\" is \"gptq_v2\"; it must be"),
        (json!({".*": {"method": "awq"}}), "dynamic[.*].method\" is \"awq\"; it must be null, as of all"),
        (json!({".*": 8}), "dynamic[.*]\" is 8; it must be an object of values"),
        (json!({"+:(": {}}), "dynamic[+:(]\" is \"(\": what is no regular expression, too large a one, or one that"),
        (json!({"-:(?<=a)b": {}}), "dynamic[-:(?<=a)b]\" is \"(?<=a)b\": what is no regular expression"),
        (json!({long: {}}), "what is no regular expression, too large a one"),
        (many.into(), "dynamic\" is 1025 names of groups and patterns; it must be at most 1024"),
    ] {
        let message = refusal(&gptq(dynamic));
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}

fn auto_round(extra_config: Value) -> Value {
    json!({"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": false, "data_type": "int",
        "packing_format": "auto_round:auto_gptq", "extra_config": extra_config})
}

/// Names decide before patterns, which hold anywhere in a name.
#[test]
fn auto_rounds_layers_may_have_other_bits_groups_and_zeros() {
    let extra = json!({
        "layers\\.1\\..*(q|k)_proj$": {"sym": true, "group_size": 64, "data_type": "int"},
        "model.layers.0.self_attn.q_proj": {"bits": 3, "group_size": 64},
        "model.layers.1.self_attn.q_proj": {"bits": 3, "group_size": 64, "sym": null},
        "model.layers.1.mlp.down_proj": {"bits": 16, "data_type": "float"},
        ".*mlp\\.down.*": {"bits": 8, "group_size": 64, "act_bits": 16},
    });
    agrees(&auto_round(extra), |module| match module {
        "model.layers.1.mlp.down_proj" => Way::Left,
        _ if module.ends_with("down_proj") => Way::By("gptq of 8 bits"),
        "model.layers.0.self_attn.q_proj" | "model.layers.1.self_attn.q_proj" => Way::By("gptq of 3 bits"),
        "model.layers.1.self_attn.k_proj" => Way::By("gptq, symmetric"),
        _ => Way::By("gptq 128"),
    });
}

#[test]
fn overrides_of_auto_round_that_cannot_be_are_refused_by_layer_and_field() {
    let many: serde_json::Map<_, _> = (0..1025).map(|index| (format!("{index}$"), json!({}))).collect();
    for (extra, expected) in [
        (
            json!({".*up.*": {"data_type": "mx_fp"}}),
            "extra_config[.*up.*].data_type\" is \"mx_fp\"; it must be \"int\", as",
        ),
        (
            json!({"lm_head": {"bits": 5}}),
            "quantization_config.extra_config[lm_head].bits\" is 5: a checkpoint quantized",
        ),
        (
            json!({".*up.*": {"group_size": 48}}),
            "extra_config[.*up.*].group_size\" is 48: a group that is no multiple of 32",
        ),
        (json!({"lm_head": 8}), "extra_config[lm_head]\" is 8; it must be an object of values"),
        (json!({"*": {}}), "extra_config[*]\" is \"*\": what is no regular expression, too large a one, or one that"),
        (many.into(), "extra_config\" is 1025 names of groups and patterns; it must be at most 1024"),
    ] {
        let message = refusal(&auto_round(extra));
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}
