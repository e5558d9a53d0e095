//! Tables of model, nodes and spec against what fits and what is chosen.

use std::sync::Arc;

use k8s_openapi::api::core::v1::Node;
use proptest::prelude::*;
use serde_json::{Value, json};

use super::*;
use crate::testing::{ServiceBuilder, gpu_node, llama_8b, service};

fn gpu() -> ServiceBuilder {
    service().with("accelerator", json!({"type": "NvidiaGPU"})).with("engine", json!({"maxModelTokens": 8192}))
}

fn judged(spec: ServiceBuilder, model: &Inspection, nodes: &[Arc<Node>]) -> Fit {
    let service = spec.valid();
    judge(&service, model, Some(&Inventory::of(&service, nodes)), &Picked::default())
}

/// Tensor and quantization that were chosen.
fn chosen(fit: &Fit) -> (Option<u32>, Option<Quantization>) {
    match fit {
        Fit::Fits { picked, .. } => (picked.tensor, picked.quantization),
        other => panic!("{other:?}"),
    }
}

/// What was found, and why it was chosen.
fn found(fit: Fit) -> (String, String) {
    match fit {
        Fit::Fits { picked, message } => (message, picked.reason.unwrap_or_default()),
        other => panic!("{other:?}"),
    }
}

fn refused(fit: Fit) -> String {
    match fit {
        Fit::TooLarge { message } => message,
        other => panic!("{other:?}"),
    }
}

fn l40s(count: u32) -> Arc<Node> {
    gpu_node("NVIDIA-L40S", 46_068, count)
}

fn rtx_4090(count: u32) -> Arc<Node> {
    gpu_node("NVIDIA-GeForce-RTX-4090", 24_564, count)
}

fn small(count: u32) -> Arc<Node> {
    gpu_node("Tesla-T4", 15_360, count)
}

#[test]
fn the_weights_stay_as_they_are_on_as_few_gpus_as_possible() {
    for (nodes, expected) in [
        (vec![l40s(1)], (Some(1), None)),
        (vec![rtx_4090(1)], (Some(1), None)),
        (vec![small(4)], (Some(2), None)),
        (vec![small(1), small(4), l40s(1)], (Some(1), None)),
        (vec![small(1)], (Some(1), Some(Quantization::Int8))),
        (vec![gpu_node("GTX", 8192, 1)], (Some(1), Some(Quantization::Int4))),
    ] {
        assert_eq!(chosen(&judged(gpu(), &llama_8b(), &nodes)), expected, "{nodes:?}");
    }
}

#[test]
fn what_the_spec_fixes_is_not_chosen() {
    let fixed = gpu().with("parallelism", json!({"tensor": 2}));
    assert_eq!(chosen(&judged(fixed.clone(), &llama_8b(), &[small(4)])), (None, None));
    let int4 = fixed.with("engine", json!({"quantization": "INT4", "maxModelTokens": 8192}));
    assert_eq!(chosen(&judged(int4, &llama_8b(), &[small(4)])), (None, None));
}

#[test]
fn a_format_that_the_spec_fixes_is_judged_as_such() {
    let gtx = || gpu_node("GTX", 8192, 1);
    for (quantization, node, told) in [
        ("BF16", l40s(1), "as stored it needs 16.70 GiB (weights 14.96 GiB"),
        ("INT8", small(1), "as INT8 it needs 9.69 GiB (weights 7.95 GiB"),
        ("FP8", small(1), "as FP8 it needs 9.69 GiB (weights 7.95 GiB"),
        ("INT4", gtx(), "as INT4 it needs 6.85 GiB (weights 5.10 GiB"),
    ] {
        let fixed = gpu().with("parallelism", json!({"tensor": 1}));
        let fixed = fixed.with("engine", json!({"quantization": quantization, "maxModelTokens": 8192}));
        let (message, reason) = found(judged(fixed, &llama_8b(), &[node]));
        assert!(message.starts_with(told), "{message}");
        assert_eq!(reason, "", "nothing was chosen");
    }
}

