//! Whole days in a second: replicas that serve a fixed rate, a queue in front of them, cold starts, drains.

use std::collections::{BTreeMap, VecDeque};
use std::time::Duration;

use crate::autoscale::policy::{Policy, Scaling};
use crate::autoscale::{Cadence, Memory, Supply, decide};
use crate::testing::{at, service, stats};
use crate::window::LoadWindow;

/// Requests a second that one replica manages.
const RATE: f64 = 2.0;
/// Time to first token without a queue, seconds.
const SERVICE_SECONDS: f64 = 0.2;
const STEP_SECONDS: i64 = 5;

/// A replica and its queue of arrival times.
struct Replica {
    born: i64,
    ready_at: i64,
    queue: VecDeque<f64>,
    credit: f64,
    stats: windlass_engine_contract::stats::Stats,
    busy: VecDeque<f64>,
}

struct World {
    now: i64,
    cold_start: i64,
    /// No reading arrives.
    is_dark: bool,
    replicas: BTreeMap<String, Replica>,
    made: usize,
    window: LoadWindow,
    memory: Memory,
    policy: Policy,
    /// Replicas asked for at each step.
    asked: Vec<i32>,
    late: usize,
    served: usize,
}

impl World {
    fn new(min: i32, max: i32, cold_start: i64) -> Self {
        let valid = service().builtin(min, max, 1000).valid();
        let Scaling::Builtin(policy) = valid.scaling else { panic!("mode Builtin") };
        let mut world = World {
            now: 0,
            cold_start,
            is_dark: false,
            replicas: BTreeMap::new(),
            made: 0,
            window: LoadWindow::default(),
            memory: Memory::default(),
            policy,
            asked: Vec::new(),
            late: 0,
            served: 0,
        };
        (0..min).for_each(|_| world.start(0));
        world
    }

    fn start(&mut self, cold_start: i64) {
        self.made += 1;
        let mut stats = stats();
        (stats.utilization, stats.uptime_seconds) = (Some(0.0), 0.0);
        let replica = Replica {
            born: self.now,
            ready_at: self.now + cold_start,
            queue: VecDeque::new(),
            credit: 0.0,
            stats,
            busy: VecDeque::new(),
        };
        self.replicas.insert(format!("pod-{:04}", self.made), replica);
    }

    /// So many seconds at so many requests a second.
    fn run(&mut self, seconds: i64, arrivals: f64) {
        for _ in 0..seconds / STEP_SECONDS {
            self.step(arrivals);
        }
    }

    fn step(&mut self, arrivals: f64) {
        self.arrive(arrivals);
        self.serve();
        self.now += STEP_SECONDS;
        self.read();
        self.scale();
    }

    fn arrive(&mut self, per_second: f64) {
        let count = (per_second * STEP_SECONDS as f64).round() as usize;
        for index in 0..count {
            let arrival = self.now as f64 + index as f64 / count as f64 * STEP_SECONDS as f64;
            let now = self.now;
            let ready = self.replicas.values_mut().filter(|replica| replica.ready_at <= now);
            if let Some(shortest) = ready.min_by_key(|replica| replica.queue.len()) {
                shortest.queue.push_back(arrival);
            }
        }
    }

    fn serve(&mut self) {
        let (now, end) = (self.now, (self.now + STEP_SECONDS) as f64);
        for replica in self.replicas.values_mut().filter(|replica| replica.ready_at <= now) {
            replica.credit = (replica.credit + RATE * STEP_SECONDS as f64).min(RATE * STEP_SECONDS as f64 + 1.0);
            let before = replica.credit;
            while replica.credit >= 1.0 {
                let Some(arrival) = replica.queue.pop_front() else { break };
                replica.credit -= 1.0;
                let begun = (end - replica.credit / RATE).max(arrival);
                let latency = begun - arrival + SERVICE_SECONDS;
                // Within one step the order of arrivals is kept; only what waited longer is late.
                let latency =
                    if replica.queue.is_empty() && latency < STEP_SECONDS as f64 { SERVICE_SECONDS } else { latency };
                replica.stats.time_to_first_token.observe(latency * 1000.0);
                replica.stats.finished += 1;
                self.served += 1;
                self.late += usize::from(latency > 1.0);
            }
            replica.busy.push_back((before - replica.credit) / (RATE * STEP_SECONDS as f64));
            if replica.busy.len() > 12 {
                replica.busy.pop_front();
            }
        }
    }

    fn read(&mut self) {
        for (name, replica) in self.replicas.iter_mut().filter(|(_, replica)| replica.ready_at <= self.now) {
            let mean = replica.busy.iter().sum::<f64>() / replica.busy.len().max(1) as f64;
            replica.stats.utilization = Some(mean.clamp(0.0, 1.0));
            replica.stats.uptime_seconds = (self.now - replica.born) as f64;
            replica.stats.waiting = u32::try_from(replica.queue.len()).expect("few");
            let oldest = replica.queue.front().map_or(0.0, |arrival| self.now as f64 - arrival);
            replica.stats.oldest_queue_age_seconds = oldest.max(0.0);
            if !self.is_dark {
                self.window.record(name, at(100_000 + self.now), replica.stats.clone());
            }
        }
    }

