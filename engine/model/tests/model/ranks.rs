//! A model divided among tensor-parallel ranks computes what it computes whole.

use crate::common::driver::{Job, generate};
use crate::common::gguf::{gguf, gguf_builder};
use crate::common::harbour_tokens;
use crate::common::hub::{CHUNK, Family, config, llama_oracle};
use crate::common::oracle::{compare, our_logits_with};
use crate::common::tiny::{Random, Tiny};
use crate::packed::{self, BYTES, SORTED, SORTED_BYTES, SORTED_CRUMBS};
use serde_json::json;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::real_model;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_model::{Batch, KvBudget, LoadOptions, Logits, Quantization, build, load};
use windlass_kernels::{ActivationType, WeightType};

/// Tests use activations of 16 bits: with 8 bits, a sum that differs in its last bit is soon rounded to another code,
/// and the difference grows to the rounding error itself.
fn ranks(count: u32) -> LoadOptions {
    LoadOptions { tensor_parallel: count, threads: 2, activations: ActivationType::Int16, ..LoadOptions::default() }
}

/// Bound of the relative error of a divided model's logits, by Frobenius norms over 75 positions.
fn error_of(checkpoint: &Checkpoint, vocabulary: u64, options: &LoadOptions) -> f64 {
    let mut random = Random(7);
    let tokens: Vec<u32> = (0..75).map(|_| (random.bits() % vocabulary) as u32).collect();
    let alone = LoadOptions { tensor_parallel: 1, ..options.clone() };
    let [whole, divided] = [&alone, options].map(|options| our_logits_with(checkpoint, &tokens, CHUNK, options));
    let agreement = compare(&whole, &divided);
    println!("{} ranks: {agreement}", options.tensor_parallel);
    agreement.relative_error()
}

/// Formats with blocks of 1, 32 and 256 values, tied and untied heads, a vocabulary that is not divisible, and more
/// ranks than key heads.
#[test]
fn shapes_and_types_are_divided_in_two_and_four() {
    let wide =
        |kind| Tiny { hidden: 1024, heads: 8, kv_heads: 2, rope_dims: 128, feed_forward: 1024, ..Tiny::of(kind) };
    let cases = [
        Tiny { vocabulary: 323, tied: false, ..Tiny::of(WeightType::F32) },
        Tiny { vocabulary: 321, ..wide(WeightType::BF16) },
        Tiny { feed_forward: 224, ..wide(WeightType::Q4_1) },
        wide(WeightType::Q4K),
        Tiny { tied: false, ..wide(WeightType::Q8_0) },
    ];
    for tiny in cases {
        let checkpoint = Checkpoint::from_bytes(tiny.build().build()).unwrap();
        for count in [2, 4] {
            let error = error_of(&checkpoint, tiny.vocabulary, &ranks(count));
            assert!(error <= 1e-3, "{} on {count} ranks: {error}", tiny.kind.name());
        }
    }
}

/// Biases, head norms, and floats that are quantized as they are loaded.
#[test]
fn the_parts_of_other_families_are_divided_too() {
    let more = json!({"head_dim": 64, "attention_bias": false, "max_window_layers": 4, "sliding_window": null,
        "use_sliding_window": false, "tie_word_embeddings": false});
    let window = json!({"sliding_window": 512, "max_window_layers": 4, "use_sliding_window": false});
    let family = |config, biases, head_norms| Family { config, biases, head_norms, oracle: llama_oracle };
    let gemma = json!({"hidden_act": null, "hidden_activation": "gelu_pytorch_tanh", "head_dim": 64,
        "sliding_window": 20, "attn_logit_softcapping": 5.0, "final_logit_softcapping": 3.0});
    let families = [
        family(config("qwen3", more), false, true),
        family(config("qwen2", window), true, false),
        family(config("gemma2", gemma.clone()), false, false),
        family(config("gemma3_text", gemma), false, true),
        family(config("phi3", json!({"tie_word_embeddings": false})), false, false),
    ];
    for family in families {
        let checkpoint = family.open(&family.safetensors());
        for quantization in [None, Some(Quantization::INT8), Some(Quantization::FP8), Some(Quantization::INT4)] {
            let error =
                error_of(&checkpoint, crate::common::hub::VOCABULARY, &LoadOptions { quantization, ..ranks(2) });
            assert!(error <= 1e-3, "{} {quantization:?}: {error}", family.config["model_type"]);
        }
    }
}