#[test]
fn a_choice_is_told_with_what_would_have_been_better() {
    for (nodes, need, better) in [
        (l40s(1), "as stored it needs 16.70 GiB (weights 14.96 GiB", None),
        (small(4), "as stored it needs 8.72 GiB on each of 2 GPUs (weights 7.48 GiB", Some("as stored it needs 16.70")),
        (small(1), "as INT8 it needs 9.69 GiB (weights 7.95 GiB", Some("as stored it needs 16.70")),
    ] {
        let (message, reason) = found(judged(gpu(), &llama_8b(), &[nodes]));
        assert!(message.starts_with(need) && reason.starts_with(&message), "{message}: {reason}");
        let told = reason[message.len()..].strip_suffix(", which is more than there is");
        assert_eq!(told.is_some(), better.is_some(), "{reason}");
        assert!(told.unwrap_or_default().contains(better.unwrap_or_default()), "{reason}");
    }
}

#[test]
fn a_model_that_does_not_fit_is_told_with_numbers_and_alternatives() {
    let fixed = gpu().with("parallelism", json!({"tensor": 1}));
    let fixed = fixed.with("engine", json!({"quantization": "BF16", "maxModelTokens": 8192}));
    let message = refused(judged(fixed, &llama_8b(), &[small(4)]));
    for part in [
        "weights 14.96 GiB",
        "KV cache of 8192 tokens 1.00 GiB",
        "workspace 0.68 GiB, process 0.06 GiB",
        "13.50 GiB that Tesla-T4 leaves",
        "parallelism.tensor: 2 fits 2 × Tesla-T4",
        "engine.quantization: INT8 fits 1 × Tesla-T4",
        "1 × NVIDIA-GeForce-RTX-4090 (21.59 GiB) would do",
    ] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

#[test]
fn an_alternative_names_every_field_that_it_takes() {
    let fixed = gpu().with("parallelism", json!({"tensor": 1}));
    let fixed = fixed.with("engine", json!({"quantization": "BF16", "maxModelTokens": 8192}));
    let message = refused(judged(fixed, &llama_8b(), &[gpu_node("GTX", 8192, 2)]));
    for part in ["INT8 with parallelism.tensor: 2 fits 2 × GTX", "engine.quantization: INT4 fits 1 × GTX"] {
        assert!(message.contains(part), "{part}: {message}");
    }
}

/// 65536 tokens are 8.0 GiB in bf16 and, with 4 bytes for each token and head, 4.1 GiB in int8.
#[test]
fn keys_and_values_in_bytes_take_about_half() {
    let with = |kv: &str| {
        let engine = json!({"quantization": "BF16", "maxModelTokens": 65_536, "kvCacheDataType": kv});
        judged(gpu().with("engine", engine), &llama_8b(), &[rtx_4090(1)])
    };
    assert_eq!(chosen(&with("INT8")), (Some(1), None), "{:?}", with("INT8"));
    for kv in ["BF16", "Auto"] {
        let message = refused(with(kv));
        assert!(message.contains("KV cache of 65536 tokens 8.00 GiB"), "{message}");
    }
}

#[test]
fn integers_are_not_converted() {
    let packed = Inspection { int8_bytes: None, fp8_bytes: None, int4_bytes: None, ..llama_8b() };
    let message = refused(judged(gpu(), &packed, &[small(1)]));
    assert!(!message.contains("INT8") && !message.contains("INT4"), "{message}");
}

/// IQ4_NL is bytes on a GPU: what fits one by the file's size does not.
#[test]
fn on_a_gpu_weights_take_what_they_take_there() {
    let mut small_file = Inspection { int8_bytes: None, fp8_bytes: None, int4_bytes: None, ..llama_8b() };
    small_file.shape.weight_bytes = 12 << 30;
    assert_eq!(chosen(&judged(gpu(), &small_file, &[rtx_4090(2)])), (Some(1), None));
    let larger = Inspection { gpu_bytes: Some(24 << 30), ..small_file };
    assert_eq!(chosen(&judged(gpu(), &larger, &[rtx_4090(2)])), (Some(2), None));
}

#[test]
fn slices_of_a_gpu_do_not_share_a_model() {
    let slices = gpu_node("NVIDIA-A100-SXM4-80GB-MIG-1g.10gb", 9728, 7);
    assert_eq!(chosen(&judged(gpu(), &llama_8b(), &[slices])), (Some(1), Some(Quantization::Int4)));
}

#[test]
fn heads_limit_the_split() {
    let mut narrow = llama_8b();
    narrow.shape.kv_heads = 1;
    let fixed = gpu().with("engine", json!({"quantization": "BF16", "maxModelTokens": 8192}));
    assert!(matches!(judged(fixed, &narrow, &[small(8)]), Fit::TooLarge { .. }));
}

#[test]
fn a_processor_is_limited_by_the_container_or_else_by_the_largest_node() {
    let with = |limit: Value| service().with("resources", json!({"limits": {"memory": limit}}));
    assert_eq!(chosen(&judged(with(json!("20Gi")), &llama_8b(), &[])), (None, None));
    assert_eq!(chosen(&judged(with(json!("12Gi")), &llama_8b(), &[])), (None, Some(Quantization::Int8)));
    let message = refused(judged(with(json!("4Gi")), &llama_8b(), &[l40s(1)]));
    assert!(message.contains("4.00 GiB that resources.limits.memory leaves"), "{message}");
    assert!(message.contains("resources.limits.memory of 15."), "{message}");
    assert_eq!(chosen(&judged(service(), &llama_8b(), &[l40s(1)])), (None, None), "a node of 64 GiB");
    assert!(matches!(judged(service(), &llama_8b(), &[]), Fit::NoInventory { .. }));
}

/// As the engine does by itself (`cpu_kv_bytes`): 65536 tokens are 8 GiB, of 4 × 8 GiB beside the weights.
#[test]
fn on_a_processor_a_longest_sequence_has_to_fit_into_the_share_that_the_engine_takes() {
    let asks = |tokens: Option<i32>, limit: &str| {
        let engine = json!({"quantization": "BF16", "maxModelTokens": tokens});
        service().with("engine", engine).with("resources", json!({"limits": {"memory": limit}}))
    };
    let (message, _) = found(judged(asks(Some(65_536), "48Gi"), &llama_8b(), &[]));
    assert!(
        message.contains("KV cache of 65536 tokens 8.00 GiB, at most a quarter of what the weights leave"),
        "{message}"
    );
    let message = refused(judged(asks(Some(65_536), "46Gi"), &llama_8b(), &[]));
    assert!(message.contains("it needs 47.08 GiB") && message.contains("limits.memory of 47.08 GiB"), "{message}");
    let (message, _) = found(judged(asks(None, "15.6Gi"), &llama_8b(), &[]));
    assert!(!message.contains("quarter"), "the engine takes what there is: {message}");
}

#[test]
fn a_product_without_a_node_is_judged_by_its_name_and_an_unknown_one_not_at_all() {
    let asks = |product: &str| {
        service().with("accelerator", json!({"type": "NvidiaGPU", "nvidiaGPU": {"products": [product]}}))
    };
    assert_eq!(chosen(&judged(asks("NVIDIA-H100-80GB-HBM3"), &llama_8b(), &[])), (Some(1), None));
    assert!(matches!(judged(asks("Unheard-of"), &llama_8b(), &[]), Fit::NoInventory { .. }));
}

#[test]
fn an_earlier_choice_is_kept_while_it_fits() {
    let service = gpu().valid();
    let held = Picked { tensor: Some(2), reason: Some("of another day".into()), ..Picked::default() };
    let judge_on = |nodes: &[Arc<Node>]| judge(&service, &llama_8b(), Some(&Inventory::of(&service, nodes)), &held);
    assert_eq!(chosen(&judge_on(&[l40s(4)])), (Some(2), None), "one would do, too");
    assert_eq!(chosen(&judge_on(&[l40s(1)])), (Some(1), None), "two are not there any more");
}

proptest! {
    /// What is said to fit does, in each rank, and what is said not to fit is refused by every larger memory's rule too.
    #[test]
    fn more_memory_never_makes_a_model_too_large(mebibytes in 1024_u64..200_000, more in 0_u64..100_000) {
        let on = |mebibytes: u64| judged(gpu(), &llama_8b(), &[gpu_node("G", mebibytes, 1)]);
        let fits = |fit: &Fit| matches!(fit, Fit::Fits { .. });
        prop_assert!(!fits(&on(mebibytes)) || fits(&on(mebibytes + more)));
    }
}
