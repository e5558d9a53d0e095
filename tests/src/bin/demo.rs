//! The demo: from nothing to a streamed answer, then load, out to two replicas and back in. `tests/demo` calls it.

use anyhow::{Context, Result, ensure};
use clap::{Parser, Subcommand};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use std::io::Write;
use std::time::{Duration, Instant};
use windlass_operator_api::InferenceServiceStatus;
use windlass_tests::chat::{self, Client};
use windlass_tests::cluster::Cluster;
use windlass_tests::image::{self, Builder};
use windlass_tests::load::Load;
use windlass_tests::namespace::Namespace;
use windlass_tests::progress::Progress;
use windlass_tests::service::{self, Reach, Service};
use windlass_tests::{model, operator};

const NAMESPACE: &str = "windlass-demo";
const SERVICE: &str = "smollm2";
/// Requests at a time: three times what one replica computes at once, so that the others wait.
const CONCURRENCY: usize = 12;
const SEQUENCES: u32 = 4;
const PATIENCE: Duration = Duration::from_secs(240);

/// From nothing to a streamed answer on a real Kubernetes cluster; then load, out to two replicas and back in.
///
/// Uses the cluster that KUBECONFIG names, else starts one on this machine (Linux, root). With a cluster of yours, say
/// how images get there: WINDLASS_IMAGE_REGISTRY=registry/path to push to, or WINDLASS_IMAGE_LOAD="kind load
/// image-archive" (any command that takes an archive's path).
#[derive(Parser)]
#[command(name = "tests/demo", max_term_width = 110)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    /// What to ask
    #[arg(long, default_value = "Explain in two sentences what a windlass on a ship is for.")]
    question: String,
    /// Stop after the answer, without load
    #[arg(long)]
    no_load: bool,
}

#[derive(Subcommand)]
enum Command {
    /// End what the demo started: our cluster, or on yours the service and the operator
    Stop,
}

fn main() -> Result<()> {
    let cli = Cli::parse();
    match cli.command {
        Some(Command::Stop) => stop(),
        None => demo(&cli),
    }
}

fn demo(cli: &Cli) -> Result<()> {
    let mut progress = Progress::since_environment("Install what is missing, compile");
    let namespace = prepare(&mut progress)?;
    let service = serve(&mut progress, &namespace)?;
    let reach = service.reach()?;
    answer(&progress, &reach, &cli.question)?;
    if !cli.no_load {
        scale(&mut progress, &service, &reach)?;
    }
    print_times(&progress);
    print_next(&namespace, &reach)
}

/// Everything up to a namespace that holds the model, on a cluster with the operator.
fn prepare(progress: &mut Progress) -> Result<Namespace> {
    let cluster = progress.phase("Start the cluster", |_| Cluster::start())?;
    let [operator, engine] =
        progress.phase("Build and load both images", |_| image::deliver(&cluster, Builder::find()?))?;
    progress.phase("Install the operator with helm", |_| operator::install(&cluster, &operator, &engine))?;
    let namespace = Namespace::create(&cluster, NAMESPACE)?;
    progress.phase("Put the model into a claim", |_| model::upload(&namespace, &model::file()?))?;
    Ok(namespace)
}

fn serve<'a>(progress: &mut Progress, namespace: &'a Namespace) -> Result<Service<'a>> {
    progress.phase("Apply the InferenceService, wait until Ready", |_| {
        let service = Service::apply(namespace, SERVICE, &spec())?;
        service.wait_condition("Ready", "True", None, PATIENCE)?;
        Ok(service)
    })
}

/// One to two replicas of half a core each; the pace is quicker than one would have it in service.
fn spec() -> Value {
    let mut spec = service::real();
    spec["engine"] = json!({"maxSequences": SEQUENCES});
    spec["autoscaling"] = json!({
        "mode": "Builtin", "minReplicas": 1, "maxReplicas": 2,
        "targets": [{"metric": "TimeToFirstToken", "percentile": 95, "milliseconds": 500}],
        "gpuUtilization": {"scaleUpPercent": 60, "scaleDownPercent": 30},
        "behavior": {"scaleDown": {"stabilizationWindowSeconds": 15}},
    });
    spec
}

