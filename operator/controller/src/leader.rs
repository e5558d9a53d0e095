//! Leadership by a `coordination.k8s.io/v1` Lease: at most one replica acts.
//!
//! The rule is client-go's: a candidate takes the lease when its record has not changed for the record's own duration
//! *on the candidate's clock*, so clocks of two machines are never compared; a leader that could not renew for two
//! thirds of the duration stops itself first. Writes carry the resource version, so of two takers one is refused; a leader
//! that is refused reads again, as whoever else wrote may have meant something else than to lead.

use crate::config::LeaseConfig;
use jiff::Timestamp;
use k8s_openapi::api::coordination::v1::{Lease, LeaseSpec};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::{MicroTime, ObjectMeta};
use kube::api::{Api, PostParams};
use std::time::{Duration, Instant};

/// How long each part of the election takes, all derived from the lease's duration.
#[derive(Clone, Copy, Debug)]
struct Timing {
    /// Between renewals: three fit into the deadline.
    renew: Duration,
    /// Without a renewal for this long, the leader stops.
    deadline: Duration,
    /// Between looks at another's record.
    retry: Duration,
}

impl Timing {
    fn of(lease: Duration) -> Self {
        Timing { renew: lease * 2 / 9, deadline: lease * 2 / 3, retry: (lease / 10).min(Duration::from_secs(2)) }
    }
}

/// Before a leader reads again what somebody else wrote meanwhile.
const REREAD: Duration = Duration::from_millis(100);

/// What to do about the record just read.
#[derive(Debug, PartialEq)]
enum Step {
    /// Write this record: it makes or keeps us the leader.
    Write(LeaseSpec),
    /// Another replica leads.
    Stand,
}

/// The election's memory, without client or clock.
#[derive(Debug)]
struct Election {
    identity: String,
    lease: Duration,
    /// The last foreign record, and when it was first seen on our own clock.
    seen: Option<(LeaseSpec, Instant)>,
}

impl Election {
    /// Decides on `record`; `now` is the monotonic clock, `wall` goes into the record for people to read.
    fn step(&mut self, record: Option<&LeaseSpec>, now: Instant, wall: Timestamp) -> Step {
        let Some(record) = record else { return Step::Write(self.claim(0, wall)) };
        match record.holder_identity.as_deref() {
            Some(holder) if holder == self.identity => Step::Write(self.renewal(record, wall)),
            None | Some("") => Step::Write(self.claim(next_transition(record), wall)),
            Some(_) if self.is_silent(record, now) => Step::Write(self.claim(next_transition(record), wall)),
            Some(_) => Step::Stand,
        }
    }

    /// Whether `record` has stood unchanged for its own duration.
    fn is_silent(&mut self, record: &LeaseSpec, now: Instant) -> bool {
        match &self.seen {
            Some((seen, since)) if seen == record => {
                let seconds = record.lease_duration_seconds.and_then(|seconds| u64::try_from(seconds).ok());
                now.duration_since(*since) >= seconds.map_or(self.lease, Duration::from_secs)
            }
            _ => {
                self.seen = Some((record.clone(), now));
                false
            }
        }
    }

    fn claim(&self, transitions: i32, wall: Timestamp) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(self.identity.clone()),
            lease_duration_seconds: i32::try_from(self.lease.as_secs()).ok(),
            acquire_time: Some(MicroTime(wall)),
            renew_time: Some(MicroTime(wall)),
            lease_transitions: Some(transitions),
            ..LeaseSpec::default()
        }
    }

    fn renewal(&self, record: &LeaseSpec, wall: Timestamp) -> LeaseSpec {
        let transitions = record.lease_transitions.unwrap_or(0);
        LeaseSpec { acquire_time: record.acquire_time.clone(), ..self.claim(transitions, wall) }
    }

    /// The record of a leader that steps down: free at once, its transitions kept.
    fn released(&self, record: &LeaseSpec, wall: Timestamp) -> LeaseSpec {
        LeaseSpec {
            holder_identity: Some(String::new()),
            lease_duration_seconds: Some(1),
            ..self.renewal(record, wall)
        }
    }
}

fn next_transition(record: &LeaseSpec) -> i32 {
    record.lease_transitions.unwrap_or(0).saturating_add(1)
}

/// A candidate for the lease.
pub struct Elector {
    leases: Api<Lease>,
    name: String,
    timing: Timing,
    election: Election,
}

/// Whether a write made us the leader.
#[derive(Debug)]
enum Outcome {
    Held,
    /// Another replica leads.
    Refused,
    /// Somebody else wrote between our looking and our writing.
    Raced,
}

