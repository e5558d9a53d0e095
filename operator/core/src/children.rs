//! The children that every service has once: identity, policy, endpoint, budget. Applied where they are not as wanted.

use std::sync::Arc;

use k8s_openapi::Metadata;
use k8s_openapi::api::core::v1::Service;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;
use serde::Serialize;

use crate::autoscale::policy::Scaling;
use crate::build::{autoscaler, disruption_budget, network_policy, service, service_account};
use crate::diff;
use crate::fleet::{Fleet, is_owned};
use crate::names::WorkloadKind;
use crate::observed::{Defaults, Observed};
use crate::plan::{Kind, Object, Step};
use crate::standby::Standby;
use crate::validate::ValidatedService;
use crate::workloads::is_wanted;

/// Writes that bring these children to what the spec asks for: what pods need first comes first.
pub fn steps(service: &ValidatedService, standby: &Standby, observed: &Observed, defaults: &Defaults) -> Vec<Step> {
    let account = service_account::build(service).map(|wanted| wish(wanted, &observed.service_accounts));
    let policy = policy(network_policy::build(service, defaults), &observed.network_policies);
    let endpoint = endpoint(service::build(service, standby), &observed.services);
    let budget = wish(disruption_budget::build(service), &observed.disruption_budgets);
    [
        account.flatten().map(Object::ServiceAccount),
        policy.map(Object::NetworkPolicy),
        endpoint.map(Object::Service),
        budget.map(Object::PodDisruptionBudget),
    ]
    .into_iter()
    .flatten()
    .map(Step::Apply)
    .chain(autoscaler(service, observed))
    .collect()
}

/// `wanted`, unless the cluster has it already, and by the same labels: with one too many it would lead to fewer pods.
fn endpoint(wanted: Service, observed: &[Arc<Service>]) -> Option<Service> {
    let selector = |service: &Service| service.spec.as_ref().and_then(|spec| spec.selector.clone());
    let existing = observed.iter().find(|found| found.metadata.name == wanted.metadata.name);
    let leads_elsewhere = existing.is_some_and(|existing| selector(existing) != selector(&wanted));
    if leads_elsewhere { Some(wanted) } else { wish(wanted, observed) }
}

/// `wanted`, unless the cluster has it already, and by the same rules for the same pods: one that says less lets more
/// through.
fn policy(wanted: NetworkPolicy, observed: &[Arc<NetworkPolicy>]) -> Option<NetworkPolicy> {
    let rules = |policy: &NetworkPolicy| {
        let spec = policy.spec.clone().unwrap_or_default();
        (spec.pod_selector, spec.ingress.unwrap_or_default(), spec.egress.unwrap_or_default())
    };
    let existing = observed.iter().find(|found| found.metadata.name == wanted.metadata.name);
    let lets_others_through = existing.is_some_and(|existing| rules(existing) != rules(&wanted));
    if lets_others_through { Some(wanted) } else { wish(wanted, observed) }
}

/// The HorizontalPodAutoscaler of mode HPA, or its end in any other.
fn autoscaler(service: &ValidatedService, observed: &Observed) -> Option<Step> {
    if let Scaling::Hpa { policy, by_utilization, .. } = &service.scaling {
        let wanted = wish(autoscaler::build(service, policy, *by_utilization), &observed.autoscalers);
        return wanted.map(|wanted| Step::Apply(Object::HorizontalPodAutoscaler(Box::new(wanted))));
    }
    let ours = observed.autoscalers.iter().find(|found| is_owned(&found.metadata, &service.uid))?;
    let (name, uid) = (ours.metadata.name.clone()?, ours.metadata.uid.clone()?);
    Some(Step::Delete { kind: Kind::HorizontalPodAutoscaler, name, uid })
}

/// Deletes the ServiceAccount we made, once the user brings one and no pod runs as ours any more.
pub fn leftovers(service: &ValidatedService, fleet: &Fleet<'_>, observed: &Observed) -> Option<Step> {
    let ours = observed.service_accounts.iter().find(|account| is_owned(&account.metadata, &service.uid))?;
    let is_used = |pod: &crate::fleet::FleetPod<'_>| {
        pod.pod.spec.service_account_name.as_deref() == ours.metadata.name.as_deref()
    };
    if service.service_account_name.is_none() || fleet.is_rolling() || fleet.pods().any(is_used) {
        return None;
    }
    let (name, uid) = (ours.metadata.name.clone()?, ours.metadata.uid.clone()?);
    Some(Step::Delete { kind: Kind::ServiceAccount, name, uid })
}

/// Objects that have the name of a child of ours and belong to somebody else: `Kind name`.
pub fn strangers(service: &ValidatedService, observed: &Observed) -> Vec<String> {
    let named = |kind: &str, name: &str, found: Vec<&ObjectMeta>| {
        let is_strange = |meta: &&ObjectMeta| meta.name.as_deref() == Some(name) && !is_owned(meta, &service.uid);
        found.into_iter().find(is_strange).map(|_| format!("{kind} {name}"))
    };
    let wanted = WorkloadKind::ALL.into_iter().filter(|kind| is_wanted(service, *kind));
    let workloads =
        wanted.filter_map(|kind| named("Deployment", &kind.deployment(&service.name), metas(&observed.deployments)));
    let is_hpa = matches!(service.scaling, Scaling::Hpa { .. });
    let account = service.service_account_name.is_none().then(|| metas(&observed.service_accounts));
    [
        account.and_then(|metas| named("ServiceAccount", &service.name, metas)),
        named("NetworkPolicy", &service.name, metas(&observed.network_policies)),
        named("Service", &service.name, metas(&observed.services)),
        named("PodDisruptionBudget", &service.name, metas(&observed.disruption_budgets)),
        is_hpa.then(|| named("HorizontalPodAutoscaler", &service.name, metas(&observed.autoscalers))).flatten(),
    ]
    .into_iter()
    .flatten()
    .chain(workloads)
    .collect()
}

/// `wanted`, unless the cluster has it already.
fn wish<K: Serialize + Metadata<Ty = ObjectMeta>>(wanted: K, observed: &[Arc<K>]) -> Option<K> {
    let existing = observed.iter().find(|found| found.metadata().name == wanted.metadata().name);
    let is_current = existing.is_some_and(|existing| diff::covers(existing.as_ref(), &wanted));
    (!is_current).then_some(wanted)
}

fn metas<K: Metadata<Ty = ObjectMeta>>(objects: &[Arc<K>]) -> Vec<&ObjectMeta> {
    objects.iter().map(|object| object.metadata()).collect()
}