/// Matrices with inputs in their own order (`desc_act`): a rank has some inputs of each group. With four ranks that is
/// half a block of a group, which is padded.
#[test]
fn inputs_in_an_order_of_their_own_are_divided_too() {
    for name in [SORTED, SORTED_CRUMBS, SORTED_BYTES] {
        let checkpoint = packed::checkpoint(name);
        for count in [2, 4] {
            let error = error_of(&checkpoint, crate::common::hub::VOCABULARY, &ranks(count));
            assert!(error > 0.0 && error <= 1e-3, "{name} on {count} ranks: {error}");
        }
    }
    // Two query heads of 32 values are 64 inputs of the output projection, 32 of each group, in blocks of 32.
    let [whole, divided] = [1, 2].map(|count| build(&packed::checkpoint(SORTED), &ranks(count)).unwrap());
    let rows: u64 = 4 * 2 * 128;
    let (wider, narrower) = ([128, 256].map(|cols| cols / 64 * 36), [128, 256].map(|cols| cols / 32 * 20));
    let grown = (0..2).map(|index| rows / 2 * (narrower[index] - wider[index])).sum::<u64>();
    let norms = 4 * 128 * (2 * 4 + 1);
    assert_eq!(divided.ledger().weights, whole.ledger().weights + grown + norms);
}

/// The output projection has 128 inputs, 32 on each of four ranks: half of a group of 64, and a quarter of a row.
#[test]
fn inputs_that_cut_groups_of_eight_bits_are_divided_too() {
    let coded = crate::coded::checkpoints().filter(|(case, ..)| ["fp8 by output", "bitsandbytes int8"].contains(case));
    let coded = coded.map(|(case, _, checkpoint, _)| (case, checkpoint));
    for (name, checkpoint) in coded.chain([(BYTES, packed::checkpoint(BYTES))]) {
        let error = error_of(&checkpoint, crate::common::hub::VOCABULARY, &ranks(4));
        assert!(error > 0.0 && error <= 1e-3, "{name}: {error}");
    }
}

/// Experts of two widths, the shared one among them. Every expert is used, because a token whose scores of two experts
/// are close may go to either with another order of sums.
#[test]
fn experts_are_divided_by_their_columns() {
    let more = json!({"num_experts": 3, "num_experts_per_tok": 3, "moe_intermediate_size": 96, "norm_topk_prob": false,
        "shared_expert_intermediate_size": 160, "decoder_sparse_step": 1, "tie_word_embeddings": false});
    let config = config("qwen2_moe", more);
    let family = Family { config, biases: true, head_norms: false, oracle: llama_oracle };
    let checkpoint = family.open(&family.safetensors());
    for (quantization, count) in [(None, 2), (None, 4), (Some(Quantization::INT8), 2), (Some(Quantization::FP8), 2)] {
        let error =
            error_of(&checkpoint, crate::common::hub::VOCABULARY, &LoadOptions { quantization, ..ranks(count) });
        assert!(error <= 1e-3, "{quantization:?} on {count}: {error}");
    }
    let int8 = LoadOptions { quantization: Some(Quantization::INT8), ..ranks(4) };
    assert_eq!(
        build(&checkpoint, &int8).map(drop).unwrap_err().to_string(),
        "3 blocks of an expert's columns cannot be divided among 4"
    );
}

/// A mixture of `count` experts of an odd width, some of which each token uses, and a shared one.
fn mixture(layers: u32, count: u32, used: u32) -> Family {
    let more = json!({"num_experts": count, "num_experts_per_tok": used, "moe_intermediate_size": 96,
        "norm_topk_prob": false, "shared_expert_intermediate_size": 160, "decoder_sparse_step": 1,
        "tie_word_embeddings": false, "num_hidden_layers": layers});
    Family { config: config("qwen2_moe", more), biases: true, head_norms: false, oracle: llama_oracle }
}

fn whole_experts(count: u32) -> LoadOptions {
    LoadOptions { expert_parallel: true, ..ranks(count) }
}

/// Five experts on two ranks and on four, from both kinds of files. On four ranks their columns could not be divided in
/// integer formats.
#[test]
fn experts_are_divided_among_ranks_as_they_are() {
    let family = mixture(4, 5, 5);
    let hub = family.open(&family.safetensors());
    let gguf = Checkpoint::from_bytes(gguf(&family, "qwen2moe")).unwrap();
    for (checkpoint, quantization, count) in
        [(&hub, None, 2), (&gguf, None, 4), (&gguf, Some(Quantization::FP8), 2), (&hub, Some(Quantization::INT8), 4)]
    {
        let options = LoadOptions { quantization, ..whole_experts(count) };
        let error = error_of(checkpoint, crate::common::hub::VOCABULARY, &options);
        assert!(error > 0.0 && error <= 1e-3, "{quantization:?} on {count}: {error}");
    }
    let divided = LoadOptions { quantization: Some(Quantization::INT8), ..ranks(4) };
    let refusal = build(&hub, &divided).map(drop).unwrap_err().to_string();
    assert_eq!(refusal, "3 blocks of an expert's columns cannot be divided among 4");
}

