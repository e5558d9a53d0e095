//! The server's configuration, validated once: what the flags mean together.

use crate::cli::{ExecutorKind, Runner, SchedulingPolicy, ServeArgs, SimArgs, UnknownFields};
use crate::dialogue::{Chosen, DialogueConfig};
use crate::encoding::BatchLimits;
use crate::failure::Failure;
use crate::http::tls::{ClientSource, TlsSource};
use crate::machine;
use crate::reply::ThoughtFormat;
use crate::speculation::Speculation;
use crate::tenants::{KeySource, Limits, LimitsSource, TenantSource};
use crate::text_log::TextLog;
use crate::tools::ToolFormat;
use axum::http::HeaderValue;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;
use windlass_checkpoint::HubFolder;
use windlass_engine_contract::flags;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::engine::{Policy, QueueLimits};
use windlass_engine_core::sim::StepTime;
use windlass_engine_model::{ActivationType, Encoder, KvBudget, SwapSpace};

/// Everything that `serve` decides before it does anything.
#[derive(Clone, Debug)]
pub struct Config {
    /// Names the API answers to; never empty.
    pub served_names: Vec<String>,
    /// Address of the API port.
    pub api_address: SocketAddr,
    /// Address of the admin port.
    pub admin_address: SocketAddr,
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
}

/// What computes.
#[derive(Clone, Debug)]
pub enum ExecutorConfig {
    /// A model on this machine's CPU.
    Cpu(CpuConfig),
    /// The simulator.
    Sim(SimConfig),
    /// An encoder on this machine's CPU.
    Encoder(EncoderConfig),
}

/// A model that reads texts and writes none.
#[derive(Clone, Debug)]
pub struct EncoderConfig {
    /// Folder.
    pub model: PathBuf,
    /// How texts are put together.
    pub limits: BatchLimits,
}

/// A model on this machine's CPU, or on its GPU.
#[derive(Clone, Debug)]
pub struct CpuConfig {
    /// Where it is computed.
    pub device: DeviceChoice,
    /// GGUF file or folder.
    pub model: PathBuf,
    /// Threads that compute.
    pub threads: usize,
    /// Ranks that the model is divided among.
    pub tensor_parallel: u32,
    /// On a GPU, kernels are launched one by one instead of being replayed.
    pub eager: bool,
    /// How finely activations are rounded.
    pub activations: ActivationType,
    /// The weight type that the file must have; `None` takes any.
    pub quantization: Option<String>,
    /// The processes that share the layers, if there are several.
    pub pipeline: Option<PipelineConfig>,
}

/// Where a model is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// On a GPU where there is one.
    Auto,
    /// On the CPU.
    Cpu,
    /// On an NVIDIA GPU, which must be there.
    Cuda,
}

/// Processes that share a model's layers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PipelineConfig {
    /// How many there are.
    pub nodes: u32,
    /// Which one this is: 0 serves.
    pub node_rank: u32,
    /// Where node 0 listens for the others, `host:port`.
    pub master: String,
    /// How long they wait for each other.
    pub patience: Duration,
}

/// The simulator.
#[derive(Clone, Debug)]
pub struct SimConfig {
    /// GGUF file or folder whose tokenizer and template are used; without one, the simulator's own words.
    pub tokenizer: Option<PathBuf>,
    /// How long steps take.
    pub step_time: StepTime,
    /// Tokens after which an answer ends by itself, on average; `None` for never.
    pub mean_answer_tokens: Option<u64>,
    /// How long loading takes.
    pub load_time: Duration,
    /// Ranks it says it has.
    pub tensor_parallel: u32,
    /// Weight type it says it has.
    pub quantization: String,
}

