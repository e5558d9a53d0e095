//! Predicted times to the first token, and retry times of rejected requests, against what comes true.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, HashMap, HashSet};
use std::time::Duration;

use crate::support::{CONFIG, GEOMETRY, TestClock, With};
use windlass_engine_core::engine::{Engine, EngineConfig, Policy, QueueLimits};
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::request::{RejectReason, Request, RequestDemand, RequestId};
use windlass_engine_core::sim::{Pace, SimExecutor, SimStop, SimVocabulary, StepTime, mix};
use windlass_engine_core::update::RequestUpdate;

const STOP: u32 = 99;

/// A deterministic random number generator.
struct Dice(u64);

impl Dice {
    fn below(&mut self, most: u64) -> u64 {
        self.0 = mix(self.0, 1);
        self.0 % most
    }

    fn within(&mut self, least: u64, most: u64) -> u64 {
        least + self.below(most - least + 1)
    }

    fn one_of<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len() as u64) as usize]
    }
}

/// Lengths of answers.
#[derive(Clone, Copy, Debug)]
enum Answers {
    /// All answers have this length.
    Alike(u32),
    /// Each answer has the length of its own random limit, up to this.
    Limited(u32),
    /// Each token stops the answer with a probability of one in this many.
    Stopping(u64),
}

impl Answers {
    fn name(self) -> &'static str {
        match self {
            Answers::Alike(_) => "answers of one length",
            Answers::Limited(_) => "answers as long as they may be",
            Answers::Stopping(_) => "answers that stop by themselves",
        }
    }
}

fn some_answers(dice: &mut Dice) -> Answers {
    match dice.below(3) {
        0 => Answers::Alike(dice.within(8, 150) as u32),
        1 => Answers::Limited(dice.within(30, 300) as u32),
        _ => Answers::Stopping(dice.within(20, 100)),
    }
}

/// An engine in modelled time.
struct Site {
    engine: Engine<SimExecutor<TestClock>>,
    clock: TestClock,
}

impl Site {
    fn new(places: u32, blocks: u32, answers: Answers, step_time: StepTime, config: EngineConfig) -> Site {
        let stop = match answers {
            Answers::Stopping(one_in) => Some(SimStop { token: STOP, one_in }),
            Answers::Alike(_) | Answers::Limited(_) => None,
        };
        let vocabulary = SimVocabulary { word: |number| (number % 90) as u32, stop };
        let geometry = Geometry {
            block_tokens: 16,
            blocks,
            max_sequence_tokens: 2048,
            max_step_rows: places,
            max_step_logits: places,
            max_step_tokens: 256,
            ..GEOMETRY
        };
        let clock = TestClock::default();
        Site { engine: Engine::new(SimExecutor::new(geometry, step_time, vocabulary, clock.clone()), config), clock }
    }

    fn now(&mut self) -> f64 {
        self.clock.now().as_secs_f64()
    }

    fn add(&mut self, request: Request) -> Result<(), RejectReason> {
        let now = self.now();
        self.engine.add(request, now)
    }

    fn step(&mut self) -> Vec<RequestUpdate> {
        let now = self.now();
        self.engine.step(now).expect("the simulator does not fail").updates
    }

    /// Serves a few requests, so that it measures its speed and the lengths of answers.
    fn learn(&mut self, dice: &mut Dice, answers: Answers) {
        (0..8).for_each(|id| self.add(asked(1_000_000 + id, dice, answers)).expect("an admissible request"));
        while !self.engine.is_idle() {
            self.step();
        }
    }

    /// Predicts the seconds to the first token of a tiny request, and adds that request.
    fn probe(&mut self, id: u64) -> Option<Probe> {
        let predicted = self.engine.stats().predicted_ttft_seconds?;
        self.add(Request::greedy(RequestId(id), vec![1], 1)).ok()?;
        Some(Probe { predicted, asked: self.now(), drains: false })
    }
}

/// A request of random sizes.
fn asked(id: u64, dice: &mut Dice, answers: Answers) -> Request {
    let exponent = dice.within(3, 9);
    let prompt = dice.within(1 << exponent, 2 << exponent);
    let max = match answers {
        Answers::Alike(tokens) => tokens,
        Answers::Limited(most) => dice.within(8, most.into()) as u32,
        Answers::Stopping(_) => 800,
    };
    let tokens = (0..prompt).map(|_| dice.below(90) as u32).collect::<Vec<_>>();
    Request::greedy(RequestId(id), tokens, max).stop(&[STOP])
}

/// A prediction to compare with the truth.
struct Probe {
    predicted: f64,
    asked: f64,
    /// Whether only probes are still added.
    drains: bool,
}

