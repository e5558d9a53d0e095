//! Reads `/stats` of every ready engine pod: often under load, seldom at rest, never all at once.
//!
//! At rest, the pods of a service take turns, so that a crowd of idle engines costs little: of one that is scaled by its
//! load one is read as often as under load, of one that is scaled by hand one as often as at rest. When it has work, the
//! others are read at once, so that a burst is not noticed late.
//!
//! A reading only goes into the window of its service; what it means is decided by the plan. A service is queued for a
//! reconcile when a reading could change that plan.

mod fetch;
mod loads;
mod schedule;

pub use fetch::drain;
pub use loads::Loads;

use crate::children::owner;
use crate::config::ScrapeConfig;
use crate::metrics::Metrics;
use crate::watches::{Engines, Guarded};
use crate::written::ServiceKey;
use futures::channel::mpsc::{self, Sender};
use futures::stream::StreamExt;
use jiff::Timestamp;
use kube::ResourceExt;
use kube::runtime::reflector::ObjectRef;
use rand::Rng;
use schedule::Schedule;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::time::{Duration, Instant};
use windlass_engine_contract::ADMIN_PORT;
use windlass_engine_contract::stats::Stats;
use windlass_operator_api::autoscaling::AutoscalingMode;
use windlass_operator_core::pod::Pod;

/// How often the set of pods is compared with the schedule, and queued services are let go.
const TICK: Duration = Duration::from_millis(500);
/// Readings under way at once: bounds sockets and memory. The next begins as one ends, so ten thousand busy pods, 2,000
/// readings a second, take 250 ms each at most.
const CONCURRENT: usize = 512;
/// Between two plans of a service for its load alone, at least: each of its pods is read on its own, and a plan for each of these
/// readings costs more than they do.
const PLAN_PAUSE: Duration = Duration::from_secs(2);
/// Pods of a service scaled by hand that take turns, at most: each is read once in so many pauses of rest.
const MOST_TURNS: u32 = 10;

/// A pod to read.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Target {
    uid: String,
    service: ServiceKey,
    pod: String,
    address: SocketAddr,
}

/// What one attempt brought.
struct Finished {
    target: Target,
    result: Result<Stats, fetch::Error>,
}

/// Reads the engines of one scope.
pub struct Scraper {
    config: ScrapeConfig,
    engines: Engines,
    loads: Loads,
    metrics: Metrics,
    queue: Sender<ObjectRef<Guarded>>,
    schedule: Schedule,
    /// Changes of pods that the schedule has followed.
    followed: Option<u64>,
    /// Services whose plan a reading may have changed since the last tick.
    touched: HashSet<ServiceKey>,
    /// Services that have new readings of their load, since they were queued for that last.
    loaded: HashSet<ServiceKey>,
    /// When they were.
    planned: HashMap<ServiceKey, Instant>,
}

impl Scraper {
    /// A scraper that fills `loads` and queues services on `queue`.
    pub fn new(
        config: ScrapeConfig,
        engines: Engines,
        loads: Loads,
        metrics: Metrics,
        queue: Sender<ObjectRef<Guarded>>,
    ) -> Self {
        let schedule = Schedule::default();
        let (touched, loaded, planned) = Default::default();
        Scraper { config, engines, loads, metrics, queue, schedule, followed: None, touched, loaded, planned }
    }

    /// Reads until it is dropped.
    pub async fn run(self) {
        let timeout = self.config.timeout;
        self.run_with(|address| fetch::stats(address, timeout)).await;
    }

