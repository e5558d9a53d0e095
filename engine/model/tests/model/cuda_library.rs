//! A library of the machine's that multiplies many tokens, where a token's bits may depend on what is beside it.

use crate::common::driver::{Job, generate};
use crate::cuda::{checkpoint, options, tiny};
use windlass_cuda_shim::{HostMachine, Issued, Kernels};
use windlass_engine_model::LoadOptions;
use windlass_engine_model::cuda::{CudaModel, Replay};
use windlass_kernels::WeightType;

/// Tokens of the prompt: one step.
const PROMPT: u32 = 150;

/// What a model of this type says of the library, how many products that made, and the tokens that came.
fn said(
    kind: WeightType,
    machine: &HostMachine,
    batch_invariant: bool,
) -> (Option<Result<String, String>>, usize, Vec<u32>) {
    let driver = machine.driver(0, 1 << 28);
    let free = || driver.device().driver().memory().unwrap().free_bytes as u64;
    let before = free();
    let options = LoadOptions { batch_invariant, max_step_tokens: 160, ..options() };
    let model = CudaModel::load(&checkpoint(tiny(kind)), &options, &[driver.device()]).unwrap();
    let products = model.products();
    let loaded = model.start(options.kv, Replay::Graphs).unwrap();
    let (ledger, mut executor) = (loaded.ledger(), loaded.executor);
    let small = before - free() - ledger.total();
    assert!(small < 64 << 10, "{ledger:?} of {}", before - free());
    let prompt: Vec<u32> = (0..PROMPT).map(|token| token * 37 % 127).collect();
    let text = generate(&mut executor, &[Job::greedy(&prompt)], 4, 160, 2).remove(0);
    let multiplied = driver.issued().iter().filter(|work| **work == Issued::Multiply).count();
    (products, multiplied, text)
}

#[test]
fn many_tokens_go_through_the_machines_library_where_bits_may_depend_on_them() {
    let without = HostMachine::new(Kernels::Run, 7);
    let with = without.clone().with_products();
    let (none, made, alike) = said(WeightType::BF16, &with, true);
    assert_eq!((none, made), (None, 0));
    let (found, made, text) = said(WeightType::BF16, &with, false);
    assert_eq!((found, text), (Some(Ok("the shim's products".into())), alike.clone()));
    assert_eq!(made, 4 * 2, "the products of two layers, of the prompt alone");
    let (missing, made, text) = said(WeightType::BF16, &without, false);
    let why = "dlopen failed: there is no library for products";
    assert_eq!((missing, made, text), (Some(Err(why.into())), 0, alike));
    let (nothing_to_do, made, _) = said(WeightType::Q8_0, &with, false);
    assert_eq!((nothing_to_do, made), (None, 0));
}
