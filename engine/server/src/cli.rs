//! The command line as it is typed. What it means is decided in [`crate::config`].

mod kernels;
mod person;

use crate::config::GpuLayers;
use clap::{Args, Parser, Subcommand, ValueEnum};
pub use kernels::{BuildArgs, KernelsArgs, KernelsCommand};
pub use person::{BatchArgs, BenchArgs, ChatArgs, FitArgs, FitDevice, Profile, ServerArgs};
use std::net::IpAddr;
use std::path::PathBuf;
use windlass_engine_contract::flags::{self, fetch, inspect};
use windlass_engine_contract::{ADMIN_PORT, API_PORT, PIPELINE_PORT};
use windlass_engine_model::{ActivationType, MemoryShare};

/// A flag's name as clap wants it, without its dashes.
const fn bare(flag: &'static str) -> &'static str {
    flag.split_at(2).1
}

/// The flag that bounds what is taken of a GPU's memory.
pub const GPU_MEMORY_UTILIZATION: &str = "--gpu-memory-utilization";
/// The flag that leaves experts whole.
pub const ENABLE_EXPERT_PARALLEL: &str = "--enable-expert-parallel";
/// The flag that leaves layers to the CPU.
pub const N_GPU_LAYERS: &str = "--n-gpu-layers";
/// How finely activations are rounded.
pub const ACTIVATION_DTYPE: &str = "--activation-dtype";

const AFTER_HELP: &str = "\
Examples:
  windlass-engine serve SmolLM2-135M-Instruct.Q4_1.gguf
      Serves a model on port 8000; probes, metrics and drain are on port 8001.
  windlass-engine serve my-model --executor sim
      The same server without a model: simulated times, made-up words.
  windlass-engine inspect SmolLM2-135M-Instruct.Q4_1.gguf --summary
      Prints the model's shape and the memory it takes.
  windlass-engine fetch hf://org/name --to /cache/name
      Downloads, resumes and verifies; does nothing for what is already there.

Ask a running server:
  curl localhost:8000/v1/chat/completions -H 'Content-Type: application/json' \\
    -d '{\"model\":\"SmolLM2-135M-Instruct.Q4_1\",\"messages\":[{\"role\":\"user\",\"content\":\"Hi!\"}]}'";

/// Serves language models over an OpenAI-compatible API.
#[derive(Debug, Parser)]
#[command(name = "windlass-engine", version, after_help = AFTER_HELP, max_term_width = 110)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve a model until told to stop
    #[command(after_help = AFTER_HELP)]
    Serve(Box<ServeArgs>),
    /// Download a model or a file, resume an interrupted download, verify checksums
    Fetch(FetchArgs),
    /// Print a model's shape and memory as JSON
    Inspect(InspectArgs),
    /// Measure a model's perplexity on a text, and its divergence from another model
    Eval(EvalArgs),
    /// Talk to a model in the terminal
    Chat(ChatArgs),
    /// Answer a file of requests; resume where an earlier run stopped
    Batch(BatchArgs),
    /// Put load on a server and measure its latency and throughput
    Bench(BenchArgs),
    /// Show what fits into which memory, and how many replicas a peak load needs
    Fit(FitArgs),
    /// Compile the CUDA kernels ahead of the first start
    Kernels(KernelsArgs),
    /// Run chat templates for a server, which starts this by itself
    #[command(hide = true)]
    RenderTemplates(ProcessArgs),
}

/// Flags of every command.
#[derive(Args, Clone, Debug)]
pub struct ProcessArgs {
    /// File for the structured last word when the program fails [default: /dev/termination-log if it exists]
    #[arg(long, value_name = "FILE", help_heading = "Process")]
    pub termination_log: Option<PathBuf>,
    /// How log lines are written to standard error
    #[arg(long, value_enum, default_value_t = LogFormat::Text, help_heading = "Process")]
    pub log_format: LogFormat,
}

/// How log lines are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum LogFormat {
    /// For people
    Text,
    /// One JSON object per line
    Json,
}

/// What happens to a request with a field that nobody knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum UnknownFields {
    /// 400 with its name
    Refuse,
    /// Served as if it were not there
    Ignore,
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ExecutorKind {
    /// The model, on this machine's GPUs or CPU: see --device
    Model,
    /// A simulation: times from a formula, tokens from a hash
    Sim,
}

