//! The command line, as typed ([`Args`]) and as used ([`Config`]).
//!
//! Everything that can be wrong with a flag is found here, once; nothing below asks about an option again.

use clap::{Args, Parser, Subcommand, ValueEnum};
use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;
use std::time::Duration;
use windlass_operator_replay::market::{Interruption, Span};

/// Serves language models on Kubernetes: turns each InferenceService into engine pods and keeps them at their target.
#[derive(Debug, Parser)]
#[command(name = "windlass-operator", version, propagate_version = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Watch InferenceServices and act on them until stopped
    ///
    /// Connects with the pod's service account, or outside a cluster with the current context of KUBECONFIG.
    /// SIGTERM ends it cleanly: running reconciles finish, the lease is released, the exit status is 0.
    #[command(after_help = RUN_EXAMPLES)]
    Run(Box<RunArgs>),
    /// Print the CustomResourceDefinition of InferenceService as YAML
    #[command(after_help = "Example:\n  windlass-operator crd | kubectl apply --server-side -f -")]
    Crd,
    /// Replay a request trace offline against the autoscaler and other policies
    ///
    /// A modelled engine serves the trace on a modelled cluster; what each policy attains and what it costs is printed.
    /// With --stdio a simulator of your own asks instead, by the replay protocol: one JSON object a line.
    #[command(after_help = REPLAY_EXAMPLES)]
    Replay(Box<ReplayArgs>),
}

const REPLAY_EXAMPLES: &str = "\
Examples:
  A trace of lines milliseconds,prompt tokens,output tokens below a heading, four times as many requests:
    windlass-operator replay trace.csv --scale 4 --max-replicas 64 --cold-start-seconds 90
  Only two policies:
    windlass-operator replay trace.csv --policy builtin,static-12
  One replica on demand and the others on spot, which is away for ten minutes and taken back twice:
    windlass-operator replay trace.csv --policy builtin --on-demand-base 1 \\
      --spot-absences 600-1200 --spot-interruptions 300=1,2000=2
  Answer a judge:
    windlass-operator replay --stdio";

/// Flags of `replay`.
#[derive(Clone, Debug, Args)]
pub struct ReplayArgs {
    /// The trace, as CSV; - reads standard input
    #[arg(value_name = "TRACE", required_unless_present = "stdio", conflicts_with = "stdio")]
    pub trace: Option<std::path::PathBuf>,

    /// Speak the replay protocol on standard input and output
    #[arg(long)]
    pub stdio: bool,

    /// Policies, separated by commas; with --stdio the first of them answers
    #[arg(
        long = "policy",
        value_name = "NAME",
        value_delimiter = ',',
        default_value = "builtin,hpa,keda,kpa,apa,wva-v1,wva-v2,plain"
    )]
    pub policies: Vec<windlass_operator_replay::policy::Name>,

    /// So many times the requests
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0, value_parser = scale)]
    pub scale: f64,

    /// Start of a pod on a new node
    #[arg(long, value_name = "SECONDS", default_value_t = 90, value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub cold_start_seconds: u32,

    /// Fewest replicas
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..=1000))]
    pub min_replicas: i32,

    /// Most replicas
    #[arg(long, value_name = "COUNT", default_value_t = 16, value_parser = clap::value_parser!(i32).range(1..=1000))]
    pub max_replicas: i32,

    /// Replicas at the start
    #[arg(long, value_name = "COUNT", default_value_t = 1, value_parser = clap::value_parser!(i32).range(1..=1000))]
    pub initial_replicas: i32,

    /// Target for the time to first token
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 2000,
          value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub time_to_first_token_milliseconds: u32,

    /// Target for the mean time between tokens of a request
    #[arg(long, value_name = "MILLISECONDS", default_value_t = 200,
          value_parser = clap::value_parser!(u32).range(1..=60_000))]
    pub inter_token_milliseconds: u32,

    /// Replicas above so many run on spot nodes, where there are some
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(i32).range(0..=1000))]
    pub on_demand_base: Option<i32>,

    /// Spans without a spot node for a new pod, separated by commas
    #[arg(long, value_name = "FROM-TO", value_delimiter = ',', requires = "on_demand_base")]
    pub spot_absences: Vec<Span>,

    /// When spot nodes are taken back, and how many, separated by commas
    #[arg(long, value_name = "AT=NODES", value_delimiter = ',', requires = "on_demand_base")]
    pub spot_interruptions: Vec<Interruption>,

    /// Between the notice and the end of a spot node
    #[arg(long, value_name = "SECONDS", default_value_t = 120, requires = "on_demand_base",
          value_parser = clap::value_parser!(u32).range(0..=3600))]
    pub spot_notice_seconds: u32,

    /// Replicas run on demand when one has waited for a spot node for so long
    #[arg(long, value_name = "SECONDS", default_value_t = 60, requires = "on_demand_base",
          value_parser = clap::value_parser!(u32).range(1..=3600))]
    pub fallback_after_seconds: u32,
}

