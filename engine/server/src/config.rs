//! The server's configuration, validated once: what the flags mean together.

mod access;
mod batching;
mod executor;

use crate::cli::{ServeArgs, UnknownFields};
use crate::dialogue::{Chosen, DialogueConfig};
use crate::failure::Failure;
use crate::fetch::incoming::{self, Incoming};
use crate::http::tls::TlsSource;
use crate::reply::ThoughtFormat;
use crate::speculation::Speculation;
use crate::tenants::{KeySource, LimitsSource, TenantSource};
use crate::text_log::TextLog;
use crate::tools::ToolFormat;
use axum::http::HeaderValue;
pub use batching::{Batching, kv_data_type};
pub use executor::{
    CpuConfig, DeviceChoice, EncoderConfig, EncoderModel, ExecutorConfig, GpuLayers, PipelineConfig, SimConfig,
};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use windlass_engine_contract::flags;
use windlass_engine_contract::termination::Reason;

/// Everything that `serve` decides before it does anything.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names the API answers to; never empty.
    pub served_names: Vec<String>,
    /// Address of the API port.
    pub api_address: SocketAddr,
    /// Address of the admin port.
    pub admin_address: SocketAddr,
    /// Where the tokens of the admin port are, if it asks for any.
    pub admin_tokens: Option<TenantSource>,
    /// What computes.
    pub executor: ExecutorConfig,
    /// Sizes of steps and sequences.
    pub batching: Batching,
    /// Who guesses what comes next, if anybody.
    pub speculation: Option<Speculation>,
    /// Where API keys and their limits are, if any are asked for.
    pub tenants: Option<TenantSource>,
    /// Age at which key, limit and certificate files are read again.
    pub refresh_every: Duration,
    /// TLS of the API port, if it has any.
    pub tls: Option<TlsSource>,
    /// Origins whose pages may ask, as browsers spell them.
    pub allowed_origins: Vec<HeaderValue>,
    /// Fields that nobody knows are ignored instead of refused.
    pub ignore_unknown_fields: bool,
    /// Memory of all bodies together; absent is a part of what is free.
    pub body_memory_bytes: Option<u64>,
    /// Connections of clients at once; absent is as many as files may be open for.
    pub max_connections: Option<usize>,
    /// Which texts are logged.
    pub text_log: TextLog,
    /// Where spans of requests go, if anywhere.
    pub traces_endpoint: Option<String>,
    /// How the model converses, as far as flags say it.
    pub dialogue: DialogueConfig,
    /// This program, which is started once more to run chat templates.
    pub program: PathBuf,
    /// How patient the server is with clients.
    pub patience: Patience,
    /// Times of the life cycle.
    pub times: LifeTimes,
    /// The model, where it is still on its way.
    pub incoming: Option<Arc<Incoming>>,
}

/// Times of the life cycle.
#[derive(Clone, Copy, Debug)]
pub struct LifeTimes {
    /// From the signal on, how long new requests are served.
    pub drain_accept: Duration,
    /// From the signal on, how long streams may last.
    pub drain_timeout: Duration,
    /// How long a connection may be kept; `None` for ever.
    pub max_connection_age: Option<Duration>,
    /// With work and no finished step for so long, the server is not ready.
    pub stall_timeout_seconds: f64,
}

/// A time that lets a changed Secret count soon and reads it rarely.
const REFRESH_EVERY: Duration = Duration::from_secs(10);

/// How long the server bears with a client that sends or reads slowly.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// Longest time a request's header may take, and longest idleness of an HTTP/1.1 connection.
    pub header: Duration,
    /// Longest time a request's body may take.
    pub body: Duration,
    /// Longest time in which a client may take nothing of what waits for it.
    pub read: Duration,
    /// Longest silence of a stream before a comment tells proxies that it is alive.
    pub keep_alive: Duration,
}

impl Default for Patience {
    /// Proxies cut what is silent for half a minute or more.
    fn default() -> Patience {
        let half_a_minute = Duration::from_secs(30);
        let keep_alive = Duration::from_secs(10);
        Patience { header: half_a_minute, body: half_a_minute, read: half_a_minute, keep_alive }
    }
}

impl Config {
    /// Whether this process computes a stage for another one and serves nothing.
    pub fn is_headless(&self) -> bool {
        match &self.executor {
            ExecutorConfig::Cpu(cpu) => cpu.pipeline.as_ref().is_some_and(|pipeline| pipeline.node_rank > 0),
            ExecutorConfig::Sim(_) | ExecutorConfig::Encoder(_) => false,
        }
    }