    fn scale(&mut self) {
        let asked = i32::try_from(self.replicas.len()).expect("few");
        let serving = self.replicas.iter().filter(|(_, replica)| replica.ready_at <= self.now);
        let supply = Supply {
            asked,
            serving: serving.map(|(name, replica)| (name.as_str(), at(100_000 + replica.ready_at))).collect(),
            leaving: 0,
            faltering: 0,
            is_rolling: false,
            overdue: 0,
            cold_starts: Vec::new(),
        };
        let cadence = Cadence { active: Duration::from_secs(5), idle: Duration::from_secs(30) };
        let decision = decide(&self.policy, &supply, &self.window, &self.memory, cadence, at(100_000 + self.now));
        self.memory = decision.memory;
        for _ in asked..decision.replicas {
            self.start(self.cold_start);
        }
        for _ in decision.replicas..asked {
            let shortest = self.replicas.iter().min_by_key(|(_, replica)| replica.queue.len());
            let victim = shortest.map(|(name, _)| name.clone()).expect("a replica");
            self.replicas.remove(&victim);
        }
        self.asked.push(decision.replicas);
    }

    fn latest(&self) -> i32 {
        *self.asked.last().expect("a step")
    }

    /// How often the direction changed from up to down or back.
    fn turns(&self) -> usize {
        let moves: Vec<i32> =
            self.asked.windows(2).map(|pair| (pair[1] - pair[0]).signum()).filter(|way| *way != 0).collect();
        moves.windows(2).filter(|pair| pair[0] != pair[1]).count()
    }
}

#[test]
fn a_burst_is_met_in_a_few_cold_starts_without_overshoot() {
    let mut world = World::new(1, 16, 60);
    world.run(300, 1.0);
    assert_eq!(world.latest(), 1, "{:?}", world.asked);
    world.run(900, 9.0);
    let (peak, most) = (world.latest(), world.asked.iter().max().copied());
    assert!((5..=9).contains(&peak), "nine requests a second need five replicas: {:?}", world.asked);
    assert!(most.is_some_and(|most| most <= 10), "{:?}", world.asked);
    let late_before = world.late;
    world.run(300, 9.0);
    assert_eq!(world.late - late_before, 0, "steady again: {:?}", world.asked);
}

#[test]
fn a_cold_start_does_not_cascade() {
    let mut world = World::new(1, 64, 300);
    world.run(300, 1.0);
    // Four requests a second need two replicas; one more is bought by the backlog, not one per look.
    world.run(290, 4.0);
    assert!(world.latest() <= 10, "{:?}", world.asked);
}

#[test]
fn after_the_load_has_gone_replicas_go_one_by_one_to_the_minimum() {
    let mut world = World::new(1, 16, 30);
    world.run(1200, 9.0);
    let peak = world.latest();
    assert!(peak >= 5);
    world.run(290, 0.0);
    assert_eq!(world.latest(), peak, "the window holds: {:?}", world.asked);
    let before = world.asked.len();
    world.run(1500, 0.0);
    assert_eq!(world.latest(), 1, "{:?}", &world.asked[before..]);
    assert!(world.asked[before..].windows(2).all(|pair| pair[0] - pair[1] <= 1), "one at a time");
}

#[test]
fn a_steady_load_is_left_alone() {
    let mut world = World::new(1, 16, 30);
    world.run(1800, 5.0);
    let settled = world.asked.len();
    world.run(3600, 5.0);
    let rest: Vec<i32> = world.asked[settled..].to_vec();
    assert!(world.turns() <= 2, "{:?}", world.asked);
    assert!(rest.windows(2).filter(|pair| pair[0] != pair[1]).count() <= 1, "{rest:?}");
}

#[test]
fn a_slow_wave_is_followed_and_targets_are_held() {
    let mut world = World::new(1, 16, 30);
    for minute in 0..240 {
        let phase = f64::from(minute) / 120.0 * std::f64::consts::TAU;
        world.run(60, 6.0 - 4.0 * phase.cos());
    }
    let late = world.late as f64 / world.served as f64;
    assert!(late < 0.05, "{late:.3} of requests late; {:?}", world.asked);
    let mean = world.asked.iter().sum::<i32>() as f64 / world.asked.len() as f64;
    assert!(mean < 7.0, "on average {mean:.1} replicas where four are needed");
}

#[test]
fn an_outage_of_readings_at_peak_keeps_every_replica() {
    let mut world = World::new(1, 16, 30);
    world.run(1200, 9.0);
    let peak = world.latest();
    world.is_dark = true;
    world.run(3600, 9.0);
    assert_eq!(world.latest(), peak, "{:?}", world.asked);
}
