//! What computes: a model on a CPU or GPU, an encoder, or the simulator.

use super::unsupported;
use crate::cli::{ENABLE_EXPERT_PARALLEL, ExecutorKind, N_GPU_LAYERS, Runner, ServeArgs, SimArgs, Task};
use crate::encoding::BatchLimits;
use crate::failure::Failure;
use crate::machine;
use std::fmt::{self, Display, Formatter};
use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;
use windlass_checkpoint::HubFolder;
use windlass_engine_contract::flags;
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::sim::StepTime;
use windlass_engine_model::{ActivationType, Encoder, MemoryShare};

/// What computes.
#[derive(Clone, Debug)]
pub enum ExecutorConfig {
    /// A model on this machine's CPU.
    Cpu(CpuConfig),
    /// The simulator.
    Sim(SimConfig),
    /// An encoder, on this machine's CPU or simulated.
    Encoder(EncoderConfig),
}

/// A model that reads texts and writes none.
#[derive(Clone, Debug)]
pub struct EncoderConfig {
    /// What reads them.
    pub model: EncoderModel,
    /// How texts are put together.
    pub limits: BatchLimits,
}

/// What an encoder is.
#[derive(Clone, Debug)]
pub enum EncoderModel {
    /// A folder's weights, on this machine's CPU.
    Folder(PathBuf),
    /// The simulator.
    Sim {
        /// As it simulates any model.
        sim: SimConfig,
        /// It gives scores of pairs, and not vectors.
        scores: bool,
    },
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
    /// Whether a rank holds some of a mixture's experts whole, instead of columns of each.
    pub expert_parallel: bool,
    /// Layers that a GPU computes, the last ones, and at least one; `None` for all.
    pub gpu_layers: Option<GpuLayers>,
    /// What the engine may take of each GPU's memory.
    pub gpu_share: MemoryShare,
    /// Bytes of each GPU that are left to a draft model: decided when the model is loaded.
    pub gpu_reserved_bytes: u64,
    /// On a GPU, kernels are launched one by one instead of being replayed.
    pub eager: bool,
    /// On a GPU, no token depends on what is computed beside it.
    pub batch_invariant: bool,
    /// How finely activations are rounded; `None` for a device's own way: int8 on a CPU, not at all on a GPU.
    pub activations: Option<ActivationType>,
    /// What floats become, or the weight type that the file must have; `None` takes any as it is.
    pub quantization: Option<String>,
    /// The processes that share the layers, if there are several.
    pub pipeline: Option<PipelineConfig>,
}

impl CpuConfig {
    /// What weights are computed in, for the fingerprint, where `built` is the type that most of them have: several ways to
    /// quantize them end in one type.
    pub fn quantization_flag(&self, built: &str) -> String {
        format!("quantization={}", self.quantization.as_deref().unwrap_or(built))
    }

    /// How finely a CPU rounds activations.
    pub fn cpu_activations(&self) -> ActivationType {
        self.activations.unwrap_or_default()
    }

    /// Whether a GPU rounds them to 8 bits.
    pub fn inputs_in_bytes(&self) -> bool {
        self.activations == Some(ActivationType::Int8)
    }

