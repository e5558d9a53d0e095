//! Experts of many tokens by Hopper's warpgroups, where a token's bits may depend on what is beside it.

use crate::common::driver::{Job, generate};
use crate::cuda::{APART_IF_FLOAT8, VOCABULARY, family, most_regret, options};
use serde_json::json;
use windlass_checkpoint::Checkpoint;
use windlass_cuda_shim::{HostMachine, Issued, Kernels};
use windlass_engine_model::cuda::{CudaModel, Replay};
use windlass_engine_model::{KvBudget, LoadOptions, Quantization, load};
use windlass_kernels::cuda::Kernel;

/// Tokens of the prompt, one step: an expert of four gets about a block's, where a token goes through two.
const PROMPT: u32 = 262;

/// Most tokens of a step.
const STEP: usize = 272;

/// How many products of experts went through warpgroups, and the tokens that came.
fn said(checkpoint: &Checkpoint, quantization: Option<Quantization>, batch_invariant: bool) -> ([usize; 3], Vec<u32>) {
    let driver = HostMachine::new(Kernels::Run, 7).driver(0, 1 << 28);
    let free = || driver.device().driver().memory().unwrap().free_bytes as u64;
    let before = free();
    let kv = KvBudget::Blocks(10);
    let sizes = LoadOptions { max_step_tokens: STEP as u32, max_model_tokens: Some(512), kv, ..options() };
    let options = LoadOptions { batch_invariant, quantization, ..sizes };
    let model = CudaModel::load(checkpoint, &options, &[driver.device()]).unwrap();
    let loaded = model.start(options.kv, Replay::Graphs).unwrap();
    let (ledger, mut executor) = (loaded.ledger(), loaded.executor);
    let small = before - free() - ledger.total();
    assert!(small < 64 << 10, "{ledger:?} of {}", before - free());
    let text = generate(&mut executor, &[Job::greedy(&prompt())], 4, STEP, 2).remove(0);
    let launched = |kernel| driver.issued().iter().filter(|work| **work == Issued::Launch(kernel)).count();
    let experts = [Kernel::GemmHopperExperts, Kernel::Int4HopperExperts, Kernel::W8a8HopperFp8Experts];
    (experts.map(launched), text)
}

fn prompt() -> Vec<u32> {
    (0..PROMPT).map(|token| token * 37 % VOCABULARY).collect()
}

#[test]
fn experts_of_many_tokens_go_through_warpgroups_where_bits_may_depend_on_them() {
    let experts = json!({"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 256,
        "num_hidden_layers": 2, "tie_word_embeddings": false});
    let mixture = family("mixtral", false, experts);
    for (quantization, expected) in [
        (None, [4, 0, 0]),
        (Some(Quantization::INT4), [0, 4, 0]),
        // With inputs rounded, too, which tokens as few as those of the other steps have in bf16.
        (Some(Quantization::FP8), [0, 0, 4]),
    ] {
        let (narrow, alike) = said(&mixture, quantization, true);
        assert_eq!(narrow, [0, 0, 0]);
        let (wide, text) = said(&mixture, quantization, false);
        assert_eq!(wide, expected, "two products of two layers, of the prompt alone");
        // Inputs in e4m3 say three bits of a value: another token may come, but none that the CPU, which does not round them, finds
        // much worse.
        match quantization {
            Some(Quantization::FP8) => {
                let options =
                    LoadOptions { quantization, max_model_tokens: Some(512), kv: KvBudget::Blocks(40), ..options() };
                let mut cpu = load(&mixture, &options).unwrap().executor;
                let regret = most_regret(&mut cpu, &prompt(), &text);
                assert!(regret <= APART_IF_FLOAT8, "{text:?} is {regret} from the CPU's choices");
            }
            _ => assert_eq!(text, alike),
        }
    }
}