/// The shared expert is quantized in blocks of 32. The 80 columns of the others are not a multiple of that, so a rank
/// would lack 16 of them.
#[test]
fn columns_that_no_rank_would_hold_are_refused_and_whole_experts_are_not() {
    const Q8_0: u32 = 8;
    let mut family = mixture(1, 2, 2);
    family.config["moe_intermediate_size"] = 80.into();
    let (name, hidden) = ("blk.0.ffn_down_shexp.weight", family.size("hidden_size"));
    let file = gguf_builder(&family, "qwen2moe").without_tensor(name);
    let file = file.tensor(name, &[160, hidden], Q8_0, &vec![0; 160 / 32 * 34 * hidden as usize]);
    let checkpoint = Checkpoint::from_bytes(file.build()).unwrap();
    let refusal = build(&checkpoint, &ranks(2)).map(drop).expect_err("it should be refused").to_string();
    assert_eq!(
        refusal,
        "ranks divide the expert of 80 columns in blocks of 32, of which it has no whole number: use one rank"
    );
    let error = error_of(&checkpoint, crate::common::hub::VOCABULARY, &whole_experts(2));
    assert!(error <= 1e-3, "{error}");
}

/// Some ranks have none of a token's experts, and no experts at all in a step of few tokens. A token whose scores of
/// two experts are close may go to either; in a decoder of one layer that changes the output of this token only.
#[test]
fn tokens_go_to_the_ranks_of_their_experts() {
    let tokens: Vec<u32> = (0..75).map(|token| token * 37 % 320).collect();
    for used in 1..5 {
        let family = mixture(1, 5, used);
        let checkpoint = family.open(&family.safetensors());
        for chunk in [1, CHUNK] {
            let [whole, divided] =
                [ranks(1), whole_experts(4)].map(|options| our_logits_with(&checkpoint, &tokens, chunk, &options));
            let near = |position: &usize| {
                let one = *position..position + 1;
                compare(&whole[one.clone()], &divided[one]).relative_error() <= 1e-3
            };
            let agreeing = (0..whole.len()).filter(near).count();
            println!("{used} of 5 experts, {chunk} tokens a step: {agreeing} of {}", whole.len());
            assert!(agreeing + 1 >= whole.len(), "{used} of 5 experts: {agreeing} of {}", whole.len());
        }
    }
}

/// Five experts on two ranks: one rank has an expert more in every layer, as its ledger shows.
#[test]
fn a_rank_with_an_expert_more_takes_more_memory() {
    let (layers, family) = (4, mixture(4, 5, 5));
    let built = build(&family.open(&family.safetensors()), &whole_experts(2)).unwrap();
    let [first, second] = built.ledgers[..] else { panic!("{:?}", built.ledgers) };
    let expert = 3 * 96 * family.size("hidden_size") * 4;
    assert_eq!(second.weights - first.weights, layers * expert);
    // Activations are as wide as an expert, or as the rank's part of the shared one, which is narrower.
    let divided = build(&family.open(&family.safetensors()), &ranks(2)).unwrap();
    let columns = u64::from(LoadOptions::default().max_step_tokens) * (96 - 80);
    assert_eq!(first.workspace - divided.ledgers[0].workspace, columns * 3 * 4);
}

#[test]
fn experts_that_are_too_few_or_not_there_are_refused() {
    let refusal = |checkpoint: &Checkpoint, count| {
        build(checkpoint, &whole_experts(count)).map(drop).expect_err("it should be refused").to_string()
    };
    let few = mixture(1, 3, 1);
    assert_eq!(refusal(&few.open(&few.safetensors()), 4), "3 experts cannot be divided among 4");
    let dense = Checkpoint::from_bytes(Tiny::of(WeightType::F32).build().build()).unwrap();
    for count in [1, 2] {
        assert_eq!(
            refusal(&dense, count),
            "the model (architecture \"llama\") is no mixture of experts: leave expert parallelism out"
        );
    }
}

#[test]
fn what_ranks_cannot_share_is_refused_with_its_numbers() {
    let refusal = |tiny: Tiny, count| {
        let checkpoint = Checkpoint::from_bytes(tiny.build().build()).unwrap();
        build(&checkpoint, &ranks(count)).map(drop).expect_err("it should be refused").to_string()
    };
    assert_eq!(
        refusal(Tiny::of(WeightType::F32), 3),
        "4 query heads and 2 key-value heads cannot be divided among 3 ranks: use 1, 2, 4"
    );
    // Two heads of 64 are half a block of Q4_K.
    assert_eq!(
        refusal(Tiny { feed_forward: 1024, ..Tiny::of(WeightType::Q4K) }, 2),
        "a rank would hold 128 columns of \"blk.0.attn_output.weight\", no whole number of q4_k blocks of 256: \
         use fewer ranks"
    );
}

