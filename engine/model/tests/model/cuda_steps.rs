//! Steps on a GPU: graphs, two steps in flight, rows that the host samples, and rows that fail.

use std::slice;

use crate::common::driver::{Job, generate, sample_row};
use crate::common::rows::{plan, row};
use crate::common::tiny::Tiny;
use crate::cuda::{GENERATED, VOCABULARY, checkpoint, device, driver, executor, jobs, loaded, options, step, tiny};
use windlass_cuda_shim::Issued;
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{
    BlockId, BlockMove, History, InputToken, PlanRow, PromptLogprobsRow, RowLogprobs, RowOutput, SampleRow, StepPlan,
};
use windlass_engine_core::request::Sampling;
use windlass_engine_core::sampling::Penalties;
use windlass_engine_model::cuda::{CudaModel, Replay};
use windlass_engine_model::{KvBudget, LoadOptions};
use windlass_kernels::WeightType;

#[test]
fn graphs_chunks_steps_in_flight_and_the_order_of_threads_change_no_token() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let random = Sampling { temperature: 0.8, top_p: 0.9, top_k: 20, seed: 3, ..Sampling::GREEDY };
    let penalties = Penalties { repetition: 1.2, frequency: 0.7, presence: 0.3 };
    for sampling in [Sampling::GREEDY, random.clone(), Sampling { penalties, ..random }] {
        let text = |replay, seed, chunk, in_flight| {
            let mut executor = loaded(&checkpoint, &device(seed), replay).executor;
            generate(&mut executor, &jobs(&sampling), GENERATED, chunk, in_flight)
        };
        let graphs = text(Replay::Graphs, 7, 9, 2);
        assert_eq!(graphs, text(Replay::Eager, 8, 32, 2));
        assert_eq!(graphs, text(Replay::Graphs, 9, 9, 1), "fed back on the device and through the host");
    }
}

/// Logits are in the order of rows, whether or not a graph computed them.
#[test]
fn logits_that_a_step_leaves_are_those_that_it_draws_from() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    for replay in [Replay::Graphs, Replay::Eager] {
        let mut executor = executor(&checkpoint, replay);
        let asks = |(block, token): (u32, u32)| PlanRow {
            blocks: [BlockId(block)].into(),
            ..row(InputToken::Known(token), 0)
        };
        let rows = (0..).zip([1, 9, 30]).map(asks).collect();
        let drawn = step(&mut executor, plan(rows));
        let logits = executor.decoder().logits(3).unwrap();
        let likeliest = |row: &[f32]| (0..VOCABULARY).max_by(|&a, &b| row[a as usize].total_cmp(&row[b as usize]));
        let found: Vec<_> =
            logits.chunks_exact(VOCABULARY as usize).filter_map(likeliest).map(RowOutput::Sampled).collect();
        assert_eq!(found, drawn);
        assert!(found[0] != found[1] && found[1] != found[2], "{found:?}");
    }
}

/// The host samples rows with `typical_p`: such a step waits for the one in flight, and its token is input of the next.
#[test]
fn what_only_the_host_samples_is_mixed_with_what_the_device_does() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut jobs = jobs(&Sampling::GREEDY);
    jobs[1].sampling = Sampling { logit_bias: vec![(5, 100.0)], typical_p: 0.5, ..Sampling::GREEDY };
    let together = generate(&mut executor(&checkpoint, Replay::Graphs), &jobs, 4, 32, 2);
    assert_eq!(together[1], [5; 4]);
    let alone = generate(&mut executor(&checkpoint, Replay::Graphs), &jobs[..1], 4, 32, 2);
    assert_eq!(together[0], alone[0]);
}

/// A row whose sampling depends on all tokens before it.
fn penalized(token: InputToken, position: u32, known: &[u32]) -> PlanRow {
    let penalties = Penalties { frequency: 100.0, ..Penalties::NONE };
    let history = Some(History { tokens: known.to_vec(), prompt_tokens: 1 });
    let sample = SampleRow { history, ..sample_row(&Sampling { penalties, ..Sampling::GREEDY }) };
    PlanRow { sample: Some(sample), ..row(token, position) }
}

