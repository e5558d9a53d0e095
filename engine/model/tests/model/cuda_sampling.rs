//! Sampling on a GPU gives the results of the host's sampler.

use std::sync::Arc;
use std::time::Duration;

use crate::common::driver::sample_row;
use crate::common::rows::{plan, row};
use crate::cuda::{VOCABULARY, checkpoint, driver, executor, loaded, options, step, tiny};
use windlass_cuda_shim::Issued;
use windlass_engine_core::constraint::{Constraint, MaskUnavailable, TokenSet};
use windlass_engine_core::executor::Executor;
use windlass_engine_core::plan::{BlockId, History, InputToken, PlanRow, PromptLogprobsRow, RowOutput, SampleRow};
use windlass_engine_core::request::Sampling;
use windlass_engine_core::sampling::{Penalties, TokenLogprobs};
use windlass_engine_model::cuda::Replay;
use windlass_engine_model::load;
use windlass_kernels::WeightType;

/// Makes the host sample a row; it keeps the most likely token, whatever the value.
const FOR_THE_HOST: f32 = 0.5;
/// How many of the cases change the sampled token, and the index of the case in which no token is allowed.
const CHANGING: usize = 7;
const LEAVING_NONE: usize = 9;
/// How far sums of floats may change log probabilities.
const NEAR: f32 = 2e-5;

#[derive(Debug)]
struct Even;

impl Constraint for Even {
    fn allowed(&self, _generated: &[u32], _patience: Duration) -> Result<TokenSet, MaskUnavailable> {
        Ok(TokenSet::from_words(vec![0x5555_5555; 2000]))
    }
}

/// Allows the number behind the last token's, and 5 at first.
#[derive(Debug)]
struct Counting;

impl Constraint for Counting {
    fn allowed(&self, generated: &[u32], _patience: Duration) -> Result<TokenSet, MaskUnavailable> {
        let mut next = TokenSet::default();
        next.insert(generated.last().map_or(5, |last| last + 1));
        Ok(next)
    }
}

#[derive(Debug)]
struct Panicking;

impl Constraint for Panicking {
    fn allowed(&self, generated: &[u32], _patience: Duration) -> Result<TokenSet, MaskUnavailable> {
        panic!("nothing goes on {generated:?}")
    }
}

/// A row with a constraint that depends on known tokens, and on one that a step in flight samples.
fn constrained(constraint: Arc<dyn Constraint>, token: InputToken, position: u32, known: &[u32]) -> PlanRow {
    let history = Some(History { tokens: known.to_vec(), prompt_tokens: 1 });
    let sample = SampleRow { history, constraint: Some(constraint), ..sample_row(&Sampling::GREEDY) };
    PlanRow { sample: Some(sample), ..row(token, position) }
}

/// Ways to decide which token comes where `likeliest` would. Of those before [`CHANGING`] each has another come.
fn ways(likeliest: u32) -> Vec<SampleRow> {
    let greedy = |sampling: Sampling| sample_row(&sampling);
    let history = |count: usize| Some(History { tokens: [vec![1], vec![likeliest; count]].concat(), prompt_tokens: 1 });
    let other = (likeliest + 1) % VOCABULARY;
    let frequency = Penalties { frequency: 100.0, ..Penalties::NONE };
    let repetition = Penalties { repetition: 1e6, ..Penalties::NONE };
    let presence = Penalties { presence: 1e6, ..Penalties::NONE };
    let penalized = |penalties| greedy(Sampling { penalties, ..Sampling::GREEDY });
    vec![
        greedy(Sampling { logit_bias: vec![(other, 100.0)], ..Sampling::GREEDY }),
        greedy(Sampling { allowed_tokens: vec![3, 9, 2], ..Sampling::GREEDY }),
        SampleRow { banned: vec![likeliest, VOCABULARY + 7], ..greedy(Sampling::GREEDY) },
        SampleRow { history: history(3), ..penalized(frequency) },
        SampleRow { history: Some(History { tokens: vec![likeliest], prompt_tokens: 1 }), ..penalized(repetition) },
        SampleRow { history: history(1), ..penalized(presence) },
        SampleRow {
            history: history(2),
            ..greedy(Sampling { bad_words: vec![vec![likeliest, likeliest], vec![5, 6]], ..Sampling::GREEDY })
        },
        SampleRow { constraint: Some(Arc::new(Even)), history: history(1), ..greedy(Sampling::GREEDY) },
        SampleRow {
            constraint: Some(Arc::new(Even)),
            history: history(1),
            ..greedy(Sampling { allowed_tokens: vec![7, 100, 4], ..Sampling::GREEDY })
        },
        SampleRow { banned: vec![5], ..greedy(Sampling { allowed_tokens: vec![5], ..Sampling::GREEDY }) },
        SampleRow { logprobs: Some(4), ..greedy(Sampling::GREEDY) },
        SampleRow { logprobs: Some(0), ..greedy(Sampling { top_k: 3, ..Sampling::at_temperature(1.5) }) },
    ]
}

