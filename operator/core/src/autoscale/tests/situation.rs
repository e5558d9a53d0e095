//! A situation in which is decided, described by what differs from a calm one.

use std::time::Duration;

use jiff::Timestamp;
use windlass_operator_api::autoscaling::LatencyMetric;
use windlass_operator_api::status::ScalingDecision::{self, Hold};

use crate::autoscale::policy::{Policy, Scaling, Target};
use crate::autoscale::speed::{Sample, Speed};
use crate::autoscale::{Cadence, Decision, Memory, Reason, Supply, decide};
use crate::testing::{at, service, stats};
use crate::window::LoadWindow;

pub const NOW: i64 = 100_000;

/// A situation: so many replicas between 1 and 8, a target of 500 ms for 95 % of first tokens.
pub struct Situation {
    pub asked: i32,
    pub pods: Vec<Pod>,
    pub leaving: i32,
    pub faltering: i32,
    pub is_rolling: bool,
    pub overdue: i32,
    pub memory: Memory,
    pub shadow: Option<i32>,
    pub up_window: Duration,
    pub max_step: i32,
    /// Seconds since the readings.
    pub age: i64,
    /// Seconds since the last request, seen by a second reading.
    pub silence: i64,
    /// Share of each pod's KV cache in use.
    pub kv_usage: f64,
    /// Seconds since the last pod came, of replicas that were added.
    pub came: Option<i64>,
}

/// One serving pod and its last minute.
#[derive(Clone)]
pub struct Pod {
    /// Requests that got a first token in the last minute, and after how many milliseconds.
    pub served: Vec<f64>,
    pub running: u32,
    pub waiting: u32,
    pub oldest_seconds: f64,
    pub utilization: Option<f64>,
    pub is_read: bool,
    /// Prompt tokens of the last minute.
    pub prompt_tokens: u64,
    /// Those that wait.
    pub queued_tokens: u64,
    /// Tokens generated in the last minute.
    pub generated_tokens: u64,
    /// Times between tokens in it: how many, of how many milliseconds.
    pub between: (u32, f64),
}

pub fn pod(utilization: f64) -> Pod {
    let utilization = Some(utilization);
    Pod {
        served: Vec::new(),
        running: 0,
        waiting: 0,
        oldest_seconds: 0.0,
        utilization,
        is_read: true,
        prompt_tokens: 0,
        queued_tokens: 0,
        generated_tokens: 0,
        between: (0, 0.0),
    }
}

impl Pod {
    pub fn served(mut self, count: usize, milliseconds: f64) -> Self {
        self.served.extend(vec![milliseconds; count]);
        self
    }

    pub fn queue(mut self, waiting: u32, oldest_seconds: f64) -> Self {
        (self.running, self.waiting, self.oldest_seconds) = (8, waiting, oldest_seconds);
        self
    }

    pub fn prompted(mut self, tokens: u64) -> Self {
        self.prompt_tokens = tokens;
        self
    }

    pub fn behind(mut self, tokens: u64) -> Self {
        self.queued_tokens = tokens;
        self
    }

    pub fn generated(mut self, tokens: u64) -> Self {
        self.generated_tokens = tokens;
        self
    }

    pub fn between(mut self, count: u32, milliseconds: f64) -> Self {
        self.between = (count, milliseconds);
        self
    }

    pub fn blind(mut self) -> Self {
        self.utilization = None;
        self
    }

    pub fn silent(mut self) -> Self {
        self.is_read = false;
        self
    }
}

/// Pods that have all served for long; scaling down is not held by a window.
pub fn situation(pods: Vec<Pod>) -> Situation {
    let memory = Memory { recommendations: [(at(0), 1)].into(), ..Memory::default() };
    Situation {
        asked: i32::try_from(pods.len()).expect("few"),
        pods,
        leaving: 0,
        faltering: 0,
        is_rolling: false,
        overdue: 0,
        memory,
        shadow: None,
        up_window: Duration::ZERO,
        max_step: 4,
        age: 0,
        silence: 0,
        kv_usage: 0.0,
        came: None,
    }
}

impl Situation {
    pub fn decide(&self) -> Decision {
        self.decide_by(&self.policy())
    }