/// Sizes of steps and sequences.
#[derive(Clone, Debug)]
pub struct Batching {
    /// Longest sequence; `None` for the model's own.
    pub max_model_tokens: Option<u32>,
    /// Most sequences in a step.
    pub max_sequences: u32,
    /// Most tokens in a step.
    pub max_step_tokens: u32,
    /// Tokens in a KV block; `None` for what suits the device.
    pub block_tokens: Option<u32>,
    /// How keys and values are held.
    pub kv_data_type: KvDataType,
    /// Size of the KV pool; `None` for what suits the machine.
    pub kv: Option<KvBudget>,
    /// Where blocks go that the pool gives up, if anywhere.
    pub swap: Option<SwapSpace>,
    /// How much may wait.
    pub queue: QueueLimits,
    /// Keep computed prompts for others that begin alike.
    pub prefix_cache: bool,
    /// How long those are kept that nobody uses.
    pub prefix_cache_ttl_seconds: Option<f64>,
    /// Tenants find each other's prompts.
    pub share_prefix_cache: bool,
    /// Who goes first.
    pub policy: Policy,
    /// Time between tokens that prefill beside them should not exceed.
    pub target_inter_token_seconds: Option<f64>,
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
/// How long the processes of a pipeline wait for each other to start and to load.
const NODE_PATIENCE: Duration = Duration::from_secs(600);

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
            admin_address: SocketAddr::new(args.host, args.admin_port),
            executor: executor(args)?,
            batching: batching(args)?,
            speculation: args.speculative_config.as_deref().map(Speculation::parse).transpose()?,
            tenants: tenants(args)?,
            refresh_every: REFRESH_EVERY,
            tls: tls(args)?,
            allowed_origins: allowed_origins(args)?,
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
        })
    }
}

fn served_names(args: &ServeArgs) -> Result<Vec<String>, Failure> {
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

fn executor(args: &ServeArgs) -> Result<ExecutorConfig, Failure> {
    let pipeline = pipeline(args)?;
    check_together(args)?;
    if args.tensor_parallel_size == 0 {
        return Err(Failure::configuration(format!("{} must be at least 1", flags::TENSOR_PARALLEL_SIZE)));
    }
    let encodes = args.executor == ExecutorKind::Cpu && is_encoder(Path::new(&args.model));
    check_runner(args, encodes)?;
    match args.executor {
        ExecutorKind::Sim if pipeline.is_some() => {
            let size = args.pipeline_parallel_size.to_string();
            Err(unsupported(flags::PIPELINE_PARALLEL_SIZE, &size, "the simulator is one process: use 1"))
        }
        ExecutorKind::Sim => Ok(ExecutorConfig::Sim(sim(args)?)),
        ExecutorKind::Cpu if encodes => Ok(ExecutorConfig::Encoder(encoder(args)?)),
        ExecutorKind::Cpu => Ok(ExecutorConfig::Cpu(CpuConfig { pipeline, ..cpu(args)? })),
    }
}

/// A model is served as what it is: the flags are a check.
fn check_runner(args: &ServeArgs, encodes: bool) -> Result<(), Failure> {
    let asked = [("--runner", args.runner), ("--task", args.task.into())];
    let wrong = |runner| matches!((runner, encodes), (Runner::Generate, true) | (Runner::Pooling, false));
    let Some((flag, _)) = asked.into_iter().find(|(_, runner)| wrong(*runner)) else { return Ok(()) };
    let (wanted, is) = if encodes { ("texts", "vectors or scores") } else { ("vectors or scores", "texts") };
    let message = format!("{flag} asks for a model that gives {wanted}, and this one gives {is}");
    Err(Failure::new(Reason::Unsupported, message))
}

/// Whether the folder's configuration names an encoder. What cannot be read is refused later, with its reason.
fn is_encoder(model: &Path) -> bool {
    HubFolder::is_at(model) && HubFolder::open(model).is_ok_and(|folder| Encoder::is_in(&folder))
}

fn encoder(args: &ServeArgs) -> Result<EncoderConfig, Failure> {
    if device(&args.device)? == DeviceChoice::Cuda {
        return Err(unsupported(flags::DEVICE, "cuda", "encoders are computed on the CPU: use auto or cpu"));
    }
    let sizes = [("--max-batch-size", args.max_batch_size), ("--max-batch-tokens", args.max_batch_tokens)];
    if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return Err(Failure::configuration(format!("{flag} must be at least 1")));
    }
    let limits = BatchLimits {
        max_wait: Duration::from_millis(args.max_batch_wait_ms.into()),
        max_texts: args.max_batch_size as usize,
        max_tokens: args.max_batch_tokens as usize,
        max_queue_tokens: args.max_queue_tokens,
    };
    Ok(EncoderConfig { model: PathBuf::from(&args.model), limits })
}

