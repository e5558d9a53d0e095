//! The sampler: tables for each rule, and drawn frequencies against the exact distribution.

use proptest::prelude::*;
use windlass_engine_core::constraint::TokenSet;
use windlass_engine_core::request::{Penalties, Sampling};
use windlass_engine_model::{Draw, Drawn, RowTask, SampleError, sample};

const RANDOM: Sampling = Sampling::RANDOM;

/// A draw after nothing.
fn blank(sampling: &Sampling) -> Draw<'_> {
    Draw { sampling, banned: &[], prompt: &[], generated: &[], allowed: None, position: 0, logprobs: None }
}

fn draw(logits: &[f32], sampling: &Sampling, banned: &[u32], position: u32) -> Result<u32, SampleError> {
    let task = RowTask::Draw(Draw { banned, position, ..blank(sampling) });
    sample(&mut logits.to_vec(), &task).map(|drawn| drawn.token)
}

/// The most likely token after a prompt and an answer.
fn best_after(logits: &[f32], sampling: &Sampling, prompt: &[u32], generated: &[u32]) -> u32 {
    let greedy = Sampling { temperature: 0.0, ..sampling.clone() };
    let task = RowTask::Draw(Draw { prompt, generated, ..blank(&greedy) });
    sample(&mut logits.to_vec(), &task).unwrap().token
}

/// The tokens that ever come in many draws.
fn support(logits: &[f32], sampling: &Sampling, banned: &[u32]) -> Vec<u32> {
    let mut drawn: Vec<u32> = (0..500).map(|at| draw(logits, sampling, banned, at).unwrap()).collect();
    drawn.sort_unstable();
    drawn.dedup();
    drawn
}

#[test]
fn greedy_takes_the_largest_and_the_lowest_of_equals() {
    let cases: [(&[f32], &[u32], u32); 5] = [
        (&[1.0, 3.0, 2.0], &[], 1),
        (&[5.0, 7.0, 7.0, 7.0], &[], 1),
        (&[5.0, 7.0, 7.0, 7.0], &[1], 2),
        (&[-5.0, -7.0], &[0], 1),
        (&[0.0, 0.0], &[], 0),
    ];
    for (logits, banned, expected) in cases {
        assert_eq!(draw(logits, &Sampling::GREEDY, banned, 9), Ok(expected), "{logits:?} without {banned:?}");
    }
}

#[test]
fn a_row_that_gives_no_token_says_why() {
    for (wrong, token) in [(f32::NAN, 1), (f32::INFINITY, 1), (f32::NEG_INFINITY, 1)] {
        let found = draw(&[0.0, wrong, 1.0], &Sampling::GREEDY, &[1], 0);
        assert_eq!(found, Err(SampleError::NotFinite { token }), "{wrong}");
    }
    for sampling in [Sampling::GREEDY, RANDOM] {
        assert_eq!(draw(&[0.0, 1.0], &sampling, &[0, 1, 7], 0), Err(SampleError::AllBanned));
    }
}

#[test]
fn filters_keep_what_they_say() {
    // Probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625 in another order.
    let logits = [0.25f32, 0.0625, 0.5, 0.0625, 0.125].map(f32::ln);
    let cases: [(Sampling, &[u32], &[u32]); 13] = [
        (RANDOM, &[], &[0, 1, 2, 3, 4]),
        (RANDOM, &[2, 99], &[0, 1, 3, 4]),
        (Sampling { top_k: 1, ..RANDOM }, &[], &[2]),
        (Sampling { top_k: 2, ..RANDOM }, &[], &[0, 2]),
        (Sampling { top_k: 4, ..RANDOM }, &[], &[0, 1, 2, 4]),
        (Sampling { top_k: 900, ..RANDOM }, &[], &[0, 1, 2, 3, 4]),
        (Sampling { top_p: 0.01, ..RANDOM }, &[], &[2]),
        (Sampling { top_p: 0.49, ..RANDOM }, &[], &[2]),
        (Sampling { top_p: 0.7, ..RANDOM }, &[], &[0, 2]),
        (Sampling { top_p: 0.8, ..RANDOM }, &[], &[0, 2, 4]),
        (Sampling { min_p: 0.2, ..RANDOM }, &[], &[0, 2, 4]),
        // The first two are 2/3 and 1/3 of what top_k keeps.
        (Sampling { top_k: 2, top_p: 0.6, ..RANDOM }, &[], &[2]),
        (Sampling { top_p: 0.9, min_p: 0.4, ..RANDOM }, &[], &[0, 2]),
    ];
    for (sampling, banned, expected) in cases {
        assert_eq!(support(&logits, &sampling, banned), expected, "{sampling:?} without {banned:?}");
    }
    // A sum that is exactly top_p is reached.
    assert_eq!(support(&[0.0, 0.0], &Sampling { top_p: 0.5, ..RANDOM }, &[]), [0]);
}