const RUN_EXAMPLES: &str = "\
Examples:
  In a cluster, two replicas of which one acts:
    windlass-operator run --leader-elect --engine-image IMAGE --log-format json
  On your own machine, against one namespace of the current context:
    windlass-operator run --namespace demo --engine-image IMAGE";

/// Flags of `run`, as typed.
#[derive(Clone, Debug, Args)]
pub struct RunArgs {
    /// Image of engine pods whose resource names none, by tag or by digest
    #[arg(long, env = "WINDLASS_ENGINE_IMAGE", value_name = "IMAGE", value_parser = image)]
    engine_image: String,

    /// Pull policy of engine containers; Kubernetes chooses by the image's tag when absent
    #[arg(long, env = "WINDLASS_IMAGE_PULL_POLICY", value_name = "POLICY")]
    image_pull_policy: Option<PullPolicy>,

    /// Namespaces to serve, repeated or separated by commas; all of the cluster when absent
    ///
    /// With a list, a Role in each of them is enough; without, a ClusterRole is needed.
    #[arg(long = "namespace", env = "WINDLASS_NAMESPACES", value_name = "NAMESPACE", value_delimiter = ',')]
    namespaces: Vec<String>,

    /// Namespace of the operator's pods, which engines' NetworkPolicies let in; absent when it runs outside the cluster
    #[arg(long, env = "POD_NAMESPACE", value_name = "NAMESPACE")]
    operator_namespace: Option<String>,