fn device(name: &str) -> Result<DeviceChoice, Failure> {
    match name {
        "auto" => Ok(DeviceChoice::Auto),
        "cpu" => Ok(DeviceChoice::Cpu),
        "cuda" => Ok(DeviceChoice::Cuda),
        other => Err(unsupported(flags::DEVICE, other, "use auto, cpu or cuda")),
    }
}

fn cpu(args: &ServeArgs) -> Result<CpuConfig, Failure> {
    let threads = args.threads.unwrap_or_else(machine::cpus);
    if threads == 0 {
        return Err(Failure::configuration("--threads must be at least 1"));
    }
    let quantization = Some(args.quantization.to_ascii_lowercase()).filter(|kind| kind != "auto");
    Ok(CpuConfig {
        device: device(&args.device)?,
        model: PathBuf::from(&args.model),
        threads,
        tensor_parallel: args.tensor_parallel_size,
        eager: args.enforce_eager,
        activations: args.activation_dtype.into(),
        quantization,
        pipeline: None,
    })
}

/// What several ranks or processes do not do yet.
fn check_together(args: &ServeArgs) -> Result<(), Failure> {
    let (ranks, nodes) = (args.tensor_parallel_size, args.pipeline_parallel_size);
    if args.swap_space > 0.0 && (ranks > 1 || nodes > 1) {
        let size = args.swap_space.to_string();
        return Err(unsupported("--swap-space", &size, "blocks that are divided among ranks or nodes are not swapped"));
    }
    match &args.speculative_config {
        Some(config) if nodes > 1 => {
            Err(unsupported("--speculative-config", config, "a pipeline of several nodes computes no guesses"))
        }
        _ => Ok(()),
    }
}

fn pipeline(args: &ServeArgs) -> Result<Option<PipelineConfig>, Failure> {
    let (nodes, node_rank) = (args.pipeline_parallel_size, args.node_rank);
    let flag = flags::PIPELINE_PARALLEL_SIZE;
    let wrong = match (args.nnodes, args.headless) {
        _ if nodes == 0 => format!("{flag} must be at least 1"),
        (Some(count), _) if count != nodes => {
            format!("--nnodes is {count} and {flag} is {nodes}: every node is a stage, so they are the same")
        }
        _ if node_rank >= nodes => format!("--node-rank is {node_rank}; with {flag} {nodes} it is less than {nodes}"),
        (_, true) if node_rank == 0 => "--headless is for nodes other than 0, which serves".to_owned(),
        (_, false) if node_rank > 0 => format!("node {node_rank} serves nothing: give it --headless"),
        _ => {
            let master = format!("{}:{}", args.master_addr, args.master_port);
            let pipeline = PipelineConfig { nodes, node_rank, master, patience: NODE_PATIENCE };
            return Ok(Some(pipeline).filter(|_| nodes > 1));
        }
    };
    Err(Failure::configuration(wrong))
}

fn sim(args: &ServeArgs) -> Result<SimConfig, Failure> {
    let SimArgs { sim_step_us, sim_prefill_token_us, sim_decode_sequence_us, sim_context_token_us, .. } = args.sim;
    let step_time = StepTime {
        base_us: microseconds("--sim-step-us", sim_step_us)?,
        prefill_token_us: microseconds("--sim-prefill-token-us", sim_prefill_token_us)?,
        decode_row_us: microseconds("--sim-decode-sequence-us", sim_decode_sequence_us)?,
        context_token_us: microseconds("--sim-context-token-us", sim_context_token_us)?,
    };
    let path = PathBuf::from(&args.model);
    Ok(SimConfig {
        tokenizer: path.exists().then_some(path),
        step_time,
        mean_answer_tokens: Some(args.sim.sim_mean_answer_tokens).filter(|tokens| *tokens > 0),
        load_time: Duration::try_from_secs_f64(args.sim.sim_load_seconds)
            .map_err(|error| Failure::configuration(format!("--sim-load-seconds: {error}")))?,
        tensor_parallel: args.tensor_parallel_size,
        quantization: if args.quantization == "auto" { "bf16".to_owned() } else { args.quantization.clone() },
    })
}

/// A step may take at most an hour, which keeps every sum of them a time.
fn microseconds(flag: &str, value: f64) -> Result<f64, Failure> {
    match (0.0..=3.6e9).contains(&value) {
        true => Ok(value),
        false => Err(Failure::configuration(format!("{flag} is {value}; it must be from 0 to 3.6e9"))),
    }
}