#[test]
fn typical_tokens_are_those_whose_surprise_is_near_the_entropy() {
    // Probabilities 0.5, 0.25, 0.125, 0.0625, 0.0625: surprises of 1, 2, 3, 4 and 4 bits, an entropy of 1.875.
    let logits = [0.5f32, 0.25, 0.125, 0.0625, 0.0625].map(f32::ln);
    let cases: [(f32, &[u32]); 4] = [(0.1, &[1]), (0.26, &[0, 1]), (0.76, &[0, 1, 2]), (1.0, &[0, 1, 2, 3, 4])];
    for (typical_p, expected) in cases {
        assert_eq!(support(&logits, &Sampling { typical_p, ..RANDOM }, &[]), expected, "{typical_p}");
    }
    // After top_k has left 2/3 and 1/3: surprises of 0.58 and 1.58 bits, an entropy of 0.92.
    assert_eq!(support(&logits, &Sampling { typical_p: 0.5, top_k: 2, ..RANDOM }, &[]), [0]);
    // Of the two typical ones, top_p keeps the more likely.
    assert_eq!(support(&logits, &Sampling { typical_p: 0.6, top_p: 0.6, ..RANDOM }, &[]), [0]);
}

#[test]
fn penalties_and_biases_move_single_tokens() {
    let penalized = |repetition, frequency, presence| Sampling {
        penalties: Penalties { repetition, frequency, presence },
        ..RANDOM
    };
    let biased = |logit_bias: &[(u32, f32)]| Sampling { logit_bias: logit_bias.to_vec(), ..RANDOM };
    let logits = [1.0, 2.0, 1.5, -1.0];
    let cases: [(Sampling, &[u32], &[u32], u32); 13] = [
        (penalized(1.0, 0.0, 0.0), &[1], &[1, 1], 1),
        // 2 / 1.5 is less than 1.5, in the prompt or in the answer, once however often.
        (penalized(1.5, 0.0, 0.0), &[1], &[], 2),
        (penalized(1.5, 0.0, 0.0), &[], &[1], 2),
        (penalized(1.3, 0.0, 0.0), &[1, 1], &[1, 1], 1),
        (penalized(0.1, 0.0, 0.0), &[0], &[], 0),
        // The answer counts, the prompt does not.
        (penalized(1.0, 0.3, 0.0), &[1, 1, 1], &[1], 1),
        (penalized(1.0, 0.3, 0.0), &[], &[1, 0, 1], 2),
        (penalized(1.0, 0.0, 0.6), &[1], &[], 1),
        (penalized(1.0, 0.0, 0.4), &[], &[1, 1, 1], 1),
        (penalized(1.0, 0.0, 0.6), &[], &[1], 2),
        (biased(&[(3, 3.5)]), &[], &[], 3),
        (biased(&[(1, -100.0), (2, -0.6)]), &[], &[], 0),
        (biased(&[(77, 100.0)]), &[], &[], 1),
    ];
    for (sampling, prompt, generated, expected) in cases {
        assert_eq!(
            best_after(&logits, &sampling, prompt, generated),
            expected,
            "{sampling:?} {prompt:?} {generated:?}"
        );
    }
    // A negative logit is penalized downwards.
    assert_eq!(best_after(&[-1.0, -1.2], &penalized(1.5, 0.0, 0.0), &[0], &[]), 1);
    // Nothing that is banned comes back by a bias, and nothing overflows.
    let banned = Sampling { logit_bias: vec![(1, 100.0)], ..RANDOM };
    assert_eq!(draw(&[0.0, 1.0], &Sampling { temperature: 0.0, ..banned }, &[1], 0), Ok(0));
    assert_eq!(best_after(&[f32::MAX, -1.0], &penalized(0.01, 0.0, 0.0), &[0], &[]), 0);
}

