//! A cluster in numbers: pods that start, serve, drain and end, a gateway in front of them, and the bill.
//!
//! The world does to a policy's replies what a cluster would: missing pods start at once and are ready after the cold
//! start, a node stays warm for two minutes after its pod, victims and surplus pods drain, and what a pod still streams
//! when its drain timeout ends, or its spot node, is broken. A tick is told before its reply is carried out, as a scrape
//! is.

use std::collections::VecDeque;

use crate::engine::{Ended, Engine, StepTime};
use crate::market::Market;
use crate::policy::Policy;
use crate::protocol::{
    CapacityType, Edges, EngineSize, Gateway, Hello, Pod, PodPhase, Reply, Spec, SpotSupply, Targets, Tick,
};
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
    /// Spot nodes; `None`: there are none.
    pub market: Option<Market>,
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
            market: None,
        }
    }

    /// As the protocol says it.
    pub fn hello(&self) -> Hello {
        let edges = Edges { ttft: edges(), inter_token: edges(), e2e: edges() };
        Hello {
            protocol: crate::protocol::VERSION,
            scenario: self.name.clone(),
            scrape_interval_seconds: TICK,
            spec: Spec { spot: SpotSupply { available: self.market.is_some(), ..self.spec.spot }, ..self.spec.clone() },
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
    /// No spot node.
    Pending,
    Starting {
        ready_at: f64,
    },
    Ready {
        since: f64,
        engine: Engine,
    },
    Draining {
        since: f64,
        ready_since: f64,
        engine: Engine,
    },
}

#[derive(Debug)]
struct Node {
    name: String,
    born: f64,
    capacity: CapacityType,
    /// Since when its node is paid for.
    placed: f64,
    /// When its node is taken away.
    reclaimed: Option<f64>,
    stage: Stage,
}

/// A node without a pod.
#[derive(Debug)]
struct Warm {
    until: f64,
    capacity: CapacityType,
}

struct World<'a> {
    scenario: &'a Scenario,
    trace: &'a [Request],
    edges: Edges,
    now: f64,
    next: usize,
    made: usize,
    pods: Vec<Node>,
    /// Nodes without a pod, the one that has been warm for longest first.
    warm: Vec<Warm>,
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
        (0..scenario.spec.initial_replicas).for_each(|_| world.start(CapacityType::OnDemand, 0.0));
        world.promote();
        world
    }

    fn is_busy(&self) -> bool {
        let load = |pod: &Node| match &pod.stage {
            Stage::Pending | Stage::Starting { .. } => 0,
            Stage::Ready { engine, .. } | Stage::Draining { engine, .. } => engine.load(),
        };
        !self.gateway.is_empty() || self.pods.iter().any(|pod| load(pod) > 0)
    }

    /// Makes a pod on a new node that takes so long, or on a warm one; without a spot node it waits for one.
    fn add(&mut self, capacity: CapacityType) {
        self.warm.retain(|node| node.until >= self.now);
        // Its warm time is no longer paid for.
        if let Some(place) = self.warm.iter().position(|node| node.capacity == capacity) {
            let node = self.warm.remove(place);
            self.score.pay(capacity, self.now - node.until);
            self.start(capacity, self.scenario.warm_start);
        } else if capacity == CapacityType::OnDemand || self.is_open() {
            self.start(capacity, self.scenario.cold_start);
        } else {
            self.push(capacity, Stage::Pending);
        }
    }

    fn start(&mut self, capacity: CapacityType, seconds: f64) {
        self.push(capacity, Stage::Starting { ready_at: self.now + seconds });
    }

    fn push(&mut self, capacity: CapacityType, stage: Stage) {
        self.made += 1;
        let (name, now) = (format!("pod-{}", self.made), self.now);
        self.pods.push(Node { name, born: now, capacity, placed: now, reclaimed: None, stage });
    }

    /// Whether a new pod finds a spot node.
    fn is_open(&self) -> bool {
        self.scenario.market.as_ref().is_some_and(|market| market.is_open(self.now))
    }

    /// What the policy sees.
    fn tick(&mut self) -> Tick {
        let now = self.now;
        let oldest = self.gateway.front().map_or(0.0, |(_, arrived)| now - arrived);
        let gateway = Gateway { queued: self.gateway.len() as u64, oldest_age_seconds: oldest };
        let pods = self.pods.iter_mut().map(|pod| {
            let (phase, ready_since, engine) = match &mut pod.stage {
                Stage::Pending => (PodPhase::Pending, None, None),
                Stage::Starting { .. } => (PodPhase::Starting, None, None),
                Stage::Ready { since, engine } => (PodPhase::Ready, Some(*since), Some(engine)),
                Stage::Draining { ready_since, engine, .. } => (PodPhase::Draining, Some(*ready_since), Some(engine)),
            };
            Pod {
                name: pod.name.clone(),
                phase,
                capacity_type: pod.capacity,
                age_seconds: now - pod.born,
                ready_seconds: ready_since.map(|since| now - since),
                reclaim_in_seconds: pod.reclaimed.map(|at| (at - now).max(0.0)),
                metrics: engine.map(|engine| engine.read(now, TICK)),
                prometheus: None,
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
        match self.scenario.market.as_ref().and(reply.on_demand) {
            Some(on_demand) => {
                let on_demand = usize::try_from(on_demand).unwrap_or(0).min(desired);
                self.resize(CapacityType::OnDemand, on_demand, desired);
                self.resize(CapacityType::Spot, desired - on_demand, desired);
            }
            None => self.resize_all(desired),
        }
        self.score.replicas.push(self.count(|pod| !is_draining(pod)) as i32);
    }

    /// To so many pods, new ones on spot where there is a node.
    fn resize_all(&mut self, desired: usize) {
        while self.count(|pod| !is_draining(pod)) < desired {
            self.add(if self.is_open() { CapacityType::Spot } else { CapacityType::OnDemand });
        }
        while self.count(|pod| !is_draining(pod)) > desired {
            self.drain_one(|_| true);
        }
    }

    /// To so many pods of one kind. One that serves goes only once enough serve in all.
    fn resize(&mut self, capacity: CapacityType, wanted: usize, in_all: usize) {
        let is_it = |pod: &Node| pod.capacity == capacity && !is_draining(pod);
        while self.count(is_it) < wanted {
            self.add(capacity);
        }
        while self.count(is_it) > wanted
            && (self.count(is_ready) > in_all || self.count(|pod| is_it(pod) && !is_ready(pod)) > 0)
        {
            self.drain_one(is_it);
        }
    }

    fn count(&self, is_meant: impl Fn(&Node) -> bool) -> usize {
        self.pods.iter().filter(|pod| is_meant(pod)).count()
    }

    /// Lets one of these go as a ReplicaSet would: one that does not serve, then the youngest.
    fn drain_one(&mut self, is_meant: impl Fn(&Node) -> bool) {
        let is_unready = |pod: &Node| is_meant(pod) && matches!(pod.stage, Stage::Pending | Stage::Starting { .. });
        let unready = self.pods.iter().rposition(is_unready);
        let youngest = unready.or_else(|| self.pods.iter().rposition(|pod| is_meant(pod) && !is_draining(pod)));
        let name = youngest.map(|index| self.pods[index].name.clone()).unwrap_or_default();
        self.drain(|pod| pod.name == name);
    }

    /// Lets the pod drain, or ends it if it serves nothing yet.
    fn drain(&mut self, is_meant: impl Fn(&Node) -> bool) {
        let Some(index) = self.pods.iter().position(is_meant) else { return };
        let pod = &mut self.pods[index];
        if matches!(pod.stage, Stage::Pending) {
            self.pods.remove(index);
            return;
        }
        match std::mem::replace(&mut pod.stage, Stage::Pending) {
            Stage::Pending | Stage::Starting { .. } => self.end(index),
            Stage::Ready { since, engine } => {
                pod.stage = Stage::Draining { since: self.now, ready_since: since, engine };
            }
            draining => pod.stage = draining,
        }
    }

    /// Ends a pod and pays for it and for its warm node.
    fn end(&mut self, index: usize) {
        let pod = self.pods.remove(index);
        // Of a node that was taken away, nothing is left to be warm.
        let warm = if pod.reclaimed.is_some() { 0.0 } else { WARM };
        self.score.pay(pod.capacity, self.now - pod.placed + warm);
        self.warm.extend((warm > 0.0).then_some(Warm { until: self.now + warm, capacity: pod.capacity }));
    }

    /// Lets time pass.
    fn advance(&mut self, seconds: f64) {
        let (began, until) = (self.now, self.now + seconds);
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
        self.interrupt(began);
    }

    /// Gives notice to spot nodes for what has come due since `before`, and ends those whose time is up.
    fn interrupt(&mut self, before: f64) {
        let Some(market) = &self.scenario.market else { return };
        let (noticed, ends) = (market.noticed(before, self.now), self.now + market.notice);
        let on_spot = |pod: &&mut Node| pod.capacity == CapacityType::Spot && !matches!(pod.stage, Stage::Pending);
        let taken = self.pods.iter_mut().filter(on_spot).filter(|pod| pod.reclaimed.is_none()).take(noticed);
        taken.for_each(|pod| pod.reclaimed = Some(ends));
        while let Some(index) = self.pods.iter().position(|pod| pod.reclaimed.is_some_and(|at| at <= self.now)) {
            self.cut(index);
        }
    }

    /// Ends a pod whatever it does: its streams break, and what has no token yet is asked of another.
    fn cut(&mut self, index: usize) {
        if let Stage::Ready { engine, .. } | Stage::Draining { engine, .. } = &mut self.pods[index].stage {
            let (broken, elsewhere) = engine.evict();
            self.score.broken += broken;
            self.gateway.extend(elsewhere);
        }
        self.end(index);
    }

    /// Starting pods whose time has come serve.
    fn promote(&mut self) {
        let Scenario { engine, step_time, .. } = *self.scenario;
        let is_open = self.is_open();
        for pod in &mut self.pods {
            if is_open && matches!(pod.stage, Stage::Pending) {
                pod.placed = self.now;
                pod.stage = Stage::Starting { ready_at: self.now + self.scenario.cold_start };
            }
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
                    self.cut(index);
                }
                _ => index += 1,
            }
        }
    }

    /// The result, with pods paid for to `end`.
    fn score(mut self, end: f64) -> Score {
        self.score.requests = self.trace.len();
        for pod in self.pods.iter().filter(|pod| !matches!(pod.stage, Stage::Pending)) {
            self.score.pay(pod.capacity, (end - pod.placed).max(0.0));
        }
        self.score
    }
}