/// How finely activations are rounded before they multiply quantized weights.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum ActivationDtype {
    /// 8 bits in blocks of 32: the fastest
    Int8,
    /// Two times 8 bits: as good as floats, for twice the products
    Int16,
}

impl From<ActivationDtype> for ActivationType {
    fn from(dtype: ActivationDtype) -> ActivationType {
        match dtype {
            ActivationDtype::Int8 => ActivationType::Int8,
            ActivationDtype::Int16 => ActivationType::Int16,
        }
    }
}

/// What a model is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Runner {
    /// As its files tell
    Auto,
    /// Texts
    Generate,
    /// Vectors and scores
    Pooling,
}

/// What a model is for, as vLLM once called it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Task {
    /// As its files tell
    Auto,
    /// Texts
    Generate,
    /// Vectors
    #[value(alias = "embedding")]
    Embed,
    /// Scores
    Score,
}

impl From<Task> for Runner {
    fn from(task: Task) -> Runner {
        match task {
            Task::Auto => Runner::Auto,
            Task::Generate => Runner::Generate,
            Task::Embed | Task::Score => Runner::Pooling,
        }
    }
}

/// Who goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum SchedulingPolicy {
    /// First come, first served
    Fcfs,
    /// The lowest `priority` of the request first
    Priority,
    /// Tenants in turn, each with as many tokens as the others
    Fair,
    /// The longest cached prefix first
    LongestPrefix,
}

/// Flags of `serve`, by vLLM's names where vLLM has them.
#[derive(Args, Clone, Debug)]
pub struct ServeArgs {
    /// GGUF file, or folder that holds exactly one, or of the hub's kind; or an address as `fetch` takes it (hf://, s3://,
    /// gs://, az://, oci://, https://), from which it comes while it is loaded; with `--executor sim` any name will do
    pub model: String,
    /// Where a model that comes from an address is kept, beside others
    #[arg(long, value_name = "FOLDER", help_heading = "Source")]
    pub download_dir: Option<PathBuf>,
    /// How it comes from there.
    #[command(flatten)]
    pub download: DownloadArgs,

    /// Name that requests give as `model`; repeat it for more [default: the file's name without `.gguf`]
    #[arg(long = bare(flags::SERVED_MODEL_NAME), value_name = "NAME", num_args = 1.., help_heading = "API")]
    pub served_model_name: Vec<String>,
    /// Address to listen on
    #[arg(long = bare(flags::HOST), default_value = "0.0.0.0", help_heading = "API")]
    pub host: IpAddr,
    /// Port of the OpenAI API; 0 takes a free one
    #[arg(long = bare(flags::PORT), default_value_t = API_PORT, help_heading = "API")]
    pub port: u16,
    /// Address of probes, metrics, stats and drain: others than this machine's programs see them where it is wider
    #[arg(long = bare(flags::ADMIN_HOST), default_value = "127.0.0.1", help_heading = "API")]
    pub admin_host: IpAddr,
    /// File with tokens, a line each, of which requests for anything but probes need one: `Authorization: Bearer TOKEN`
    #[arg(long = bare(flags::ADMIN_TOKEN_FILE), value_name = "FILE", help_heading = "API")]
    pub admin_token_file: Option<PathBuf>,
    /// Port of probes, metrics, stats and drain; 0 takes a free one
    #[arg(long = bare(flags::ADMIN_PORT), default_value_t = ADMIN_PORT, help_heading = "API")]
    pub admin_port: u16,
    /// PEM file with the server's certificate chain; the API then speaks TLS. Read again when it changes
    #[arg(long, value_name = "FILE", help_heading = "API")]
    pub ssl_certfile: Option<PathBuf>,
    /// PEM file with its private key
    #[arg(long, value_name = "FILE", help_heading = "API")]
    pub ssl_keyfile: Option<PathBuf>,
    /// PEM file with the authorities that sign clients' certificates
    #[arg(long, value_name = "FILE", help_heading = "API")]
    pub ssl_ca_certs: Option<PathBuf>,
    /// Clients' certificates: 0 not asked for, 1 checked if shown, 2 required
    #[arg(long, default_value_t = 0, value_parser = clap::value_parser!(u8).range(0..=2), value_name = "N", help_heading = "API")]
    pub ssl_cert_reqs: u8,
    /// Origins whose pages browsers let ask: a JSON list, or one; `*` is any
    #[arg(long, value_name = "ORIGINS", help_heading = "API")]
    pub allowed_origins: Option<String>,
    /// What to do with request fields that are in no API this server knows
    #[arg(long, value_enum, default_value_t = UnknownFields::Refuse, help_heading = "API")]
    pub unknown_fields: UnknownFields,
    /// Memory that the bodies of all requests may take together; by default a quarter of what is free once the model
    /// stands, from 16 to 256 MiB. The largest body has an eighth of it
    #[arg(long, value_name = "BYTES", value_parser = clap::value_parser!(u64).range(1 << 20..), help_heading = "API")]
    pub body_memory_bytes: Option<u64>,
    /// Log the prompt of every request that generates
    #[arg(long, help_heading = "API")]
    pub enable_log_requests: bool,
    /// Log the text of every answer
    #[arg(long, help_heading = "API")]
    pub enable_log_outputs: bool,
    /// Characters of a prompt or an answer that a log line holds at most
    #[arg(long, value_name = "CHARACTERS", default_value_t = 2000, help_heading = "API")]
    pub max_log_len: usize,
    /// Send a span for every request to this OTLP collector, by HTTP: http://host:4318/v1/traces
    #[arg(long, value_name = "URL", help_heading = "API")]
    pub otlp_traces_endpoint: Option<String>,
    /// File with API keys, a line each: `KEY` or `TENANT KEY`; requests then need `Authorization: Bearer KEY`
    #[arg(long, value_name = "FILE", help_heading = "API")]
    pub api_key_file: Option<PathBuf>,
    /// Folder in which every file is a tenant and every line in it one of its API keys, read again when it changes
    #[arg(long = bare(flags::API_KEY_DIR), value_name = "DIR", help_heading = "API")]
    pub api_key_dir: Option<PathBuf>,
    /// Requests of one tenant that this replica answers at once
    #[arg(long, value_name = "N", help_heading = "API")]
    pub tenant_max_concurrent_requests: Option<u32>,
    /// Tokens a minute of one tenant on this replica, prompts and answers together
    #[arg(long, value_name = "TOKENS", help_heading = "API")]
    pub tenant_tokens_per_minute: Option<u64>,
    /// JSON file with limits of single tenants: {"NAME": {"max_concurrent_requests": 4, "tokens_per_minute": 60000}}
    #[arg(long, value_name = "FILE", help_heading = "API")]
    pub tenant_limits_file: Option<PathBuf>,

