//! A cluster in numbers: pods that start, serve, drain and end, a gateway in front of them, and the bill.
//!
//! The world does to a policy's replies what a cluster would: missing pods start at once and are ready after the cold
//! start, a node stays warm for two minutes after its pod, victims and surplus pods drain, and what a pod still streams
//! when its drain timeout ends is broken. A tick is told before its reply is carried out, as a scrape is.

use std::collections::VecDeque;

use crate::engine::{Ended, Engine, StepTime};
use crate::policy::Policy;
use crate::protocol::{CapacityType, Edges, EngineSize, Gateway, Hello, Pod, PodPhase, Reply, Spec, Targets, Tick};
use crate::score::Score;
use crate::trace::Request;

/// Time between ticks, seconds.
pub const TICK: f64 = 5.0;
/// A node is paid for so long after its pod, and a pod that comes meanwhile finds it warm.
const WARM: f64 = 120.0;
/// Clients give up after this long without a first token.
const PATIENCE: f64 = 60.0;
/// After the last request, the world goes on for this long at most.
const EPILOGUE: f64 = 300.0;

/// Everything that a run is made of, besides the trace and the policy.
#[derive(Clone, Debug)]
pub struct Scenario {
    /// For people.
    pub name: String,
    /// Bounds and goals.
    pub spec: Spec,
    /// Sizes of the engine.
    pub engine: EngineSize,
    /// Its speed.
    pub step_time: StepTime,
    /// A pod's start on a new node, seconds.
    pub cold_start: f64,
    /// A pod's start on a warm node.
    pub warm_start: f64,
}

impl Scenario {
    /// Between 1 and 16 large GPUs, 3 at the start, with 99 % of requests to hold their targets.
    pub fn new(name: &str, cold_start: f64) -> Self {
        let targets = Targets { ttft_seconds: 2.0, inter_token_seconds: 0.2, share: 0.99 };
        let spot = Default::default();
        Scenario {
            name: name.to_owned(),
            spec: Spec {
                min_replicas: 1,
                max_replicas: 16,
                initial_replicas: 3,
                targets,
                drain_timeout_seconds: 300.0,
                spot,
            },
            engine: EngineSize { kv_cache_tokens: 400_000, max_num_seqs: 256, max_num_batched_tokens: 8192 },
            step_time: StepTime::LARGE_GPU,
            cold_start,
            warm_start: 20.0_f64.min(cold_start),
        }
    }

    /// As the protocol says it.
    pub fn hello(&self) -> Hello {
        let edges = Edges { ttft: edges(), inter_token: edges(), e2e: edges() };
        Hello {
            protocol: crate::protocol::VERSION,
            scenario: self.name.clone(),
            scrape_interval_seconds: TICK,
            spec: self.spec.clone(),
            engine: self.engine,
            histogram_edges: edges,
        }
    }
}

/// The edges that the engine's own histograms have, in seconds.
fn edges() -> Vec<f64> {
    windlass_engine_contract::stats::LATENCY_EDGES_MS.map(|edge| f64::from(edge) / 1000.0).to_vec()
}

/// Replays `trace` under `policy`.
pub fn replay(scenario: &Scenario, trace: &[Request], policy: &mut dyn Policy) -> Score {
    let mut world = World::new(scenario, trace);
    let end = trace.last().map_or(0.0, |last| last.at);
    while world.now <= end || (world.is_busy() && world.now <= end + EPILOGUE) {
        let tick = world.tick();
        let reply = policy.decide(&tick);
        world.carry_out(&reply);
        world.advance(TICK);
    }
    world.score(end)
}

/// Where a pod is in its life.
#[derive(Debug)]
enum Stage {
    Starting { ready_at: f64 },
    Ready { since: f64, engine: Engine },
    Draining { since: f64, ready_since: f64, engine: Engine },
}

#[derive(Debug)]
struct Node {
    name: String,
    born: f64,
    stage: Stage,
}

struct World<'a> {
    scenario: &'a Scenario,
    trace: &'a [Request],
    edges: Edges,
    now: f64,
    next: usize,
    made: usize,
    pods: Vec<Node>,
    /// Until when nodes without a pod stay warm.
    warm: Vec<f64>,
    gateway: VecDeque<(usize, f64)>,
    ended: Vec<Ended>,
    score: Score,
}

impl<'a> World<'a> {
    fn new(scenario: &'a Scenario, trace: &'a [Request]) -> Self {
        let edges = scenario.hello().histogram_edges;
        let mut world = World {
            scenario,
            trace,
            edges,
            now: 0.0,
            next: 0,
            made: 0,
            pods: Vec::new(),
            warm: Vec::new(),
            gateway: VecDeque::new(),
            ended: Vec::new(),
            score: Score::default(),
        };
        // Those of the start have been there before.
        (0..scenario.spec.initial_replicas).for_each(|_| world.start(0.0));
        world.promote();
        world
    }