fn is_ready(pod: &Node) -> bool {
    matches!(pod.stage, Stage::Ready { .. })
}

fn is_draining(pod: &Node) -> bool {
    matches!(pod.stage, Stage::Draining { .. })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::market::{Interruption, SPOT_PRICE, Span};

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

    /// A pool that needs three replicas, one of them on demand, with these spot nodes.
    fn on_spot(market: Market) -> (Scenario, Vec<Request>) {
        let mut scenario = scenario();
        scenario.spec.initial_replicas = 1;
        (scenario.spec.min_replicas, scenario.spec.max_replicas) = (3, 8);
        scenario.spec.spot.on_demand_base = Some(1);
        scenario.market = Some(Market { notice: 120.0, ..market });
        (scenario, chats(2400, 1.0))
    }

    /// What ours does: pods that serve or are to serve, by kind, at each tick.
    fn follow(scenario: &Scenario, trace: &[Request]) -> (Vec<(f64, usize, usize, usize)>, Score) {
        let mut ours = crate::policy::Name::Builtin.policy(&scenario.hello()).expect("valid bounds");
        let mut seen = Vec::new();
        let score = replay(
            scenario,
            trace,
            &mut Plan(|tick: &Tick| {
                let count = |capacity: CapacityType, phase: PodPhase| {
                    tick.standing().filter(|pod| pod.capacity_type == capacity && pod.phase == phase).count()
                };
                let spot = count(CapacityType::Spot, PodPhase::Ready);
                seen.push((
                    tick.t,
                    count(CapacityType::OnDemand, PodPhase::Ready),
                    spot,
                    count(CapacityType::Spot, PodPhase::Pending),
                ));
                ours.decide(tick)
            }),
        );
        (seen, score)
    }

    fn at(seen: &[(f64, usize, usize, usize)], time: f64) -> (usize, usize, usize) {
        let &(_, on_demand, spot, pending) = seen.iter().find(|(t, ..)| *t == time).expect("a tick");
        (on_demand, spot, pending)
    }

    #[test]
    fn replicas_above_the_base_go_to_spot_and_cost_what_spot_costs() {
        let (scenario, trace) = on_spot(Market::default());
        let (seen, score) = follow(&scenario, &trace);
        assert_eq!(at(&seen, 600.0), (1, 2, 0));
        assert_eq!((score.broken, score.attained), (0, trace.len()));
        let on_demand = score.gpu_seconds - score.spot_seconds * SPOT_PRICE;
        assert!((on_demand - 2399.0).abs() < 1.0 && (score.spot_seconds - 2.0 * 2399.0).abs() < 10.0, "{score:?}");
    }

    #[test]
    fn a_notice_lets_streams_end_and_is_followed_by_a_replacement_within_a_tick() {
        let taken = Interruption { at: 600.0, nodes: 1 };
        let (scenario, trace) = on_spot(Market { interruptions: vec![taken], ..Market::default() });
        let mut made = Vec::new();
        let mut ours = crate::policy::Name::Builtin.policy(&scenario.hello()).expect("valid bounds");
        let score = replay(
            &scenario,
            &trace,
            &mut Plan(|tick: &Tick| {
                made.push((tick.t, tick.pods.iter().filter(|pod| pod.age_seconds <= TICK && tick.t > 0.0).count()));
                ours.decide(tick)
            }),
        );
        // Told and answered at 600, seen with the next tick.
        assert_eq!(made.iter().find(|(t, count)| *t > 500.0 && *count > 0), Some(&(605.0, 1)));
        assert_eq!((score.broken, score.attained), (0, trace.len()));
    }

    #[test]
    fn a_node_that_is_taken_breaks_what_it_still_streams() {
        let taken = Interruption { at: 100.0, nodes: 2 };
        let (mut scenario, _) = on_spot(Market { interruptions: vec![taken], ..Market::default() });
        scenario.market.as_mut().expect("a market").notice = 10.0;
        let trace = vec![Request { at: 90.0, prompt: 10, output: 4000 }; 6];
        let score = follow(&scenario, &trace).1;
        assert_eq!((score.broken, score.attained), (4, 2), "two thirds of them were on the two nodes");
    }

    #[test]
    fn without_spot_nodes_replicas_run_on_demand_and_go_back_when_there_are_some() {
        let absent = Market { absences: vec![Span { from: 0.0, to: 1200.0 }], ..Market::default() };
        let (scenario, trace) = on_spot(absent);
        let (seen, score) = follow(&scenario, &trace);
        assert_eq!(at(&seen, 55.0), (1, 0, 2), "asked for, and not given up yet");
        assert_eq!(at(&seen, 600.0), (3, 0, 1), "one probe goes on asking");
        assert_eq!(at(&seen, 2000.0), (1, 2, 0));
        let serving = seen.iter().filter(|(t, ..)| *t > 200.0).map(|(_, on_demand, spot, _)| on_demand + spot);
        assert!(serving.clone().min() >= Some(3), "what serves goes once another does: {:?}", serving.min());
        assert_eq!((score.broken, score.attained), (0, trace.len()));
    }
}
