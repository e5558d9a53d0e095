//! What is refused at load, by name and with numbers, and what a loaded model says of itself.

use crate::common::driver::{Job, generate};
use crate::common::tiny::Tiny;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::{GgufBuilder, real_model};
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{
    BlockId, BlockMove, InputToken, PlanRow, RowOutput, SequenceFailure, StepPlan, SwapSlotId, Ticket,
};
use windlass_engine_core::request::{RequestId, Sampling};
use windlass_engine_model::{KvBudget, LoadOptions, Loaded, SwapSpace, build, load};
use windlass_kernels::WeightType;

fn options() -> LoadOptions {
    LoadOptions { threads: 1, kv: KvBudget::Blocks(8), max_sequences: 4, max_step_tokens: 32, ..LoadOptions::default() }
}

fn open(builder: &GgufBuilder) -> Checkpoint {
    Checkpoint::from_bytes(builder.build()).unwrap()
}

fn tiny() -> GgufBuilder {
    Tiny::of(WeightType::Q4_1).build()
}

fn refusal(builder: &GgufBuilder, options: &LoadOptions) -> String {
    load(&open(builder), options).map(drop).expect_err("it should be refused").to_string()
}

/// A tiny model with one metadata key of its own: the builder's would be a second.
fn with_key(key: &str, set: impl Fn(GgufBuilder) -> GgufBuilder) -> GgufBuilder {
    set(tiny().without(key))
}