impl Elector {
    /// A candidate named `identity`.
    pub fn new(client: kube::Client, config: &LeaseConfig, identity: &str) -> Self {
        let leases = match &config.namespace {
            Some(namespace) => Api::namespaced(client, namespace),
            None => Api::default_namespaced(client),
        };
        let election = Election { identity: identity.to_owned(), lease: config.duration, seen: None };
        Elector { leases, name: config.name.clone(), timing: Timing::of(config.duration), election }
    }

    /// Waits until this replica is the leader.
    pub async fn acquire(&mut self) {
        loop {
            match self.attempt().await {
                Ok(Outcome::Held) => return,
                Ok(Outcome::Refused | Outcome::Raced) => {}
                Err(error) => tracing::warn!(lease = self.name, %error, "the lease cannot be read or taken"),
            }
            tokio::time::sleep(self.timing.retry).await;
        }
    }

    /// Renews until leadership is lost, to another replica or to silence of the API server.
    pub async fn hold(&mut self) {
        let (mut renewed, mut pause) = (Instant::now(), self.timing.renew);
        while renewed.elapsed() < self.timing.deadline {
            tokio::time::sleep(pause).await;
            pause = self.timing.renew;
            let left = self.timing.deadline.saturating_sub(renewed.elapsed());
            match tokio::time::timeout(left, self.attempt()).await {
                Ok(Ok(Outcome::Held)) => renewed = Instant::now(),
                Ok(Ok(Outcome::Refused)) => return,
                Ok(Ok(Outcome::Raced)) => pause = REREAD,
                Ok(Err(error)) => tracing::warn!(lease = self.name, %error, "the lease was not renewed"),
                Err(_elapsed) => tracing::warn!(lease = self.name, "the API server does not answer"),
            }
        }
    }

    /// Frees the lease so that another replica takes it at its next look.
    ///
    /// # Errors
    /// The API server refuses or does not answer; the lease then runs out by itself.
    pub async fn release(&mut self) -> Result<(), kube::Error> {
        let Some(lease) = self.leases.get_opt(&self.name).await? else { return Ok(()) };
        let Some(record) = lease.spec.clone() else { return Ok(()) };
        if record.holder_identity.as_deref() != Some(&self.election.identity) {
            return Ok(());
        }
        let spec = self.election.released(&record, Timestamp::now());
        self.leases.replace(&self.name, &PostParams::default(), &Lease { spec: Some(spec), ..lease }).await.map(drop)
    }

    /// Reads the record and writes what the election decides.
    async fn attempt(&mut self) -> Result<Outcome, kube::Error> {
        let lease = self.leases.get_opt(&self.name).await?;
        let record = lease.as_ref().and_then(|lease| lease.spec.as_ref());
        let Step::Write(spec) = self.election.step(record, Instant::now(), Timestamp::now()) else {
            return Ok(Outcome::Refused);
        };
        match self.write(lease, spec).await {
            Ok(()) => Ok(Outcome::Held),
            Err(kube::Error::Api(status)) if status.code == 409 => Ok(Outcome::Raced),
            Err(error) => Err(error),
        }
    }