#[test]
fn a_second_step_is_computed_before_the_token_is_known_that_its_draw_hangs_on() {
    let (checkpoint, driver) = (checkpoint(tiny(WeightType::BF16)), driver());
    let mut executor = loaded(&checkpoint, &driver.device(), Replay::Graphs).executor;
    let graphs = || driver.issued().iter().filter(|work| matches!(work, Issued::Graph(_))).count();
    let mut text = vec![1];
    let mut last = executor.submit(plan(vec![penalized(InputToken::Known(1), 0, &text)])).unwrap();
    for position in 1..5 {
        let fed = penalized(InputToken::SampledBy { ticket: last, row: 0 }, position, &text);
        let next = executor.submit(plan(vec![fed])).unwrap();
        assert_eq!(graphs(), 1 + position as usize, "the second step is computed meanwhile");
        let rows = executor.collect(last).unwrap().rows;
        let [RowOutput::Sampled(token)] = rows[..] else { panic!("{rows:?}") };
        assert!(!text[1..].contains(&token), "{token} came before: {text:?}");
        text.push(token);
        last = next;
    }
    executor.collect(last).unwrap();
}

/// The host does not wait for the draws when the step before is collected. The step after waits, because it overwrites
/// their logits.
#[test]
fn draws_of_the_host_are_made_when_their_step_is_collected_or_the_next_one_is_submitted() {
    let (checkpoint, driver) = (checkpoint(tiny(WeightType::BF16)), driver());
    let mut executor = loaded(&checkpoint, &driver.device(), Replay::Graphs).executor;
    let drawn_on_host = || {
        let logits = Issued::Copy(4 * VOCABULARY as usize);
        driver.issued().iter().filter(|work| **work == logits).count()
    };
    let on_host = |row: PlanRow| {
        let sample = row.sample.map(|sample| {
            let sampling = Sampling { typical_p: 0.5, ..sample.sampling.as_ref().clone() };
            SampleRow { sampling: sampling.into(), ..sample }
        });
        PlanRow { sample, ..row }
    };
    let fed = |ticket| InputToken::SampledBy { ticket, row: 0 };
    let token = |rows: Vec<RowOutput>| {
        let [RowOutput::Sampled(token)] = rows[..] else { panic!("{rows:?}") };
        token
    };
    let first = executor.submit(plan(vec![penalized(InputToken::Known(1), 0, &[1])])).unwrap();
    let second = executor.submit(plan(vec![on_host(penalized(fed(first), 1, &[1]))])).unwrap();
    let one = token(executor.collect(first).unwrap().rows);
    assert_eq!(drawn_on_host(), 0, "the first step is told before the second one is drawn");
    let third = executor.submit(plan(vec![on_host(penalized(fed(second), 2, &[1, one]))])).unwrap();
    assert_eq!(drawn_on_host(), 1, "before its logits are written over");
    let two = token(executor.collect(second).unwrap().rows);
    assert_eq!(drawn_on_host(), 1);
    let three = token(executor.collect(third).unwrap().rows);
    assert_eq!(drawn_on_host(), 2);
    assert!(one != two && two != three && three != one, "one came before: {one}, {two}, {three}");
}

/// Changes of one step's logits do not affect the next step: both have buffers of their own.
#[test]
fn changes_of_two_steps_in_flight_do_not_mix() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let biased = |block: u32, token: u32| {
        let sampling = Sampling { logit_bias: vec![(token, 100.0)], ..Sampling::GREEDY };
        PlanRow { blocks: [BlockId(block)].into(), sample: Some(sample_row(&sampling)), ..row(InputToken::Known(1), 0) }
    };
    let tickets = [(1, 9), (2, 77)].map(|(block, token)| executor.submit(plan(vec![biased(block, token)])).unwrap());
    let rows = tickets.map(|ticket| executor.collect(ticket).unwrap().rows);
    assert_eq!(rows, [9, 77].map(|token| vec![RowOutput::Sampled(token)]));
}

/// A draw that fails also fails the rows that need its token, without log probabilities of them.
#[test]
fn what_follows_a_draw_that_fails_is_not_told() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let told =
        |row: PlanRow| PlanRow { sample: row.sample.map(|sample| SampleRow { logprobs: Some(0), ..sample }), ..row };
    let none = Sampling { allowed_tokens: vec![5], ..Sampling::GREEDY };
    let failing = SampleRow { banned: vec![5], ..sample_row(&none) };
    let failing = PlanRow { sample: Some(failing), ..row(InputToken::Known(1), 0) };
    let other = PlanRow { blocks: [BlockId(2)].into(), ..row(InputToken::Known(1), 0) };
    let first = executor.submit(plan(vec![failing, told(other.clone())])).unwrap();
    let follow = |index: u32, row: PlanRow| {
        let tokens = vec![InputToken::SampledBy { ticket: first, row: index }];
        told(PlanRow { tokens, first_position: 1, ..row })
    };
    let second = vec![follow(0, row(InputToken::Known(1), 0)), follow(1, other)];
    let second = executor.submit(plan(second)).unwrap();
    let [first, second] = [first, second].map(|ticket| executor.collect(ticket).unwrap());
    for output in [first, second] {
        assert!(matches!(&output.rows[..], [RowOutput::Failed(_), RowOutput::Sampled(_)]), "{:?}", output.rows);
        assert_eq!(output.scores.iter().map(|told| told.row).collect::<Vec<_>>(), [1]);
    }
}

