//! Nodes and pods that only the API server knows: KWOK says for them what a kubelet would say. Every engine's address is
//! this machine's, where [`Responder`] answers as an idle engine or a busy one does; a pod that inspects a model has found
//! a small one.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;
use windlass_engine_contract::inspection::Inspection;
use windlass_engine_contract::memory::{KvDataType, kv_bytes_per_token};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_contract::stats::{EffectiveConfig, Stats};
use windlass_engine_contract::{ADMIN_PORT, fixture};

use crate::cluster::Cluster;
use crate::process::Running;
use crate::wait::{self, Look};
use crate::{command, service};

/// A class of runtimes that is there.
pub const RUNTIME: &str = "kwok";
/// The label and the taint of its nodes.
pub const NODE: &str = "test.windlass.dev/kwok";
/// Renewed every 10 s: a node that is silent for 50 s counts as lost, and its pods as not ready.
const LEASE: &str = "--node-lease-duration-seconds=40";
/// The name that every service on them serves: one responder speaks for all.
pub const SERVED_NAME: &str = "shared";
const PATIENCE: Duration = Duration::from_secs(60);

/// Whether KWOK is on the PATH.
pub fn is_installed() -> bool {
    command::output(Command::new("kwok").arg("--version")).is_ok()
}

/// A running KWOK with its nodes; both go when it is dropped.
#[derive(Debug)]
pub struct Kwok<'a> {
    cluster: &'a Cluster,
    process: Running,
}

impl<'a> Kwok<'a> {
    /// Starts it, with so many nodes.
    ///
    /// # Errors
    /// When a node does not become ready.
    pub fn start(cluster: &'a Cluster, nodes: usize, folder: &Path) -> Result<Kwok<'a>> {
        let address = cluster.host_address().context("pods of this cluster cannot have this machine's address")?;
        let stages = folder.join("stages.yaml");
        let documents = stages_of(&address.to_string()).map(|stage| stage.to_string()).join("\n---\n");
        std::fs::write(&stages, documents)?;
        let mut kwok = Command::new("kwok");
        kwok.arg("--kubeconfig").arg(cluster.kubeconfig()).arg("--config").arg(&stages);
        kwok.args([&format!("--manage-nodes-with-label-selector={NODE}"), LEASE]);
        let process = Running::start("kwok", &mut kwok, folder)?;
        let kwok = Kwok { cluster, process };
        let runtime = json!({"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": RUNTIME}, "handler": "runc"});
        cluster.kubectl().apply(&[runtime])?;
        add_nodes(cluster, nodes).with_context(|| kwok.process.log())?;
        Ok(kwok)
    }

    /// A spec whose pods go to these nodes.
    pub fn spec(&self) -> Value {
        let mut spec = service::simulated(&[]);
        spec["model"]["servedNames"] = json!([SERVED_NAME]);
        spec["scheduling"] =
            json!({"nodeSelector": {NODE: "yes"}, "tolerations": [{"key": NODE, "operator": "Exists"}]});
        spec["resources"] = json!({"requests": {"cpu": "10m"}});
        spec
    }
}

impl Drop for Kwok<'_> {
    fn drop(&mut self) {
        let (nodes, runtime) = (["nodes", "--selector", NODE], ["runtimeclass", RUNTIME, "--ignore-not-found"]);
        for what in [nodes, runtime] {
            if let Err(error) = self.cluster.kubectl().run(&[&["delete", "--wait=false"][..], &what].concat()) {
                eprintln!("KWOK's objects are left: {error:#}");
            }
        }
    }
}

/// Makes so many nodes, those that are there left as they are, and waits until they are ready.
///
/// # Errors
/// When one does not become ready.
pub fn add_nodes(cluster: &Cluster, nodes: usize) -> Result<()> {
    cluster.kubectl().apply(&(0..nodes).map(node).collect::<Vec<_>>())?;
    wait::until("KWOK's nodes are ready", PATIENCE, || {
        let ready = cluster.kubectl().run(&["get", "nodes", "--selector", NODE, "--no-headers"])?;
        // A node that is being emptied is ready and cordoned.
        let ready = ready.lines().filter(|line| line.contains(" Ready ")).count();
        Ok(Look::when(ready == nodes, (), format!("{ready} are")))
    })
}