    /// How its ranks divide it, for the fingerprint: sums have another order in each way.
    pub fn ranks_flag(&self) -> String {
        let whole_experts = if self.expert_parallel && self.tensor_parallel > 1 { ",whole-experts" } else { "" };
        format!("tensor-parallel-size={}{whole_experts}", self.tensor_parallel)
    }
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

/// How long the processes of a pipeline wait for each other to start and to load.
const NODE_PATIENCE: Duration = Duration::from_secs(600);

/// What the flags say of what computes.
pub(super) fn from_args(args: &ServeArgs) -> Result<ExecutorConfig, Failure> {
    let pipeline = pipeline(args)?;
    check_together(args)?;
    if args.tensor_parallel_size == 0 {
        return Err(Failure::configuration(format!("{} must be at least 1", flags::TENSOR_PARALLEL_SIZE)));
    }
    let encodes = match args.executor {
        ExecutorKind::Model => is_encoder(Path::new(&args.model)),
        // The simulator is what it is asked to be.
        ExecutorKind::Sim => [args.runner, args.task.into()].contains(&Runner::Pooling),
    };
    check_runner(args, encodes)?;
    check_gpu_layers(args, encodes)?;
    match args.executor {
        ExecutorKind::Sim if pipeline.is_some() => {
            let size = args.pipeline_parallel_size.to_string();
            Err(unsupported(flags::PIPELINE_PARALLEL_SIZE, &size, "the simulator is one process: use 1"))
        }
        ExecutorKind::Sim if encodes => {
            let model = EncoderModel::Sim { sim: sim(args)?, scores: args.task == Task::Score };
            Ok(ExecutorConfig::Encoder(encoder(args, model)?))
        }
        ExecutorKind::Sim => Ok(ExecutorConfig::Sim(sim(args)?)),
        ExecutorKind::Model if encodes => {
            let model = EncoderModel::Folder(PathBuf::from(&args.model));
            Ok(ExecutorConfig::Encoder(encoder(args, model)?))
        }
        ExecutorKind::Model => Ok(ExecutorConfig::Cpu(CpuConfig { pipeline, ..cpu(args)? })),
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

fn encoder(args: &ServeArgs, model: EncoderModel) -> Result<EncoderConfig, Failure> {
    if device(args)? == DeviceChoice::Cuda {
        return Err(unsupported(flags::DEVICE, "cuda", "encoders are computed on the CPU: use auto or cpu"));
    }
    if args.enable_expert_parallel {
        let message =
            format!("{ENABLE_EXPERT_PARALLEL} is for mixtures of experts, and an encoder is none: leave it out");
        return Err(Failure::new(Reason::Unsupported, message));
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
    Ok(EncoderConfig { model, limits })
}

/// How many layers a GPU computes: the last ones.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GpuLayers {
    /// So many.
    Last(u32),
    /// As many as it has room for.
    Auto,
}

impl FromStr for GpuLayers {
    type Err = String;

    fn from_str(text: &str) -> Result<GpuLayers, String> {
        match text {
            "auto" => Ok(GpuLayers::Auto),
            _ => text.parse().map(GpuLayers::Last).map_err(|_| "a number of layers, or auto".to_owned()),
        }
    }
}

impl Display for GpuLayers {
    fn fmt(&self, out: &mut Formatter<'_>) -> fmt::Result {
        match self {
            GpuLayers::Last(layers) => layers.fmt(out),
            GpuLayers::Auto => out.write_str("auto"),
        }
    }
}

/// Who says how many layers a GPU computes has said where.
fn device(args: &ServeArgs) -> Result<DeviceChoice, Failure> {
    match (args.device.as_str(), args.n_gpu_layers) {
        ("auto", None) => Ok(DeviceChoice::Auto),
        ("cpu", _) | ("auto", Some(GpuLayers::Last(0))) => Ok(DeviceChoice::Cpu),
        ("cuda", _) | ("auto", Some(_)) => Ok(DeviceChoice::Cuda),
        (other, _) => Err(unsupported(flags::DEVICE, other, "use auto, cpu or cuda")),
    }
}

/// Layers stay on the CPU beside one GPU and in one process.
fn check_gpu_layers(args: &ServeArgs, encodes: bool) -> Result<(), Failure> {
    let Some(layers) = args.n_gpu_layers else { return Ok(()) };
    let way_out = match (args.device.as_str(), layers) {
        _ if args.executor == ExecutorKind::Sim => "the simulator has no layers: leave it out",
        _ if encodes => "encoders are computed on the CPU: leave it out",
        ("cuda", GpuLayers::Last(0)) => "nothing is left for the GPU: use 1 or more, or --device cpu",
        (_, GpuLayers::Last(0)) => return Ok(()),
        ("cpu", _) => "the CPU computes all layers: use --device cuda, or 0",
        _ if args.tensor_parallel_size > 1 => "layers stay on the CPU beside one GPU: use --tensor-parallel-size 1",
        _ if args.pipeline_parallel_size > 1 => "layers stay on the CPU of one node: use --pipeline-parallel-size 1",
        _ => return Ok(()),
    };
    Err(unsupported(N_GPU_LAYERS, &layers.to_string(), way_out))
}

fn cpu(args: &ServeArgs) -> Result<CpuConfig, Failure> {
    let threads = args.threads.unwrap_or_else(machine::cpus);
    if threads == 0 {
        return Err(Failure::configuration("--threads must be at least 1"));
    }
    let quantization = Some(args.quantization.to_ascii_lowercase()).filter(|kind| kind != "auto");
    Ok(CpuConfig {
        device: device(args)?,
        model: PathBuf::from(&args.model),
        threads,
        tensor_parallel: args.tensor_parallel_size,
        expert_parallel: args.enable_expert_parallel,
        gpu_layers: args.n_gpu_layers.filter(|layers| *layers != GpuLayers::Last(0)),
        gpu_share: args.gpu_memory_utilization,
        gpu_reserved_bytes: 0,
        eager: args.enforce_eager,
        batch_invariant: !args.no_deterministic,
        activations: args.activation_dtype.map(ActivationType::from),
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
    Ok(())
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
