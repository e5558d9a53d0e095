//! A real Argo CD beside the cluster: controller, repository server, API server and cache as processes of this machine,
//! and a Git repository for it to follow.

use anyhow::{Context, Result, ensure};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;
use tempfile::TempDir;

use crate::cluster::Cluster;
use crate::process::{Running, free_port};
use crate::service::Service;
use crate::wait::{self, Look};
use crate::{command, go_module, operator};

const NAMESPACE: &str = "argocd";
const APPLICATION: &str = "windlass-test";

/// Whether it is on the PATH.
pub fn is_installed() -> bool {
    command::output(Command::new("argocd").args(["version", "--client"])).is_ok()
}

/// A running Argo CD with one application.
#[derive(Debug)]
pub struct ArgoCd<'a> {
    cluster: &'a Cluster,
    folder: TempDir,
    server: String,
    processes: Vec<Running>,
}

/// What Argo CD says of the application.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// `Synced` or `OutOfSync`.
    pub sync: String,
    /// `Healthy`, `Progressing`, `Degraded`, `Suspended`, `Missing`.
    pub health: String,
    /// Syncs so far.
    pub syncs: usize,
    /// Health of each resource of ours, by name.
    pub resources: Vec<(String, String)>,
}

impl<'a> ArgoCd<'a> {
    /// Installs what it needs in the cluster, with health and actions as the chart renders them, and starts it.
    ///
    /// # Errors
    /// When a part does not start.
    pub fn start(cluster: &'a Cluster) -> Result<ArgoCd<'a>> {
        let folder = tempfile::tempdir()?;
        let namespace = json!({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}});
        cluster.kubectl().apply(&[namespace])?;
        for definition in definitions()? {
            cluster.kubectl().define(&definition)?;
        }
        cluster.kubectl().apply(&settings(cluster)?)?;
        customize(cluster)?;
        git(folder.path(), &["init", "--quiet", "--initial-branch=main", "repository"])?;
        let mut argocd = ArgoCd { cluster, folder, server: String::new(), processes: Vec::new() };
        argocd.launch()?;
        Ok(argocd)
    }

    fn launch(&mut self) -> Result<()> {
        let kubeconfig = self.kubeconfig()?;
        let local = |port: u16| format!("127.0.0.1:{port}");
        let (redis, repository, server) = (local(free_port()?), local(free_port()?), free_port()?);
        let port = repository.rsplit(':').next().unwrap_or_default().to_owned();
        let cache = ["--redis", &redis];
        let repositories = ["--repo-server", &repository, "--repo-server-plaintext"];
        let metrics = || free_port().map(|port| port.to_string());
        let run = |name: &str, arguments: &[&str]| {
            let mut program = Command::new("argocd");
            program.env("KUBECONFIG", &kubeconfig).env("ARGOCD_GPG_ENABLED", "false").args(arguments);
            Running::start(name, &mut program, self.folder.path())
        };
        let processes = vec![
            run("redis", &["redis", &redis])?,
            run(
                "repo-server",
                &[
                    &["argocd-repo-server"],
                    &cache[..],
                    &["--disable-tls", "--port", &port, "--metrics-port", &metrics()?],
                ]
                .concat(),
            )?,
            run(
                "controller",
                &[
                    &["argocd-application-controller"],
                    &cache[..],
                    &repositories,
                    // The health of each resource is in the application's status, where it is looked for.
                    &["--metrics-port", &metrics()?, "--app-resync", "5", "--persist-resource-health"],
                ]
                .concat(),
            )?,
            run(
                "server",
                &[
                    &[
                        "argocd-server",
                        "--insecure",
                        "--disable-auth",
                        "--port",
                        &server.to_string(),
                        "--metrics-port",
                        &metrics()?,
                    ],
                    &cache[..],
                    &repositories,
                ]
                .concat(),
            )?,
        ];
        self.processes = processes;
        self.server = local(server);
        Ok(())
    }

