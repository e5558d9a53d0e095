//! The cluster under test: the one that `KUBECONFIG` names, or our own (`tests/cluster/cluster`).

use anyhow::{Context, Result, ensure};
use k8s_openapi::api::core::v1::Pod;
use serde_json::json;
use std::net::{IpAddr, Ipv4Addr};
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::image::{Builder, Image};
use crate::kubectl::Kubectl;
use crate::{command, workspace};

/// The machine's address as pods of our own cluster see it: `HOST_IP` of `tests/cluster/cluster`.
const HOST_OF_OWN: IpAddr = IpAddr::V4(Ipv4Addr::new(10, 90, 0, 1));
/// Its only node.
const NODE_OF_OWN: &str = "local";
/// Registry of images that are only ever loaded, never pushed.
const NO_REGISTRY: &str = "localhost";

/// A cluster that answers.
#[derive(Clone, Debug)]
pub struct Cluster {
    kubectl: Kubectl,
    helm: PathBuf,
    kubeconfig: PathBuf,
    kind: Kind,
}

/// Whose it is.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Kind {
    /// Started by the harness, on this machine.
    Own {
        /// Its state folder.
        state: PathBuf,
    },
    /// Of the user.
    Users {
        /// How images get there.
        images: Images,
    },
}

/// How images get into a cluster that is not ours.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Images {
    /// Pushed to this registry, from which its nodes pull.
    Push(String),
    /// Given to this command, a program and its arguments, with the archive's path appended.
    Load(String),
}

impl Images {
    /// From `WINDLASS_IMAGE_REGISTRY` or `WINDLASS_IMAGE_LOAD`.
    ///
    /// # Errors
    /// When neither is set.
    fn from_environment() -> Result<Images> {
        let set = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let push = set("WINDLASS_IMAGE_REGISTRY").map(Images::Push);
        push.or_else(|| set("WINDLASS_IMAGE_LOAD").map(Images::Load)).context(
            "KUBECONFIG names a cluster of yours; say how images get there: WINDLASS_IMAGE_REGISTRY=registry/path to push \
             to, or WINDLASS_IMAGE_LOAD=command such as `kind load image-archive`, which gets an archive's path",
        )
    }
}

impl Cluster {
    /// The user's cluster, or our own, started if it is not running.
    ///
    /// # Errors
    /// When the user's does not answer, or ours does not start.
    pub fn start() -> Result<Cluster> {
        if users_kubeconfig().is_none() {
            command::output(Command::new(script()).arg("up"))?;
        }
        Cluster::attach()
    }

    /// The user's cluster, or our own if it is running.
    ///
    /// # Errors
    /// When it does not answer.
    pub fn attach() -> Result<Cluster> {
        let (kubectl, helm) = tools()?;
        let (kubeconfig, kind) = match users_kubeconfig() {
            Some(kubeconfig) => (kubeconfig, Kind::Users { images: Images::from_environment()? }),
            None => (own_kubeconfig(), Kind::Own { state: own_state() }),
        };
        let cluster = Cluster { kubectl: Kubectl::new(kubectl, kubeconfig.clone()), helm, kubeconfig, kind };
        cluster.kubectl.run(&["get", "--raw", "/readyz"]).context("the cluster does not answer")?;
        Ok(cluster)
    }

    /// Ends our own cluster; a user's is left alone.
    ///
    /// # Errors
    /// When it cannot be ended.
    pub fn stop() -> Result<()> {
        if users_kubeconfig().is_none() {
            command::output(Command::new(script()).arg("down"))?;
        }
        Ok(())
    }

    /// Whether it is ours.
    pub fn is_own(&self) -> bool {
        matches!(self.kind, Kind::Own { .. })
    }

    /// Its command-line client.
    pub fn kubectl(&self) -> &Kubectl {
        &self.kubectl
    }

    /// The file that names it.
    pub fn kubeconfig(&self) -> &Path {
        &self.kubeconfig
    }

    /// A helm command against it, without arguments.
    pub fn helm(&self) -> Command {
        let mut helm = Command::new(&self.helm);
        helm.env("KUBECONFIG", &self.kubeconfig);
        helm
    }

    /// The registry part of images' names here.
    pub fn registry(&self) -> &str {
        match &self.kind {
            Kind::Users { images: Images::Push(registry) } => registry,
            _ => NO_REGISTRY,
        }
    }

    /// Makes `image` available to its nodes.
    ///
    /// # Errors
    /// The loader's own.
    pub fn load(&self, builder: Builder, image: &Image) -> Result<()> {
        match &self.kind {
            Kind::Own { .. } => command::output(Command::new(script()).arg("load").arg(&image.archive))?,
            Kind::Users { images: Images::Load(line) } => {
                let mut words = line.split_whitespace();
                let program = words.next().context("WINDLASS_IMAGE_LOAD is blank")?;
                command::output(Command::new(program).args(words).arg(&image.archive))?
            }
            Kind::Users { images: Images::Push(_) } => builder.push(image)?,
        };
        Ok(())
    }

    /// Gives an image that is on the node of our own cluster another name.
    ///
    /// # Errors
    /// When there is no such image, or the cluster is a user's.
    pub fn tag(&self, image: &str, other: &str) -> Result<()> {
        ensure!(self.is_own(), "the images of this cluster are not ours");
        command::output(Command::new(script()).args(["tag", image, other])).map(drop)
    }