/// Log probabilities of a prompt need not wait for the step in flight, and later steps do not wait for them.
#[test]
fn prompts_are_told_of_with_a_step_in_flight() {
    let mut executor = executor(&checkpoint(tiny(WeightType::BF16)), Replay::Graphs);
    let scored = |block: u32| {
        let tokens = [3, 9, 27].map(InputToken::Known).to_vec();
        let score = Some(PromptLogprobsRow { targets: vec![9, 27], top: 2 });
        PlanRow { tokens, score, blocks: [BlockId(block)].into(), ..row(InputToken::Known(0), 0) }
    };
    let follow = |token, block| PlanRow { score: None, tokens: vec![token], first_position: 3, ..scored(block) };
    let first = executor.submit(plan(vec![scored(1)])).unwrap();
    let second = follow(InputToken::SampledBy { ticket: first, row: 0 }, 1);
    let second = executor.submit(plan(vec![second])).unwrap();
    let first = executor.collect(first).unwrap();
    let alone = executor.submit(plan(vec![scored(2)])).unwrap();
    let second = executor.collect(second).unwrap();
    let alone = executor.collect(alone).unwrap();
    assert_eq!((&first.rows, &first.scores[0].prompt), (&alone.rows, &alone.scores[0].prompt));
    let RowOutput::Sampled(token) = first.rows[0] else { panic!("{:?}", first.rows) };
    assert_eq!(second.rows, step(&mut executor, plan(vec![follow(InputToken::Known(token), 2)])));
}

/// The device reports the same log probabilities as the host, which a bias of 0 forces to sample. Such a step does not
/// wait for the one in flight.
#[test]
fn log_probabilities_of_drawn_tokens_are_told_on_the_device() {
    let checkpoint = checkpoint(Tiny { tied: false, ..tiny(WeightType::BF16) });
    let text: Vec<InputToken> = (0..9).map(|token| InputToken::Known(token * 31 % VOCABULARY)).collect();
    let sampling = Sampling { temperature: 0.9, top_k: 40, seed: 8, ..Sampling::GREEDY };
    let scored = |tops: [Option<u32>; 3], bias: Vec<(u32, f32)>| {
        let mut executor = executor(&checkpoint, Replay::Graphs);
        let asked = |(index, logprobs): (usize, Option<u32>)| {
            let sampling = Sampling { logit_bias: bias.clone(), ..sampling.clone() };
            let sample = Some(SampleRow { logprobs, ..sample_row(&sampling) });
            let blocks = [BlockId(index as u32 + 1)].into();
            PlanRow { tokens: text[..3 + 2 * index].to_vec(), sample, blocks, ..row(InputToken::Known(0), 0) }
        };
        let first = executor.submit(plan(tops.into_iter().enumerate().map(asked).collect())).unwrap();
        let follow = |index: usize| PlanRow {
            tokens: vec![InputToken::SampledBy { ticket: first, row: index as u32 }],
            first_position: 3 + 2 * index as u32,
            ..asked((index, tops[index]))
        };
        let second = executor.submit(plan((0..3).map(follow).collect())).unwrap();
        let outputs = [first, second].map(|ticket| executor.collect(ticket).unwrap());
        outputs.map(|output| (output.rows, output.scores))
    };
    let tops = [Some(0), None, Some(20)];
    for ((rows, found), (expected_rows, expected)) in scored(tops, vec![]).into_iter().zip(scored(tops, vec![(1, 0.0)]))
    {
        assert_eq!(rows, expected_rows);
        assert_eq!(found.len(), 2);
        for (found, expected) in found.iter().zip(&expected) {
            assert_eq!((found.row, found.prompt.len()), (expected.row, 0));
            let told = |scores: &RowLogprobs| {
                let all = scores.sampled.iter().flat_map(|told| [told.chosen].into_iter().chain(told.top.clone()));
                all.collect::<Vec<_>>()
            };
            let (found, expected) = (told(found), told(expected));
            assert_eq!(found.len(), expected.len());
            for (found, expected) in found.iter().zip(&expected) {
                assert_eq!((found.token, found.rank), (expected.token, expected.rank));
                assert!((found.logprob - expected.logprob).abs() < 1e-5, "{found:?} instead of {expected:?}");
            }
        }
    }
}

