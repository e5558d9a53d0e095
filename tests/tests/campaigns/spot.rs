//! Spot nodes as four providers label, taint and take them back: nodes of KWOK beside the real one, on which the base runs
//! and what finds no spot node.

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::{Value, json};
use std::time::{Duration, Instant};
use windlass_tests::kwok::{self, Kwok, Responder};
use windlass_tests::namespace::{Namespace, skip, with_namespace};
use windlass_tests::service::{self, Service, is_ready, pod_name};
use windlass_tests::wait::{self, Look};

const PATIENCE: Duration = Duration::from_secs(120);
const NODES: [&str; 2] = ["kwok-0", "kwok-1"];
/// A replacement is asked for within this time after the notice.
const ASKED: Duration = Duration::from_secs(5);
const FALLBACK_SECONDS: u32 = 5;

/// How a provider tells spot nodes, and that one ends.
struct Provider {
    name: &'static str,
    label: &'static str,
    /// What keeps other pods off such nodes, if anything does.
    taint: Option<&'static str>,
    notice: Notice,
}

#[derive(Clone, Copy)]
enum Notice {
    Taint(&'static str),
    /// The node is deleted, and a finalizer keeps it while it is emptied.
    Deletion,
}

const PROVIDERS: [Provider; 5] = [
    Provider {
        name: "gke",
        label: "cloud.google.com/gke-spot=true",
        taint: Some("cloud.google.com/gke-spot=true:NoSchedule"),
        notice: Notice::Taint("cloud.google.com/impending-node-termination"),
    },
    Provider {
        name: "eks",
        label: "eks.amazonaws.com/capacityType=SPOT",
        taint: None,
        notice: Notice::Taint("aws-node-termination-handler/spot-itn"),
    },
    Provider {
        name: "aks",
        label: "kubernetes.azure.com/scalesetpriority=spot",
        taint: Some("kubernetes.azure.com/scalesetpriority=spot:NoSchedule"),
        notice: Notice::Taint("remediator.kubernetes.azure.com/unschedulable"),
    },
    Provider {
        name: "karpenter",
        label: "karpenter.sh/capacity-type=spot",
        taint: None,
        notice: Notice::Taint("karpenter.sh/disrupted"),
    },
    Provider {
        name: "karpenter-deletes",
        label: "karpenter.sh/capacity-type=spot",
        taint: None,
        notice: Notice::Deletion,
    },
];

#[test]
fn spot_nodes_of_four_providers_are_left_in_time_and_returned_to() -> Result<()> {
    with_namespace("spot-providers", |namespace| {
        if !kwok::is_installed() || !namespace.cluster().is_own() {
            return skip("KWOK is not installed (tests/setup campaigns), or the cluster is not ours");
        }
        let folder = tempfile::tempdir()?;
        let _responder = Responder::start(namespace.cluster())?;
        for provider in &PROVIDERS {
            // Nodes of their own: what the one before has left on them is gone with them.
            let _kwok = Kwok::start(namespace.cluster(), NODES.len(), folder.path())?;
            tried(namespace, provider).with_context(|| provider.name.to_owned())?;
        }
        Ok(())
    })
}

fn tried(namespace: &Namespace, provider: &Provider) -> Result<()> {
    let kubectl = namespace.cluster().kubectl();
    kubectl.run(&[&["label", "nodes"][..], &NODES, &[provider.label]].concat())?;
    if let Some(taint) = provider.taint {
        kubectl.run(&[&["taint", "nodes"][..], &NODES, &[taint]].concat())?;
    }
    let service = Service::apply(namespace, provider.name, &spec())?;
    let placed = |on_spot: usize, asking: usize| until_placed(&service, Seen { here: 3 - on_spot, on_spot, asking });
    placed(2, 0)?;

    let before: Vec<String> = service.pods()?.iter().map(|pod| pod_name(pod).to_owned()).collect();
    let noticed = Instant::now();
    provider.notice.give(namespace, NODES[0])?;
    wait::until("a replacement is asked for", PATIENCE, || {
        let new = service.pods()?.iter().any(|pod| !before.iter().any(|name| name == pod_name(pod)));
        Ok(Look::when(new, (), "none"))
    })?;
    let asked_after = noticed.elapsed();
    ensure!(asked_after <= ASKED, "a replacement was asked for after {asked_after:?}");
    placed(2, 0)?;
    let on_first = service.pods()?.iter().filter(|pod| node(pod) == Some(NODES[0])).count();
    ensure!(on_first == 0, "{on_first} pods are left on the node that was taken back");

    provider.notice.give(namespace, NODES[1])?;
    placed(0, 1)?;
    let status = service.read()?.status.unwrap_or_default();
    ensure!(status.spot_fallback_replicas == Some(2), "{:?} replicas fell back", status.spot_fallback_replicas);

    provider.notice.take_back(namespace, provider)?;
    placed(2, 0)?;
    println!("{}: a replacement after {:.1} s; fell back and returned", provider.name, asked_after.as_secs_f64());
    service.delete()?;
    wait::until("its pods are gone", PATIENCE, || {
        let left = service.pods()?.len();
        Ok(Look::when(left == 0, (), format!("{left} are left")))
    })
}

impl Notice {
    fn give(self, namespace: &Namespace, node: &str) -> Result<()> {
        let kubectl = namespace.cluster().kubectl();
        match self {
            Notice::Taint(key) => kubectl.run(&["taint", "node", node, &format!("{key}=:NoSchedule")]),
            Notice::Deletion => {
                let kept = json!({"metadata": {"finalizers": ["karpenter.sh/termination"]}}).to_string();
                kubectl.run(&["patch", "node", node, "--type=merge", "--patch", &kept])?;
                // As Karpenter does before it deletes one.
                kubectl.run(&["cordon", node])?;
                kubectl.run(&["delete", "node", node, "--wait=false"])
            }
        }
        .map(drop)
    }

