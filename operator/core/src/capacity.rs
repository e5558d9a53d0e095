//! What the autoscaler learned of a service, kept over restarts and changes of leader in one ConfigMap: what tokens cost a
//! replica, how full it may be, and how long it takes to start. Written where it has changed by enough to matter, and
//! every five minutes at most.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;

use crate::autoscale::Memory;
use crate::autoscale::cold_start::ColdStarts;
use crate::autoscale::need::Headroom;
use crate::autoscale::speed::{Costs, Speed};
use crate::build::metadata;
use crate::fleet::is_owned;
use crate::observed::Observed;
use crate::plan::{Object, Step};
use crate::validate::ValidatedService;
use crate::window::minus;

/// Between two writes.
const WRITE_INTERVAL: Duration = Duration::from_secs(300);
/// What changes by less than this share is not worth a write.
const CHANGE: f64 = 0.05;

/// Longest cold start that is believed, seconds.
const MAX_COLD_START_SECONDS: f64 = 3600.0;

/// Keys of the ConfigMap.
const SPEED: &str = "speed";
const SPEED_AT: &str = "speedLearnedAtSecond";
const HEADROOM: &str = "headroom";
const COLD_STARTS: &str = "coldStartSeconds";
const COLD_STARTS_UNTIL: &str = "coldStartsUntilSecond";

/// What was last written, and when.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kept {
    at: Timestamp,
    /// Prompt token, generated token, headroom, cold start.
    values: [f64; 4],
    /// It was not written: the ConfigMap is somebody else's.
    pub is_taken: bool,
}

/// Name of the ConfigMap of `service`.
pub fn name(service: &str) -> String {
    format!("{service}-capacity")
}

/// Writes what `memory` has learned where that is due, and notes in it that it was written. A ConfigMap of somebody else's
/// is left alone, and looked at again when the next write would be due.
pub fn keep(service: &ValidatedService, observed: &Observed, memory: &mut Memory, now: Timestamp) -> Option<Step> {
    let costs = memory.speed.costs()?;
    let values = values(&costs, memory);
    let is_due = memory.kept.is_none_or(|kept| kept.at <= minus(now, WRITE_INTERVAL) && kept.differs_from(&values));
    if !is_due {
        return None;
    }
    let is_taken = is_taken(service, observed);
    memory.kept = Some(Kept { at: now, values, is_taken });
    (!is_taken).then(|| Step::Apply(Object::ConfigMap(build(service, memory))))
}

fn values(costs: &Costs, memory: &Memory) -> [f64; 4] {
    [costs.prompt, costs.generated, memory.headroom.0, memory.cold_starts.p90().as_secs_f64()]
}

fn is_taken(service: &ValidatedService, observed: &Observed) -> bool {
    let name = name(&service.name);
    let found = observed.capacities.iter().find(|found| found.metadata.name.as_ref() == Some(&name));
    found.is_some_and(|found| !is_owned(&found.metadata, &service.uid))
}

impl Kept {
    fn differs_from(&self, values: &[f64; 4]) -> bool {
        let is_other = |(before, now): (&f64, &f64)| (now - before).abs() > CHANGE * before.abs();
        self.is_taken || self.values.iter().zip(values).any(is_other)
    }
}

fn build(service: &ValidatedService, memory: &Memory) -> ConfigMap {
    let (sums, learned_at) = memory.speed.to_parts();
    let sums: Vec<String> = sums.iter().map(f64::to_string).collect();
    let (starts, until) = memory.cold_starts.to_parts();
    let starts: Vec<String> = starts.map(|took| took.as_secs().to_string()).collect();
    let data = [
        (SPEED, sums.join(" ")),
        (SPEED_AT, learned_at.map_or(0, Timestamp::as_second).to_string()),
        (HEADROOM, memory.headroom.0.to_string()),
        (COLD_STARTS, starts.join(" ")),
        (COLD_STARTS_UNTIL, until.map_or(0, Timestamp::as_second).to_string()),
    ];
    ConfigMap {
        metadata: metadata(service, name(&service.name)),
        data: Some(data.map(|(key, value)| (key.to_owned(), value)).into()),
        ..ConfigMap::default()
    }
}

