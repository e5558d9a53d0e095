//! The model that is measured beside the large one.

use std::fmt;
use std::path::PathBuf;

use windlass_checkpoint::Checkpoint;
use windlass_kernels::WeightType;

use crate::Outcome;
use crate::tiny::Tiny;

/// Which one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Model {
    File(PathBuf),
    /// Random weights in the shape of SmolLM2-135M: as fast, and of no sense.
    Generated,
    /// A tiny one, on the CPU shim.
    Dry,
}

/// The shape of SmolLM2-135M.
const GENERATED: Tiny = Tiny {
    kind: WeightType::Q4_1,
    other: None,
    layers: 30,
    hidden: 576,
    feed_forward: 1536,
    heads: 9,
    kv_heads: 3,
    longest_tokens: 512,
    rope_dims: 64,
    vocabulary: 49_152,
    tied: true,
    rope_factors: false,
    spread: 1.0,
};

impl Model {
    /// What [`Model`]'s `Display` says.
    pub fn named(word: &str) -> Model {
        match word {
            "--generated" => Model::Generated,
            "--dry-run" => Model::Dry,
            path => Model::File(path.into()),
        }
    }

    pub fn is_dry(&self) -> bool {
        *self == Model::Dry
    }

    /// Whether it was trained, so that what it says has a meaning.
    pub fn is_trained(&self) -> bool {
        matches!(self, Model::File(_))
    }

    pub fn checkpoint(&self) -> Outcome<Checkpoint> {
        let random = |tiny: Tiny| Ok(Checkpoint::from_bytes(tiny.build().build())?);
        match self {
            Model::File(path) => Ok(Checkpoint::open(path)?),
            Model::Generated => random(GENERATED),
            Model::Dry => random(Tiny::of(WeightType::Q4_1)),
        }
    }
}

impl fmt::Display for Model {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Model::File(path) => write!(f, "{}", path.display()),
            Model::Generated => f.write_str("--generated"),
            Model::Dry => f.write_str("--dry-run"),
        }
    }
}