    /// Chat template to use instead of the model's own
    #[arg(long, value_name = "FILE", help_heading = "Conversations")]
    pub chat_template: Option<PathBuf>,
    /// Render requests that bring a chat template (`chat_template`) with theirs
    #[arg(long, help_heading = "Conversations")]
    pub trust_request_chat_template: bool,
    /// How the model writes calls of tools: auto (as its chat template tells), none, or a format's name
    #[arg(long, default_value = "auto", value_name = "FORMAT", help_heading = "Conversations")]
    pub tool_call_parser: String,
    /// Calls may be left to the model: always so where its format is known, and accepted for those who ask for it
    #[arg(long, help_heading = "Conversations")]
    pub enable_auto_tool_choice: bool,
    /// How the model writes what it thinks before it answers: auto (as its vocabulary tells), none, or a format's name
    #[arg(long, default_value = "auto", value_name = "FORMAT", help_heading = "Conversations")]
    pub reasoning_parser: String,

    /// Longest sequence in tokens, prompt and answer together [default: what the model was trained for]
    #[arg(long = bare(flags::MAX_MODEL_LEN), value_name = "TOKENS", help_heading = "Model")]
    pub max_model_len: Option<u32>,
    /// What float weights become as they are loaded: int8, fp8, int4 (also -g64, -g128, -sym, -g64-sym, -g128-sym);
    /// auto, or the type that the file holds (q4_1, q8_0, …), as a check
    #[arg(long = bare(flags::QUANTIZATION), default_value = "auto", value_name = "TYPE", help_heading = "Model")]
    pub quantization: String,
    /// How the KV cache holds keys and values: auto (bf16), f16, fp8 or int8 (half the memory), int4
    #[arg(long = bare(flags::KV_CACHE_DTYPE), default_value = "auto", value_name = "TYPE", help_heading = "Model")]
    pub kv_cache_dtype: String,
    /// How finely activations are rounded before they multiply quantized weights: on a CPU int8 unless told, on a GPU bf16, and
    /// int8 (for a GGUF file's integers) if told
    #[arg(long = bare(ACTIVATION_DTYPE), value_enum, help_heading = "Model")]
    pub activation_dtype: Option<ActivationDtype>,
    /// Ranks that share the model: on a CPU each has its part of the weights and of the threads
    #[arg(long = bare(flags::TENSOR_PARALLEL_SIZE), default_value_t = 1, value_name = "N", help_heading = "Model")]
    pub tensor_parallel_size: u32,
    /// Ranks hold a mixture's experts whole, each some of them, instead of columns of every one
    #[arg(long = bare(ENABLE_EXPERT_PARALLEL), help_heading = "Model")]
    pub enable_expert_parallel: bool,
    /// Processes that share the model's layers, this one among them; each has its own `--tensor-parallel-size`
    #[arg(long = bare(flags::PIPELINE_PARALLEL_SIZE), default_value_t = 1, value_name = "N", help_heading = "Model")]
    pub pipeline_parallel_size: u32,
    /// Which of those processes this is: 0 serves, the others (`--headless`) only compute
    #[arg(long = bare(flags::NODE_RANK), default_value_t = 0, value_name = "N", help_heading = "Model")]
    pub node_rank: u32,
    /// How many processes there are: as many as `--pipeline-parallel-size`
    #[arg(long = bare(flags::NNODES), value_name = "N", help_heading = "Model")]
    pub nnodes: Option<u32>,
    /// Where node 0 listens for the others. It trusts who comes: never expose it
    #[arg(long = bare(flags::MASTER_ADDR), default_value = "127.0.0.1", value_name = "HOST", help_heading = "Model")]
    pub master_addr: String,
    /// Port of that
    #[arg(long = bare(flags::MASTER_PORT), default_value_t = PIPELINE_PORT, value_name = "PORT", help_heading = "Model")]
    pub master_port: u16,
    /// Serve nothing: what every node but 0 does
    #[arg(long = bare(flags::HEADLESS), help_heading = "Model")]
    pub headless: bool,
    /// Where to compute: cpu, cuda, or auto for a GPU where there is one
    #[arg(long = bare(flags::DEVICE), default_value = "auto", help_heading = "Model")]
    pub device: String,
    /// Layers that the GPU computes, for a model that it has no room for: the last ones, with the head, or auto for as many
    /// as fit. Those before stay on the CPU; a step goes through one after the other, so each layer left behind costs speed
    /// [default: all]
    #[arg(long = bare(N_GPU_LAYERS), value_name = "N", help_heading = "Model")]
    pub n_gpu_layers: Option<GpuLayers>,
    /// On CUDA: launch every kernel of every step instead of replaying what was recorded; changes nothing elsewhere
    #[arg(long, help_heading = "Model")]
    pub enforce_eager: bool,
    /// What the model is for, as a check
    #[arg(long, value_enum, default_value_t = Runner::Auto, help_heading = "Model")]
    pub runner: Runner,
    /// The same by vLLM's older name
    #[arg(long, value_enum, default_value_t = Task::Auto, help_heading = "Model")]
    pub task: Task,
    /// What computes
    #[arg(long, value_enum, default_value_t = ExecutorKind::Model, help_heading = "Model")]
    pub executor: ExecutorKind,
    /// Threads that compute [default: the CPUs this process may use]
    #[arg(long, value_name = "N", help_heading = "Model")]
    pub threads: Option<usize>,