/// What a memory begins with, where an earlier one was kept for the service with this UID. The window of recommendations
/// is empty: scaling down waits for a whole one. A value that cannot be read counts as never learned.
pub fn restored(kept: &ConfigMap, uid: &str, now: Timestamp) -> Memory {
    let empty = BTreeMap::new();
    let data = kept.data.as_ref().filter(|_| is_owned(&kept.metadata, uid)).unwrap_or(&empty);
    let number = |key: &str| data.get(key).and_then(|text| text.parse::<f64>().ok()).filter(|value| value.is_finite());
    let sums: Option<Vec<f64>> =
        data.get(SPEED).and_then(|text| text.split(' ').map(|word| word.parse().ok()).collect());
    let past = |key| number(key).and_then(|second| Timestamp::from_second(second as i64).ok()).filter(|at| *at <= now);
    let learned_at = past(SPEED_AT);
    let speed = sums.zip(learned_at).and_then(|(sums, at)| Speed::of_parts(&sums, at)).unwrap_or_default();
    let starts =
        data.get(COLD_STARTS).into_iter().flat_map(|text| text.split(' ')).filter_map(|word| word.parse::<f64>().ok());
    let believed = starts.filter(|seconds| (0.0..=MAX_COLD_START_SECONDS).contains(seconds));
    let cold_starts = believed.map(Duration::from_secs_f64);
    let mut memory = Memory {
        speed,
        headroom: number(HEADROOM).map_or_else(Headroom::default, Headroom::bounded),
        cold_starts: ColdStarts::of_parts(cold_starts, past(COLD_STARTS_UNTIL)),
        ..Memory::default()
    };
    if let Some(costs) = memory.speed.costs() {
        let values = values(&costs, &memory);
        memory.kept = Some(Kept { at: now, values, is_taken: false });
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autoscale::speed::Sample;
    use crate::status::Outcome;
    use crate::testing::cluster::Cluster;
    use crate::testing::{UID, at, service};
    use std::sync::Arc;

    /// A memory that has learned an engine of which a prompt token takes so many seconds.
    fn learned(prompt_seconds: f64) -> Memory {
        learned_at(prompt_seconds, at(1000))
    }

    fn learned_at(prompt_seconds: f64, now: Timestamp) -> Memory {
        let mut memory = Memory::default();
        memory.cold_starts.learn(&[(at(900), Duration::from_secs(42)), (at(950), Duration::from_secs(7))]);
        let sample = |i: u32| {
            let (prompt, generated) = (f64::from(i % 8) * 500.0, f64::from(i / 8) * 50.0);
            let inter_token_seconds = 0.012 / (1.0 - prompt_seconds * prompt - 2e-4 * generated);
            Sample { at: now, observations: 50, inter_token_seconds, prompt, generated }
        };
        memory.speed.learn((0..40).map(sample), now);
        memory
    }

    fn kept(memory: &mut Memory, second: i64) -> Option<ConfigMap> {
        kept_beside(&Observed::default(), memory, second)
    }

    fn kept_beside(observed: &Observed, memory: &mut Memory, second: i64) -> Option<ConfigMap> {
        let service = service().builtin(1, 4, 500).valid();
        keep(&service, observed, memory, at(second)).map(|step| match step {
            Step::Apply(Object::ConfigMap(map)) => map,
            other => panic!("{other:?}"),
        })
    }

    #[test]
    fn what_was_learned_survives_and_the_window_does_not() {
        let mut memory = learned(1e-4);
        memory.headroom = Headroom(0.4);
        memory.recommendations.push_back((at(1000), 3));
        let map = kept(&mut memory, 1000).expect("due");
        assert_eq!(map.metadata.name.as_deref(), Some("llama-capacity"));
        let again = restored(&map, UID, at(1010));
        assert_eq!(again.speed, memory.speed);
        assert_eq!((again.headroom, &again.cold_starts), (Headroom(0.4), &memory.cold_starts));
        assert!(again.recommendations.is_empty());
        assert_eq!(kept(&mut again.clone(), 1400), None, "what was restored is not written again");
    }

    #[test]
    fn it_is_written_every_five_minutes_at_most_and_only_when_it_changed() {
        let mut memory = learned(1e-4);
        assert!(kept(&mut memory, 1000).is_some());
        assert_eq!(kept(&mut memory, 2000), None, "the same");
        memory.speed = learned(2e-4).speed;
        assert_eq!(kept(&mut memory, 1299), None, "too early");
        assert!(kept(&mut memory, 1300).is_some());
        assert_eq!(kept(&mut Memory::default(), 0), None, "nothing is known");
    }

    #[test]
    fn what_stays_unknown_is_no_change() {
        let mut memory = Memory { cold_starts: ColdStarts::default(), ..learned(1e-4) };
        assert!(kept(&mut memory, 1000).is_some());
        assert_eq!(kept(&mut memory, 2000), None);
    }

    #[test]
    fn what_was_refused_is_written_again_and_comes_last() {
        let mut cluster = Cluster::serving(service().builtin(1, 4, 500).build());
        cluster.observed.memory = learned_at(1e-4, cluster.now);
        cluster.observed.services.clear();
        let before = cluster.observed.memory.clone();
        let plan = crate::plan(&cluster.service, &cluster.observed, &cluster.defaults, cluster.now);
        assert!(
            plan.steps.len() == 2 && matches!(plan.steps[1], Step::Apply(Object::ConfigMap(_))),
            "{:?}",
            plan.steps
        );
        let refused = Outcome::Failed { attempt: String::new(), message: String::new() };
        assert_eq!(plan.clone().remembered(&before, &refused).kept, None);
        assert!(plan.remembered(&before, &Outcome::Applied).kept.is_some());
    }

    #[test]
    fn a_config_map_of_somebody_else_s_is_left_alone_and_looked_at_again() {
        let ours = kept(&mut learned(1e-4), 1000).expect("due");
        let mut theirs = ours.clone();
        theirs.metadata.owner_references = None;
        let beside = |map: &ConfigMap| Observed { capacities: vec![Arc::new(map.clone())], ..Observed::default() };
        let mut memory = learned(1e-4);
        assert_eq!(kept_beside(&beside(&theirs), &mut memory, 1000), None);
        assert!(memory.kept.is_some_and(|kept| kept.is_taken));
        assert_eq!(kept(&mut memory, 1299), None, "not at every look");
        assert_eq!(kept_beside(&beside(&ours), &mut memory, 1300), Some(ours), "it is ours by now");
        assert!(memory.kept.is_some_and(|kept| !kept.is_taken));
    }

    #[test]
    fn what_is_not_ours_or_broken_is_never_learned() {
        let map = kept(&mut learned(1e-4), 1000).expect("due");
        assert_eq!(restored(&map, "another", at(2000)), Memory::default());
        for (key, text) in [(SPEED, "1 2 3"), (SPEED, "nan"), (SPEED_AT, "9e99"), (SPEED, "1 1 1 1 1 1 1 1 1 inf")] {
            let mut broken = map.clone();
            broken.data.as_mut().expect("data").insert(key.to_owned(), text.to_owned());
            assert_eq!(restored(&broken, UID, at(2000)).speed, Speed::default(), "{key} {text}");
        }
        let mut wide = map;
        let data = wide.data.as_mut().expect("data");
        data.insert(HEADROOM.to_owned(), "7".to_owned());
        data.insert(COLD_STARTS.to_owned(), "30 x -1 nan 1e99 40".to_owned());
        let read = restored(&wide, UID, at(2000));
        assert!(read.headroom.0 < 1.0);
        assert_eq!((read.cold_starts.to_parts().0.count(), read.cold_starts.p90()), (2, Duration::from_secs(40)));
    }
}
