//! The decoder: a checkpoint's configuration and tensors, the layers over a backend's fused blocks, sampling, and the
//! executor that runs it behind `windlass_engine_core`'s seam.
//!
//! It knows no requests' limits, text, HTTP or queues. [`load`] is the way in: it decides sizes, checks the memory
//! ledger, packs the weights and starts the executor.

mod agreement;
mod backend;
mod batch;
mod config;
mod cpu;
mod gpu;
mod decoder;
mod executor;
mod family;
mod finder;
mod group;
mod load;
mod matrix_tensor;
mod names;
mod packed;
mod panic;
mod part;
mod philox;
mod pipeline;
mod places;
mod quantization;
mod ranks;
mod reader;
mod sampler;
mod sizes;
mod step;
mod weights;

pub use agreement::{Agreement, Perplexity};
pub use backend::{Backend, FileMatrix, Layer, PackError};
pub use batch::{Batch, BatchRow, Logits};
pub use config::{ConfigError, DecoderConfig, RopeConfig, RotaryLayers, Unsupported};
pub use cpu::{CpuBackend, CpuStep, CpuWorkspace};
pub use gpu::{CudaBackend, CudaExecutor, Replay};
pub use decoder::Decoder;
pub use executor::CpuExecutor;
pub use load::{Built, LoadError, Loaded, build, LoadedCuda, load, load_cuda, load_leader, work};
pub use pipeline::{Gathering, PipelineError};
pub use quantization::Quantization;
pub use ranks::Ranks;
pub use reader::Reader;
pub use sampler::{Draw, Drawn, RowTask, SampleError, sample};
pub use sizes::{KvBudget, LoadOptions, SizeError};
pub use weights::{DecoderWeights, ShardError, TensorError};
pub use windlass_kernels::ActivationType;
