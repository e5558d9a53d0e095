//! What the autoscaler learned of a service, kept over restarts and changes of leader in one ConfigMap: what tokens cost a
//! replica, how full it may be, and how long it takes to start. Written where it has changed by enough to matter, and
//! every five minutes at most.

use std::collections::BTreeMap;
use std::time::Duration;

use jiff::Timestamp;
use k8s_openapi::api::core::v1::ConfigMap;

use crate::autoscale::Memory;
use crate::autoscale::need::Headroom;
use crate::autoscale::speed::Speed;
use crate::build::metadata;
use crate::fleet::is_owned;
use crate::plan::{Object, Step};
use crate::validate::ValidatedService;
use crate::window::minus;

/// Between two writes.
const WRITE_INTERVAL: Duration = Duration::from_secs(300);
/// What changes by less than this share is not worth a write.
const CHANGE: f64 = 0.05;

/// Keys of the ConfigMap.
const SPEED: &str = "speed";
const SPEED_AT: &str = "speedLearnedAtSecond";
const HEADROOM: &str = "headroom";
const COLD_START: &str = "coldStartSeconds";

/// What was last written, and when.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Kept {
    at: Timestamp,
    /// Prompt token, generated token, headroom, cold start.
    values: [f64; 4],
}

/// Name of the ConfigMap of `service`.
pub fn name(service: &str) -> String {
    format!("{service}-capacity")
}

/// Writes what `memory` has learned where that is due, and notes in it that it was written.
pub fn keep(service: &ValidatedService, memory: &mut Memory, now: Timestamp) -> Option<Step> {
    let costs = memory.speed.costs()?;
    let values = [costs.prompt, costs.generated, memory.headroom.0, memory.cold_start.as_secs_f64()];
    let is_due =
        memory.kept.is_none_or(|kept| kept.at <= minus(now, WRITE_INTERVAL) && is_other(&kept.values, &values));
    if !is_due {
        return None;
    }
    memory.kept = Some(Kept { at: now, values });
    Some(Step::Apply(Object::ConfigMap(build(service, memory))))
}

fn is_other(before: &[f64; 4], now: &[f64; 4]) -> bool {
    before.iter().zip(now).any(|(before, now)| (now - before).abs() > CHANGE * before.abs())
}

fn build(service: &ValidatedService, memory: &Memory) -> ConfigMap {
    let (sums, learned_at) = memory.speed.to_parts();
    let sums: Vec<String> = sums.iter().map(f64::to_string).collect();
    let data = [
        (SPEED, sums.join(" ")),
        (SPEED_AT, learned_at.map_or(0, Timestamp::as_second).to_string()),
        (HEADROOM, memory.headroom.0.to_string()),
        (COLD_START, memory.cold_start.as_secs().to_string()),
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
    let learned_at =
        number(SPEED_AT).and_then(|second| Timestamp::from_second(second as i64).ok()).filter(|at| *at <= now);
    let speed = sums.zip(learned_at).and_then(|(sums, at)| Speed::of_parts(&sums, at)).unwrap_or_default();
    let mut memory = Memory {
        speed,
        headroom: number(HEADROOM).map_or_else(Headroom::default, Headroom::bounded),
        cold_start: Duration::from_secs(number(COLD_START).unwrap_or(0.0).clamp(0.0, 3600.0) as u64),
        ..Memory::default()
    };
    if let Some(costs) = memory.speed.costs() {
        let values = [costs.prompt, costs.generated, memory.headroom.0, memory.cold_start.as_secs_f64()];
        memory.kept = Some(Kept { at: now, values });
    }
    memory
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::autoscale::speed::Sample;
    use crate::testing::{UID, at, service};
    use crate::validate::validate;

    /// A memory that has learned an engine of which a prompt token takes so many seconds.
    fn learned(prompt_seconds: f64) -> Memory {
        let mut memory = Memory { cold_start: Duration::from_secs(42), ..Memory::default() };
        let sample = |i: u32| {
            let (prompt, generated) = (f64::from(i % 8) * 500.0, f64::from(i / 8) * 50.0);
            let inter_token_seconds = 0.012 / (1.0 - prompt_seconds * prompt - 2e-4 * generated);
            Sample { observations: 50, inter_token_seconds, prompt, generated }
        };
        memory.speed.learn((0..40).map(sample), at(1000));
        memory
    }

    fn kept(memory: &mut Memory, second: i64) -> Option<ConfigMap> {
        let service = validate(&service().builtin(1, 4, 500).build()).expect("valid");
        keep(&service, memory, at(second)).map(|step| match step {
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
        let again = restored(&map, UID, at(1010));
        assert_eq!(again.speed, memory.speed);
        assert_eq!((again.headroom, again.cold_start), (Headroom(0.4), Duration::from_secs(42)));
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
    fn what_is_not_ours_or_broken_is_never_learned() {
        let map = kept(&mut learned(1e-4), 1000).expect("due");
        assert_eq!(restored(&map, "another", at(2000)), Memory::default());
        for (key, text) in [(SPEED, "1 2 3"), (SPEED, "nan"), (SPEED_AT, "9e99"), (SPEED, "1 1 1 1 1 1 1 1 1 inf")] {
            let mut broken = map.clone();
            broken.data.as_mut().expect("data").insert(key.to_owned(), text.to_owned());
            assert_eq!(restored(&broken, UID, at(2000)).speed, Speed::default(), "{key} {text}");
        }
        let mut wide = map;
        wide.data.as_mut().expect("data").insert(HEADROOM.to_owned(), "7".to_owned());
        assert!(restored(&wide, UID, at(2000)).headroom.0 < 1.0);
    }
}