    async fn run_with<Read>(mut self, read: impl Fn(SocketAddr) -> Read)
    where
        Read: Future<Output = Result<Stats, fetch::Error>>,
    {
        let (line, due) = mpsc::unbounded();
        let finish = |target: Target| {
            let reading = read(target.address);
            async move { Finished { target, result: reading.await } }
        };
        let mut readings = due.map(finish).buffer_unordered(CONCURRENT);
        let mut tick = tokio::time::interval(TICK);
        tick.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                Some(finished) = readings.next() => self.take_in(finished),
                _ = tick.tick() => {
                    self.let_go(Instant::now());
                    // Each stands in line once, until it was read: the line is no longer than there are pods.
                    self.due().into_iter().for_each(|target| drop(line.unbounded_send(target)));
                }
            }
        }
    }

    /// Pods whose time has come.
    fn due(&mut self) -> Vec<Target> {
        let changes = self.engines.pods.changes();
        if self.followed.replace(changes) != Some(changes) {
            self.follow();
        }
        self.schedule.take(Instant::now())
    }

    /// Takes notice of which pods serve now.
    fn follow(&mut self) {
        let targets: Vec<_> = self.engines.pods.all().iter().filter_map(|pod| target(pod)).collect();
        self.loads.retain(targets.iter().map(|target| (&target.service, target.pod.as_str())));
        let services: HashSet<&ServiceKey> = targets.iter().map(|target| &target.service).collect();
        self.planned.retain(|service, _| services.contains(service));
        // New pods are read within a tick or two, so that Ready does not wait for a cadence.
        self.schedule.follow(targets, Instant::now(), || rand::rng().random_range(Duration::ZERO..TICK));
    }

    fn take_in(&mut self, finished: Finished) {
        let Finished { target, result } = finished;
        if !self.schedule.follows(&target.uid) {
            return;
        }
        let previous = self.loads.latest(&target.service, &target.pod);
        self.metrics.scraped(result.as_ref().map_or_else(fetch::Error::category, |_| "ok"));
        let is_busy = result.as_ref().is_ok_and(|stats| has_traffic(previous.as_ref(), stats));
        let mode = self.mode(&target.service);
        let woke = is_busy && previous.as_ref().is_some_and(|previous| !is_working(previous));
        let matters = match &result {
            Ok(stats) => matters(previous.as_ref(), stats),
            Err(_) => self.loads.is_answering(&target.service, &target.pod),
        };
        if matters {
            self.touched.insert(target.service.clone());
        } else if is_busy && mode == AutoscalingMode::Builtin {
            self.loaded.insert(target.service.clone());
        }
        match result {
            Ok(stats) => self.loads.record(&target.service, &target.pod, Timestamp::now(), stats),
            Err(error) => {
                let (namespace, service) = &target.service;
                tracing::debug!(namespace, service, pod = target.pod, %error, "an engine was not read");
                let text = error.to_string();
                self.loads.record_failure(&target.service, &target.pod, Timestamp::now(), text);
            }
        }
        let (now, random) = (Instant::now(), rand::rng().random());
        let pause = if is_busy || !self.loads.is_answering(&target.service, &target.pod) {
            jittered(self.config.active, random)
        } else {
            idle_pause(&self.config, mode, self.loads.pods(&target.service), random)
        };
        self.schedule.put_back(&target.uid, now + pause);
        if woke && takes_turns(mode) {
            self.schedule.hasten(&target.service, now);
        }
    }

    /// Queues the services touched since the last tick, each once, and those with new readings of their load where that is
    /// not too soon. What does not fit waits for the next tick.
    fn let_go(&mut self, now: Instant) {
        let Scraper { queue, touched, loaded, planned, .. } = self;
        touched.extend(loaded.extract_if(|service| planned.get(service).is_none_or(|last| now >= *last + PLAN_PAUSE)));
        touched.retain(|service| {
            let (namespace, name) = service;
            let is_full = queue.try_send(ObjectRef::new(name).within(namespace)).is_err();
            if !is_full {
                loaded.remove(service);
                planned.insert(service.clone(), now);
            }
            is_full
        });
    }

    /// Who scales `service`; somebody by hand where it is not known.
    fn mode(&self, (namespace, name): &ServiceKey) -> AutoscalingMode {
        let service = self.engines.services.get(&ObjectRef::new(name).within(namespace));
        let spec = service.as_ref().and_then(|service| service.0.as_ref().ok()).map(|service| &service.spec);
        spec.and_then(|spec| spec.autoscaling.as_ref()).map(|autoscaling| autoscaling.mode).unwrap_or_default()
    }
}

/// Whether its idle pods are read one after the other. Those of others' autoscalers all have to be known.
fn takes_turns(mode: AutoscalingMode) -> bool {
    matches!(mode, AutoscalingMode::Builtin | AutoscalingMode::Manual)
}

/// Until an idle engine, one of `pods` of its service, is read again; `random` is even in 0 to 1.
fn idle_pause(config: &ScrapeConfig, mode: AutoscalingMode, pods: usize, random: f64) -> Duration {
    let pods = u32::try_from(pods).unwrap_or(u32::MAX).max(1);
    match mode {
        AutoscalingMode::Builtin => jittered(config.active.saturating_mul(pods).min(config.idle), random),
        // No decision waits for it. Pods that were read together are soon read one at a time.
        AutoscalingMode::Manual => config.idle.saturating_mul(pods.min(MOST_TURNS)).mul_f64(0.5 + random),
        _ => jittered(config.idle, random),
    }
}

/// A pod that serves: ready, with an address, and not on its way out.
fn target(pod: &Pod) -> Option<Target> {
    let address: IpAddr = pod.status.pod_ip.as_ref()?.parse().ok()?;
    if pod.is_leaving() || !pod.is_ready() {
        return None;
    }
    Some(Target {
        uid: pod.metadata.uid.clone()?,
        service: (pod.namespace()?, owner(pod)?.to_owned()),
        pod: pod.name_any(),
        address: SocketAddr::new(address, ADMIN_PORT),
    })
}