    fn kubeconfig(&self) -> Result<PathBuf> {
        let view = ["config", "view", "--raw", "--flatten", "-o", "json"];
        let mut config: Value = serde_json::from_str(&self.cluster.kubectl().run(&view)?)?;
        config["contexts"][0]["context"]["namespace"] = json!(NAMESPACE);
        let path = self.folder.path().join("kubeconfig");
        std::fs::write(&path, config.to_string())?;
        Ok(path)
    }

    /// Puts objects into the repository as its only content, one file each.
    ///
    /// # Errors
    /// git's own words.
    pub fn commit(&self, message: &str, objects: &[Value]) -> Result<()> {
        let repository = self.folder.path().join("repository");
        let app = repository.join("app");
        if app.exists() {
            std::fs::remove_dir_all(&app)?;
        }
        std::fs::create_dir(&app)?;
        for object in objects {
            let name = object["metadata"]["name"].as_str().context("an object without a name")?;
            std::fs::write(app.join(format!("{name}.yaml")), serde_yaml_ng::to_string(object)?)?;
        }
        git(&repository, &["add", "--all"])?;
        let who = ["-c", "user.name=test", "-c", "user.email=test@localhost"];
        git(&repository, &[&who[..], &["commit", "--quiet", "--message", message]].concat())?;
        self.tell()
    }

    /// Tells Argo CD of the commit, as a repository's webhook does; else it may look for minutes at what it remembers.
    fn tell(&self) -> Result<()> {
        let look = ["annotate", "applications", "--all", "-n", NAMESPACE, "argocd.argoproj.io/refresh=normal"];
        self.cluster.kubectl().run(&[&look[..], &["--overwrite"]].concat()).map(drop)
    }

    /// Lets it follow the repository into `namespace`, with self-healing and pruning.
    ///
    /// # Errors
    /// The API server's own words.
    pub fn follow(&self, namespace: &str) -> Result<()> {
        let url = format!("file://{}", self.folder.path().join("repository").display());
        let application = json!({
            "apiVersion": "argoproj.io/v1alpha1", "kind": "Application",
            "metadata": {"name": APPLICATION, "namespace": NAMESPACE},
            "spec": {
                "project": "default",
                "source": {"repoURL": url, "path": "app", "targetRevision": "main"},
                "destination": {"server": api_server(self.cluster)?.0, "namespace": namespace},
                "syncPolicy": {"automated": {"prune": true, "selfHeal": true}, "syncOptions": ["ServerSideApply=true"]},
            },
        });
        self.cluster.kubectl().apply(&[application]).map(drop)
    }

    /// What it says now.
    ///
    /// # Errors
    /// kubectl's own words.
    pub fn verdict(&self) -> Result<Verdict> {
        let found: Value = self.cluster.kubectl().get(&["get", "applications", APPLICATION, "-n", NAMESPACE])?;
        let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
        let status = &found["status"];
        let resources = status["resources"].as_array().into_iter().flatten();
        Ok(Verdict {
            sync: text(&status["sync"]["status"]),
            health: text(&status["health"]["status"]),
            syncs: status["history"].as_array().map_or(0, Vec::len),
            resources: resources.map(|found| (text(&found["name"]), text(&found["health"]["status"]))).collect(),
        })
    }

    /// Waits until it is Synced with the newest commit and of this health.
    ///
    /// # Errors
    /// With what it said last, and the ends of its logs.
    pub fn wait(&self, health: &str, timeout: Duration) -> Result<Verdict> {
        let newest = command::output(
            Command::new("git").current_dir(self.folder.path().join("repository")).args(["rev-parse", "HEAD"]),
        )?;
        let waited = wait::until(&format!("Argo CD says Synced and {health}"), timeout, || {
            let found: Value = self.cluster.kubectl().get(&["get", "applications", APPLICATION, "-n", NAMESPACE])?;
            let is_newest = found["status"]["sync"]["revision"].as_str() == Some(newest.trim());
            let verdict = self.verdict()?;
            let holds = is_newest && verdict.sync == "Synced" && verdict.health == health;
            let conditions = &found["status"]["conditions"];
            Ok(Look::when(holds, verdict.clone(), format!("{verdict:?}, newest: {is_newest}, {conditions}")))
        });
        waited.with_context(|| self.processes.iter().map(Running::log).collect::<Vec<_>>().join("\n---\n"))
    }