    /// Labels that the operator's own pods carry, by which engines' NetworkPolicies let them in
    #[arg(long, env = "WINDLASS_OPERATOR_POD_LABELS", value_name = "KEY=VALUE", value_delimiter = ',',
          default_value = "app.kubernetes.io/name=windlass-operator", value_parser = label)]
    operator_pod_labels: Vec<(String, String)>,

    /// Namespace whose pods may read the metrics of engines
    #[arg(long, env = "WINDLASS_MONITORING_NAMESPACE", value_name = "NAMESPACE")]
    monitoring_namespace: Option<String>,

    /// DNS suffix of the cluster, for the URL in status
    #[arg(long, env = "WINDLASS_CLUSTER_DOMAIN", value_name = "DOMAIN", default_value = "cluster.local")]
    cluster_domain: String,

    /// Act only while holding the Lease, so that several replicas can run
    #[arg(long, env = "WINDLASS_LEADER_ELECT", default_value_t = false, action = clap::ArgAction::SetTrue)]
    leader_elect: bool,

    /// Name of the Lease
    #[arg(long, env = "WINDLASS_LEASE_NAME", value_name = "NAME", default_value = "windlass-operator")]
    lease_name: String,

    /// Namespace of the Lease; the operator's own when absent
    #[arg(long, env = "WINDLASS_LEASE_NAMESPACE", value_name = "NAMESPACE")]
    lease_namespace: Option<String>,

    /// Seconds after which a silent leader is replaced; it stops itself at two thirds of that
    #[arg(long, env = "WINDLASS_LEASE_DURATION_SECONDS", value_name = "SECONDS", default_value_t = 15,
          value_parser = clap::value_parser!(u32).range(6..=300))]
    lease_duration_seconds: u32,

    /// Name of this replica in the Lease and in events; must be unique. A random one when absent
    #[arg(long, env = "POD_NAME", value_name = "NAME")]
    identity: Option<String>,

    /// Port of /livez, /readyz and, unless it is guarded, /metrics; 0 takes a free one and logs it
    #[arg(long, env = "WINDLASS_METRICS_PORT", value_name = "PORT", default_value_t = 8080)]
    metrics_port: u16,

    /// Seconds between readings of an engine that has traffic
    #[arg(long, env = "WINDLASS_SCRAPE_ACTIVE_SECONDS", value_name = "SECONDS", default_value_t = 5,
          value_parser = clap::value_parser!(u32).range(1..=60))]
    scrape_active_seconds: u32,

    /// Seconds between readings of an idle engine
    #[arg(long, env = "WINDLASS_SCRAPE_IDLE_SECONDS", value_name = "SECONDS", default_value_t = 30,
          value_parser = clap::value_parser!(u32).range(1..=600))]
    scrape_idle_seconds: u32,

    /// Seconds until a reading is given up
    #[arg(long, env = "WINDLASS_SCRAPE_TIMEOUT_SECONDS", value_name = "SECONDS", default_value_t = 2,
          value_parser = clap::value_parser!(u32).range(1..=30))]
    scrape_timeout_seconds: u32,

    /// Seconds that pods wait for a Job that reads their model's header; 0 reads none, and decides nothing by it
    #[arg(long, env = "WINDLASS_INSPECT_TIMEOUT_SECONDS", value_name = "SECONDS", default_value_t = 60,
          value_parser = clap::value_parser!(u32).range(0..=3600))]
    inspect_timeout_seconds: u32,

    /// Most InferenceServices reconciled at the same time
    #[arg(long, env = "WINDLASS_CONCURRENCY", value_name = "COUNT", default_value_t = 16,
          value_parser = clap::value_parser!(u16).range(1..=256))]
    concurrency: u16,

    /// Port of /metrics alone, over TLS, for those whose bearer token may get the path; absent: it is on --metrics-port
    #[arg(long, env = "WINDLASS_GUARDED_METRICS_PORT", value_name = "PORT", requires = "guarded_metrics_certificates")]
    guarded_metrics_port: Option<u16>,

    /// Folder with the certificate of that port, tls.crt and tls.key
    #[arg(long, env = "WINDLASS_GUARDED_METRICS_CERTIFICATES", value_name = "FOLDER")]
    guarded_metrics_certificates: Option<PathBuf>,

    /// Port on which custom.metrics.k8s.io is served to the API server's aggregation layer; absent: it is not
    #[arg(long, env = "WINDLASS_CUSTOM_METRICS_PORT", value_name = "PORT",
          requires_all = ["custom_metrics_certificates", "custom_metrics_service"])]
    custom_metrics_port: Option<u16>,

    /// Folder with the certificate of that port, tls.crt and tls.key
    #[arg(long, env = "WINDLASS_CUSTOM_METRICS_CERTIFICATES", value_name = "FOLDER")]
    custom_metrics_certificates: Option<PathBuf>,

    /// Service before that port, in the operator's namespace, as the APIService names it
    #[arg(long, env = "WINDLASS_CUSTOM_METRICS_SERVICE", value_name = "NAME")]
    custom_metrics_service: Option<String>,

    /// Form of log lines on standard error
    #[arg(long, env = "WINDLASS_LOG_FORMAT", value_name = "FORMAT", default_value = "text")]
    log_format: LogFormat,

    /// Level (error, warn, info, debug, trace), or directives as target=level,…
    #[arg(long, env = "WINDLASS_LOG_LEVEL", value_name = "LEVEL", default_value = "info")]
    log_level: String,
}

/// Forms of log lines.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Kubernetes' image pull policies, spelled as Kubernetes spells them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[allow(missing_docs)]
pub enum PullPolicy {
    #[value(name = "Always")]
    Always,
    #[value(name = "IfNotPresent")]
    IfNotPresent,
    #[value(name = "Never")]
    Never,
}

impl PullPolicy {
    /// As a pod spells it.
    pub fn name(self) -> &'static str {
        match self {
            PullPolicy::Always => "Always",
            PullPolicy::IfNotPresent => "IfNotPresent",
            PullPolicy::Never => "Never",
        }
    }
}

/// Part of the cluster that one set of watches covers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Scope {
    /// Every namespace, with one watch per kind.
    Cluster,
    /// One namespace.
    Namespace(String),
}

