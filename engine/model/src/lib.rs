//! The decoder: a checkpoint's configuration and tensors, the layers over a backend's fused blocks, sampling, and the
//! executor that runs it behind `windlass_engine_core`'s seam.
//!
//! [`Encoder`] runs the models that read instead of write.
//!
//! It knows no requests' limits, text, HTTP or queues. [`load`] is the way in: it decides sizes, checks the memory
//! ledger, packs the weights and starts the executor.

mod agreement;
mod backend;
mod batch;
mod bounds;
mod config;
mod cpu;
pub mod cuda;
mod decoder;
mod draft_model;
mod encoder;
mod executor;
mod family;
mod group;
mod intake;
mod kv_layers;
mod load;
mod memory_share;
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
mod swap;
mod tier;
mod verdict;
mod weights;

pub use agreement::{Agreement, Perplexity};
pub use backend::{Backend, Experts, FeedForward, Gated, Heads, Layer, Packer, Rows, SharedExpert, Storage, Workspace};
pub use batch::{Batch, BatchRow, Logits};
pub use config::{
    Activation, ConfigError, DecoderConfig, ExpertsConfig, LayerSet, LocalAttention, LongRope, RopeConfig, Unsupported,
};
pub use cpu::{CpuBackend, CpuStep};
pub use decoder::Decoder;
pub use draft_model::DraftModel;
pub use encoder::{Encoder, EncoderError, EncoderInput, EncoderShape, Purpose};
pub use executor::CpuExecutor;
pub use load::{Built, LoadError, Loaded, Survey, build, load, load_leader, survey, work};
pub use memory_share::MemoryShare;
pub use packed::Float8;
pub use pipeline::{Gathering, PipelineError};
pub use quantization::Quantization;
pub use ranks::Ranks;
pub use reader::Reader;
pub use sampler::{Draw, Drawn, RowTask, SampleError, sample};
pub use sizes::{KvBudget, LoadOptions, SizeError, SwapSpace};
pub use tier::{FileTier, MemoryTier, Tier};
pub use weights::{DecoderWeights, ShardError, TensorError};
pub use windlass_kernels::{ActivationType, Noting, refused_bytes};
