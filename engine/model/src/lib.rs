//! The models: configuration and tensors of checkpoints, the layers of decoders over fused blocks of a backend,
//! sampling, and the executors behind the interface of `windlass_engine_core`.
//!
//! [`Encoder`] runs models that make vectors or scores of texts.
//!
//! The crate does not know limits of requests, text, HTTP or queues. [`load`] is the entry point: it decides sizes,
//! checks the memory ledger, packs the weights and starts the executor.

mod agreement;
mod batch;
mod config;
mod cpu;
pub mod cuda;
mod decoder;
mod draft_model;
mod encoder;
mod error;
mod executor;
mod load;
mod panic;
mod pipeline;
mod ranks;
mod reader;
mod sampler;
mod sharded;
mod sizes;
mod step;
mod tier;
mod weights;

pub use agreement::{Agreement, Perplexity};
pub use batch::{Batch, BatchRow, Logits};
pub use config::{
    Activation, ConfigError, DecoderConfig, ExpertsConfig, LayerSet, LocalAttention, LongRope, RopeConfig, Unsupported,
};
pub use cpu::{Built, CpuBackend, CpuDecoder, CpuRank};
pub use decoder::{Backend, Decoder, DecoderWeights};
pub use draft_model::DraftModel;
pub use encoder::{Encoder, EncoderError, EncoderInput, EncoderShape, Purpose};
pub use error::LoadError;
pub use executor::CpuExecutor;
pub use load::{Loaded, Survey, build, load, load_leader, survey, work};
pub use pipeline::{Gathering, PipelineError};
pub use ranks::Ranks;
pub use reader::Reader;
pub use sampler::{Draw, Drawn, RowTask, SampleError, sample};
pub use sizes::memory_share::MemoryShare;
pub use sizes::{KvBudget, LoadOptions, SizeError, SwapSpace};
pub use tier::{FileTier, MemoryTier, Tier};
pub use weights::quantization::Quantization;
pub use weights::quantized::Float8;
pub use weights::{ShardError, TensorError};
pub use windlass_kernels::{ActivationType, Noting, refused_bytes};