    /// Most sequences in one step [default: 64, on CUDA 256]
    #[arg(long = bare(flags::MAX_NUM_SEQS), value_name = "N", help_heading = "Batching and memory")]
    pub max_num_seqs: Option<u32>,
    /// Most tokens in one step: longer prompts are computed in chunks [default: 512, on CUDA 2048]
    #[arg(long, value_name = "TOKENS", help_heading = "Batching and memory")]
    pub max_num_batched_tokens: Option<u32>,
    /// Tokens in a KV block, a multiple of 16 [default: 16, on CUDA 64]
    #[arg(long, value_name = "TOKENS", help_heading = "Batching and memory")]
    pub block_size: Option<u32>,
    /// Bytes of the KV cache [default: what the sequences can use, at most a quarter of the free memory]
    #[arg(long, value_name = "BYTES", help_heading = "Batching and memory")]
    pub kv_cache_memory_bytes: Option<u64>,
    /// Share of each GPU's memory that the engine may take, weights and all, from above 0 to 1: less where others compute
    /// there, such as 0.45 for each of two engines. Of what weights leave of it keys and values take nine tenths at most, unless
    /// their size is given; changes nothing on a CPU
    #[arg(long = bare(GPU_MEMORY_UTILIZATION), default_value = "1", value_name = "SHARE", help_heading = "Batching and memory")]
    pub gpu_memory_utilization: MemoryShare,
    /// KV blocks, instead of a number of bytes
    #[arg(long, value_name = "BLOCKS", conflicts_with = "kv_cache_memory_bytes", help_heading = "Batching and memory")]
    pub num_gpu_blocks_override: Option<u32>,
    /// GiB for cached prompts outside the KV cache: they go there when their room is needed, and come back
    #[arg(long, default_value_t = 0.0, value_name = "GIB", help_heading = "Batching and memory")]
    pub swap_space: f64,
    /// Folder of a file for them [default: memory]
    #[arg(long, value_name = "DIR", help_heading = "Batching and memory")]
    pub swap_dir: Option<PathBuf>,
    /// Compute every prompt from its first token
    #[arg(long, help_heading = "Batching and memory")]
    pub no_enable_prefix_caching: bool,
    /// Forget cached prompts that nobody used for so long [default: when their room is needed]
    #[arg(long, value_name = "SECONDS", help_heading = "Batching and memory")]
    pub prefix_cache_ttl: Option<f64>,
    /// Let tenants with different keys find each other's prompts in the cache
    #[arg(long, help_heading = "Batching and memory")]
    pub share_prefix_cache: bool,
    /// Who goes first
    #[arg(long, value_enum, default_value_t = SchedulingPolicy::Fcfs, help_heading = "Batching and memory")]
    pub scheduling_policy: SchedulingPolicy,
    /// With the policy priority: a waiting request preempts a running one whose priority is higher by more than this
    #[arg(long, default_value_t = 10, value_name = "N", help_heading = "Batching and memory")]
    pub priority_preemption_threshold: u32,
    /// Cut prompts into chunks small enough that the tokens of running sequences come so often [default: three times what
    /// they take without prompts]
    #[arg(long, value_name = "MILLISECONDS", help_heading = "Batching and memory")]
    pub target_inter_token_ms: Option<f64>,
    /// Refuse with 429 and Retry-After what would wait longer than this for its first token
    #[arg(long, value_name = "MILLISECONDS", help_heading = "Batching and memory")]
    pub max_predicted_ttft_ms: Option<f64>,
    /// Same bytes out whatever else is served: so it is without the flag, too
    #[arg(long, help_heading = "Batching and memory")]
    pub deterministic: bool,
    /// Multiply many tokens at once faster than few, by products that round otherwise, so that a token may depend on what is
    /// computed beside it: on CUDA, and on CPUs with AVX-512 in K-quants
    #[arg(long, conflicts_with = "deterministic", help_heading = "Batching and memory")]
    pub no_deterministic: bool,
    /// Speculative decoding, as vLLM spells it: {"method": "ngram"|"suffix"|"draft_model", "num_speculative_tokens": N,
    /// "prompt_lookup_min": N, "prompt_lookup_max": N, "model": FILE} [default: off]
    #[arg(long, value_name = "JSON", help_heading = "Batching and memory")]
    pub speculative_config: Option<String>,
    /// Requests that may wait; one more is refused with 429 and Retry-After
    #[arg(long, default_value_t = 256, value_name = "N", help_heading = "Batching and memory")]
    pub max_queue_requests: u32,
    /// Prompt tokens that may wait
    #[arg(long, default_value_t = 262_144, value_name = "TOKENS", help_heading = "Batching and memory")]
    pub max_queue_tokens: u64,