    /// The actions that its page offers for a service, and whether each is greyed out.
    ///
    /// # Errors
    /// Argo CD's own words.
    pub fn actions(&self, service: &Service<'_>) -> Result<BTreeMap<String, bool>> {
        let url = self.url("resource/actions");
        let query = resource(service).into_iter().map(|(name, value)| (name, value.to_owned()));
        let agent = agent();
        let text = agent.get(&url).query_pairs(query).call()?.body_mut().read_to_string()?;
        let answer: Value = serde_json::from_str(&text).with_context(|| text.clone())?;
        let offered = answer["actions"].as_array().with_context(|| format!("no actions: {answer}"))?;
        let offer = |action: &Value| Some((action["name"].as_str()?.to_owned(), action["disabled"] == true));
        Ok(offered.iter().filter_map(offer).collect())
    }

    /// Runs an action, as a click in its page does; parameters are names and values.
    ///
    /// # Errors
    /// Argo CD's own words.
    pub fn act(&self, service: &Service<'_>, action: &str, parameters: &[(&str, &str)]) -> Result<()> {
        let given = parameters.iter().map(|(name, value)| json!({"name": name, "value": value}));
        let mut request =
            json!({"name": APPLICATION, "action": action, "resourceActionParameters": given.collect::<Vec<_>>()});
        for (name, value) in resource(service) {
            request[name] = json!(value);
        }
        let post = agent().post(self.url("resource/actions/v2")).content_type("application/json");
        let mut answer = post.send(request.to_string())?;
        let text = answer.body_mut().read_to_string()?;
        ensure!(answer.status().is_success(), "{action}: {text}");
        Ok(())
    }

    fn url(&self, rest: &str) -> String {
        format!("http://{}/api/v1/applications/{APPLICATION}/{rest}", self.server)
    }

    /// Looks at it for so long; it has to stay Synced and to sync nothing anew. Returns the healths seen.
    ///
    /// # Errors
    /// On the first drift.
    pub fn stays_synced(&self, time: Duration, mut meanwhile: impl FnMut() -> Result<bool>) -> Result<Vec<String>> {
        let (started, before) = (std::time::Instant::now(), self.verdict()?);
        let mut healths = Vec::new();
        while started.elapsed() < time || !meanwhile()? {
            ensure!(started.elapsed() < time + Duration::from_secs(240), "what is waited for does not come");
            let now = self.verdict()?;
            ensure!(now.sync == "Synced", "after {} s: {now:?}", started.elapsed().as_secs());
            ensure!(now.syncs == before.syncs, "it has synced again: {now:?}");
            if healths.last() != Some(&now.health) {
                healths.push(now.health);
            }
            std::thread::sleep(Duration::from_millis(500));
        }
        Ok(healths)
    }
}

impl Drop for ArgoCd<'_> {
    fn drop(&mut self) {
        // The application first, without its finalizer there is nothing to wait for; the namespace takes the rest.
        self.processes.clear();
        for delete in [["delete", "application", APPLICATION], ["delete", "namespace", NAMESPACE]] {
            let arguments = [&delete[..], &["-n", NAMESPACE, "--ignore-not-found", "--timeout=60s"]].concat();
            if let Err(error) = self.cluster.kubectl().run(&arguments) {
                eprintln!("Argo CD's objects are left: {error:#}");
            }
        }
    }
}