    /// Checks the flags against each other and the machine.
    pub fn from_args(args: &ServeArgs) -> Result<Config, Failure> {
        Ok(Config {
            served_names: served_names(args)?,
            api_address: SocketAddr::new(args.host, args.port),
            admin_address: SocketAddr::new(args.admin_host, args.admin_port),
            admin_tokens: args
                .admin_token_file
                .clone()
                .map(|file| TenantSource { keys: KeySource::File(file), limits: LimitsSource::default() }),
            executor: executor::from_args(args)?,
            batching: batching::from_args(args)?,
            speculation: args.speculative_config.as_deref().map(Speculation::parse).transpose()?,
            tenants: access::tenants(args)?,
            refresh_every: REFRESH_EVERY,
            tls: access::tls(args)?,
            allowed_origins: access::allowed_origins(args)?,
            max_connections: None,
            body_memory_bytes: args.body_memory_bytes,
            ignore_unknown_fields: args.unknown_fields == UnknownFields::Ignore,
            text_log: TextLog {
                prompts: args.enable_log_requests,
                answers: args.enable_log_outputs,
                most_chars: args.max_log_len,
            },
            traces_endpoint: args.otlp_traces_endpoint.clone(),
            dialogue: dialogue(args)?,
            program: PathBuf::from("/proc/self/exe"),
            patience: Patience::default(),
            times: times(args)?,
            incoming: None,
        })
    }

    /// The same where the model may be at an address: it begins to come from there.
    pub fn begin(args: &ServeArgs, first_pause: Duration) -> Result<Config, Failure> {
        let (args, incoming) = incoming::begin(args, first_pause)?;
        Ok(Config { incoming, ..Config::from_args(&args)? })
    }
}

/// Names the API answers to.
pub fn served_names(args: &ServeArgs) -> Result<Vec<String>, Failure> {
    let mut names = args.served_model_name.clone();
    if names.is_empty() {
        let path = Path::new(&args.model);
        let name = match path.extension().is_some_and(|extension| extension == "gguf") {
            true => path.file_stem(),
            false => path.file_name(),
        };
        names.push(name.map_or_else(|| args.model.clone(), |name| name.to_string_lossy().into_owned()));
    }
    match names.iter().find(|name| name.trim().is_empty()) {
        Some(_) => Err(Failure::configuration(format!("{} must not be empty", flags::SERVED_MODEL_NAME))),
        None => Ok(names),
    }
}

fn dialogue(args: &ServeArgs) -> Result<DialogueConfig, Failure> {
    Ok(DialogueConfig {
        template: args.chat_template.clone(),
        trust_requests: args.trust_request_chat_template,
        calls: chosen("--tool-call-parser", &args.tool_call_parser, ToolFormat::NAMES)?,
        thoughts: chosen("--reasoning-parser", &args.reasoning_parser, ThoughtFormat::NAMES)?,
    })
}

fn chosen<T: Copy>(flag: &str, word: &str, known: &[(&str, T)]) -> Result<Chosen<T>, Failure> {
    match (word, known.iter().find(|(name, _)| *name == word)) {
        ("auto", _) => Ok(Chosen::Auto),
        ("none", _) => Ok(Chosen::Off),
        (_, Some((_, format))) => Ok(Chosen::Fixed(*format)),
        _ => {
            let names: Vec<&str> = known.iter().map(|(name, _)| *name).collect();
            let message = format!("{flag} {word} is not known: use auto, none, {}", names.join(", "));
            Err(Failure::new(Reason::Unsupported, message))
        }
    }
}

fn milliseconds(flag: &str, value: Option<f64>) -> Result<Option<f64>, Failure> {
    Ok(positive(flag, value)?.map(|milliseconds| milliseconds / 1e3))
}

fn positive(flag: &str, value: Option<f64>) -> Result<Option<f64>, Failure> {
    match value {
        Some(value) if !(value > 0.0 && value.is_finite()) => {
            Err(Failure::configuration(format!("{flag} is {value}; it must be greater than 0")))
        }
        value => Ok(value),
    }
}