    fn is_busy(&self) -> bool {
        let load = |pod: &Node| match &pod.stage {
            Stage::Starting { .. } => 0,
            Stage::Ready { engine, .. } | Stage::Draining { engine, .. } => engine.load(),
        };
        !self.gateway.is_empty() || self.pods.iter().any(|pod| load(pod) > 0)
    }

    fn start(&mut self, seconds: f64) {
        self.made += 1;
        let stage = Stage::Starting { ready_at: self.now + seconds };
        self.pods.push(Node { name: format!("pod-{}", self.made), born: self.now, stage });
    }

    /// What the policy sees.
    fn tick(&mut self) -> Tick {
        let now = self.now;
        let oldest = self.gateway.front().map_or(0.0, |(_, arrived)| now - arrived);
        let gateway = Gateway { queued: self.gateway.len() as u64, oldest_age_seconds: oldest };
        let pods = self.pods.iter_mut().map(|pod| {
            let (phase, ready_since, engine) = match &mut pod.stage {
                Stage::Starting { .. } => (PodPhase::Starting, None, None),
                Stage::Ready { since, engine } => (PodPhase::Ready, Some(*since), Some(engine)),
                Stage::Draining { ready_since, engine, .. } => (PodPhase::Draining, Some(*ready_since), Some(engine)),
            };
            Pod {
                name: pod.name.clone(),
                phase,
                capacity_type: CapacityType::OnDemand,
                age_seconds: now - pod.born,
                ready_seconds: ready_since.map(|since| now - since),
                reclaim_in_seconds: None,
                metrics: engine.map(|engine| engine.read(now, TICK)),
            }
        });
        Tick { t: now, gateway, pods: pods.collect() }
    }

    /// Does what a reply asks for.
    fn carry_out(&mut self, reply: &Reply) {
        let Spec { min_replicas, max_replicas, .. } = self.scenario.spec;
        let desired = reply.desired_replicas.clamp(min_replicas, max_replicas) as usize;
        for victim in &reply.victims {
            self.drain(|pod| pod.name == *victim);
        }
        self.warm.retain(|until| *until >= self.now);
        while self.standing() < desired {
            // The node that has been warm for longest is taken, and its warm time is no longer paid for.
            let is_warm = !self.warm.is_empty();
            if is_warm {
                let until = self.warm.remove(0);
                self.score.gpu_seconds -= until - self.now;
            }
            self.start(if is_warm { self.scenario.warm_start } else { self.scenario.cold_start });
        }
        while self.standing() > desired {
            let is_starting = |pod: &Node| matches!(pod.stage, Stage::Starting { .. });
            let starting = self.pods.iter().rposition(is_starting);
            let youngest = starting.or_else(|| self.pods.iter().rposition(|pod| !is_draining(pod)));
            let name = youngest.map(|index| self.pods[index].name.clone()).unwrap_or_default();
            self.drain(|pod| pod.name == name);
        }
        self.score.replicas.push(self.standing() as i32);
    }

    fn standing(&self) -> usize {
        self.pods.iter().filter(|pod| !is_draining(pod)).count()
    }

    /// Lets the pod drain, or ends it if it serves nothing yet.
    fn drain(&mut self, is_meant: impl Fn(&Node) -> bool) {
        let Some(index) = self.pods.iter().position(is_meant) else { return };
        let pod = &mut self.pods[index];
        match std::mem::replace(&mut pod.stage, Stage::Starting { ready_at: f64::INFINITY }) {
            Stage::Starting { .. } => self.end(index),
            Stage::Ready { since, engine } => {
                pod.stage = Stage::Draining { since: self.now, ready_since: since, engine };
            }
            draining => pod.stage = draining,
        }
    }

    /// Ends a pod and pays for it and for its warm node.
    fn end(&mut self, index: usize) {
        let pod = self.pods.remove(index);
        self.score.gpu_seconds += self.now - pod.born + WARM;
        self.warm.push(self.now + WARM);
    }

    /// Lets time pass.
    fn advance(&mut self, seconds: f64) {
        let until = self.now + seconds;
        while let Some(request) = self.trace.get(self.next).filter(|request| request.at < until) {
            self.now = self.now.max(request.at);
            self.promote();
            self.run();
            self.gateway.push_back((self.next, request.at));
            self.next += 1;
            self.route();
        }
        self.now = until;
        self.promote();
        self.run();
        self.route();
        self.give_up();
        self.end_drained();
    }

    /// Starting pods whose time has come serve.
    fn promote(&mut self) {
        let Scenario { engine, step_time, .. } = *self.scenario;
        for pod in &mut self.pods {
            if let Stage::Starting { ready_at } = pod.stage
                && ready_at <= self.now
            {
                let engine = Engine::new(engine, step_time, &self.edges, self.now);
                pod.stage = Stage::Ready { since: self.now, engine };
            }
        }
    }