    /// Where certificate (`.crt`) and key (`.key`) lie that our own cluster's API server shows to those it asks for others;
    /// `None` on a user's cluster.
    pub fn front_proxy(&self) -> Option<PathBuf> {
        match &self.kind {
            Kind::Own { state } => Some(state.join("pki/front-proxy")),
            Kind::Users { .. } => None,
        }
    }

    /// Lets the node of our own cluster advertise so many of a resource, for scheduling only: there is no such thing.
    ///
    /// # Errors
    /// On a user's cluster, which has no such node.
    pub fn advertise(&self, resource: &str, count: u32) -> Result<()> {
        let path = format!("/status/capacity/{}", resource.replace('/', "~1"));
        let patch = json!([{"op": "add", "path": path, "value": count.to_string()}]).to_string();
        let advertise = ["patch", "node", NODE_OF_OWN, "--subresource=status", "--type=json", "--patch", &patch];
        self.kubectl.run(&advertise).map(drop)
    }

    /// Kills a pod's processes as the kernel does when memory runs out: without a word to them. On a user's cluster, where
    /// they are out of reach, the pod is deleted without grace.
    ///
    /// # Errors
    /// When none is found.
    pub fn kill(&self, pod: &Pod) -> Result<()> {
        let name = pod.metadata.name.as_deref().unwrap_or_default();
        let namespace = pod.metadata.namespace.as_deref().unwrap_or_default();
        if !self.is_own() {
            let delete = ["delete", "pod", name, "-n", namespace, "--grace-period=0", "--force"];
            return self.kubectl.run(&delete).map(drop);
        }
        let group = format!("pod{}", pod.metadata.uid.as_deref().context("a pod without a uid")?);
        let roots = ["/sys/fs/cgroup/pids/windlass", "/sys/fs/cgroup/windlass"].map(Path::new);
        let group =
            roots.iter().find_map(|root| find_folder(root, &group)).with_context(|| format!("no cgroup {group}"))?;
        let processes = processes(&group)?;
        ensure!(!processes.is_empty(), "{name} has no processes");
        command::output(Command::new("kill").arg("-KILL").args(processes)).map(drop)
    }

    /// Where pods reach a server on this machine; `None` on a user's cluster, where nobody knows.
    pub fn host_address(&self) -> Option<IpAddr> {
        self.is_own().then_some(HOST_OF_OWN)
    }

    /// The API server's audit log; `None` on a user's cluster.
    pub fn audit_log(&self) -> Option<PathBuf> {
        match &self.kind {
            Kind::Own { state } => Some(state.join("log/audit.json")),
            Kind::Users { .. } => None,
        }
    }

    /// Writes for a person how to reach it from a shell.
    ///
    /// # Errors
    /// Never on a machine where [`Cluster::attach`] succeeded.
    pub fn shell_line(&self) -> Result<String> {
        match self.kind {
            Kind::Own { .. } => Ok("eval \"$(./tests/cluster/cluster env)\"".to_owned()),
            Kind::Users { .. } => Ok(format!("export KUBECONFIG={}", self.kubeconfig.display())),
        }
    }
}

/// The folder of that name at or below `root`.
fn find_folder(root: &Path, name: &str) -> Option<PathBuf> {
    if root.file_name().is_some_and(|found| found == name) {
        return Some(root.to_owned());
    }
    let entries = std::fs::read_dir(root).ok()?.filter_map(|entry| Some(entry.ok()?.path()));
    entries.filter(|path| path.is_dir()).find_map(|path| find_folder(&path, name))
}

/// Processes of a pod's containers; the sandbox's own is left out.
fn processes(group: &Path) -> Result<Vec<String>> {
    let mut found = Vec::new();
    for entry in std::fs::read_dir(group)? {
        let listed = std::fs::read_to_string(entry?.path().join("cgroup.procs")).unwrap_or_default();
        let is_sandbox =
            |pid: &str| std::fs::read_to_string(format!("/proc/{pid}/comm")).is_ok_and(|name| name.trim() == "pause");
        found.extend(listed.lines().filter(|pid| !is_sandbox(pid)).map(str::to_owned));
    }
    Ok(found)
}

fn script() -> PathBuf {
    workspace::root().join("tests/cluster/cluster")
}

/// `KUBECONFIG`, unless it is that of our own cluster.
fn users_kubeconfig() -> Option<PathBuf> {
    let named = std::env::var_os("KUBECONFIG").filter(|value| !value.is_empty()).map(PathBuf::from)?;
    (named != own_kubeconfig()).then_some(named)
}

fn own_state() -> PathBuf {
    std::env::var_os("WINDLASS_CLUSTER_STATE").map_or_else(|| "/var/lib/windlass-cluster".into(), PathBuf::from)
}

fn own_kubeconfig() -> PathBuf {
    own_state().join("admin.kubeconfig")
}

/// kubectl and helm: the user's for the user's cluster if both are there, else those that the harness has built.
fn tools() -> Result<(PathBuf, PathBuf)> {
    if users_kubeconfig().is_some() {
        let works =
            |program: &str, argument: &str| command::output(Command::new(program).args([argument, "--help"])).is_ok();
        if works("kubectl", "get") && works("helm", "upgrade") {
            return Ok(("kubectl".into(), "helm".into()));
        }
    }
    let folder = command::output(Command::new(script()).arg("bin"))?;
    let [kubectl, helm] = ["kubectl", "helm"].map(|tool| Path::new(folder.trim()).join(tool));
    ensure!(kubectl.exists(), "the cluster's program is not built; run tests/setup");
    Ok((kubectl, helm))
}
