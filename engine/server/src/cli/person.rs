//! Commands for a person: talk, measure, work through a file, reckon.

use super::ProcessArgs;
use clap::{Args, ValueEnum};
use std::path::PathBuf;

/// Who is asked, of the commands that ask a running server.
#[derive(Args, Clone, Debug)]
pub struct ServerArgs {
    /// File with the API key to send
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    pub key_file: Option<PathBuf>,
    /// PEM file with the authorities that sign the server's certificate [default: the public ones]
    #[arg(long, value_name = "FILE", help_heading = "Server")]
    pub ca_file: Option<PathBuf>,
    /// Model to ask for [default: the first one served]
    #[arg(long, value_name = "NAME", help_heading = "Server")]
    pub model_name: Option<String>,
}

/// Flags of `chat`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  windlass-engine chat SmolLM2-135M-Instruct.Q4_1.gguf
  windlass-engine chat http://localhost:8000 --temperature 0

An empty line is ignored, /reset forgets the conversation, /quit or the end of input ends it.")]
pub struct ChatArgs {
    /// Model file, which is loaded for this conversation, or http:// or https:// address of a server
    pub model: String,
    /// Instructions that come before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system: Option<String>,
    /// Sharpness of the distribution; 0 takes the likeliest token
    #[arg(long, default_value_t = 0.7)]
    pub temperature: f64,
    /// Longest answer
    #[arg(long, default_value_t = 1024, value_name = "TOKENS")]
    pub max_tokens: u32,
    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// Flags of `batch`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  windlass-engine batch model.gguf questions.jsonl answers.jsonl
  windlass-engine batch http://localhost:8000 questions.jsonl answers.jsonl --concurrency 16

A line is OpenAI's: {\"custom_id\": \"1\", \"method\": \"POST\", \"url\": \"/v1/chat/completions\", \"body\": {…}}. Run the same \
command again after an interruption: what is answered already is not asked again.")]
pub struct BatchArgs {
    /// Model file, which is loaded for this, or http:// or https:// address of a server
    pub model: String,
    /// Requests, a line each
    pub input: PathBuf,
    /// Answers, a line each, in the order in which they come
    pub output: PathBuf,
    /// Requests at once
    #[arg(long, default_value_t = 64, value_name = "N")]
    pub concurrency: usize,
    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// What the requests of a benchmark look like.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Profile {
    /// Prompts of about 200 tokens, answers of about 150
    Chat,
    /// Prompts of about 2000 tokens, answers of 32
    PrefillHeavy,
    /// Prompts of 32 tokens, answers of 512
    DecodeHeavy,
    /// Prompts of about 500 tokens, answers of 128, as many at once as allowed
    Batch,
}

/// Flags of `bench`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  windlass-engine bench http://localhost:8000 --rates 1,2,4,8 --svg latency.svg
      Latency against load: each rate for a while, requests arriving at random.
  windlass-engine bench http://localhost:8000 --profile batch --concurrency 64 --requests 512
      Throughput: 64 requests at once, always.")]
pub struct BenchArgs {
    /// http:// or https:// address of the server
    pub url: String,
    /// What requests look like
    #[arg(long, value_enum, default_value_t = Profile::Chat)]
    pub profile: Profile,
    /// Requests a second, one run for each, arriving at random [default: as many as --concurrency allows]
    #[arg(long, value_delimiter = ',', value_name = "RATE,…")]
    pub rates: Vec<f64>,
    /// Requests at once, at most
    #[arg(long, default_value_t = 32, value_name = "N")]
    pub concurrency: usize,
    /// Requests of each run
    #[arg(long, default_value_t = 200, value_name = "N")]
    pub requests: usize,
    /// Tokens of each prompt instead of the profile's
    #[arg(long, value_name = "TOKENS")]
    pub prompt_tokens: Option<u32>,
    /// Tokens of each answer instead of the profile's
    #[arg(long, value_name = "TOKENS")]
    pub answer_tokens: Option<u32>,
    /// A request is good if its first token came within this time …
    #[arg(long, default_value_t = 500.0, value_name = "MILLISECONDS")]
    pub ttft_target_ms: f64,
    /// … and its others in this time each, on average
    #[arg(long, default_value_t = 100.0, value_name = "MILLISECONDS")]
    pub tpot_target_ms: f64,
    /// Where prompts and arrivals are drawn from
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub seed: u64,
    /// File for a chart of latency against load
    #[arg(long, value_name = "FILE")]
    pub svg: Option<PathBuf>,
    /// File for all figures
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
    /// The server.
    #[command(flatten)]
    pub server: ServerArgs,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// What an engine computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum FitDevice {
    /// The machine's processors.
    Cpu,
    /// NVIDIA GPUs.
    Cuda,
}

/// Flags of `fit`.
#[derive(Args, Clone, Debug)]
#[command(after_help = "\
Examples:
  windlass-engine fit model.gguf
  windlass-engine fit model.gguf --memory 16Gi,24Gi,80Gi --max-model-len 8192
  windlass-engine fit model.gguf --memory 80Gi --requests-per-second 20 --prompt-tokens 500 --answer-tokens 200 \\
      --prefill-tokens-per-second 30000 --decode-tokens-per-second 4000
      How many replicas a peak needs, from what `bench` measured of one.")]
pub struct FitArgs {
    /// Model file, or folder that holds exactly one
    pub model: PathBuf,
    /// Memories to fit into, as in 16Gi [default: what this machine has free]
    #[arg(long, value_delimiter = ',', value_name = "BYTES,…")]
    pub memory: Vec<String>,
    /// Longest sequence [default: what the model was trained for]
    #[arg(long, value_name = "TOKENS")]
    pub max_model_len: Option<u32>,
    /// How the KV cache holds keys and values: bf16, f16, fp8, int8 or int4
    #[arg(long, default_value = "bf16", value_name = "TYPE")]
    pub kv_cache_dtype: String,
    /// What float weights become: int8, fp8 or int4 [default: what they are]
    #[arg(long, value_name = "TYPE")]
    pub quantization: Option<String>,
    /// Size of the KV pool [default: what `serve` takes]
    #[arg(long, value_name = "BYTES")]
    pub kv_cache_memory_bytes: Option<u64>,
    /// What computes, for what steps are where nothing is said of them
    #[arg(long, value_enum, default_value_t = FitDevice::Cpu)]
    pub device: FitDevice,
    /// Most sequences in one step [default: 64, on CUDA 256]
    #[arg(long, value_name = "N")]
    pub max_num_seqs: Option<u32>,
    /// Most tokens in one step [default: 512, on CUDA 2048]
    #[arg(long, value_name = "TOKENS")]
    pub max_num_batched_tokens: Option<u32>,
    /// Requests a second at the peak
    #[arg(long, value_name = "RATE", help_heading = "Replicas", requires_all = ["prefill_tokens_per_second", "decode_tokens_per_second"])]
    pub requests_per_second: Option<f64>,
    /// Tokens of a prompt
    #[arg(long, default_value_t = 500, value_name = "TOKENS", help_heading = "Replicas")]
    pub prompt_tokens: u32,
    /// Tokens of an answer
    #[arg(long, default_value_t = 200, value_name = "TOKENS", help_heading = "Replicas")]
    pub answer_tokens: u32,
    /// Prompt tokens a second of one replica
    #[arg(long, value_name = "RATE", help_heading = "Replicas")]
    pub prefill_tokens_per_second: Option<f64>,
    /// Generated tokens a second of one replica with a full batch
    #[arg(long, value_name = "RATE", help_heading = "Replicas")]
    pub decode_tokens_per_second: Option<f64>,
    /// Milliseconds between tokens at that speed
    #[arg(long, default_value_t = 50.0, value_name = "MILLISECONDS", help_heading = "Replicas")]
    pub inter_token_ms: f64,
    /// Share of its time that a replica should be busy at the peak
    #[arg(long, default_value_t = 0.8, value_name = "SHARE", help_heading = "Replicas")]
    pub utilization: f64,
    /// The process.
    #[command(flatten)]
    pub process: ProcessArgs,
}