/// The same rows for the host's sampler, but for the last: it draws at random, which `typical_p` would change.
fn on_host(samples: &[SampleRow]) -> Vec<SampleRow> {
    let for_the_host = |sample: &SampleRow| {
        let sampling = Sampling { typical_p: FOR_THE_HOST, ..sample.sampling.as_ref().clone() };
        SampleRow { sampling: Arc::new(sampling), ..sample.clone() }
    };
    samples[..samples.len() - 1].iter().map(for_the_host).collect()
}

/// The most likely token.
fn likeliest(executor: &mut dyn Executor) -> u32 {
    match answers(executor, &[sample_row(&Sampling::GREEDY)])[..] {
        [(RowOutput::Sampled(token), _)] => token,
        _ => panic!("nothing was drawn"),
    }
}

/// The same row of logits for each of `samples`, in steps of up to four.
fn answers(executor: &mut dyn Executor, samples: &[SampleRow]) -> Vec<(RowOutput, Vec<TokenLogprobs>)> {
    let row = |(block, sample): (u32, &SampleRow)| PlanRow {
        blocks: [BlockId(block)].into(),
        sample: Some(sample.clone()),
        ..row(InputToken::Known(1), 0)
    };
    let step = |samples: &[SampleRow]| {
        let ticket = executor.submit(plan((0..).zip(samples).map(row).collect())).unwrap();
        let output = executor.collect(ticket).unwrap();
        let told = |row: usize| output.scores.iter().find(|scores| scores.row as usize == row);
        let told = |row| told(row).map(|scores| scores.sampled.clone()).unwrap_or_default();
        output.rows.iter().cloned().enumerate().map(|(row, output)| (output, told(row))).collect::<Vec<_>>()
    };
    samples.chunks(4).flat_map(step).collect()
}

fn assert_near(found: &[TokenLogprobs], expected: &[TokenLogprobs]) {
    assert_eq!(found.len(), expected.len());
    for (found, expected) in found.iter().zip(expected) {
        assert_eq!(found.top.len(), expected.top.len());
        let all = |told: &TokenLogprobs| [vec![told.chosen], told.top.clone()].concat();
        for (found, expected) in all(found).iter().zip(all(expected)) {
            assert_eq!((found.token, found.rank), (expected.token, expected.rank));
            assert!((found.logprob - expected.logprob).abs() <= NEAR, "{found:?} for {expected:?}");
        }
    }
}

#[test]
fn a_device_answers_as_the_hosts_sampler_does() {
    let mut executor = executor(&checkpoint(tiny(WeightType::BF16)), Replay::Graphs);
    let likeliest = likeliest(&mut executor);
    let ways = ways(likeliest);
    let found = answers(&mut executor, &ways);
    let expected = answers(&mut executor, &on_host(&ways));
    for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
        assert_eq!(found.0, expected.0, "{:?}", ways[index]);
        assert_near(&found.1, &expected.1);
        assert!(index >= CHANGING || found.0 != RowOutput::Sampled(likeliest), "{:?} changes nothing", ways[index]);
    }
    assert!(matches!(found[CHANGING].0, RowOutput::Sampled(token) if token % 2 == 0));
    assert!(matches!(found[LEAVING_NONE].0, RowOutput::Failed(_)), "{:?}", found[LEAVING_NONE]);
    assert_eq!(found[10].1[0].top[0].token, likeliest);
    assert!(found[11].1[0].chosen.rank <= 3 && found[11].1[0].top.is_empty());
}