/// How the KV cache is to be held.
pub fn kv_data_type(name: &str) -> Result<KvDataType, Failure> {
    KvDataType::named(name)
        .ok_or_else(|| unsupported(flags::KV_CACHE_DTYPE, name, "use auto, bf16, f16, fp8, int8 or int4"))
}

fn batching(args: &ServeArgs) -> Result<Batching, Failure> {
    let sizes = [
        (flags::MAX_MODEL_LEN, args.max_model_len.unwrap_or(1)),
        (flags::MAX_NUM_SEQS, args.max_num_seqs),
        ("--max-num-batched-tokens", args.max_num_batched_tokens),
        ("--block-size", args.block_size.unwrap_or(1)),
        ("--num-gpu-blocks-override", args.num_gpu_blocks_override.unwrap_or(1)),
    ];
    if let Some((flag, _)) = sizes.iter().find(|(_, size)| *size == 0) {
        return Err(Failure::configuration(format!("{flag} must be at least 1")));
    }
    if args.max_num_batched_tokens < args.max_num_seqs {
        return Err(Failure::configuration(format!(
            "--max-num-batched-tokens is {} and {} is {}: a step must have a token for each sequence",
            args.max_num_batched_tokens,
            flags::MAX_NUM_SEQS,
            args.max_num_seqs
        )));
    }
    let bytes = args.kv_cache_memory_bytes.map(KvBudget::Bytes);
    Ok(Batching {
        max_model_tokens: args.max_model_len,
        max_sequences: args.max_num_seqs,
        max_step_tokens: args.max_num_batched_tokens,
        block_tokens: args.block_size,
        kv_data_type: kv_data_type(&args.kv_cache_dtype)?,
        kv: args.num_gpu_blocks_override.map(KvBudget::Blocks).or(bytes),
        swap: swap(args)?,
        queue: QueueLimits {
            max_waiting_requests: args.max_queue_requests,
            max_queued_prompt_tokens: args.max_queue_tokens,
            max_predicted_ttft_seconds: milliseconds("--max-predicted-ttft-ms", args.max_predicted_ttft_ms)?,
        },
        prefix_cache: !args.no_enable_prefix_caching,
        prefix_cache_ttl_seconds: positive("--prefix-cache-ttl", args.prefix_cache_ttl)?,
        share_prefix_cache: args.share_prefix_cache,
        policy: policy(args),
        target_inter_token_seconds: milliseconds("--target-inter-token-ms", args.target_inter_token_ms)?,
    })
}

/// Room outside the KV pool, which only cached prompts use.
fn swap(args: &ServeArgs) -> Result<Option<SwapSpace>, Failure> {
    const GIB: f64 = (1u64 << 30) as f64;
    if !(0.0..=1e6).contains(&args.swap_space) {
        return Err(Failure::configuration(format!(
            "--swap-space is {}; it must be from 0 to 1e6 GiB",
            args.swap_space
        )));
    }
    match (args.swap_space > 0.0, &args.swap_dir) {
        (false, Some(_)) => Err(Failure::configuration("--swap-dir needs --swap-space, the size of its file")),
        (true, _) if args.no_enable_prefix_caching => {
            Err(Failure::configuration("--swap-space keeps cached prompts, and --no-enable-prefix-caching caches none"))
        }
        (true, folder) => Ok(Some(SwapSpace { bytes: (args.swap_space * GIB) as u64, folder: folder.clone() })),
        (false, None) => Ok(None),
    }
}

fn tenants(args: &ServeArgs) -> Result<Option<TenantSource>, Failure> {
    let keys = match (&args.api_key_file, &args.api_key_dir) {
        (Some(_), Some(_)) => {
            let message = format!("give either --api-key-file or {}, not both", flags::API_KEY_DIR);
            return Err(Failure::configuration(message));
        }
        (Some(file), None) => Some(KeySource::File(file.clone())),
        (None, folder) => folder.clone().map(KeySource::Folder),
    };
    let limits = limits(args)?;
    match keys {
        Some(keys) => Ok(Some(TenantSource { keys, limits })),
        None if limits.default != Limits::default() || limits.file.is_some() => {
            Err(Failure::configuration("limits are for tenants: give their keys by --api-key-file or --api-key-dir"))
        }
        None => Ok(None),
    }
}