/// Whether requests are in the engine.
fn is_working(stats: &Stats) -> bool {
    stats.running + stats.waiting > 0
}

/// Whether requests are in the engine, or came and went since the last reading.
fn has_traffic(previous: Option<&Stats>, current: &Stats) -> bool {
    let went = |stats: &Stats| (stats.finished, stats.rejected);
    is_working(current) || previous.is_some_and(|previous| went(previous) != went(current))
}

/// Whether a reading tells something new about what serves: the first one, another phase, configuration or fingerprint.
fn matters(previous: Option<&Stats>, current: &Stats) -> bool {
    previous.is_none_or(|previous| {
        let is_built_anew = current.effective.is_some() && current.effective != previous.effective;
        is_built_anew || (current.phase, &current.fingerprint) != (previous.phase, &previous.fingerprint)
    })
}

/// `pause`, up to a tenth shorter or longer, so that many pods drift apart; `random` is even in 0 to 1.
fn jittered(pause: Duration, random: f64) -> Duration {
    pause.mul_f64(0.9 + 0.2 * random)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::children::Children;
    use kube::runtime::reflector;
    use kube::runtime::watcher::Event;
    use serde_json::json;
    use std::cell::Cell;
    use windlass_engine_contract::fixture::idle;
    use windlass_engine_contract::stats::Phase;

    fn pod(ready: &str, deleted: bool) -> Pod {
        let mut pod = json!({
            "metadata": {
                "namespace": "n", "name": "p", "uid": "u",
                "labels": {"windlass.dev/inference-service": "a"},
            },
            "status": {"podIP": "fd00::7", "conditions": [{"type": "Ready", "status": ready}]},
        });
        if deleted {
            pod["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z".into();
        }
        serde_json::from_value(pod).expect("a pod")
    }

    #[test]
    fn only_pods_that_serve_are_read() {
        let read = target(&pod("True", false)).expect("a target");
        assert_eq!(read.address.to_string(), "[fd00::7]:8001");
        assert_eq!(read.service, ("n".to_owned(), "a".to_owned()));
        assert_eq!(target(&pod("False", false)), None);
        assert_eq!(target(&pod("True", true)), None);
    }

    #[test]
    fn traffic_is_seen_in_the_engine_and_between_two_readings() {
        assert!(!has_traffic(None, &idle()));
        assert!(!has_traffic(Some(&idle()), &idle()));
        assert!(has_traffic(None, &Stats { waiting: 1, ..idle() }));
        assert!(has_traffic(Some(&idle()), &Stats { finished: 1, ..idle() }));
    }

    #[test]
    fn the_first_reading_and_a_change_of_phase_or_fingerprint_matter() {
        assert!(matters(None, &idle()));
        assert!(!matters(Some(&idle()), &Stats { running: 3, ..idle() }));
        assert!(matters(Some(&idle()), &Stats { phase: Phase::Draining, ..idle() }));
        assert!(matters(Some(&idle()), &Stats { fingerprint: None, ..idle() }));
    }

    /// So many pods that serve.
    fn crowd(count: u32) -> Engines {
        let (pods, mut feed) = Children::new();
        feed.take(&Event::Init);
        for index in 0..count {
            let mut pod = pod("True", false);
            (pod.metadata.name, pod.metadata.uid) = (Some(format!("p-{index}")), Some(format!("u-{index}")));
            feed.take(&Event::InitApply(pod));
        }
        feed.take(&Event::InitDone);
        Engines { services: reflector::store().0, pods }
    }

    #[test]
    fn a_pod_that_comes_later_is_followed_and_nothing_is_kept_of_one_that_has_left() {
        let named = |name: &str| {
            let mut pod = pod("True", false);
            (pod.metadata.name, pod.metadata.uid) = (Some(name.into()), Some(name.into()));
            pod
        };
        let (pods, mut feed) = Children::new();
        [Event::Init, Event::InitApply(named("a")), Event::InitDone].iter().for_each(|event| feed.take(event));
        let engines = Engines { services: reflector::store().0, pods };
        let second = Duration::from_secs(1);
        let config = ScrapeConfig { active: second, idle: second, timeout: second };
        let (loads, metrics) = (Loads::default(), Metrics::new().expect("names"));
        let mut scraper = Scraper::new(config, engines, loads.clone(), metrics, mpsc::channel(1).0);
        scraper.due();
        let read = |name| Finished { target: target(&named(name)).expect("it serves"), result: Ok(idle()) };
        scraper.take_in(read("a"));
        assert_eq!(loads.pods(&("n".into(), "a".into())), 1);

        feed.take(&Event::Apply(named("b")));
        feed.take(&Event::Delete(named("a")));
        scraper.due();
        // Its reading was under way when it left.
        scraper.take_in(read("a"));
        assert_eq!(loads.pods(&("n".into(), "a".into())), 0);
        scraper.take_in(read("b"));
        assert_eq!(loads.pods(&("n".into(), "a".into())), 1);
    }

    #[test]
    fn a_service_under_load_is_planned_every_two_seconds_and_at_once_for_what_matters() {
        let spec = json!({
            "model": {"source": "pvc://models/m.gguf"},
            "autoscaling": {"mode": "Builtin", "minReplicas": 1, "maxReplicas": 2},
        });
        let object = json!({
            "apiVersion": "windlass.dev/v1alpha1", "kind": "InferenceService",
            "metadata": {"namespace": "n", "name": "a"}, "spec": spec,
        });
        let (services, mut writer) = reflector::store();
        writer.apply_watcher_event(&Event::Apply(serde_json::from_value(object).expect("guarded")));
        let engines = Engines { services, ..crowd(1) };
        let second = Duration::from_secs(1);
        let config = ScrapeConfig { active: second, idle: second, timeout: second };
        let (queue, mut queued) = mpsc::channel(8);
        let (loads, metrics) = (Loads::default(), Metrics::new().expect("names"));
        let mut scraper = Scraper::new(config, engines, loads, metrics, queue);
        scraper.due();
        let start = Instant::now();
        let busy = Stats { running: 1, ..idle() };
        let mut is_planned = |stats: &Stats, milliseconds: u64| {
            let target = target(&pod("True", false)).expect("it serves");
            let target = Target { uid: "u-0".into(), pod: "p-0".into(), ..target };
            scraper.take_in(Finished { target, result: Ok(stats.clone()) });
            scraper.let_go(start + Duration::from_millis(milliseconds));
            queued.try_recv().is_ok()
        };
        assert!(is_planned(&busy, 0), "the first reading matters");
        assert_eq!([500, 1000, 1500, 2000, 2500].map(|at| is_planned(&busy, at)), [false, false, false, true, false]);
        assert!(is_planned(&Stats { phase: Phase::Draining, ..busy.clone() }, 3000), "another phase");
        assert!(!is_planned(&Stats { phase: Phase::Draining, ..idle() }, 9000), "at rest");
    }

    #[tokio::test]
    async fn ten_thousand_pods_are_read_as_others_end_and_a_bounded_number_at_a_time() {
        const PODS: u32 = 10_000;
        let config = ScrapeConfig {
            active: Duration::from_secs(600),
            idle: Duration::from_secs(600),
            timeout: Duration::from_secs(1),
        };
        let (loads, metrics) = (Loads::default(), Metrics::new().expect("names"));
        let scraper = Scraper::new(config, crowd(PODS), loads.clone(), metrics, mpsc::channel(1).0);
        let (under_way, most) = (Cell::new(0), Cell::new(0));
        let read = |_| {
            let (under_way, most) = (&under_way, &most);
            async move {
                under_way.set(under_way.get() + 1);
                most.set(under_way.get().max(most.get()));
                tokio::time::sleep(Duration::from_millis(5)).await;
                under_way.set(under_way.get() - 1);
                Ok(idle())
            }
        };
        let all = async {
            while loads.pods(&("n".into(), "a".into())) < PODS as usize {
                tokio::time::sleep(Duration::from_millis(10)).await;
            }
        };
        // Were each tick to begin a bounded number, twenty would pass.
        tokio::select! {
            () = scraper.run_with(read) => panic!("it has ended"),
            () = all => {}
            () = tokio::time::sleep(TICK * 16) => panic!("{} were read", loads.pods(&("n".into(), "a".into()))),
        }
        assert_eq!(most.get(), CONCURRENT);
    }

    #[test]
    fn idle_pods_take_turns_unless_another_autoscaler_has_to_know_them_all() {
        use AutoscalingMode::{Builtin, External, Hpa, Manual};
        let [active, idle] = [5, 30].map(Duration::from_secs);
        let config = ScrapeConfig { active, idle, timeout: active };
        for (mode, pods, seconds) in [
            (Builtin, 0, 5),
            (Builtin, 3, 15),
            (Builtin, 1000, 30),
            (Manual, 1, 30),
            (Manual, 4, 120),
            (Manual, 1000, 300),
            (External, 4, 30),
            (Hpa, 4, 30),
        ] {
            assert_eq!(idle_pause(&config, mode, pods, 0.5), Duration::from_secs(seconds), "{pods} pods of {mode:?}");
        }
        assert_eq!([0.0, 1.0].map(|random| idle_pause(&config, Manual, 1, random).as_secs()), [15, 45]);
    }

    #[test]
    fn jitter_keeps_to_a_tenth() {
        let second = Duration::from_secs(1);
        assert_eq!((jittered(second, 0.0), jittered(second, 1.0)), (second.mul_f64(0.9), second.mul_f64(1.1)));
    }
}