/// How `run` behaves.
#[derive(Clone, Debug)]
pub struct Config {
    /// Image of engine pods whose resource names none.
    pub engine_image: String,
    /// Pull policy of engine containers.
    pub image_pull_policy: Option<PullPolicy>,
    /// Namespace the operator's pods run in; absent outside a cluster.
    pub operator_namespace: Option<String>,
    /// Labels of the operator's own pods.
    pub operator_pod_labels: BTreeMap<String, String>,
    /// Namespace whose pods may read the metrics of engines.
    pub monitoring_namespace: Option<String>,
    /// DNS suffix of the cluster.
    pub cluster_domain: String,
    /// What to watch: the cluster, or each listed namespace. Never empty.
    pub scopes: Vec<Scope>,
    /// Present when only a leader may act.
    pub lease: Option<LeaseConfig>,
    /// Name of this replica.
    pub identity: String,
    /// Port of health and metrics, 0 for any.
    pub metrics_port: u16,
    /// When engines are read.
    pub scrape: ScrapeConfig,
    /// Where the operator's own metrics are served behind a guard; `None`: on the port of health, to anybody.
    pub guarded_metrics: Option<GuardedMetricsConfig>,
    /// Where custom metrics are served; `None`: nowhere.
    pub custom_metrics: Option<CustomMetricsConfig>,
    /// How long pods wait for their model's header; `None`: it is not read.
    pub inspect_timeout: Option<Duration>,
    /// Most services reconciled at once.
    pub concurrency: u16,
    /// Form of log lines.
    pub log_format: LogFormat,
    /// Level or directives.
    pub log_level: String,
}

/// Where and how long leadership is recorded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LeaseConfig {
    /// Name of the Lease.
    pub name: String,
    /// Its namespace; the client's own when absent.
    pub namespace: Option<String>,
    /// Silence after which another replica takes over.
    pub duration: Duration,
}

/// Where the operator's own metrics are served behind a guard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct GuardedMetricsConfig {
    /// The port.
    pub port: u16,
    /// Folder with its certificate.
    pub certificates: PathBuf,
}

/// Where custom metrics are served.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CustomMetricsConfig {
    /// The port.
    pub port: u16,
    /// Folder with its certificate.
    pub certificates: PathBuf,
    /// Name of the Service before it.
    pub service: String,
    /// That Service's namespace.
    pub namespace: Option<String>,
}

/// Cadence and bounds of reading `/stats`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ScrapeConfig {
    /// Between readings of an engine with traffic.
    pub active: Duration,
    /// Between readings of an idle engine.
    pub idle: Duration,
    /// Until a reading is given up, connecting included.
    pub timeout: Duration,
}

impl RunArgs {
    /// The configuration; `random` makes an identity unique where the environment gives none.
    pub fn into_config(self, random: u32) -> Config {
        let seconds = |count: u32| Duration::from_secs(count.into());
        let lease = self.leader_elect.then(|| LeaseConfig {
            name: self.lease_name,
            namespace: self.lease_namespace.or_else(|| self.operator_namespace.clone()),
            duration: seconds(self.lease_duration_seconds),
        });
        let custom_metrics = self.custom_metrics_port.map(|port| CustomMetricsConfig {
            port,
            // clap has seen to it that these are given with the port.
            certificates: self.custom_metrics_certificates.unwrap_or_default(),
            service: self.custom_metrics_service.unwrap_or_default(),
            namespace: self.operator_namespace.clone(),
        });
        let guarded_metrics = self.guarded_metrics_port.map(|port| GuardedMetricsConfig {
            port,
            // clap has seen to it that it is given with the port.
            certificates: self.guarded_metrics_certificates.unwrap_or_default(),
        });
        Config {
            guarded_metrics,
            custom_metrics,
            engine_image: self.engine_image,
            image_pull_policy: self.image_pull_policy,
            operator_namespace: self.operator_namespace.filter(|namespace| !namespace.is_empty()),
            operator_pod_labels: self.operator_pod_labels.into_iter().collect(),
            monitoring_namespace: self.monitoring_namespace.filter(|namespace| !namespace.is_empty()),
            cluster_domain: self.cluster_domain,
            scopes: scopes(self.namespaces),
            lease,
            identity: self.identity.unwrap_or_else(|| format!("windlass-operator-{random:08x}")),
            metrics_port: self.metrics_port,
            scrape: ScrapeConfig {
                active: seconds(self.scrape_active_seconds),
                idle: seconds(self.scrape_idle_seconds.max(self.scrape_active_seconds)),
                timeout: seconds(self.scrape_timeout_seconds),
            },
            inspect_timeout: (self.inspect_timeout_seconds > 0).then(|| seconds(self.inspect_timeout_seconds)),
            concurrency: self.concurrency,
            log_format: self.log_format,
            log_level: self.log_level,
        }
    }
}