/// Only the shim records what was issued to it.
#[test]
fn logits_leave_a_device_where_it_does_not_answer_alone() {
    let (checkpoint, driver) = (checkpoint(tiny(WeightType::BF16)), driver());
    let mut executor = loaded(&checkpoint, &driver.device(), Replay::Graphs).executor;
    let ways = ways(likeliest(&mut executor));
    let logits = Issued::Copy(4 * VOCABULARY as usize);
    for (samples, leave) in [(&ways, false), (&on_host(&ways), true)] {
        let before = driver.issued().len();
        answers(&mut executor, samples);
        assert_eq!(driver.issued()[before..].contains(&logits), leave);
    }
}

/// Rows that ask for more most likely tokens than the device can report are sampled on the host.
#[test]
fn known_tokens_are_scored_as_the_host_scores_them() {
    let mut executor = executor(&checkpoint(tiny(WeightType::BF16)), Replay::Graphs);
    let mut scored = |top: u32| {
        let tokens: Vec<u32> = (0..9).map(|token| token * 31 % VOCABULARY).collect();
        let score = Some(PromptLogprobsRow { targets: tokens[1..].to_vec(), top });
        let tokens = tokens.into_iter().map(InputToken::Known).collect();
        let ticket =
            executor.submit(plan(vec![PlanRow { tokens, sample: None, score, ..row(InputToken::Known(0), 0) }]));
        executor.collect(ticket.unwrap()).unwrap().scores.remove(0).prompt
    };
    let (found, mut expected) = (scored(3), scored(21));
    expected.iter_mut().for_each(|told| told.top.truncate(3));
    assert_near(&found, &expected);
}

/// The second step is computed before the token that its constraint needs is known.
#[test]
fn a_constraint_is_asked_with_the_token_that_a_step_in_flight_draws() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    let mut executor = loaded(&checkpoint, &driver().device(), Replay::Graphs).executor;
    let counting = |token, position, known: &[u32]| plan(vec![constrained(Arc::new(Counting), token, position, known)]);
    let mut text = vec![1];
    let mut last = executor.submit(counting(InputToken::Known(1), 0, &text)).unwrap();
    for position in 1..5 {
        let fed = InputToken::SampledBy { ticket: last, row: 0 };
        let next = executor.submit(counting(fed, position, &text)).unwrap();
        assert_eq!(executor.collect(last).unwrap().rows, [RowOutput::Sampled(4 + position)]);
        text.push(4 + position);
        last = next;
    }
    assert_eq!(executor.collect(last).unwrap().rows, [RowOutput::Sampled(9)]);
}

#[test]
fn a_constraint_that_panics_fails_its_own_row_alone() {
    let checkpoint = checkpoint(tiny(WeightType::BF16));
    constraints_fail_alone(&mut loaded(&checkpoint, &driver().device(), Replay::Graphs).executor);
    constraints_fail_alone(&mut load(&checkpoint, &options()).unwrap().executor);
}

fn constraints_fail_alone(executor: &mut dyn Executor) {
    let asked = |constraint: Arc<dyn Constraint>, block: u32| PlanRow {
        blocks: [BlockId(block)].into(),
        ..constrained(constraint, InputToken::Known(1), 0, &[1])
    };
    let plain = PlanRow { blocks: [BlockId(3)].into(), ..row(InputToken::Known(1), 0) };
    for _ in 0..2 {
        let rows = vec![asked(Arc::new(Panicking), 1), asked(Arc::new(Counting), 2), plain.clone()];
        let rows = step(executor, plan(rows));
        let [RowOutput::Failed(why), RowOutput::Sampled(5), RowOutput::Sampled(_)] = &rows[..] else {
            panic!("{rows:?}")
        };
        assert!(why.to_string().contains("the constraint panicked: nothing goes on []"), "{why}");
    }
}