    /// Spot is back: the notices go, or new nodes come in place of those that went.
    fn take_back(self, namespace: &Namespace, provider: &Provider) -> Result<()> {
        let kubectl = namespace.cluster().kubectl();
        match self {
            Notice::Taint(key) => {
                kubectl.run(&[&["taint", "nodes"][..], &NODES, &[&format!("{key}-")]].concat()).map(drop)
            }
            Notice::Deletion => {
                for node in NODES {
                    kubectl.run(&[
                        "patch",
                        "node",
                        node,
                        "--type=merge",
                        "--patch",
                        r#"{"metadata":{"finalizers":null}}"#,
                    ])?;
                }
                kwok::add_nodes(namespace.cluster(), NODES.len())?;
                kubectl.run(&[&["label", "nodes"][..], &NODES, &[provider.label]].concat()).map(drop)
            }
        }
    }
}

/// One replica of three on the real node, the others where the providers' own labels say that spot is.
fn spec() -> Value {
    let mut spec = service::simulated(&[]);
    spec["replicas"] = json!(3);
    spec["model"]["servedNames"] = json!([kwok::SERVED_NAME]);
    spec["scheduling"] = json!({"tolerations": [{"key": kwok::NODE, "operator": "Exists"}]});
    spec["spot"] = json!({"mode": "Prefer", "onDemandBase": 1, "fallbackAfterSeconds": FALLBACK_SECONDS});
    spec
}

/// Pods that serve on the real node and on spot nodes, and those that find no node.
#[derive(Debug, PartialEq, Eq)]
struct Seen {
    here: usize,
    on_spot: usize,
    asking: usize,
}

impl Seen {
    fn of(service: &Service<'_>) -> Result<Seen> {
        let pods = service.pods()?;
        let live: Vec<&Pod> = pods.iter().filter(|pod| pod.metadata.deletion_timestamp.is_none()).collect();
        let is_spot = |pod: &Pod| node(pod).is_some_and(|node| NODES.contains(&node));
        let count = |is_meant: &dyn Fn(&Pod) -> bool| live.iter().filter(|pod| is_meant(pod)).count();
        Ok(Seen {
            here: count(&|pod| is_ready(pod) && !is_spot(pod)),
            on_spot: count(&|pod| is_ready(pod) && is_spot(pod)),
            asking: count(&|pod| node(pod).is_none()),
        })
    }
}

fn node(pod: &Pod) -> Option<&str> {
    pod.spec.as_ref()?.node_name.as_deref()
}

fn until_placed(service: &Service<'_>, wanted: Seen) -> Result<()> {
    wait::until(&format!("pods stand like this: {wanted:?}"), PATIENCE, || {
        let seen = Seen::of(service)?;
        let is_so = seen == wanted;
        Ok(Look::when(is_so, (), format!("{seen:?}")))
    })
}