/// Prints the answer as it comes.
fn answer(progress: &Progress, reach: &Reach, question: &str) -> Result<()> {
    println!("\n> {question}");
    let mut first = None;
    let answer = Client::pooled(reach.url()).stream(&chat::request(SERVICE, question, 120), |text| {
        first.get_or_insert_with(|| progress.elapsed());
        print!("{text}");
        // A terminal that is gone makes the next line fail; this one may.
        let _ = std::io::stdout().flush();
    })?;
    let tokens = answer.completion_tokens.unwrap_or(0);
    let rate = tokens as f64 / answer.total.as_secs_f64();
    println!(
        "\n\n  {tokens} tokens, the first after {:.0} ms, {rate:.0} a second",
        answer.first_token.as_secs_f64() * 1e3
    );
    println!("  first streamed token {:.1} s after the command\n", first.context("no token came")?.as_secs_f64());
    Ok(())
}

fn scale(progress: &mut Progress, service: &Service<'_>, reach: &Reach) -> Result<()> {
    let client = Client::pooled(reach.url());
    let prompt =
        |number: u64| chat::request(SERVICE, &format!("Write a short story about sailor number {number}."), 100);
    let load = Load::start(&client, CONCURRENCY, prompt);
    let title = format!("{CONCURRENCY} requests at a time: out to 2 replicas");
    progress.phase(&title, |bar| watch(service, bar, |status| status.available_replicas == 2))?;
    let report = load.stop();
    eprintln!("  {} requests answered, {} failed", report.completed, report.failures.len());
    ensure!(report.failures.is_empty(), "under load: {:?}", report.failures);
    progress.phase("No load: in to 1 replica", |bar| {
        watch(service, bar, |status| status.desired_replicas == 1 && status.replicas == 1)?;
        service.wait_ready(1, PATIENCE)
    })
}

/// Prints each new decision of the autoscaler until `reached`.
fn watch(service: &Service<'_>, bar: &ProgressBar, reached: impl Fn(&InferenceServiceStatus) -> bool) -> Result<()> {
    let (started, mut printed) = (Instant::now(), String::new());
    loop {
        let status = service.read()?.status.context("there is no status")?;
        let line = decision(&status);
        if line != printed {
            bar.suspend(|| eprintln!("  {:>3} s  {line}", started.elapsed().as_secs()));
            printed = line;
        }
        if reached(&status) {
            return Ok(());
        }
        ensure!(started.elapsed() < PATIENCE, "not within {} s: {printed}", PATIENCE.as_secs());
        std::thread::sleep(Duration::from_secs(1));
    }
}

fn decision(status: &InferenceServiceStatus) -> String {
    let (serving, desired) = (status.ready_replicas, status.desired_replicas);
    let why = status.autoscaling.as_ref().map_or("", |autoscaling| &autoscaling.message);
    format!("{serving} serving, {desired} wanted: {why}")
}

fn print_times(progress: &Progress) {
    println!("\n  phase                                                   seconds");
    for (title, took) in progress.phases() {
        println!("  {title:<52} {:>10.1}", took.as_secs_f64());
    }
    println!("  {:<52} {:>10.1}", "everything", progress.elapsed().as_secs_f64());
}

fn print_next(namespace: &Namespace, reach: &Reach) -> Result<()> {
    println!("\nIt goes on running.");
    if reach.is_balanced() {
        println!("  Ask it     curl {}/v1/chat/completions -H 'Content-Type: application/json' \\", reach.url());
        println!("               -d '{}'", json!({"model": SERVICE, "messages": [{"role": "user", "content": "Hi!"}]}));
    } else {
        println!("  Ask it     kubectl port-forward -n {NAMESPACE} service/{SERVICE} 8000:http");
    }
    println!("  Look       {}", namespace.cluster().shell_line()?);
    println!("             kubectl get infsvc,pods -n {NAMESPACE}");
    println!("  Stop       tests/demo stop");
    Ok(())
}

fn stop() -> Result<()> {
    match Cluster::attach() {
        Ok(cluster) if !cluster.is_own() => {
            cluster.kubectl().run(&["delete", "namespace", NAMESPACE, "--ignore-not-found"])?;
            operator::uninstall(&cluster)
        }
        _ => Cluster::stop(),
    }
}