/// How its API names a service.
fn resource<'a>(service: &'a Service<'_>) -> [(&'static str, &'a str); 5] {
    [
        ("namespace", service.namespace().name()),
        ("resourceName", service.name()),
        ("group", "windlass.dev"),
        ("version", "v1alpha1"),
        ("kind", "InferenceService"),
    ]
}

fn agent() -> ureq::Agent {
    ureq::Agent::config_builder().http_status_as_error(false).build().into()
}

/// Its definitions, as they come with the module that the program is built from.
///
/// # Errors
/// When Go is missing, or the module cannot be downloaded.
pub fn definitions() -> Result<Vec<PathBuf>> {
    let folder = go_module::folder("github.com/argoproj/argo-cd/v3")?.join("manifests/crds");
    Ok(["application", "applicationset", "appproject"].map(|name| folder.join(format!("{name}-crd.yaml"))).into())
}

/// Its own objects, as its manifests have them.
fn settings(cluster: &Cluster) -> Result<Vec<Value>> {
    let metadata =
        |name: &str| json!({"name": name, "namespace": NAMESPACE, "labels": {"app.kubernetes.io/part-of": "argocd"}});
    let config = |name: &str| json!({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata(name)});
    let names = ["argocd-rbac-cm", "argocd-gpg-keys-cm", "argocd-ssh-known-hosts-cm", "argocd-tls-certs-cm"];
    let mut objects: Vec<Value> = names.into_iter().map(config).collect();
    let mut own = config("argocd-cm");
    own["data"] = json!({"timeout.reconciliation": "5s", "users.anonymous.enabled": "true"});
    objects.push(own);
    let secret = |name: &str, data: Value| json!({"apiVersion": "v1", "kind": "Secret", "metadata": metadata(name), "stringData": data});
    objects.push(secret(
        "argocd-secret",
        json!({"server.secretkey": "only for tests", "admin.password": "", "admin.passwordMtime": ""}),
    ));
    let (server, tls) = api_server(cluster)?;
    let config = json!({"tlsClientConfig": tls}).to_string();
    let mut destination = secret("cluster", json!({"name": "test", "server": server, "config": config}));
    destination["metadata"]["labels"] = json!({"argocd.argoproj.io/secret-type": "cluster"});
    objects.push(destination);
    objects.push(json!({
        "apiVersion": "argoproj.io/v1alpha1", "kind": "AppProject",
        "metadata": {"name": "default", "namespace": NAMESPACE},
        "spec": {
            "sourceRepos": ["*"], "destinations": [{"namespace": "*", "server": "*"}],
            "clusterResourceWhitelist": [{"group": "*", "kind": "*"}],
        },
    }));
    Ok(objects)
}

/// The API server's URL, and how to be trusted by it.
fn api_server(cluster: &Cluster) -> Result<(String, Value)> {
    let view = ["config", "view", "--raw", "--flatten", "--minify", "-o", "json"];
    let config: Value = serde_json::from_str(&cluster.kubectl().run(&view)?)?;
    let (api, user) = (&config["clusters"][0]["cluster"], &config["users"][0]["user"]);
    let server = api["server"].as_str().context("the kubeconfig names no server")?.to_owned();
    let tls = json!({
        "caData": api["certificate-authority-data"], "certData": user["client-certificate-data"], "keyData": user["client-key-data"],
    });
    Ok((server, tls))
}

/// Health and actions, added to Argo CD's own ConfigMap as the chart's README says.
fn customize(cluster: &Cluster) -> Result<()> {
    let only = ["--set", "argocd.enabled=true", "--show-only", "templates/argocd.yaml"];
    let rendered = operator::template(cluster, "windlass", operator::RELEASE, operator::NAMESPACE, &only)?;
    let apply = ["apply", "--server-side", "--field-manager=windlass", "-f", "-"];
    cluster.kubectl().run_with_input(&apply, &rendered).map(drop)
}

fn git(folder: &Path, arguments: &[&str]) -> Result<()> {
    command::output(Command::new("git").current_dir(folder).args(arguments)).map(drop)
}