#[test]
fn a_decoding_step_is_one_graph_and_allocates_nothing() {
    let (checkpoint, driver) = (checkpoint(tiny(WeightType::BF16)), driver());
    let mut executor = loaded(&checkpoint, &driver.device(), Replay::Graphs).executor;
    step(&mut executor, plan(vec![row(InputToken::Known(1), 0)]));
    let (before, free) = (driver.issued().len(), driver.device().driver().memory().unwrap());
    step(&mut executor, plan(vec![row(InputToken::Known(2), 1)]));
    let issued = driver.issued()[before..].to_vec();
    assert_eq!(driver.device().driver().memory().unwrap(), free);
    let graphs: Vec<usize> =
        issued.iter().filter_map(|work| if let Issued::Graph(pieces) = work { Some(*pieces) } else { None }).collect();
    // Two layers of eight kernels, and four other kernels.
    assert_eq!(graphs, [2 * 8 + 4], "{issued:?}");
    assert_eq!(issued.iter().filter(|work| matches!(work, Issued::Launch(_))).count(), 1, "the draw: {issued:?}");
    let copies = issued.iter().filter(|work| matches!(work, Issued::Copy(_))).count();
    assert_eq!(copies, 3, "the step's numbers, the draw's, and the token: {issued:?}");
}

#[test]
fn a_copied_block_is_read_like_the_one_it_was_copied_from() {
    copied_blocks_are_read_alike(&mut executor(&checkpoint(tiny(WeightType::BF16)), Replay::Graphs));
}

pub fn copied_blocks_are_read_alike(executor: &mut dyn Executor) {
    step(executor, plan(vec![row(InputToken::Known(9), 0)]));
    let told = || SampleRow { logprobs: Some(0), ..sample_row(&Sampling::GREEDY) };
    let asks = |block: u32, position: u32| PlanRow {
        blocks: [BlockId(block)].into(),
        sample: Some(told()),
        ..row(InputToken::Known(3), position)
    };
    let moves = vec![BlockMove::Copy { from: BlockId(1), to: BlockId(2) }];
    let ticket = executor
        .submit(StepPlan { moves, rows: vec![asks(1, 1), asks(2, 1), asks(3, 0)], ..StepPlan::default() })
        .unwrap();
    let scores = executor.collect(ticket).unwrap().scores;
    let [own, copied, alone] = [0, 1, 2].map(|row: usize| scores[row].sampled[0].chosen.logprob);
    assert_eq!(own, copied);
    assert_ne!(own, alone, "the token before matters");
}

#[test]
fn a_wrong_row_fails_alone_and_its_followers_with_it() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = executor(&checkpoint, Replay::Graphs);
    let wrong = PlanRow { blocks: [BlockId(99)].into(), ..row(InputToken::Known(1), 0) };
    let first = executor.submit(plan(vec![row(InputToken::Known(1), 0), wrong])).unwrap();
    let follow = |index| row(InputToken::SampledBy { ticket: first, row: index }, 1);
    let second = executor.submit(plan(vec![follow(0), follow(1)])).unwrap();
    assert!(executor.submit(StepPlan::default()).unwrap_err().to_string().contains("2 steps are in flight"));
    assert!(executor.collect(second).is_err(), "the first comes first");
    let rows = executor.collect(first).unwrap().rows;
    assert!(
        matches!(&rows[..], [RowOutput::Sampled(_), RowOutput::Failed(why)] if why.to_string().contains("block 99")),
        "{rows:?}"
    );
    let rows = executor.collect(second).unwrap().rows;
    assert!(matches!(&rows[..], [RowOutput::Sampled(_), RowOutput::Failed(_)]), "{rows:?}");
}

/// The splits and pages of a step depend on its longest sequence, in a few sizes, each with its own graph.
#[test]
fn a_sequence_that_grows_longer_than_its_graph_has_room_for_goes_on_in_another() {
    let small = Tiny { layers: 1, hidden: 64, feed_forward: 64, heads: 1, kv_heads: 1, ..tiny(WeightType::BF16) };
    let checkpoint = checkpoint(Tiny { longest_tokens: 4096, ..small });
    let kv = KvBudget::Blocks(40);
    let options = LoadOptions { kv, max_step_tokens: 512, max_model_tokens: Some(2500), ..options() };
    let prompt: Vec<u32> = (0..2044).map(|token| token * token % 127).collect();
    let job = Job { prompt, sampling: Sampling::GREEDY };
    let [graphs, eager] = [Replay::Graphs, Replay::Eager].map(|replay| {
        let model = CudaModel::load(&checkpoint, &options, &[device(7)]).unwrap();
        let mut executor = model.start(kv, replay).unwrap().executor;
        let answer = generate(&mut executor, slice::from_ref(&job), 8, 512, 2);
        (answer, executor.decoder().graphs())
    });
    assert_eq!((graphs.0, graphs.1, eager.1), (eager.0, 2, 0));
}