/// Ranks together take as much memory as one rank, except for norms: nothing else is stored twice.
#[test]
fn ranks_divide_the_memory() {
    let tiny = Tiny { tied: false, ..Tiny::of(WeightType::Q4_1) };
    let checkpoint = Checkpoint::from_bytes(tiny.build().build()).unwrap();
    let [whole, divided] = [1, 2].map(|count| build(&checkpoint, &ranks(count)).unwrap());
    let norms = 4 * 256 * (2 * 2 + 1);
    assert_eq!(divided.ledger().weights, whole.ledger().weights + norms);
    assert_eq!(divided.ledgers[0].weights, divided.ledgers[1].weights);
    assert_eq!(divided.ledgers[0].kv * 2, divided.ledger().kv);
    assert_eq!(divided.geometry, whole.geometry);
    let packed = |built: &windlass_engine_model::Built| -> u64 {
        built.decoder.weights().matrices().map(|matrix| matrix.bytes() as u64).sum()
    };
    assert_eq!(packed(&divided) * 2, packed(&whole));
}

/// A rank that fails ends the step on all ranks with its message, and no rank hangs.
#[test]
fn a_rank_that_fails_is_named() {
    let checkpoint = Checkpoint::from_bytes(Tiny::of(WeightType::F32).build().build()).unwrap();
    let mut built = build(&checkpoint, &ranks(2)).unwrap();
    let mut batch = Batch::default();
    // Both ranks refuse a block that does not exist; the error names the first one to leave.
    batch.push([1], 0, &[windlass_engine_core::plan::BlockId(u32::MAX)], Logits::LAST);
    let outcome = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| built.decoder.forward(&batch)));
    assert!(outcome.is_err());
    drop(built);
}

/// 9 heads and 3 key heads: three ranks, not two.
#[test]
fn the_real_model_on_three_ranks() {
    let Some(path) = real_model() else { return };
    let file = Checkpoint::open(&path).unwrap();
    let refusal = build(&file, &ranks(2)).map(drop).expect_err("two do not divide nine heads").to_string();
    assert_eq!(refusal, "9 query heads and 3 key-value heads cannot be divided among 2 ranks: use 1, 3, 9");
    let tokens = &harbour_tokens()[..128];
    // Sums in another order are soon rounded to another value: of 11 bits in f16, of 8 bits in bf16.
    for (activations, kv_data_type, bound) in [
        (ActivationType::Int16, KvDataType::F16, 1e-3),
        (ActivationType::Int16, KvDataType::Bf16, 3e-3),
        (ActivationType::Int8, KvDataType::Bf16, 0.05),
    ] {
        let options = |count| LoadOptions { activations, kv_data_type, ..ranks(count) };
        let [whole, divided] = [1, 3].map(|count| our_logits_with(&file, tokens, 64, &options(count)));
        let agreement = compare(&whole, &divided);
        println!("{activations:?}, {kv_data_type:?}: {agreement}");
        assert!(agreement.relative_error() <= bound, "{activations:?}, {kv_data_type:?}: {agreement}");
    }
}

/// Greedy texts of 200 tokens, whole and divided: where they first differ, the two best tokens are as close as
/// rounding.
#[test]
fn the_real_models_text_is_the_same_on_three_ranks() {
    let Some(path) = real_model() else { return };
    let file = Checkpoint::open(&path).unwrap();
    let prompt = &harbour_tokens()[..40];
    let options = |count| LoadOptions { kv: KvBudget::Blocks(32), ..ranks(count) };
    let text = |count| {
        let mut executor = load(&file, &options(count)).unwrap().executor;
        generate(&mut executor, &[Job::greedy(prompt)], 200, 64, 2).remove(0)
    };
    let (whole, divided) = (text(1), text(3));
    let same = whole.iter().zip(&divided).take_while(|(one, other)| one == other).count();
    println!("{same} of 200 tokens are the same");
    if same < 200 {
        let tokens = [prompt, &whole[..same]].concat();
        let logits = our_logits_with(&file, &tokens, 64, &options(1)).pop().unwrap();
        let [one, other] = [whole[same], divided[same]].map(|token| logits[token as usize]);
        assert!((one - other).abs() <= 1e-3 * one.abs(), "token {same}: {one} and {other}");
    }
}