fn limits(args: &ServeArgs) -> Result<LimitsSource, Failure> {
    let default = Limits {
        max_concurrent_requests: args.tenant_max_concurrent_requests,
        tokens_per_minute: args.tenant_tokens_per_minute,
    };
    if default.stop_everything() {
        return Err(Failure::configuration("a tenant's limit must be at least 1"));
    }
    Ok(LimitsSource { default, file: args.tenant_limits_file.clone() })
}

fn tls(args: &ServeArgs) -> Result<Option<TlsSource>, Failure> {
    let clients = match (&args.ssl_ca_certs, args.ssl_cert_reqs) {
        (None, 0) => None,
        (Some(authorities), demanded @ 1..=2) => {
            Some(ClientSource { authorities: authorities.clone(), required: demanded == 2 })
        }
        (Some(_), _) => {
            let message = "--ssl-ca-certs is for clients' certificates: ask for them by --ssl-cert-reqs 2 (or 1)";
            return Err(Failure::configuration(message));
        }
        (None, _) => return Err(Failure::configuration("--ssl-cert-reqs needs --ssl-ca-certs to check them with")),
    };
    match (&args.ssl_certfile, &args.ssl_keyfile) {
        (Some(certificate), Some(key)) => {
            Ok(Some(TlsSource { certificate: certificate.clone(), key: key.clone(), clients }))
        }
        (None, None) if clients.is_none() => Ok(None),
        _ => Err(Failure::configuration("TLS needs both --ssl-certfile and --ssl-keyfile")),
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

/// A JSON list, as vLLM takes it, or one origin.
fn allowed_origins(args: &ServeArgs) -> Result<Vec<HeaderValue>, Failure> {
    let Some(text) = &args.allowed_origins else { return Ok(Vec::new()) };
    let wrong = |why: String| Failure::configuration(format!("--allowed-origins {text:?}: {why}"));
    let origins: Vec<String> = match text.starts_with('[') {
        true => serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?,
        false => vec![text.clone()],
    };
    let valid = |origin: &&String| *origin == "*" || origin.starts_with("http://") || origin.starts_with("https://");
    if let Some(origin) = origins.iter().find(|origin| !valid(origin)) {
        return Err(wrong(format!("{origin:?} is no origin; write https://host, or * for any")));
    }
    origins.iter().map(|origin| HeaderValue::from_str(origin).map_err(|error| wrong(error.to_string()))).collect()
}

fn policy(args: &ServeArgs) -> Policy {
    match args.scheduling_policy {
        SchedulingPolicy::Fcfs => Policy::Fcfs,
        SchedulingPolicy::Priority => Policy::Priority { preemption_threshold: args.priority_preemption_threshold },
        SchedulingPolicy::Fair => Policy::Fair,
        SchedulingPolicy::LongestPrefix => Policy::LongestPrefix,
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
            ("m --tensor-parallel-size 0", Reason::InvalidConfiguration, "--tensor-parallel-size"),
            ("m --kv-cache-dtype fp8_e5m2", Reason::Unsupported, "--kv-cache-dtype fp8_e5m2"),
            ("m --swap-space=-1", Reason::InvalidConfiguration, "--swap-space"),
            ("m --swap-dir /tmp", Reason::InvalidConfiguration, "--swap-space"),
            ("m --swap-space 1 --no-enable-prefix-caching", Reason::InvalidConfiguration, "--swap-space"),
            ("m --threads 0", Reason::InvalidConfiguration, "--threads"),
            ("m --max-num-seqs 0", Reason::InvalidConfiguration, "--max-num-seqs"),
            ("m --max-num-seqs 600", Reason::InvalidConfiguration, "--max-num-batched-tokens"),
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

    #[test]
    fn the_simulator_accepts_any_device_and_rank_count() {
        let config = config("m --executor sim --device cuda --tensor-parallel-size 8 --quantization fp8").unwrap();
        let ExecutorConfig::Sim(sim) = config.executor else { panic!("{:?}", config.executor) };
        assert_eq!((sim.tensor_parallel, sim.quantization.as_str()), (8, "fp8"));
    }
}