/// One that has room for whatever [`crate::leaves::changes`] asks for: what finds no node is held back, not changed. Every
/// second one is for spot.
fn node(number: usize) -> Value {
    let (name, pool) = (format!("kwok-{number}"), ["spot", "on-demand"][number % 2]);
    let room = json!({"cpu": "1k", "memory": "1Ti", "pods": "5k", "nvidia.com/gpu": "1k",
        "nvidia.com/mig-1g.10gb": "1k"});
    let labels = json!({
        NODE: "yes", "kubernetes.io/hostname": name, "pool": pool,
        "nvidia.com/gpu.product": "NVIDIA-H200", "nvidia.com/gpu.memory": "143771",
    });
    json!({
        "apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels},
        "spec": {"taints": [{"key": NODE, "value": "yes", "effect": "NoSchedule"}]},
        "status": {"allocatable": room, "capacity": room},
    })
}

/// What becomes of nodes and pods: ready at once, done at once where they inspect, gone at once.
fn stages_of(pod_address: &str) -> [Value; 4] {
    let stage = |name: &str, kind: &str, selector: Value, next: Value| {
        json!({
            "apiVersion": "kwok.x-k8s.io/v1alpha1", "kind": "Stage", "metadata": {"name": name},
            "spec": {"resourceRef": {"apiGroup": "v1", "kind": kind}, "selector": {"matchExpressions": selector}, "next": next},
        })
    };
    let is_not_ready = json!({
        "key": ".status.conditions.[] | select( .type == \"Ready\" ) | .status", "operator": "NotIn", "values": ["True"],
    });
    let inspects = |operator: &str| json!({"key": APPLICATION, "operator": operator, "values": ["windlass-inspect"]});
    let is_not_done = json!({"key": ".status.phase", "operator": "NotIn", "values": ["Succeeded"]});
    let stays = json!({"key": ".metadata.deletionTimestamp", "operator": "DoesNotExist"});
    let leaves = json!({"key": ".metadata.deletionTimestamp", "operator": "Exists"});
    [
        stage("node-ready", "Node", json!([is_not_ready]), json!({"statusTemplate": NODE_READY})),
        stage(
            "pod-ready",
            "Pod",
            json!([stays, is_not_ready, inspects("NotIn")]),
            json!({"statusTemplate": POD_READY.replace("ADDRESS", pod_address)}),
        ),
        stage(
            "model-inspected",
            "Pod",
            json!([stays, is_not_done, inspects("In")]),
            json!({"statusTemplate": INSPECTED.replace("FOUND", &json!(found()).to_string())}),
        ),
        stage("pod-gone", "Pod", json!([leaves]), json!({"delete": true})),
    ]
}

const NODE_READY: &str = "\
conditions:
{{ range NodeConditions }}
- {lastHeartbeatTime: {{ Now | Quote }}, lastTransitionTime: {{ Now | Quote }}, message: {{ .message | Quote }}, reason: {{ .reason | Quote }}, status: {{ .status | Quote }}, type: {{ .type | Quote }}}
{{ end }}
";