/// One scope per distinct name, or the cluster where none is given.
fn scopes(namespaces: Vec<String>) -> Vec<Scope> {
    let names: BTreeSet<String> =
        namespaces.iter().map(|name| name.trim().to_owned()).filter(|name| !name.is_empty()).collect();
    if names.is_empty() { vec![Scope::Cluster] } else { names.into_iter().map(Scope::Namespace).collect() }
}

/// Refuses what no registry could resolve; the runtime has the last word.
fn image(text: &str) -> Result<String, String> {
    let name = text.trim();
    if name.is_empty() || name.contains(char::is_whitespace) {
        return Err("an image reference as NAME:TAG or NAME@sha256:DIGEST is expected".into());
    }
    Ok(name.to_owned())
}

/// Reads a factor that keeps a trace within memory.
fn scale(text: &str) -> Result<f64, String> {
    let factor = text.parse().ok().filter(|factor| (0.001..=100.0).contains(factor));
    factor.ok_or_else(|| "a number from 0.001 to 100 is expected".into())
}

/// Reads one `KEY=VALUE`.
fn label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((key, value)) if !key.trim().is_empty() => Ok((key.trim().to_owned(), value.trim().to_owned())),
        _ => Err("a label as KEY=VALUE is expected".into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::CommandFactory;

    fn config(arguments: &[&str]) -> Config {
        let line = ["windlass-operator", "run", "--engine-image", "engine:1"].iter().chain(arguments);
        match Cli::try_parse_from(line).expect("valid arguments").command {
            Command::Run(args) => args.into_config(0xabc),
            Command::Crd | Command::Replay(_) => unreachable!("run was asked for"),
        }
    }

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    #[test]
    fn without_flags_the_whole_cluster_is_served_and_no_lease_is_needed() {
        let config = config(&[]);
        assert_eq!(config.scopes, [Scope::Cluster]);
        assert_eq!(config.lease, None);
    }

    #[test]
    fn namespaces_are_split_trimmed_and_told_apart() {
        let config = config(&["--namespace", "b, a,", "--namespace", "b"]);
        assert_eq!(config.scopes, ["a", "b"].map(|name| Scope::Namespace(name.into())));
    }

    #[test]
    fn the_lease_lives_in_the_operators_namespace_unless_told_otherwise() {
        let lease = |arguments: &[&str]| config(arguments).lease.and_then(|lease| lease.namespace);
        assert_eq!(lease(&["--leader-elect", "--operator-namespace", "a"]).as_deref(), Some("a"));
        let both = ["--leader-elect", "--operator-namespace", "a", "--lease-namespace", "b"];
        assert_eq!(lease(&both).as_deref(), Some("b"));
    }

    #[test]
    fn pod_labels_are_pairs() {
        let config = config(&["--operator-pod-labels", "a=1,b=2"]);
        assert_eq!(config.operator_pod_labels.get("b").map(String::as_str), Some("2"));
        assert!(label("a").is_err() && label("=1").is_err());
    }

    #[test]
    fn an_idle_engine_is_never_read_more_often_than_a_busy_one() {
        let config = config(&["--scrape-active-seconds", "50", "--scrape-idle-seconds", "10"]);
        assert_eq!(config.scrape.idle, config.scrape.active);
    }

    #[test]
    fn a_replay_has_a_trace_or_a_judge_and_known_policies() {
        let parse = |arguments: &[&str]| Cli::try_parse_from(["windlass-operator", "replay"].iter().chain(arguments));
        assert!(parse(&["trace.csv", "--policy", "builtin,static-3"]).is_ok() && parse(&["--stdio"]).is_ok());
        assert!(parse(&[]).is_err() && parse(&["trace.csv", "--stdio"]).is_err());
        let error = parse(&["trace.csv", "--policy", "best"]).expect_err("refused").to_string();
        assert!(error.contains("is no policy"), "{error}");
        assert!(parse(&["trace.csv", "--scale", "0"]).is_err());
    }

    #[test]
    fn an_empty_image_is_refused_with_the_expected_form() {
        let error = Cli::try_parse_from(["windlass-operator", "run", "--engine-image", " "]).expect_err("refused");
        assert!(error.to_string().contains("NAME:TAG"), "{error}");
    }
}