#[test]
fn bad_words_are_never_completed_and_only_allowed_tokens_come() {
    let logits = [1.0, 3.0, 2.0, 0.0];
    let bad = |words: &[&[u32]]| Sampling { bad_words: words.iter().map(|word| word.to_vec()).collect(), ..RANDOM };
    let cases: [(Sampling, &[u32], u32); 7] = [
        (bad(&[&[1]]), &[], 2),
        (bad(&[&[0, 1]]), &[], 1),
        (bad(&[&[0, 1]]), &[3, 0], 2),
        (bad(&[&[0, 1]]), &[0, 3], 1),
        (bad(&[&[3, 0, 1], &[0, 2]]), &[3, 0], 0),
        (Sampling { allowed_tokens: vec![3, 0], ..RANDOM }, &[], 0),
        (Sampling { allowed_tokens: vec![3, 99], ..RANDOM }, &[], 3),
    ];
    for (sampling, generated, expected) in cases {
        // What the prompt ends with completes nothing.
        assert_eq!(best_after(&logits, &sampling, &[0], generated), expected, "{sampling:?} after {generated:?}");
    }
    let allowed = TokenSet::from_words(vec![0b1101]);
    let greedy = Sampling::GREEDY;
    let task = RowTask::Draw(Draw { allowed: Some(&allowed), ..blank(&greedy) });
    assert_eq!(sample(&mut logits.to_vec(), &task).unwrap().token, 2);
    let none = Sampling { allowed_tokens: vec![99], ..RANDOM };
    assert_eq!(draw(&logits, &none, &[], 0), Err(SampleError::AllBanned));
}

#[test]
fn log_probabilities_are_the_models_own_whatever_is_drawn() {
    let logits = [0.25f32, 0.0625, 0.5, 0.0625, 0.125].map(|share| share.ln() + 7.0);
    let sampling = Sampling { logit_bias: vec![(2, -100.0)], temperature: 0.0, top_k: 1, ..RANDOM };
    let task = RowTask::Draw(Draw { logprobs: Some(2), ..blank(&sampling) });
    let Drawn { token, logprobs } = sample(&mut logits.to_vec(), &task).unwrap();
    let told = logprobs.unwrap();
    assert_eq!((token, told.chosen.token, told.chosen.rank), (0, 0, 2));
    let shares: Vec<(u32, u32, f32)> = told.top.iter().map(|top| (top.token, top.rank, top.logprob.exp())).collect();
    assert!((told.chosen.logprob.exp() - 0.25).abs() < 1e-6, "{told:?}");
    assert!(
        matches!(shares[..], [(2, 1, half), (0, 2, quarter)] if (half - 0.5).abs() < 1e-6 && (quarter - 0.25).abs() < 1e-6)
    );
    let scored = sample(&mut logits.to_vec(), &RowTask::Score { target: 3, top: 0 }).unwrap().logprobs.unwrap();
    assert_eq!((scored.chosen.token, scored.chosen.rank, scored.top.len()), (3, 5, 0));
    assert!((scored.chosen.logprob - 0.0625f32.ln()).abs() < 1e-6, "{scored:?}");
    let unknown = sample(&mut logits.to_vec(), &RowTask::Score { target: 5, top: 0 });
    assert_eq!(unknown, Err(SampleError::Unknown { token: 5, vocabulary: 5 }));
}

#[test]
fn temperatures_from_nothing_to_huge_draw_tokens() {
    let logits = [1.0, 80.0, 79.0, -80.0];
    assert_eq!(support(&logits, &Sampling { temperature: 1e-30, ..RANDOM }, &[]), [1]);
    assert_eq!(support(&logits, &Sampling { temperature: 0.01, ..RANDOM }, &[]), [1]);
    assert_eq!(support(&logits, &Sampling { temperature: 1.0, ..RANDOM }, &[]), [1, 2]);
    assert_eq!(support(&logits, &Sampling { temperature: 1e30, ..RANDOM }, &[]), [0, 1, 2, 3]);
    let large = [f32::MAX, -f32::MAX];
    assert_eq!(support(&large, &Sampling { temperature: 0.5, ..RANDOM }, &[]), [0]);
}

#[test]
fn the_nucleus_of_a_flat_distribution_is_found_whole() {
    // 50,000 equal tokens: their nucleus of a half is the 25,000 lowest ids.
    let flat = vec![0.0; 50_000];
    let drawn = support(&flat, &Sampling { top_p: 0.5, ..RANDOM }, &[]);
    assert!(drawn.last() < Some(&25_001) && drawn.last() > Some(&24_500) && drawn.len() > 480, "{:?}", drawn.last());
}

