//! Every policy on every variant of a trace, with every cold start: what a policy is judged by.

use windlass_operator_core::validate::Refusal;

use crate::policy::Name;
use crate::score::{Score, Standing};
use crate::trace::{self, Request, Variant};
use crate::world::{Scenario, replay};

/// Cold starts, seconds.
pub const COLD_STARTS: [f64; 3] = [30.0, 90.0, 180.0];
/// A trace and the pool that it is given.
#[derive(Clone, Copy, Debug)]
pub struct Case {
    /// For people.
    pub name: &'static str,
    /// Whose requests.
    pub source: Source,
    /// How they are varied.
    pub variant: Variant,
    /// Most replicas: about twice what the peak needs, so that staying there is a choice and not the answer.
    pub max_replicas: i32,
}

/// Where requests come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source {
    /// The trace that is given: long prompts, short answers.
    Given,
    /// Generated chats, for which the time between tokens is what matters.
    Chats,
}

/// What policies are judged by.
pub const CASES: [Case; 7] = [
    Case { name: "as-it-is", source: Source::Given, variant: Variant::Scaled(1.0), max_replicas: 24 },
    Case { name: "scaled-x4", source: Source::Given, variant: Variant::Scaled(4.0), max_replicas: 64 },
    Case { name: "scaled-x8", source: Source::Given, variant: Variant::Scaled(8.0), max_replicas: 128 },
    Case { name: "bursty-x4", source: Source::Given, variant: Variant::Bursty(4.0), max_replicas: 128 },
    Case { name: "diurnal-x8", source: Source::Given, variant: Variant::Diurnal(8.0), max_replicas: 128 },
    Case { name: "chat-diurnal", source: Source::Chats, variant: Variant::Diurnal(8.0), max_replicas: 24 },
    Case { name: "chat-bursty", source: Source::Chats, variant: Variant::Bursty(4.0), max_replicas: 48 },
];

/// Generated chats: seconds, and requests a second.
const CHATS: (f64, f64) = (3600.0, 5.0);
/// First token and time between tokens of a chat, seconds.
const CHAT_TARGETS: (f64, f64) = (1.0, 0.05);

impl Case {
    /// The requests, varied from `given` where they are not generated.
    pub fn trace(&self, given: &[Request]) -> Vec<Request> {
        match self.source {
            Source::Given => self.variant.of(given),
            Source::Chats => self.variant.of(&trace::chats(CHATS.0, CHATS.1)),
        }
    }

    /// The scenario with this cold start, begun with an eighth of the most replicas.
    pub fn scenario(&self, cold_start: f64) -> Scenario {
        let mut scenario = Scenario::new(self.name, cold_start);
        scenario.spec.max_replicas = self.max_replicas;
        scenario.spec.initial_replicas = self.max_replicas / 8;
        if self.source == Source::Chats {
            (scenario.spec.targets.ttft_seconds, scenario.spec.targets.inter_token_seconds) = CHAT_TARGETS;
        }
        scenario
    }
}

/// Share of requests for which a static pool is sized.
const STATIC_SHARE: f64 = 0.99;

/// What every policy came to in one scenario.
#[derive(Debug)]
pub struct Outcome {
    /// The adaptive policies, ours first.
    pub adaptive: Vec<(Name, Score)>,
    /// The smallest pool that would have done, known afterwards; the largest where none does.
    pub hindsight: (Name, Score),
}

impl Outcome {
    /// Replays `trace` under every policy.
    ///
    /// # Errors
    /// Bounds or targets that the resource does not take.
    pub fn of(scenario: &Scenario, trace: &[Request]) -> Result<Self, Refusal> {
        let run = |name: Name| Ok((name, replay(scenario, trace, name.policy(&scenario.hello())?.as_mut())));
        let adaptive = Name::ADAPTIVE.into_iter().map(run).collect::<Result<_, Refusal>>()?;
        Ok(Outcome { adaptive, hindsight: hindsight(scenario, trace) })
    }

    /// How ours stands to the peers.
    pub fn standing(&self) -> Standing {
        let named: Vec<_> = self.adaptive.iter().map(|(name, score)| (name.to_string(), score)).collect();
        match named.split_first() {
            Some(((_, ours), peers)) => Standing::of(ours, peers.iter().map(|(name, score)| (name.as_str(), *score))),
            None => Standing::default(),
        }
    }
}

/// The smallest static pool that holds the targets for 99 % of requests, by bisection.
fn hindsight(scenario: &Scenario, trace: &[Request]) -> (Name, Score) {
    let run = |replicas: i32| {
        let mut scenario = scenario.clone();
        scenario.spec.initial_replicas = replicas;
        replay(&scenario, trace, &mut crate::peers::StaticPool(replicas))
    };
    let (mut low, mut high) = (scenario.spec.min_replicas, scenario.spec.max_replicas);
    while low < high {
        let middle = (low + high) / 2;
        if run(middle).attainment() >= STATIC_SHARE { high = middle } else { low = middle + 1 }
    }
    (Name::Static(low), run(low))
}