    async fn write(&self, lease: Option<Lease>, spec: LeaseSpec) -> Result<(), kube::Error> {
        let spec = Some(spec);
        match lease {
            Some(lease) => {
                self.leases.replace(&self.name, &PostParams::default(), &Lease { spec, ..lease }).await.map(drop)
            }
            None => {
                let metadata = ObjectMeta { name: Some(self.name.clone()), ..ObjectMeta::default() };
                self.leases.create(&PostParams::default(), &Lease { metadata, spec }).await.map(drop)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(15);

    fn candidate(identity: &str) -> Election {
        Election { identity: identity.into(), lease: LEASE, seen: None }
    }

    fn wall(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("in range")
    }

    fn written(step: Step) -> LeaseSpec {
        match step {
            Step::Write(spec) => spec,
            Step::Stand => panic!("a write was expected"),
        }
    }

    #[test]
    fn the_first_candidate_takes_a_lease_that_does_not_exist() {
        let spec = written(candidate("a").step(None, Instant::now(), wall(1)));
        assert_eq!(spec.holder_identity.as_deref(), Some("a"));
        assert_eq!(spec.lease_transitions, Some(0));
        assert_eq!(spec.lease_duration_seconds, Some(15));
    }

    #[test]
    fn a_leader_renews_without_a_transition_and_keeps_its_acquire_time() {
        let mut leader = candidate("a");
        let first = written(leader.step(None, Instant::now(), wall(1)));
        let second = written(leader.step(Some(&first), Instant::now(), wall(4)));
        assert_eq!(second.acquire_time, first.acquire_time);
        assert_eq!(second.renew_time, Some(MicroTime(wall(4))));
        assert_eq!(second.lease_transitions, Some(0));
    }

    #[test]
    fn a_standby_waits_the_full_duration_from_its_own_first_look() {
        let held = written(candidate("a").step(None, Instant::now(), wall(1)));
        let (mut standby, start) = (candidate("b"), Instant::now());
        // The record may be years old by the wall clock: only what the standby saw itself counts.
        assert_eq!(standby.step(Some(&held), start, wall(900_000)), Step::Stand);
        assert_eq!(standby.step(Some(&held), start + LEASE - Duration::from_millis(1), wall(900_014)), Step::Stand);
        let taken = written(standby.step(Some(&held), start + LEASE, wall(900_015)));
        assert_eq!(taken.holder_identity.as_deref(), Some("b"));
        assert_eq!(taken.lease_transitions, Some(1));
    }

    #[test]
    fn every_renewal_restarts_the_wait() {
        let mut leader = candidate("a");
        let first = written(leader.step(None, Instant::now(), wall(1)));
        let renewed = written(leader.step(Some(&first), Instant::now(), wall(5)));
        let (mut standby, start) = (candidate("b"), Instant::now());
        assert_eq!(standby.step(Some(&first), start, wall(1)), Step::Stand);
        assert_eq!(standby.step(Some(&renewed), start + LEASE, wall(1)), Step::Stand);
        assert_eq!(standby.step(Some(&renewed), start + LEASE * 2 - Duration::from_secs(1), wall(1)), Step::Stand);
    }

    #[test]
    fn a_released_lease_is_taken_at_the_next_look() {
        let leader = candidate("a");
        let held = leader.claim(3, wall(1));
        let free = leader.released(&held, wall(2));
        let taken = written(candidate("b").step(Some(&free), Instant::now(), wall(3)));
        assert_eq!(taken.lease_transitions, Some(4));
    }

    #[test]
    fn a_leader_stops_itself_before_another_may_take_over() {
        for lease in [6, 15, 300].map(Duration::from_secs) {
            let timing = Timing::of(lease);
            assert!(timing.deadline < lease);
            assert!(timing.renew * 3 <= timing.deadline, "three attempts fit into the deadline");
        }
    }

    #[tokio::test]
    async fn of_two_replicas_one_leads_and_the_other_follows_at_its_release() {
        let api = crate::testing::FakeApi::default();
        let config = LeaseConfig { name: "l".into(), namespace: Some("n".into()), duration: Duration::from_secs(6) };
        let [mut first, mut second] = ["a", "b"].map(|name| Elector::new(api.client(), &config, name));
        first.acquire().await;
        assert!(matches!(second.attempt().await, Ok(Outcome::Refused)));
        assert!(matches!(first.attempt().await, Ok(Outcome::Held)), "a renewal");
        second.release().await.expect("nothing to release");
        assert!(matches!(second.attempt().await, Ok(Outcome::Refused)), "a standby releases nothing");
        first.release().await.expect("released");
        assert!(matches!(second.attempt().await, Ok(Outcome::Held)));
    }

    const LEASE_PATH: &str = "/apis/coordination.k8s.io/v1/namespaces/n/leases/l";

    /// A leader of `l`, whose renewals another's write may cross.
    async fn leader(api: &crate::testing::FakeApi) -> Elector {
        let config = LeaseConfig { name: "l".into(), namespace: Some("n".into()), duration: Duration::from_secs(6) };
        let mut elector = Elector::new(api.client(), &config, "a");
        elector.acquire().await;
        api.refuse("/leases/", 409, "the object has been modified");
        elector
    }

    #[tokio::test]
    async fn a_write_that_lost_a_race_makes_no_leader() {
        let mut elector = leader(&crate::testing::FakeApi::default()).await;
        assert!(matches!(elector.attempt().await, Ok(Outcome::Raced)));
    }

    #[tokio::test]
    async fn a_leader_whose_write_was_crossed_reads_again_and_goes_on() {
        let api = crate::testing::FakeApi::default();
        let mut elector = leader(&api).await;
        let renewed = || api.get(LEASE_PATH).map(|lease| lease["spec"]["renewTime"].clone());
        let (at_first, mut tries) = (renewed(), 0);
        let crossed = async {
            while tries < 3 {
                tries += api.writes().len();
                tokio::task::yield_now().await;
            }
            api.accept();
            while renewed() == at_first {
                tokio::task::yield_now().await;
            }
        };
        tokio::select! {
            () = elector.hold() => panic!("it gave up leading"),
            () = crossed => {}
        }
    }

    #[tokio::test]
    async fn a_leader_whom_another_replaced_stops() {
        let api = crate::testing::FakeApi::default();
        let mut elector = leader(&api).await;
        let mut lease = api.get(LEASE_PATH).expect("a lease");
        lease["spec"]["holderIdentity"] = "b".into();
        api.put(LEASE_PATH, lease);
        assert!(matches!(elector.attempt().await, Ok(Outcome::Refused)));
    }
}