    pub fn decide_by(&self, policy: &Policy) -> Decision {
        let names: Vec<String> = (0..self.pods.len()).map(|index| format!("pod-{index}")).collect();
        let mut serving: Vec<_> = names.iter().map(|name| (name.as_str(), at(0))).collect();
        let came = self.came.map(read_at);
        serving.last_mut().into_iter().zip(came).for_each(|((_, since), came)| *since = came);
        let memory = Memory { last_up: came.or(self.memory.last_up), ..self.memory.clone() };
        let supply = Supply {
            asked: self.asked,
            serving,
            leaving: self.leaving,
            faltering: self.faltering,
            is_rolling: self.is_rolling,
            overdue: self.overdue,
            cold_starts: Vec::new(),
        };
        decide(policy, &supply, &self.window(&names), &memory, cadence(), at(NOW))
    }

    pub fn policy(&self) -> Policy {
        let valid = service().builtin(1, 8, 500).valid();
        let Scaling::Builtin(mut policy) = valid.scaling else { panic!("mode Builtin") };
        (policy.shadow, policy.up_window, policy.max_step) = (self.shadow, self.up_window, self.max_step);
        policy
    }

    fn window(&self, names: &[String]) -> LoadWindow {
        let mut window = LoadWindow::default();
        for (name, pod) in names.iter().zip(&self.pods).filter(|(_, pod)| pod.is_read) {
            let mut said = stats();
            window.record(name, read_at(self.age + self.silence + 60), said.clone());
            said.uptime_seconds += 60.0;
            pod.served.iter().for_each(|&milliseconds| said.time_to_first_token.observe(milliseconds));
            said.finished += pod.served.len() as u64;
            (said.prompt_tokens, said.kv_usage) = (said.prompt_tokens + pod.prompt_tokens, self.kv_usage);
            (said.generation_tokens, said.queued_tokens) =
                (said.generation_tokens + pod.generated_tokens, pod.queued_tokens);
            let (count, milliseconds) = pod.between;
            (0..count).for_each(|_| said.inter_token.observe(milliseconds));
            (said.running, said.waiting) = (pod.running, pod.waiting);
            said.oldest_queue_age_seconds = pod.oldest_seconds;
            said.utilization = pod.utilization;
            window.record(name, read_at(self.age + self.silence), said.clone());
            if self.silence > 0 {
                said.uptime_seconds += self.silence as f64;
                window.record(name, read_at(self.age), said);
            }
        }
        window
    }

    pub fn gives(&self, kind: ScalingDecision, replicas: i32, reason: Reason) {
        let decision = self.decide();
        assert_eq!((decision.kind, decision.replicas, decision.reason), (kind, replicas, reason), "{decision:?}");
    }

    pub fn is_blocked_by(&self, word: &str) {
        let decision = self.decide();
        assert_eq!(decision.kind, Hold, "{decision:?}");
        assert!(decision.blockers.iter().any(|blocker| blocker.contains(word)), "{word}: {decision:?}");
    }
}

/// A memory of recommendations, by how many seconds ago each came into force.
pub fn remembered(entries: &[(i64, i32)]) -> Memory {
    let recommendations = entries.iter().map(|(age, replicas)| (read_at(*age), *replicas)).collect();
    Memory { recommendations, ..Memory::default() }
}

pub fn read_at(age: i64) -> Timestamp {
    at(NOW - age)
}

fn cadence() -> Cadence {
    Cadence { active: Duration::from_secs(5), idle: Duration::from_secs(30) }
}

/// A replica of the situation's engine is filled by 10,000 prompt tokens a second and takes 10 ms for an empty step.
pub fn known_speed() -> Speed {
    let mut speed = Speed::default();
    let sample = |load: u32| {
        let prompt = f64::from(load) * 1000.0;
        let inter_token_seconds = 0.01 / (1.0 - 1e-4 * prompt);
        Sample { at: read_at(5), observations: 50, inter_token_seconds, prompt, generated: 0.0 }
    };
    speed.learn((0..90).map(|i| sample(i % 9)), read_at(5));
    speed
}

/// A situation in which that is known.
pub fn known(pods: Vec<Pod>) -> Situation {
    let mut known = situation(pods);
    known.memory.speed = known_speed();
    known
}

/// A policy of the situation's with other targets: percentiles with their limits in milliseconds.
pub fn aiming(targets: &[(LatencyMetric, i32, i32)]) -> Policy {
    let target = |&(metric, percentile, milliseconds)| Target { metric, percentile, milliseconds };
    Policy { targets: targets.iter().map(target).collect(), ..situation(Vec::new()).policy() }
}