/// The exact distribution that the documentation describes, by a full sort.
fn exact(logits: &[f32], sampling: &Sampling, banned: &[u32]) -> Vec<f64> {
    let allowed = |token: &usize| !banned.contains(&(*token as u32));
    let mut order: Vec<usize> = (0..logits.len()).filter(allowed).collect();
    order.sort_by(|&a, &b| logits[b].total_cmp(&logits[a]).then(a.cmp(&b)));
    let max = f64::from(logits[order[0]]);
    let share = |token: usize| ((f64::from(logits[token]) - max) / f64::from(sampling.temperature)).exp();
    order.retain(|&token| share(token) >= f64::from(sampling.min_p));
    order.truncate(if sampling.top_k == 0 { usize::MAX } else { sampling.top_k as usize });
    let total: f64 = order.iter().map(|&token| share(token)).sum();
    let mut sum = 0.0;
    let kept = order.iter().position(|&token| {
        sum += share(token);
        sum >= f64::from(sampling.top_p) * total
    });
    order.truncate(kept.map_or(order.len(), |last| last + 1));
    let total: f64 = order.iter().map(|&token| share(token)).sum();
    let mut probabilities = vec![0.0; logits.len()];
    order.iter().for_each(|&token| probabilities[token] = share(token) / total);
    probabilities
}

/// Pearson's statistic over the tokens, those expected fewer than five times taken together, and its degrees of freedom.
fn chi_square(probabilities: &[f64], counts: &[u32], draws: u32) -> (f64, usize) {
    let (mut statistic, mut cells, mut rare) = (0.0, 0, (0.0, 0.0));
    for (probability, &count) in probabilities.iter().zip(counts) {
        let (expected, count) = (probability * f64::from(draws), f64::from(count));
        assert!(expected > 0.0 || count == 0.0, "a token of probability 0 was drawn");
        if expected < 5.0 {
            rare = (rare.0 + expected, rare.1 + count);
        } else {
            statistic += (count - expected).powi(2) / expected;
            cells += 1;
        }
    }
    if rare.0 >= 5.0 {
        statistic += (rare.1 - rare.0).powi(2) / rare.0;
        cells += 1;
    }
    (statistic, cells - 1)
}

#[test]
fn drawn_frequencies_are_the_distributions() {
    const DRAWS: u32 = 20_000;
    // A long tail, in no order.
    let tail = |token: u32| 4.0 - (token.wrapping_mul(2_654_435_761) as f32 / 3e8);
    let many: Vec<f32> = (0..3_000).map(tail).collect();
    let few: Vec<f32> = many[..40].to_vec();
    let settings = [
        (&few, RANDOM),
        (&few, Sampling { temperature: 0.6, ..RANDOM }),
        (&few, Sampling { temperature: 1.7, top_k: 9, ..RANDOM }),
        (&few, Sampling { top_p: 0.9, ..RANDOM }),
        (&few, Sampling { min_p: 0.05, top_p: 0.8, top_k: 20, ..RANDOM }),
        (&many, Sampling { temperature: 0.8, top_p: 0.5, ..RANDOM }),
        (&many, Sampling { min_p: 0.9, ..RANDOM }),
    ];
    for (logits, sampling) in settings {
        let probabilities = exact(logits, &sampling, &[3]);
        let mut counts = vec![0; logits.len()];
        for at in 0..DRAWS {
            // Neither seeds alone nor positions alone vary.
            let sampling = Sampling { seed: u64::from(at / 100) << 20, ..sampling.clone() };
            counts[draw(logits, &sampling, &[3], at % 100).unwrap() as usize] += 1;
        }
        let (statistic, freedom) = chi_square(&probabilities, &counts, DRAWS);
        // Five standard deviations above the statistic's mean; the draws are the same in every run.
        let limit = freedom as f64 + 5.0 * (2.0 * freedom as f64).sqrt();
        assert!(statistic <= limit, "{sampling:?}: {statistic:.1} with {freedom} degrees of freedom");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(1024) })]

    #[test]
    fn any_parameters_draw_a_token_of_the_exact_support(
        logits in prop::collection::vec(-30f32..30.0, 1..200),
        temperature in 0.01f32..5.0,
        top_k in 0u32..250,
        top_p in 0.001f32..=1.0,
        min_p in 0f32..=1.0,
        seed: u64,
        position: u32,
        banned in prop::collection::vec(0u32..200, 0..3),
    ) {
        let sampling = Sampling { temperature, top_k, top_p, min_p, seed, ..RANDOM };
        prop_assume!((0..logits.len() as u32).any(|token| !banned.contains(&token)));
        let token = draw(&logits, &sampling, &banned, position).unwrap();
        prop_assert_eq!(draw(&logits, &sampling, &banned, position), Ok(token));
        // A hair wider than asked, for what lies on a border and rounds to its other side.
        let wider = Sampling { top_p: top_p * 1.0001, min_p: min_p * 0.9999, ..sampling };
        prop_assert!(exact(&logits, &wider, &banned)[token as usize] > 0.0);
    }
}
