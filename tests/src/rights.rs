//! Rights granted against rights used: the role that the chart makes, and what the audit log saw the operator do.

use anyhow::{Result, ensure};
use k8s_openapi::api::rbac::v1::{ClusterRole, PolicyRule, Role};
use std::collections::BTreeSet;
use std::path::Path;

use crate::audit::{Act, Mark};
use crate::cluster::Cluster;
use crate::operator;

/// Rights that no request shows, and why they are granted nevertheless.
const UNSEEN: [(&str, &str); 1] = [
    // Asked for by an admission plugin that OpenShift switches on, not by a request of ours.
    ("update", "windlass.dev/inferenceservices/finalizers"),
];

/// Rights that an option of the chart grants by a role of its own, and that a test of the option uses.
const OPTIONAL: [(&str, &str); 3] = [
    ("get", "apiregistration.k8s.io/apiservices"),
    ("create", "authentication.k8s.io/tokenreviews"),
    ("create", "authorization.k8s.io/subjectaccessreviews"),
];

/// A verb and a resource with its group.
pub type Right = (String, String);

/// Compares what the installed release grants with what its operator was seen doing since the log began.
///
/// # Errors
/// When a right was never used, or something was done without one.
pub fn compare(cluster: &Cluster, log: &Path) -> Result<usize> {
    let granted = granted(cluster)?;
    let used: BTreeSet<Right> = Mark::beginning(log).acts()?.into_iter().flat_map(rights_for).collect();
    let right = |(verb, resource): (&str, &str)| (verb.to_owned(), resource.to_owned());
    let (unseen, optional) = (UNSEEN.map(right), OPTIONAL.map(right));
    let idle: Vec<_> = granted.difference(&used).filter(|right| !unseen.contains(right)).collect();
    let missing: Vec<_> = used.difference(&granted).filter(|right| !optional.contains(right)).collect();
    ensure!(idle.is_empty(), "granted and never used: {idle:?}");
    ensure!(missing.is_empty(), "tried without a right: {missing:?}");
    Ok(granted.len())
}

fn granted(cluster: &Cluster) -> Result<BTreeSet<Right>> {
    let everywhere: ClusterRole = cluster.kubectl().get(&["get", "clusterrole", operator::RELEASE])?;
    let own: Vec<Role> = cluster.kubectl().list(&["get", "roles", "-n", operator::NAMESPACE])?;
    let rules = own.into_iter().filter_map(|role| role.rules).flatten();
    Ok(everywhere.rules.into_iter().flatten().chain(rules).flat_map(rights).collect())
}

fn rights(rule: PolicyRule) -> Vec<Right> {
    let groups = rule.api_groups.unwrap_or_default();
    let resources = rule.resources.unwrap_or_default();
    let names = groups.iter().flat_map(|group| resources.iter().map(move |resource| format!("{group}/{resource}")));
    names.flat_map(|name| rule.verbs.iter().map(move |verb| (verb.clone(), name.clone()))).collect()
}

/// What an act needs.
fn rights_for(act: Act) -> Vec<Right> {
    let name = format!("{}/{}", act.group, act.resource);
    let create = act.creates.then(|| ("create".to_owned(), name.clone()));
    create.into_iter().chain([(act.verb, name)]).collect()
}