const POD_READY: &str = "\
{{ $now := Now }}
conditions:
- {lastTransitionTime: {{ $now | Quote }}, status: \"True\", type: Initialized}
- {lastTransitionTime: {{ $now | Quote }}, status: \"True\", type: Ready}
- {lastTransitionTime: {{ $now | Quote }}, status: \"True\", type: ContainersReady}
containerStatuses:
{{ range .spec.containers }}
- {image: {{ .image | Quote }}, imageID: \"\", name: {{ .name | Quote }}, ready: true, restartCount: 0, state: {running: {startedAt: {{ $now | Quote }}}}}
{{ end }}
podIP: ADDRESS
podIPs: [{ip: ADDRESS}]
phase: Running
startTime: {{ $now | Quote }}
";

/// Where KWOK finds what a pod is.
const APPLICATION: &str = ".metadata.labels[\"app.kubernetes.io/name\"]";

const INSPECTED: &str = "\
{{ $now := Now }}
containerStatuses:
{{ range .spec.containers }}
- image: {{ .image | Quote }}
  imageID: \"\"
  name: {{ .name | Quote }}
  ready: false
  restartCount: 0
  state: {terminated: {exitCode: 0, reason: Completed, startedAt: {{ $now | Quote }}, finishedAt: {{ $now | Quote }}, message: 'FOUND'}}
{{ end }}
phase: Succeeded
startTime: {{ $now | Quote }}
";

/// The model in every source: one of the size of SmolLM2-135M.
fn found() -> Inspection {
    let shape = ModelShape {
        architecture: "llama".into(),
        layers: 30,
        hidden: 576,
        feed_forward: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocabulary: 49152,
        context_tokens: 2048,
        weight_bytes: 98_000_000,
        windowed: None,
    };
    let kv_bytes_per_token = kv_bytes_per_token(&shape, KvDataType::Bf16);
    let weight_type = "q4_1".into();
    let [int8_bytes, fp8_bytes, int4_bytes, gpu_bytes] = [None; 4];
    Inspection { shape, kv_bytes_per_token, weight_type, int8_bytes, fp8_bytes, int4_bytes, gpu_bytes, revision: None }
}

/// Answers `/stats` on this machine's admin port, for every pod.
#[derive(Debug)]
pub struct Responder {
    shared: Arc<Answers>,
}

#[derive(Debug)]
struct Answers {
    /// The whole answer, head and body.
    text: RwLock<Arc<Vec<u8>>>,
    given: AtomicU64,
    is_busy: AtomicBool,
    is_over: AtomicBool,
}

impl Responder {
    /// Starts it; its engines are idle.
    ///
    /// # Errors
    /// When the port is taken.
    pub fn start(cluster: &Cluster) -> Result<Responder> {
        let address = cluster.host_address().context("pods of this cluster cannot have this machine's address")?;
        let listener = TcpListener::bind((address, ADMIN_PORT)).with_context(|| format!("{address}:{ADMIN_PORT}"))?;
        let shared = Arc::new(Answers {
            text: RwLock::new(Arc::new(answer(&idle())?)),
            given: AtomicU64::new(0),
            is_busy: AtomicBool::new(false),
            is_over: AtomicBool::new(false),
        });
        let serving = shared.clone();
        std::thread::spawn(move || {
            for client in listener.incoming().flatten() {
                if serving.is_over.load(Ordering::Relaxed) {
                    return;
                }
                let serving = serving.clone();
                // Whoever asks may go away at any time.
                std::thread::spawn(move || drop(serving.answer(&client)));
            }
        });
        let working = shared.clone();
        std::thread::spawn(move || working.work());
        Ok(Responder { shared })
    }

    /// From now on its engines have traffic, well within any target.
    pub fn begin_traffic(&self) {
        self.shared.is_busy.store(true, Ordering::Relaxed);
    }

    /// Answers so far.
    pub fn given(&self) -> u64 {
        self.shared.given.load(Ordering::Relaxed)
    }
}

impl Drop for Responder {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
    }
}

impl Answers {
    /// Answers once and closes, as an engine does when it is asked to: who closes first keeps the port for a minute, and
    /// the operator, to whom all engines have one address here, would soon have none left.
    fn answer(&self, client: &TcpStream) -> Result<()> {
        let mut lines = BufReader::new(client).lines();
        while !lines.next().context("no request")??.is_empty() {}
        let text = self.text.read().unwrap_or_else(PoisonError::into_inner).clone();
        { client }.write_all(&text)?;
        self.given.fetch_add(1, Ordering::Relaxed);
        Ok(())
    }

    /// Lets every engine get on by a second each second, while it is busy.
    fn work(&self) {
        let mut stats = idle();
        while !self.is_over.load(Ordering::Relaxed) {
            std::thread::sleep(SECOND);
            if !self.is_busy.load(Ordering::Relaxed) {
                continue;
            }
            get_on(&mut stats);
            // Numbers always serialize.
            let Ok(text) = answer(&stats) else { return };
            *self.text.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(text);
        }
    }
}

const SECOND: Duration = Duration::from_secs(1);
/// What a busy engine does in a second.
const REQUESTS: u64 = 2;
const PROMPT_TOKENS: u64 = 300;
const ANSWER_TOKENS: u64 = 20;
const FIRST_TOKEN_MS: f64 = 80.0;
const INTER_TOKEN_MS: f64 = 20.0;

fn get_on(stats: &mut Stats) {
    stats.uptime_seconds += SECOND.as_secs_f64();
    (stats.running, stats.remaining_tokens) = (1, ANSWER_TOKENS);
    stats.finished += REQUESTS;
    stats.prompt_tokens += REQUESTS * PROMPT_TOKENS;
    stats.generation_tokens += REQUESTS * ANSWER_TOKENS;
    for _ in 0..REQUESTS {
        stats.time_to_first_token.observe(FIRST_TOKEN_MS);
        (1..ANSWER_TOKENS).for_each(|_| stats.inter_token.observe(INTER_TOKEN_MS));
        stats.end_to_end.observe(FIRST_TOKEN_MS + (ANSWER_TOKENS - 1) as f64 * INTER_TOKEN_MS);
    }
}

fn answer(stats: &Stats) -> Result<Vec<u8>> {
    let body = serde_json::to_string(stats)?;
    let head = format!("HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n", body.len());
    Ok((head + &body).into_bytes())
}

/// What the simulator says in every one of its pods, half busy for ever.
fn idle() -> Stats {
    let served_names = vec![SERVED_NAME.to_owned()];
    let built = EffectiveConfig { device: "sim".into(), kernels: "sim".into(), served_names, ..fixture::effective() };
    Stats { simulated: true, utilization: Some(0.5), effective: Some(built), ..fixture::idle() }
}