/// Ratios of predicted to true times, by kind.
#[derive(Default)]
struct Ratios(BTreeMap<&'static str, Vec<f64>>);

impl Ratios {
    fn note(&mut self, kinds: [&'static str; 2], ratio: f64) {
        kinds.into_iter().for_each(|kind| self.0.entry(kind).or_default().push(ratio));
    }

    /// Prints their distribution; fails if the median error is above `most`.
    fn hold(&mut self, of: &str, most: f64) {
        for (kind, ratios) in &mut self.0 {
            ratios.sort_by(f64::total_cmp);
            let mut errors: Vec<f64> = ratios.iter().map(|ratio| (ratio - 1.0).abs()).collect();
            errors.sort_by(f64::total_cmp);
            let shares = [5, 25, 50, 75, 95].map(|percent| ratios[(ratios.len() - 1) * percent / 100]);
            let median = errors[errors.len() / 2];
            println!(
                "{of}, {kind}: {} predictions, median error {:.1} %; predicted over true at 5, 25, 50, 75, 95 %: {shares:.2?}",
                ratios.len(),
                median * 100.0
            );
            // With few answers ahead that stop at random, nobody can predict well.
            let most = if *kind == Answers::Stopping(1).name() { 1.5 * most } else { most };
            assert!(ratios.len() >= 40 && median <= most, "{of}, {kind}: {median}");
        }
    }
}

/// Adds bursts of requests, with probes among them, until all are finished.
fn predict(seed: u64, policy: Policy, has_room: bool, ratios: &mut Ratios) {
    let dice = &mut Dice(mix(seed, 7));
    let (places, answers) = (dice.one_of(&[1, 4, 8, 16, 32]), some_answers(dice));
    let step_time = dice.one_of(&[StepTime::SMALL_CPU, StepTime::LARGE_GPU]);
    let blocks = if has_room { 16_384 } else { 130 + 12 * places };
    let mut site = Site::new(places, blocks, answers, step_time, EngineConfig { policy, ..CONFIG });
    site.learn(dice, answers);
    // Under other policies later requests overtake, which cannot be predicted.
    let bursts = if policy == Policy::Fcfs { dice.within(1, 4) } else { 1 };
    let (mut id, mut probes) = (0, HashMap::new());
    for burst in 1..=bursts {
        for _ in 0..dice.within(2, 5) * u64::from(places) {
            id += 1;
            let request = asked(id, dice, answers).priority(dice.within(0, 4) as i32 - 2);
            site.add(request.tenant(dice.below(3) as u32)).expect("an admissible request");
        }
        let drains = burst == bursts;
        let steps = if drains { u64::MAX } else { dice.within(20, 400) };
        for index in 0..steps {
            if site.engine.is_idle() {
                break;
            }
            if index % 23 == 5 && site.engine.stats().waiting > 0 {
                id += 1;
                probes.extend(site.probe(id).map(|probe| (id, Probe { drains, ..probe })));
            }
            let updates = site.step();
            let now = site.now();
            for probe in updates.iter().filter_map(|update| probes.remove(&update.request.0)) {
                let when = if probe.drains { "while the queue drains" } else { "while more comes" };
                ratios.note([when, answers.name()], probe.predicted / (now - probe.asked));
            }
        }
    }
}

#[test]
fn predictions_come_true_under_every_policy_while_a_queue_grows_and_drains() {
    let policies = [
        ("first come", Policy::Fcfs, true),
        ("first come with few blocks", Policy::Fcfs, false),
        ("by priority", Policy::Priority { preemption_threshold: 10 }, true),
        ("by priority with preemption", Policy::Priority { preemption_threshold: 1 }, true),
        ("fair", Policy::Fair, true),
        ("longest prefix", Policy::LongestPrefix, true),
    ];
    for (name, policy, has_room) in policies {
        let mut ratios = Ratios::default();
        (0..60).for_each(|seed| predict(seed, policy, has_room, &mut ratios));
        ratios.hold(name, 0.2);
    }
}

/// Clients that all arrive at once and retry when told to. Returns how many were rejected, and how many rejections
/// there were of retries.
fn come_again(seed: u64, queue: QueueLimits, clients: u64) -> (usize, usize) {
    let dice = &mut Dice(mix(seed, 7));
    let (places, answers) = (dice.one_of(&[4, 8, 16]), some_answers(dice));
    let config = EngineConfig { queue, ..CONFIG };
    let mut site = Site::new(places, 16_384, answers, StepTime::LARGE_GPU, config);
    site.learn(dice, answers);
    let mut coming: BinaryHeap<Reverse<(u64, u64)>> = (1..=clients).map(|id| Reverse((0, id))).collect();
    let (began, mut refused, mut again) = (site.now(), HashSet::new(), 0);
    while !coming.is_empty() {
        let now = ((site.now() - began) * 1e3) as u64;
        while let Some(Reverse((_, id))) = coming.peek().copied().filter(|Reverse((due, _))| *due <= now) {
            coming.pop();
            let request = asked(id, dice, answers);
            let demand = RequestDemand::of(&request);
            if site.add(request).is_ok() {
                continue;
            }
            let now_seconds = site.now();
            let after = u64::from(site.engine.retry_after_seconds(demand, now_seconds));
            again += usize::from(!refused.insert(id));
            // The network.
            coming.push(Reverse((now + after * 1000 + dice.within(1, 30), id)));
        }
        match (site.engine.is_idle(), coming.peek()) {
            (true, Some(Reverse((due, _)))) => {
                site.clock.sleep_until(Duration::from_secs_f64(began) + Duration::from_millis(due + 1));
            }
            _ => _ = site.step(),
        }
    }
    (refused.len(), again)
}

#[test]
fn who_comes_again_when_told_to_is_admitted() {
    let late = QueueLimits { max_predicted_ttft_seconds: Some(1.5), ..CONFIG.queue };
    let full = QueueLimits { max_waiting_requests: 8, ..CONFIG.queue };
    for (name, queue) in [("too slow", late), ("queue full", full)] {
        let outcomes: Vec<(usize, usize)> = (0..30).map(|seed| come_again(seed, queue, 80)).collect();
        let refused: usize = outcomes.iter().map(|(refused, _)| refused).sum();
        let again: usize = outcomes.iter().map(|(_, again)| again).sum();
        let kept = 1.0 - again as f64 / refused as f64;
        println!("{name}: {refused} of 2400 refused, {:.1} % of them admitted when they came again", kept * 100.0);
        println!("    {outcomes:?}");
        assert!(refused > 500 && kept >= 0.9, "{name}: {again} of {refused} were refused again");
    }
}