    fn run(&mut self) {
        for pod in &mut self.pods {
            if let Stage::Ready { engine, .. } | Stage::Draining { engine, .. } = &mut pod.stage {
                engine.run(self.now, &self.edges, &mut self.ended);
            }
        }
        self.score.take(&mut self.ended, &self.scenario.spec.targets);
    }

    /// Hands requests to the engine with the fewest.
    fn route(&mut self) {
        while let Some(&(index, arrived)) = self.gateway.front() {
            let ready = self.pods.iter_mut().filter_map(|pod| match &mut pod.stage {
                Stage::Ready { engine, .. } => Some(engine),
                _ => None,
            });
            let Some(least) = ready.min_by_key(|engine| engine.load()) else { return };
            least.admit(index, &self.trace[index], arrived, self.now);
            self.gateway.pop_front();
        }
    }

    fn give_up(&mut self) {
        let now = self.now;
        self.gateway.retain(|(_, arrived)| now - arrived < PATIENCE);
        for pod in &mut self.pods {
            if let Stage::Ready { engine, .. } | Stage::Draining { engine, .. } = &mut pod.stage {
                engine.give_up(now, PATIENCE);
            }
        }
    }

    fn end_drained(&mut self) {
        let (now, timeout) = (self.now, self.scenario.spec.drain_timeout_seconds);
        let mut index = 0;
        while let Some(pod) = self.pods.get_mut(index) {
            match &mut pod.stage {
                Stage::Draining { since, engine, .. } if engine.load() == 0 || now - *since >= timeout => {
                    let (broken, elsewhere) = engine.evict();
                    self.score.broken += broken;
                    self.gateway.extend(elsewhere);
                    self.end(index);
                }
                _ => index += 1,
            }
        }
    }

    /// The result, with pods paid for to `end`.
    fn score(mut self, end: f64) -> Score {
        self.score.requests = self.trace.len();
        self.score.gpu_seconds += self.pods.iter().map(|pod| (end - pod.born).max(0.0)).sum::<f64>();
        self.score
    }
}

fn is_draining(pod: &Node) -> bool {
    matches!(pod.stage, Stage::Draining { .. })
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Asks for what a function of time says.
    struct Plan<F>(F);

    impl<F: FnMut(&Tick) -> Reply> Policy for Plan<F> {
        fn decide(&mut self, tick: &Tick) -> Reply {
            (self.0)(tick)
        }
    }

    fn scenario() -> Scenario {
        let mut scenario = Scenario::new("test", 60.0);
        scenario.spec.initial_replicas = 1;
        scenario
    }

    fn chats(count: u32, every: f64) -> Vec<Request> {
        (0..count).map(|index| Request { at: f64::from(index) * every, prompt: 500, output: 100 }).collect()
    }

    #[test]
    fn a_light_load_is_served_in_time_by_one_pod_that_is_paid_for() {
        let trace = chats(600, 1.0);
        let score = replay(&scenario(), &trace, &mut Plan(|_: &Tick| Reply::of(1)));
        assert_eq!((score.attained, score.requests, score.broken), (600, 600, 0));
        assert!((score.gpu_seconds - 599.0).abs() < 1e-6, "{}", score.gpu_seconds);
    }

    #[test]
    fn a_flood_is_late_and_clients_give_up() {
        let score = replay(&scenario(), &chats(6000, 0.02), &mut Plan(|_: &Tick| Reply::of(1)));
        assert!(score.attained < 600, "{}", score.attained);
    }

    #[test]
    fn a_new_pod_is_ready_after_its_cold_start_and_the_next_after_a_warm_one() {
        let mut ready = Vec::new();
        let trace = chats(400, 1.0);
        let mut plan = Plan(|tick: &Tick| {
            ready.push((tick.t, tick.ready().count()));
            // Up at 0, down at 100, up again at 110.
            Reply::of(if (100.0..110.0).contains(&tick.t) { 1 } else { 2 })
        });
        replay(&scenario(), &trace, &mut plan);
        let at = |time: f64| ready.iter().find(|(t, _)| *t == time).map(|(_, count)| *count);
        assert_eq!((at(55.0), at(60.0), at(125.0), at(130.0)), (Some(1), Some(2), Some(1), Some(2)));
    }

    #[test]
    fn a_victim_drains_and_only_the_timeout_breaks_streams() {
        let trace = vec![Request { at: 0.0, prompt: 10, output: 4000 }; 4];
        let run = |timeout: f64| {
            let mut scenario = scenario();
            (scenario.spec.initial_replicas, scenario.spec.drain_timeout_seconds) = (2, timeout);
            let mut plan = Plan(|tick: &Tick| Reply {
                victims: if tick.t == 10.0 { vec!["pod-1".into()] } else { Vec::new() },
                ..Reply::of(if tick.t < 10.0 { 2 } else { 1 })
            });
            replay(&scenario, &trace, &mut plan)
        };
        assert_eq!((run(300.0).broken, run(300.0).attained), (0, 4));
        assert_eq!((run(20.0).broken, run(20.0).attained), (2, 2));
    }
}