    /// Encoders: how long a text waits for others to be computed with
    #[arg(long, default_value_t = 5, value_name = "MILLISECONDS", help_heading = "Batching and memory")]
    pub max_batch_wait_ms: u32,
    /// Encoders: most texts computed together
    #[arg(long, default_value_t = 32, value_name = "N", help_heading = "Batching and memory")]
    pub max_batch_size: u32,
    /// Encoders: most tokens computed together, padding counted
    #[arg(long, default_value_t = 8192, value_name = "TOKENS", help_heading = "Batching and memory")]
    pub max_batch_tokens: u32,

    /// After SIGTERM or a drain, how long new requests are still served while endpoints propagate
    #[arg(long, default_value_t = 5, value_name = "SECONDS", help_heading = "Life cycle")]
    pub drain_accept_seconds: u32,
    /// After SIGTERM or a drain, how long streams may take to finish
    #[arg(long = bare(flags::DRAIN_TIMEOUT_SECONDS), default_value_t = 300, value_name = "SECONDS", help_heading = "Life cycle")]
    pub drain_timeout_seconds: u32,
    /// How long a client may keep one connection; ±10 %, ended between requests only; 0 for ever
    #[arg(long, default_value_t = 60, value_name = "SECONDS", help_heading = "Life cycle")]
    pub max_connection_age_seconds: u32,
    /// With work queued and no step finished for this long the server is not ready, and after twice as long not alive
    #[arg(long, default_value_t = 30, value_name = "SECONDS", help_heading = "Life cycle")]
    pub stall_timeout_seconds: u32,

