//! Which instruction set the ops use, chosen once at start.

/// The instruction set that a [`Pool`](crate::Pool) runs its ops with.
///
/// A value exists only for a set that this processor has; all sets give the same bits for matrix products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Kernels(InstructionSet);

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum InstructionSet {
    Scalar,
}

/// A kernel set was asked for that is unknown or that this processor does not have.
#[derive(Debug, thiserror::Error)]
#[error("kernels {name:?} are not available on this processor; available: {available}")]
pub struct UnknownKernels {
    /// The name that was asked for.
    pub name: String,
    /// The names that [`Kernels::named`] takes here, comma-separated, fastest first.
    pub available: String,
}

impl Kernels {
    /// The fastest set of this processor.
    pub fn detect() -> Self {
        Kernels(InstructionSet::Scalar)
    }

    /// All sets of this processor, fastest first; the last is always `scalar`.
    pub fn available() -> Vec<Self> {
        vec![Kernels(InstructionSet::Scalar)]
    }

    /// The set with this [`name`](Self::name), if this processor has it.
    pub fn named(name: &str) -> Result<Self, UnknownKernels> {
        Self::available().into_iter().find(|kernels| kernels.name() == name).ok_or_else(|| UnknownKernels {
            name: name.to_owned(),
            available: Self::available().iter().map(|kernels| kernels.name()).collect::<Vec<_>>().join(", "),
        })
    }

    /// `avx512vnni`, `avx2` or `scalar`.
    pub fn name(self) -> &'static str {
        match self.0 {
            InstructionSet::Scalar => "scalar",
        }
    }
}
