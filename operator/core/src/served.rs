//! What serves, in one word: the fingerprint that an engine makes of weights, tokenizer, flags, version and device. It is
//! in status, on each pod, and in every answer as `system_fingerprint`.

use std::collections::BTreeSet;

use crate::fleet::{Fleet, FleetPod};
use crate::names::FINGERPRINT;
use crate::observed::Observed;
use crate::plan::{Mark, Step};

/// Words that are told at once: one, during a rollout two, and more only of engines that differ against all intent.
const MOST_TOLD: usize = 8;
/// Longest value of a label, characters.
const MAX_LABEL_CHARS: usize = 63;

/// Labels the pods whose engine has told another word than their label has.
pub fn steps(fleet: &Fleet<'_>, observed: &Observed) -> Vec<Step> {
    let label = |pod: &FleetPod<'_>| {
        let word = told_by(pod, observed).filter(|word| labelled(pod) != Some(word))?;
        Some(Step::MarkPod { pod: pod.name.to_owned(), mark: Mark::Label(FINGERPRINT), value: Some(word.to_owned()) })
    };
    fleet.ready().filter_map(label).collect()
}

/// The words of the pods that serve, each once. A pod that was not read yet is known by its label.
pub fn fingerprints(fleet: &Fleet<'_>, observed: &Observed) -> Vec<String> {
    let words: BTreeSet<_> = fleet.ready().filter_map(|pod| told_by(pod, observed).or(labelled(pod))).collect();
    words.into_iter().take(MOST_TOLD).map(str::to_owned).collect()
}

/// What the engine said, where a label can hold it: an image of somebody else's may say anything.
fn told_by<'a>(pod: &FleetPod<'a>, observed: &'a Observed) -> Option<&'a str> {
    let word = observed.load.latest(pod.name)?.stats.fingerprint.as_deref()?;
    is_label_value(word).then_some(word)
}

fn labelled<'a>(pod: &FleetPod<'a>) -> Option<&'a str> {
    pod.pod.label(FINGERPRINT)
}

fn is_label_value(text: &str) -> bool {
    let ends = |character: Option<char>| character.is_some_and(|character| character.is_ascii_alphanumeric());
    let inner = |character: char| character.is_ascii_alphanumeric() || "-_.".contains(character);
    text.len() <= MAX_LABEL_CHARS
        && ends(text.chars().next())
        && ends(text.chars().next_back())
        && text.chars().all(inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::cluster::Cluster;
    use crate::testing::{service, stats};
    use serde_json::json;
    use windlass_engine_contract::stats::Stats;

    fn saying(word: &str) -> Stats {
        Stats { fingerprint: Some(word.to_owned()), ..stats() }
    }

    fn labels(cluster: &Cluster) -> Vec<Option<String>> {
        let label = |pod: &crate::pod::Pod| pod.label(FINGERPRINT).map(str::to_owned);
        cluster.observed.pods.iter().map(|pod| label(pod)).collect()
    }

    fn status(cluster: &Cluster) -> Vec<String> {
        cluster.service.status.clone().expect("a status").fingerprints
    }

    #[test]
    fn what_engines_say_is_in_status_and_once_on_each_pod() {
        let mut cluster = Cluster::serving(service().with("replicas", json!(2)).build());
        let [first, second] = <[String; 2]>::try_from(cluster.live()).expect("two pods");
        for (pod, word) in [(&first, "fp_a"), (&second, "fp_b")] {
            cluster.read(pod, saying(word));
        }
        cluster.reconcile();
        assert_eq!(labels(&cluster), [Some("fp_a".to_owned()), Some("fp_b".to_owned())]);
        assert_eq!(cluster.reconcile().steps, [], "each once");
        assert_eq!(status(&cluster), ["fp_a", "fp_b"], "two, as during a rollout");
        cluster.read(&second, saying("fp_a"));
        cluster.reconcile();
        assert_eq!(status(&cluster), ["fp_a"]);
    }

    #[test]
    fn a_new_operator_knows_pods_by_their_labels() {
        let mut cluster = Cluster::serving(service().build());
        let before = status(&cluster);
        assert_eq!(before, [stats().fingerprint.expect("a word")]);
        cluster.observed.load = Default::default();
        assert_eq!(cluster.reconcile().steps, []);
        assert_eq!(status(&cluster), before);
    }

    #[test]
    fn what_no_label_can_hold_is_not_told() {
        let mut cluster = Cluster::serving(service().build());
        let pod = cluster.live()[0].clone();
        for word in ["", "two words", "-a", "a_", "a/b", &"a".repeat(64)] {
            cluster.read(&pod, saying(word));
            assert_eq!(cluster.reconcile().steps, [], "{word:?}");
        }
    }
}
