//! `windlass-engine`: parse, run, say how it ended.

use clap::Parser;
use mimalloc::MiMalloc;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use tracing::info;
use windlass_engine::cli::{Cli, Command, ServeArgs};
use windlass_engine::clock::Clock;
use windlass_engine::config::Config;
use windlass_engine::failure::Failure;
use windlass_engine::lifecycle::{Lifecycle, Stage};
use windlass_engine::monitor::Monitor;
use windlass_engine::serve::Server;
use windlass_engine::text::renderer_process;
use windlass_engine::{
    batch, bench, chat, eval, fetch, fit, inspect, kernels, machine, signals, start, telemetry, vllm_flags,
};
use windlass_engine_contract::termination::Reason;
use windlass_engine_model::Noting;

#[global_allocator]
static ALLOCATOR: Noting<MiMalloc> = Noting(MiMalloc);

/// Threads that serve HTTP, at most: the others are the engine's.
const MAX_HTTP_THREADS: usize = 4;

fn main() -> ExitCode {
    let command = match parse() {
        Ok(command) => command,
        Err(ParseEnd::Told(code)) => return code,
        Err(ParseEnd::Wrong { failure, log }) => return end(&failure, log),
    };
    let process = command.process().clone();
    let log = telemetry::start(process.log_format, command.log_level());
    if let Err(failure) = prepare(&command, process.termination_log.as_deref()) {
        return end(&failure, process.termination_log);
    }
    let done = match &command {
        Command::Serve(args) => wait_for(serve_until_told(args)),
        Command::Fetch(args) => fetch::run(args, fetch::FIRST_PAUSE),
        Command::Inspect(args) => inspect::run(args, fetch::FIRST_PAUSE),
        Command::Eval(args) => eval::run(args),
        Command::Chat(args) => wait_for(chat::run(args)),
        Command::Batch(args) => wait_for(batch::run(args)),
        Command::Bench(args) => wait_for(bench::run(args)),
        Command::Fit(args) => fit::run(args),
        Command::Kernels(args) => kernels::run(args),
        Command::RenderTemplates(_) => {
            // Whoever started it sees that it ended.
            let _ = renderer_process::work();
            Ok(())
        }
    };
    // Before what ends it is told.
    drop(log);
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(failure) => end(&failure, process.termination_log),
    }
}

/// Has the system tell why where it ends the process. One that renders tells its server by the signal that ends it.
fn prepare(command: &Command, log: Option<&Path>) -> Result<(), Failure> {
    Failure::prepare_for_lost_files(log)?;
    match command {
        Command::RenderTemplates(_) => Ok(()),
        _ => Failure::prepare_for_lost_memory(log),
    }
}

/// Why there is no command to run.
enum ParseEnd {
    /// Help or the version was asked for and printed.
    Told(ExitCode),
    /// The command line is wrong.
    Wrong { failure: Failure, log: Option<PathBuf> },
}

fn parse() -> Result<Command, ParseEnd> {
    let arguments: Vec<String> = std::env::args_os().map(|argument| argument.to_string_lossy().into_owned()).collect();
    let log = termination_log(&arguments);
    let wrong = |failure| ParseEnd::Wrong { failure, log: log.clone() };
    let arguments = vllm_flags::strip(arguments).map_err(wrong)?;
    Cli::try_parse_from(arguments).map(|cli| cli.command).map_err(|error| {
        if error.use_stderr() {
            return wrong(Failure::configuration(error.to_string().trim_start_matches("error: ").trim_end()));
        }
        // Printing help fails only when nobody reads it.
        let _ = error.print();
        ParseEnd::Told(ExitCode::SUCCESS)
    })
}

/// The termination file, also where the rest of the command line is wrong.
fn termination_log(arguments: &[String]) -> Option<PathBuf> {
    let flag = "--termination-log";
    let follows = arguments.iter().skip_while(|argument| *argument != flag).nth(1);
    let inline = arguments.iter().find_map(|argument| argument.strip_prefix(flag)?.strip_prefix('='));
    follows.map(String::as_str).or(inline).map(PathBuf::from)
}

fn end(failure: &Failure, log: Option<PathBuf>) -> ExitCode {
    failure.report(log.as_deref());
    ExitCode::from(failure.reason.exit_code())
}

/// Runs until `work` is done.
fn wait_for(work: impl Future<Output = Result<(), Failure>>) -> Result<(), Failure> {
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(machine::cpus().div_ceil(2).min(MAX_HTTP_THREADS))
        .enable_all()
        .build()
        .map_err(|error| Failure::internal(format!("cannot start the HTTP threads: {error}")))?;
    let done = runtime.block_on(work);
    // What still runs belongs to clients that were given up.
    runtime.shutdown_background();
    done
}

/// A stage goes on after a signal: the leader got one too, and still needs it while its streams finish.
async fn compute_until_told(config: Config, lifecycle: Lifecycle) -> Result<(), Failure> {
    let drain_timeout = config.times.drain_timeout;
    // Nobody scrapes a stage: a GPU that is lost is told here.
    let monitor = Arc::new(Monitor::new(Clock::start(), &config.served_names[0]).map_err(Failure::internal)?);
    let watched = Arc::clone(&monitor);
    let work = tokio::task::spawn_blocking(move || start::work(&config, &watched));
    tokio::select! {
        why = monitor.gpu_is_lost() => Err(Failure::new(Reason::DeviceFailed, why)),
        done = work => match done.map_err(|error| Failure::internal(format!("the stage: {error}")))? {
            // Whichever of the two ends first: it was to be.
            Err(failure) if lifecycle.stage() >= Stage::Closing => {
                info!("{failure}");
                Ok(())
            }
            done => done,
        },
        () = async {
            lifecycle.reached(Stage::Closing).await;
            tokio::time::sleep(drain_timeout).await;
        } => Ok(()),
    }
}

/// What the flags say, with the model if it comes from an address as far as that takes; `None` where a signal comes before.
async fn begin(args: ServeArgs, lifecycle: &Lifecycle) -> Result<Option<Config>, Failure> {
    let begin = tokio::task::spawn_blocking(move || {
        fetch::record::hold(Path::new(&args.model));
        Config::begin(&args, fetch::FIRST_PAUSE)
    });
    tokio::select! {
        config = begin => config.map_err(|error| Failure::internal(format!("beginning to fetch: {error}")))?.map(Some),
        () = lifecycle.reached(Stage::Closing) => {
            info!("stopped before it was ready");
            Ok(None)
        }
    }
}

async fn serve_until_told(args: &ServeArgs) -> Result<(), Failure> {
    let lifecycle = Lifecycle::default();
    signals::watch(lifecycle.clone())?;
    let Some(config) = begin(args.clone(), &lifecycle).await? else { return Ok(()) };
    if config.is_headless() {
        return compute_until_told(config, lifecycle).await;
    }
    let server = tokio::select! {
        server = Server::start(config, lifecycle.clone()) => server?,
        () = lifecycle.reached(Stage::Closing) => {
            info!("stopped before it was ready");
            return Ok(());
        }
    };
    server.run().await
}