fn times(args: &ServeArgs) -> Result<LifeTimes, Failure> {
    if args.drain_timeout_seconds < args.drain_accept_seconds {
        return Err(Failure::configuration(format!(
            "{} is {}, less than --drain-accept-seconds, {}",
            flags::DRAIN_TIMEOUT_SECONDS,
            args.drain_timeout_seconds,
            args.drain_accept_seconds
        )));
    }
    if args.stall_timeout_seconds == 0 {
        return Err(Failure::configuration("--stall-timeout-seconds must be at least 1"));
    }
    let seconds = |seconds: u32| Duration::from_secs(seconds.into());
    Ok(LifeTimes {
        drain_accept: seconds(args.drain_accept_seconds),
        drain_timeout: seconds(args.drain_timeout_seconds),
        max_connection_age: Some(seconds(args.max_connection_age_seconds)).filter(|age| !age.is_zero()),
        stall_timeout_seconds: args.stall_timeout_seconds.into(),
    })
}

fn unsupported(flag: &str, value: &str, way_out: &str) -> Failure {
    Failure::new(Reason::Unsupported, format!("{flag} {value} is not supported: {way_out}"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;

    fn config(line: &str) -> Result<Config, Failure> {
        let arguments = format!("windlass-engine serve {line}");
        match Cli::try_parse_from(arguments.split(' ')).unwrap().command {
            Command::Serve(args) => Config::from_args(&args),
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn a_model_is_served_under_its_files_name() {
        assert_eq!(config("/models/SmolLM2.Q4_1.gguf").unwrap().served_names, ["SmolLM2.Q4_1"]);
        assert_eq!(config("/models/folder/").unwrap().served_names, ["folder"]);
        assert_eq!(config("org/name-1.5 --executor sim").unwrap().served_names, ["name-1.5"]);
        let named = config("m --served-model-name a b --served-model-name c").unwrap();
        assert_eq!(named.served_names, ["a", "b", "c"]);
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name_and_reason() {
        for (line, reason, word) in [
            ("m --device tpu", Reason::Unsupported, "--device tpu"),
            ("m --runner pooling", Reason::Unsupported, "--runner"),
            ("m --task embed", Reason::Unsupported, "--task"),
            ("m --pipeline-parallel-size 0", Reason::InvalidConfiguration, "--pipeline-parallel-size"),
            ("m --pipeline-parallel-size 2 --nnodes 3", Reason::InvalidConfiguration, "--nnodes is 3"),
            ("m --pipeline-parallel-size 2 --node-rank 2", Reason::InvalidConfiguration, "--node-rank is 2"),
            ("m --pipeline-parallel-size 2 --node-rank 1", Reason::InvalidConfiguration, "--headless"),
            ("m --pipeline-parallel-size 2 --headless", Reason::InvalidConfiguration, "--headless"),
            ("m --executor sim --pipeline-parallel-size 2", Reason::Unsupported, "--pipeline-parallel-size 2"),
            ("m --tensor-parallel-size 3 --swap-space 1", Reason::Unsupported, "--swap-space 1"),
            (
                "m --n-gpu-layers 5 --executor sim",
                Reason::Unsupported,
                "--n-gpu-layers 5 is not supported: the simulator",
            ),
            ("m --n-gpu-layers 0 --device cuda", Reason::Unsupported, "use 1 or more, or --device cpu"),
            ("m --n-gpu-layers 5 --device cpu", Reason::Unsupported, "--n-gpu-layers 5"),
            ("m --n-gpu-layers auto --device cpu", Reason::Unsupported, "--n-gpu-layers auto"),
            ("m --n-gpu-layers 5 --tensor-parallel-size 2", Reason::Unsupported, "use --tensor-parallel-size 1"),
            ("m --n-gpu-layers 5 --pipeline-parallel-size 2", Reason::Unsupported, "use --pipeline-parallel-size 1"),
            (
                "m --executor sim --task embed --enable-expert-parallel",
                Reason::Unsupported,
                "--enable-expert-parallel is for mixtures",
            ),
            ("m --tensor-parallel-size 0", Reason::InvalidConfiguration, "--tensor-parallel-size"),
            ("m --kv-cache-dtype fp8_e5m2", Reason::Unsupported, "--kv-cache-dtype fp8_e5m2"),
            ("m --swap-space=-1", Reason::InvalidConfiguration, "--swap-space"),
            ("m --swap-dir /tmp", Reason::InvalidConfiguration, "--swap-space"),
            ("m --swap-space 1 --no-enable-prefix-caching", Reason::InvalidConfiguration, "--swap-space"),
            ("m --threads 0", Reason::InvalidConfiguration, "--threads"),
            ("m --max-num-seqs 0", Reason::InvalidConfiguration, "--max-num-seqs"),
            (
                "m --max-num-seqs 600 --max-num-batched-tokens 512",
                Reason::InvalidConfiguration,
                "--max-num-batched-tokens",
            ),
            ("m --api-key-file a --api-key-dir b", Reason::InvalidConfiguration, "--api-key-file"),
            ("m --tenant-tokens-per-minute 5", Reason::InvalidConfiguration, "--api-key-file"),
            ("m --api-key-file a --tenant-max-concurrent-requests 0", Reason::InvalidConfiguration, "at least 1"),
            ("m --ssl-certfile a", Reason::InvalidConfiguration, "--ssl-keyfile"),
            ("m --ssl-certfile a --ssl-keyfile b --ssl-ca-certs c", Reason::InvalidConfiguration, "--ssl-cert-reqs"),
            ("m --ssl-certfile a --ssl-keyfile b --ssl-cert-reqs 2", Reason::InvalidConfiguration, "--ssl-ca-certs"),
            ("m --allowed-origins localhost", Reason::InvalidConfiguration, "--allowed-origins"),
            ("m --tool-call-parser xml", Reason::Unsupported, "--tool-call-parser xml"),
            ("m --reasoning-parser loud", Reason::Unsupported, "--reasoning-parser loud"),
            ("m --drain-timeout-seconds 1", Reason::InvalidConfiguration, "--drain-timeout-seconds"),
            ("m --executor sim --sim-step-us=-1", Reason::InvalidConfiguration, "--sim-step-us"),
        ] {
            let failure = config(line).unwrap_err();
            assert_eq!(failure.reason, reason, "{line}");
            assert!(failure.message.contains(word), "{line}: {failure}");
        }
    }

    /// As vLLM's flag, which changes nothing on one rank.
    #[test]
    fn experts_stay_whole_where_that_is_asked_for() {
        let ranks = |line: &str| match config(line).unwrap().executor {
            ExecutorConfig::Cpu(cpu) => (cpu.expert_parallel, cpu.ranks_flag()),
            other => panic!("{other:?}"),
        };
        let flag = |flag: &str| flag.to_owned();
        assert_eq!(ranks("m --tensor-parallel-size 2"), (false, flag("tensor-parallel-size=2")));
        assert_eq!(
            ranks("m --tensor-parallel-size 2 --enable-expert-parallel"),
            (true, flag("tensor-parallel-size=2,whole-experts"))
        );
        assert_eq!(ranks("m --enable-expert-parallel"), (true, flag("tensor-parallel-size=1")));
        assert!(config("m --executor sim --enable-expert-parallel").is_ok());
    }

    #[test]
    fn layers_on_a_gpu_ask_for_one_and_none_for_the_cpu() {
        let choice = |line: &str| match config(line).unwrap().executor {
            ExecutorConfig::Cpu(cpu) => (cpu.device, cpu.gpu_layers),
            other => panic!("{other:?}"),
        };
        assert_eq!(choice("m"), (DeviceChoice::Auto, None));
        assert_eq!(choice("m --n-gpu-layers 5"), (DeviceChoice::Cuda, Some(GpuLayers::Last(5))));
        assert_eq!(choice("m --n-gpu-layers 5 --device cuda"), (DeviceChoice::Cuda, Some(GpuLayers::Last(5))));
        assert_eq!(choice("m --n-gpu-layers auto"), (DeviceChoice::Cuda, Some(GpuLayers::Auto)));
        assert_eq!(choice("m --n-gpu-layers 0"), (DeviceChoice::Cpu, None));
        assert_eq!(choice("m --n-gpu-layers 0 --device cpu --tensor-parallel-size 3"), (DeviceChoice::Cpu, None));
    }

    #[test]
    fn the_simulator_accepts_any_device_and_rank_count() {
        let config = config("m --executor sim --device cuda --tensor-parallel-size 8 --quantization fp8").unwrap();
        let ExecutorConfig::Sim(sim) = config.executor else { panic!("{:?}", config.executor) };
        assert_eq!((sim.tensor_parallel, sim.quantization.as_str()), (8, "fp8"));
    }
}