    /// The simulated device.
    #[command(flatten)]
    pub sim: SimArgs,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// Step time of the simulated device: a sum of these.
#[derive(Args, Clone, Copy, Debug)]
#[command(next_help_heading = "Simulator")]
pub struct SimArgs {
    /// Microseconds of any step
    #[arg(long, default_value_t = 10_000.0, value_name = "MICROSECONDS")]
    pub sim_step_us: f64,
    /// Microseconds of each prompt token
    #[arg(long, default_value_t = 1_000.0, value_name = "MICROSECONDS")]
    pub sim_prefill_token_us: f64,
    /// Microseconds of each sequence that generates
    #[arg(long, default_value_t = 1_500.0, value_name = "MICROSECONDS")]
    pub sim_decode_sequence_us: f64,
    /// Microseconds of each token attended to
    #[arg(long, default_value_t = 1.0, value_name = "MICROSECONDS")]
    pub sim_context_token_us: f64,
    /// Answers end by themselves after so many tokens on average; 0 lets them run to their limit
    #[arg(long, default_value_t = 200, value_name = "TOKENS")]
    pub sim_mean_answer_tokens: u64,
    /// Seconds that loading the model takes
    #[arg(long, default_value_t = 0.0, value_name = "SECONDS")]
    pub sim_load_seconds: f64,
}

/// Flags of `fetch`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  windlass-engine fetch https://host/model.gguf --to /var/cache/windlass/model.gguf --sha256 9f86d0…
  cat model.gguf | windlass-engine fetch - --to /models/model.gguf --sha256 9f86d0…

An interrupted download leaves FILE.part and the next attempt goes on from there. The file appears under its own name \
only after its checksum was verified.")]
pub struct FetchArgs {
    /// hf://org/name, s3://bucket/prefix, gs://…, az://…, oci://registry/repository:tag, each for a whole model or with a
    /// GGUF file's name at the end; https:// or http:// for a file; or `-` for standard input
    pub source: String,
    /// Where it goes: the file that the source names, or a folder for the model's files
    #[arg(long = bare(fetch::TO), value_name = "PATH")]
    pub to: PathBuf,
    /// How it comes there.
    #[command(flatten)]
    pub download: DownloadArgs,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// How a model comes from its source, and what is kept of it.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Source")]
pub struct DownloadArgs {
    /// SHA-256 of the file, 64 hexadecimal digits: required for https://, http:// and -
    #[arg(long = bare(fetch::SHA256), value_name = "HEX")]
    pub sha256: Option<String>,
    /// How the source is reached.
    #[command(flatten)]
    pub access: AccessArgs,
    /// Folder of contents that models and pods share, on the file system of the model [default: blobs beside it]
    #[arg(long, value_name = "FOLDER")]
    pub cache: Option<PathBuf>,
    /// Most bytes that the model and those beside it may take together. What no engine serves makes room, the longest
    /// unused first
    #[arg(long = bare(fetch::CACHE_MAX_BYTES), value_name = "BYTES")]
    pub cache_max_bytes: Option<u64>,
    /// Removes models beside it that no engine serves, and that were not asked for in so many seconds
    #[arg(long = bare(fetch::CACHE_KEEP_SECONDS), value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(u64::from(fetch::MIN_CACHE_KEEP_SECONDS)..))]
    pub cache_keep_seconds: Option<u64>,
    /// Parts that are downloaded at a time
    #[arg(long, default_value_t = 8, value_name = "N")]
    pub connections: usize,
    /// Largest model accepted
    #[arg(long, default_value_t = 1 << 40, value_name = "BYTES")]
    pub max_bytes: u64,
}

/// How a model that is elsewhere is reached.
#[derive(Args, Clone, Debug)]
#[command(next_help_heading = "Source")]
pub struct AccessArgs {
    /// Branch, tag or commit of hf:// [default: main]
    #[arg(long = bare(fetch::REVISION), value_name = "REVISION")]
    pub revision: Option<String>,
    /// The hub, or a mirror of it
    #[arg(long, env = "HF_ENDPOINT", default_value = "https://huggingface.co", value_name = "URL")]
    pub hf_endpoint: String,
    /// Folder with a file for each setting of an object store, named like it: AWS_ACCESS_KEY_ID, …
    #[arg(long = bare(fetch::CREDENTIALS_DIR), value_name = "FOLDER")]
    pub credentials_dir: Option<PathBuf>,
    /// File with a token to send as `Authorization: Bearer`; for oci://, with `user:password`
    #[arg(long = bare(fetch::TOKEN_FILE), value_name = "FILE")]
    pub token_file: Option<PathBuf>,
    /// PEM file with certificate authorities to trust instead of the public ones
    #[arg(long = bare(fetch::CA_FILE), value_name = "FILE")]
    pub ca_file: Option<PathBuf>,
}

/// Flags of `inspect`.
#[derive(Args, Clone, Debug)]
pub struct InspectArgs {
    /// GGUF file, folder that holds one model, or the address of a model as `fetch` takes it (hf://, s3://, gs://, az://,
    /// oci://, https://), of which only headers are read
    #[arg(value_name = "MODEL")]
    pub model: String,
    /// Leave out the list of tensor types
    #[arg(long = bare(inspect::SUMMARY))]
    pub summary: bool,
    /// How a model that is elsewhere is reached.
    #[command(flatten)]
    pub access: AccessArgs,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// Flags of `eval`.
#[derive(Args, Clone, Debug)]
pub struct EvalArgs {
    /// GGUF file, or folder that holds one model
    pub model: PathBuf,
    /// Text file, or - for standard input
    pub text: PathBuf,
    /// Model to compare with: usually what the first was quantized from
    #[arg(long, value_name = "MODEL")]
    pub against: Option<PathBuf>,
    /// int8, fp8, int4 (also -g64, -g128, -sym, -g64-sym, -g128-sym): what float weights become as they are loaded
    #[arg(long, value_name = "TYPE")]
    pub quantization: Option<String>,
    /// How the model's KV cache holds keys and values: bf16, f16, fp8, int8 or int4
    #[arg(long, default_value = "bf16", value_name = "TYPE")]
    pub kv_cache_dtype: String,
    /// How finely both models' activations are rounded before they multiply quantized weights
    #[arg(long, value_enum, default_value_t = ActivationDtype::Int8, value_name = "TYPE")]
    pub activation_dtype: ActivationDtype,
    /// Let products of many tokens round both models' weights and activations as `serve --no-deterministic` does
    #[arg(long)]
    pub no_deterministic: bool,
    /// Tokens that are read together; the second half of them is scored
    #[arg(long, value_name = "TOKENS", default_value_t = 512)]
    pub window_tokens: usize,
    /// Windows to score [default: all of the text]
    #[arg(long, value_name = "N")]
    pub windows: Option<usize>,
    /// Threads that compute [default: the CPUs the process may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

impl Command {
    /// What is logged unless `RUST_LOG` says otherwise: where a person reads answers, only what goes wrong.
    pub fn log_level(&self) -> &'static str {
        match self {
            Command::Serve(_) | Command::Fetch(_) | Command::Inspect(_) | Command::RenderTemplates(_) => "info",
            Command::Chat(_)
            | Command::Batch(_)
            | Command::Bench(_)
            | Command::Fit(_)
            | Command::Eval(_)
            | Command::Kernels(_) => "warn",
        }
    }

    /// Flags of the process.
    pub fn process(&self) -> &ProcessArgs {
        match self {
            Command::Serve(args) => &args.process,
            Command::Fetch(args) => &args.process,
            Command::Inspect(args) => &args.process,
            Command::Eval(args) => &args.process,
            Command::Chat(args) => &args.process,
            Command::Batch(args) => &args.process,
            Command::Bench(args) => &args.process,
            Command::Fit(args) => &args.process,
            Command::Kernels(KernelsArgs { command: KernelsCommand::Build(args) }) => &args.process,
            Command::RenderTemplates(process) => process,
        }
    }
}