#[test]
fn configurations_are_refused_by_key() {
    let cases = [
        (with_key("general.architecture", |b| b), "\"general.architecture\" is missing"),
        (with_key("general.architecture", |b| b.str("general.architecture", "mamba")), "architecture \"mamba\""),
        (with_key("llama.block_count", |b| b), "\"llama.block_count\" is missing"),
        (with_key("llama.block_count", |b| b.u32("llama.block_count", 0)), "\"llama.block_count\" is 0"),
        (with_key("llama.block_count", |b| b.str("llama.block_count", "2")), "must be an integer; it is a string"),
        (
            with_key("llama.attention.head_count", |b| b.u32("llama.attention.head_count", 3)),
            "\"llama.attention.head_co",
        ),
        (
            with_key("llama.attention.head_count_kv", |b| b.u32("llama.attention.head_count_kv", 3)),
            "a divisor of the 4",
        ),
        (with_key("llama.context_length", |b| b.u32("llama.context_length", 1 << 30)), "at most 16777216"),
        (with_key("llama.rope.dimension_count", |b| b.u32("llama.rope.dimension_count", 33)), "even and at most 64"),
        (with_key("llama.rope.dimension_count", |b| b.u32("llama.rope.dimension_count", 66)), "even and at most 64"),
        (
            with_key("llama.rope.freq_base", |b| b.f32("llama.rope.freq_base", f32::NAN)),
            "\"llama.rope.freq_base\" is NaN",
        ),
        (tiny().f32("llama.attention.value_length", 64.0), "must be an integer; it is a float"),
        (tiny().u32("llama.attention.value_length", 32), "\"llama.attention.value_length\" is 32"),
        (
            tiny().u32("llama.attention.key_length", 65_538).u32("llama.attention.value_length", 65_538),
            "\"llama.attention.key_length\" is 65538; it must be at most 65536",
        ),
        (
            with_key("llama.block_count", |b| b.u32("llama.block_count", u32::MAX)),
            "\"llama.block_count\" is 4294967295; it must be at most 65536",
        ),
        (
            tiny().str_array("tokenizer.ggml.tokens", &["a", "b", "c"]),
            "it has 320 rows, and tokenizer.ggml.tokens 3 entries",
        ),
        (tiny().u32("llama.expert_count", 8), "\"llama.expert_used_count\" is missing"),
        (tiny().str("llama.rope.scaling.type", "helix"), "\"helix\": this rotary scaling is not supported"),
        (tiny().str("llama.rope.scaling.type", "linear"), "\"llama.rope.scaling.factor\" is missing"),
        (
            tiny().tensor_f32("rope_freqs.weight", &[16], &[1.0; 16]),
            "\"rope_freqs.weight\": it is f32 [16], not f32 [32]",
        ),
        (tiny().tensor_f32("rope_freqs.weight", &[32], &[0.0; 32]), "it holds 0, which divides nothing"),
    ];
    for (builder, expected) in cases {
        let message = refusal(&builder, &options());
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}

#[test]
fn tensors_are_refused_by_name_with_both_shapes() {
    let (norm, up) = ("blk.1.attn_norm.weight", "blk.0.ffn_up.weight");
    let cases = [
        (tiny().without_tensor("token_embd.weight"), "tensor \"token_embd.weight\": missing"),
        (
            tiny().without_tensor(up),
            "tensor \"blk.0.ffn_up.weight\" is missing; it should have the dimensions [256, 512]",
        ),
        (
            tiny().without_tensor(norm).tensor_f32(norm, &[128], &[1.0; 128]),
            "tensor \"blk.1.attn_norm.weight\" has the dimensions [128]; it should have [256]",
        ),
        (
            tiny().without_tensor(up).tensor_f32(up, &[512, 256], &vec![0.0; 512 * 256]),
            "tensor \"blk.0.ffn_up.weight\" has the dimensions [512, 256]; it should have [256, 512]",
        ),
        (
            tiny().without_tensor(up).tensor(up, &[256, 512], 17, &vec![0; 512 * 74]),
            "tensor \"blk.0.ffn_up.weight\" has type iq2_xs, which cannot be computed on; supported are f32, f16",
        ),
        (
            tiny().without_tensor(norm).tensor(norm, &[256], 8, &[0; 272]),
            "tensor \"blk.1.attn_norm.weight\" has type q8_0, which cannot be computed on; supported are f32, f16, bf16",
        ),
        (
            tiny().tensor_f32("blk.0.attn_q.bias", &[256], &[0.0; 256]),
            "tensor \"blk.0.attn_q.bias\" belongs to no supported decoder",
        ),
    ];
    for (builder, expected) in cases {
        let message = refusal(&builder, &options());
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}

/// Many layers are a claim that costs nothing to make.
#[test]
fn a_hostile_number_of_layers_fails_at_its_first_missing_tensor() {
    let file = with_key("llama.block_count", |b| b.u32("llama.block_count", 65_536));
    assert!(refusal(&file, &options()).contains("\"blk.2.attn_norm.weight\" is missing"));
}

#[test]
fn sizes_that_do_not_work_out_are_refused_with_numbers() {
    let cases = [
        (LoadOptions { threads: 0, ..options() }, "the number of threads must be at least 1"),
        (LoadOptions { block_tokens: 24, ..options() }, "a KV block of 24 tokens: blocks are multiples of 16"),
        (
            LoadOptions { max_sequences: 33, ..options() },
            "33 sequences need at least as many tokens in a step, which has 32",
        ),
        (LoadOptions { max_model_tokens: Some(513), ..options() }, "cannot be 513 tokens: the model's context is 512"),
        (LoadOptions { max_model_tokens: Some(129), ..options() }, "holds 128 tokens in 8 blocks, fewer than"),
        (LoadOptions { kv: KvBudget::Blocks(0), ..options() }, "the number of KV blocks must be at least 1"),
        // 2 layers of 2 heads of 64 values in bf16, K and V, 16 tokens.
        (
            LoadOptions { kv: KvBudget::Bytes(16_383), ..options() },
            "16383 bytes of KV cache hold no block: one takes 16384",
        ),
        (LoadOptions { memory_limit_bytes: Some(1_000_000), ..options() }, "1000000 are allowed: weights"),
    ];
    for (options, expected) in cases {
        let message = refusal(&tiny(), &options);
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}

#[test]
fn a_loaded_model_says_what_it_is_and_takes() {
    let options = LoadOptions { kv: KvBudget::Bytes(100_000), max_model_tokens: Some(96), ..options() };
    let Loaded { executor, shape, ledgers, weight_type, kernels } = load(&open(&tiny()), &options).unwrap();
    let [ledger] = ledgers[..] else { panic!("{ledgers:?}") };
    let geometry = executor.geometry();
    assert_eq!((geometry.blocks, geometry.max_sequence_tokens, geometry.vocabulary), (6, 96, 320));
    assert_eq!((shape.layers, shape.hidden, shape.kv_heads, shape.context_tokens), (2, 256, 2, 512));
    assert_eq!((weight_type, kernels), ("q4_1", options.kernels.name()));
    let matrix = |values: u64| values / 32 * 20;
    let layer = 2 * matrix(256 * 256) + 2 * matrix(256 * 128) + 3 * matrix(256 * 512) + 2 * 4 * 256;
    assert_eq!(ledger.weights, 2 * layer + matrix(256 * 320) + 4 * 256);
    assert_eq!(ledger.kv, 6 * 16_384);
    let exact = LoadOptions { memory_limit_bytes: Some(ledger.total()), ..options.clone() };
    assert!(load(&open(&tiny()), &exact).is_ok());
    let below = LoadOptions { memory_limit_bytes: Some(ledger.total() - 1), ..options };
    assert!(load(&open(&tiny()), &below).is_err());
}

/// What is packed is what the ledger said, a tied embedding once.
#[test]
fn the_real_model_takes_what_its_ledger_says() {
    let Some(path) = real_model() else { return };
    let file = Checkpoint::open(&path).unwrap();
    let model = build(&file, &LoadOptions::default()).unwrap();
    let packed = model.decoder.weights().matrices().map(|matrix| matrix.bytes() as u64).sum::<u64>();
    let norms = 4 * 576 * 61;
    assert_eq!(model.ledger().weights, file.tensors().map(|tensor| tensor.bytes.len() as u64).sum::<u64>());
    let ratio = (packed + norms) as f64 / model.ledger().weights as f64;
    assert!((0.95..=1.05).contains(&ratio), "{packed} bytes packed, {} in the ledger", model.ledger().weights);
    assert_eq!(model.weight_type, "q4_1");
}

fn row(tokens: Vec<InputToken>, first_position: u32, blocks: &[u32], sample: bool) -> PlanRow {
    let blocks = blocks.iter().copied().map(BlockId).collect();
    let sample = sample.then(|| crate::common::driver::sample_row(&Sampling::GREEDY));
    PlanRow { request: RequestId(0), tokens, first_position, blocks, sample, score: None }
}

fn plan(rows: Vec<PlanRow>) -> StepPlan {
    StepPlan { rows, ..StepPlan::default() }
}

fn known(tokens: &[u32]) -> Vec<InputToken> {
    tokens.iter().copied().map(InputToken::Known).collect()
}

#[test]
fn a_bad_row_fails_alone() {
    let mut executor = load(&open(&tiny()), &options()).unwrap().executor;
    let expected = generate(&mut executor, &[Job::greedy(&[1, 2, 3])], 1, 32, 1)[0][0];
    let nowhere = InputToken::SampledBy { ticket: Ticket(77), row: 0 };
    let bad = [
        (row(known(&[320]), 0, &[1], true), "token 320 is outside the vocabulary of 320"),
        (row(vec![], 0, &[1], true), "the row has no tokens"),
        (row(known(&[1; 17]), 0, &[1], true), "reaches 17 tokens; its blocks hold 16"),
        (row(known(&[1]), 128, &[1; 9], true), "reaches 129 tokens; the longest has 128"),
        (row(known(&[1]), u32::MAX, &[1], true), "reaches 4294967296 tokens"),
        (row(known(&[1]), 0, &[8], true), "names block 8; there are 8"),
        (row(vec![nowhere], 3, &[1], true), "row 0 of step 77, which sampled none"),
    ];
    for (bad, reason) in bad {
        let step = plan(vec![bad, row(known(&[1, 2, 3]), 0, &[2], true)]);
        let ticket = executor.submit(step).unwrap();
        let rows = executor.collect(ticket).unwrap().rows;
        assert!(
            matches!(&rows[0], RowOutput::Failed(found) if found.to_string().contains(reason)),
            "{:?}: {reason}",
            rows[0]
        );
        assert_eq!(rows[1], RowOutput::Sampled(expected), "{reason}");
    }
}

#[test]
fn a_failed_row_fails_what_feeds_on_it_and_a_step_too_large_is_refused() {
    let mut executor = load(&open(&tiny()), &options()).unwrap().executor;
    let first = executor.submit(plan(vec![row(known(&[999]), 0, &[0], true)])).unwrap();
    let fed = row(vec![InputToken::SampledBy { ticket: first, row: 0 }], 1, &[0], true);
    let second = executor.submit(plan(vec![fed])).unwrap();
    executor.collect(first).unwrap();
    let rows = executor.collect(second).unwrap().rows;
    assert!(
        matches!(&rows[0], RowOutput::Failed(reason) if reason.to_string().contains("could not be sampled")),
        "{rows:?}"
    );
    let large = plan(vec![row(known(&[1; 33]), 0, &[0, 1, 2], false)]);
    assert!(executor.submit(large).unwrap_err().to_string().contains("33 tokens"));
}

/// A scheduler may plan before it collects and submit after.
#[test]
fn a_token_is_fed_back_though_its_step_was_collected_since() {
    let mut executor = load(&open(&tiny()), &options()).unwrap().executor;
    let expected = generate(&mut executor, &[Job::greedy(&[1, 2, 3])], 2, 32, 1).remove(0);
    let first = executor.submit(plan(vec![row(known(&[1, 2, 3]), 0, &[0], true)])).unwrap();
    let fed = row(vec![InputToken::SampledBy { ticket: first, row: 0 }], 3, &[0], true);
    let other = executor.submit(plan(vec![row(known(&[9]), 0, &[1], false)])).unwrap();
    assert_eq!(executor.collect(first).unwrap().rows, [RowOutput::Sampled(expected[0])]);
    let third = executor.submit(plan(vec![fed])).unwrap();
    executor.collect(other).unwrap();
    assert_eq!(executor.collect(third).unwrap().rows, [RowOutput::Sampled(expected[1])]);
}

/// Weights that overflow give logits that are not finite.
#[test]
fn overflow_fails_the_row_and_not_the_engine() {
    let norm = "output_norm.weight";
    let file = tiny().without_tensor(norm).tensor_f32(norm, &[256], &[f32::MAX; 256]);
    let mut executor = load(&open(&file), &options()).unwrap().executor;
    let rows = || vec![row(known(&[1]), 0, &[0], true), row(known(&[2]), 0, &[1], false)];
    for _ in 0..2 {
        let ticket = executor.submit(plan(rows())).unwrap();
        let rows = executor.collect(ticket).unwrap().rows;
        let corrupted = RowOutput::Failed(SequenceFailure::Corrupted(
            "the model gave a logit that is not finite, for token 0".to_owned(),
        ));
        assert_eq!(rows[0], corrupted);
        assert_eq!(rows[1], RowOutput::Computed);
    }
}

#[test]
fn a_sleep_gives_the_swap_space_back_too() {
    let swap = Some(SwapSpace { bytes: 1 << 20, folder: None });
    let mut executor = load(&open(&tiny()), &LoadOptions { swap, ..options() }).unwrap().executor;
    let mut step = |moves: Vec<BlockMove>, next: PlanRow| {
        let ticket = executor.submit(StepPlan { moves, rows: vec![next], ..StepPlan::default() }).unwrap();
        executor.collect(ticket).unwrap().rows.remove(0)
    };
    let (kept, back) = (
        BlockMove::SwapOut { block: BlockId(0), slot: SwapSlotId(0) },
        BlockMove::SwapIn { slot: SwapSlotId(0), block: BlockId(2) },
    );
    step(vec![], row(known(&[1, 2, 3]), 0, &[0], true));
    step(vec![kept], row(known(&[9]), 0, &[1], true));
    let follows = || row(known(&[4]), 3, &[2], true);
    assert!(matches!(step(vec![back], follows()), RowOutput::Sampled(_)));
    executor.hold_kv(false).unwrap();
    executor.hold_kv(true).unwrap();
    let ticket = executor.submit(StepPlan { moves: vec![back], rows: vec![follows()], ..StepPlan::default() }).unwrap();
    let rows = executor.collect(ticket).unwrap().rows;
    assert!(
        matches!(&rows[0], RowOutput::Failed(SequenceFailure::LostKv(why)) if why.contains("could not be read back")),
        "{rows:?}"
    );
}
