//! Families of models on a GPU: what each has that others lack.

use crate::common::driver::{Job, generate};
use crate::cuda::{APART, APART_IF_SHARP, BLOCKS, GENERATED, VOCABULARY, agrees_with_the_cpu, device, family, options};
use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_engine_core::engine::{Engine, EngineConfig};
use windlass_engine_core::executor::{Executor, KvGroups};
use windlass_engine_core::request::{Request, RequestId};
use windlass_engine_model::cuda::{CudaModel, Replay};
use windlass_engine_model::{KvBudget, LoadOptions};

fn gemma(more: Value) -> Value {
    let mut keys = json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 48,
        "query_pre_attn_scalar": 48, "final_logit_softcapping": null});
    keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
    keys
}

/// Windows of attention in all layers or in some, caps of scores and of logits, norms behind blocks, another activation,
/// scaled embeddings, heads of 48 and of 256, rotary embeddings of their own, and LongRoPE.
#[test]
fn families_with_more_than_llama_compute_what_the_cpu_computes() {
    let factors: Vec<f32> = (0..8).map(|pair| 1.0 + pair as f32 / 4.0).collect();
    let longrope =
        json!({"type": "longrope", "short_factor": factors, "long_factor": factors, "attention_factor": 1.2});
    let phi = json!({"partial_rotary_factor": 0.5, "original_max_position_embeddings": 64, "rope_scaling": longrope,
        "tie_word_embeddings": false});
    let yarn = json!({"tie_word_embeddings": false,
        "rope_scaling": {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64}});
    let sharp = json!({"sliding_window": 20, "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0});
    // Few layers, and scores that are not large: in bf16 activations differ more where attention is sharp.
    let capped = json!({"final_logit_softcapping": 3.0, "num_hidden_layers": 1});
    let second = json!({"sliding_window": 20, "attn_logit_softcapping": 1.0, "final_logit_softcapping": 3.0,
        "head_dim": 256, "query_pre_attn_scalar": 4096, "num_hidden_layers": 2});
    let local = json!({"sliding_window": 20, "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0,
        "query_pre_attn_scalar": 4096, "num_hidden_layers": 2});
    for (name, bound, checkpoint) in [
        ("mistral", APART, family("mistral", false, json!({"sliding_window": 20, "tie_word_embeddings": false}))),
        ("gemma", APART, family("gemma", false, gemma(capped))),
        ("gemma2", APART, family("gemma2", false, gemma(second))),
        ("gemma3", APART, family("gemma3_text", true, gemma(local))),
        ("gemma3, sharp", APART_IF_SHARP, family("gemma3_text", true, gemma(sharp))),
        ("phi3", APART, family("phi3", false, phi)),
        ("yarn", APART, family("llama", false, yarn)),
    ] {
        agrees_with_the_cpu(name, &checkpoint, &options(), bound);
    }
}

/// Experts of which a token uses some or all, with one that every token goes through or without.
#[test]
fn mixtures_of_experts_compute_what_the_cpu_computes() {
    let qwen = |norm_topk_prob: bool, used: u32, more: Value| {
        let mut keys = json!({"num_experts": 6, "num_experts_per_tok": used, "moe_intermediate_size": 96,
            "norm_topk_prob": norm_topk_prob, "decoder_sparse_step": 1, "use_sliding_window": false,
            "tie_word_embeddings": false});
        keys.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        keys
    };
    let mixtral = json!({"num_local_experts": 4, "num_experts_per_tok": 2, "tie_word_embeddings": false});
    let shared = json!({"shared_expert_intermediate_size": 160});
    for (name, checkpoint) in [
        ("mixtral", family("mixtral", false, mixtral)),
        ("qwen2_moe", family("qwen2_moe", false, qwen(false, 6, shared))),
        ("qwen3_moe", family("qwen3_moe", true, qwen(true, 3, json!({"head_dim": 64, "mlp_only_layers": []})))),
    ] {
        agrees_with_the_cpu(name, &checkpoint, &options(), APART);
    }
}

/// What lies before the window is given up: its pages may hold anything.
#[test]
fn blocks_before_the_windows_are_given_up_and_no_token_changes() {
    let local = json!({"sliding_window": 20, "sliding_window_pattern": 2, "rope_local_base_freq": 1000.0,
        "query_pre_attn_scalar": 4096, "num_hidden_layers": 2});
    let windowed = KvGroups::one_windowed(20 + 63);
    // Four blocks of each group hold the sequence.
    for (checkpoint, groups, most) in [
        (family("mistral", false, json!({"sliding_window": 20, "num_hidden_layers": 2})), windowed, 3),
        (family("gemma3_text", true, gemma(local)), KvGroups { full: 1, ..windowed }, 4 + 3),
    ] {
        gives_up_what_is_before_its_windows(&checkpoint, groups, most);
    }
}

fn gives_up_what_is_before_its_windows(checkpoint: &Checkpoint, groups: KvGroups, most: u32) {
    const PROMPT: u32 = 200;
    let options = LoadOptions { max_sequences: 2, kv: KvBudget::Blocks(groups.count() * BLOCKS), ..options() };
    let executor = || {
        let model = CudaModel::load(checkpoint, &options, &[device(7)]).unwrap();
        model.start(options.kv, Replay::Graphs).unwrap().executor
    };
    let prompt: Vec<u32> = (0..PROMPT).map(|index| index * 11 % VOCABULARY).collect();
    let expected = generate(&mut executor(), &[Job::greedy(&prompt)], GENERATED, 32, 1);
    assert_eq!(executor().geometry().groups, groups);
    let mut engine = Engine::new(executor(), EngineConfig { enable_prefix_cache: false, ..EngineConfig::PLAIN });
    engine.add(Request::greedy(RequestId(0), prompt, GENERATED as u32), 0.0).unwrap();
    let (mut text, mut held) = (Vec::new(), u32::MAX);
    while !engine.is_idle() {
        text.extend(engine.step(0.0).unwrap().updates.into_iter().flat_map(|update| update.tokens));
        if !text.is_empty() && !engine.is_idle() {
            held = engine.stats().kv.held.min(held);
        }
    }
    assert_eq!(text, expected[0]);
    assert!(held <= most, "{held} blocks of a sequence of four in {groups:?}");
}
