//! Which instruction set the ops use, chosen once at start, and the one place where it is entered.

#![allow(unsafe_code)]

#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
use super::{Simd, scalar::Scalar};
#[cfg(target_arch = "x86_64")]
use super::{avx2::Avx2, avx512::Avx512};

/// The instruction set that a [`Pool`](crate::Pool) runs its ops with.
///
/// A value exists only for a set that this processor has. All sets give the same bits.
#[derive(Clone, Copy, Debug)]
pub struct Kernels(Set);

#[derive(Clone, Copy, Debug)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16(Avx512<true>),
    #[cfg(target_arch = "x86_64")]
    Avx512(Avx512<false>),
    #[cfg(target_arch = "x86_64")]
    AvxVnni(Avx2<true>),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2<false>),
    #[cfg(target_arch = "aarch64")]
    Neon(Neon),
    Scalar(Scalar),
}

/// A kernel set was asked for that is unknown or that this processor does not have.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
        Self::available()[0]
    }

    /// All sets of this processor, fastest first; the last is always `scalar`.
    pub fn available() -> Vec<Self> {
        let mut sets = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            sets.extend(Avx512::detect().map(Set::Avx512Bf16));
            sets.extend(Avx512::detect().map(Set::Avx512));
            sets.extend(Avx2::detect().map(Set::AvxVnni));
            sets.extend(Avx2::detect().map(Set::Avx2));
        }
        #[cfg(target_arch = "aarch64")]
        sets.extend(Neon::detect().map(Set::Neon));
        sets.push(Set::Scalar(Scalar));
        sets.into_iter().map(Kernels).collect()
    }

    /// The set with this [`name`](Self::name), if this processor has it.
    pub fn named(name: &str) -> Result<Self, UnknownKernels> {
        Self::available().into_iter().find(|kernels| kernels.name() == name).ok_or_else(|| UnknownKernels {
            name: name.to_owned(),
            available: Self::available().iter().map(|kernels| kernels.name()).collect::<Vec<_>>().join(", "),
        })
    }

    /// `avx512bf16`, `avx512vnni`, `avxvnni`, `avx2`, `neon` or `scalar`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16(_) => "avx512bf16",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512(_) => "avx512vnni",
            #[cfg(target_arch = "x86_64")]
            Set::AvxVnni(_) => "avxvnni",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2(_) => "avx2",
            #[cfg(target_arch = "aarch64")]
            Set::Neon(_) => "neon",
            Set::Scalar(_) => "scalar",
        }
    }

    /// Runs `kernel`, compiled as a whole for this instruction set.
    pub(crate) fn call<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the token proves the features.
            Set::Avx512Bf16(simd) => unsafe { in_avx512(kernel, simd.without_bf16()) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the token proves the features.
            Set::Avx512(simd) => unsafe { in_avx512(kernel, simd) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the token proves the features.
            Set::AvxVnni(simd) => unsafe { in_avxvnni(kernel, simd) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the token proves the features.
            Set::Avx2(simd) => unsafe { in_avx2(kernel, simd) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: the token proves the features.
            Set::Neon(simd) => unsafe { in_neon(kernel, simd) },
            Set::Scalar(simd) => kernel.run(simd),
        }
    }

    /// The same for products of floats, for which a set may have an instruction that is worth nothing elsewhere.
    pub(crate) fn call_floats<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: the token proves the features.
            Set::Avx512Bf16(simd) => unsafe { in_avx512bf16(kernel, simd) },
            _ => self.call(kernel),
        }
    }
}

/// A loop that is worth compiling for each instruction set: its arguments, and its body over any [`Simd`].
pub(crate) trait Kernel {
    /// What the body returns.
    type Output;
    /// The body; mark it `#[inline(always)]`.
    fn run<S: Simd>(self, simd: S) -> Self::Output;
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx2,fma,f16c")]
fn in_avx512<K: Kernel>(kernel: K, simd: Avx512<false>) -> K::Output {
    kernel.run(simd)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,avx2,fma,f16c")]
fn in_avx512bf16<K: Kernel>(kernel: K, simd: Avx512<true>) -> K::Output {
    kernel.run(simd)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c")]
fn in_avx2<K: Kernel>(kernel: K, simd: Avx2<false>) -> K::Output {
    kernel.run(simd)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma,f16c,avxvnni")]
fn in_avxvnni<K: Kernel>(kernel: K, simd: Avx2<true>) -> K::Output {
    kernel.run(simd)
}

#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon,dotprod")]
fn in_neon<K: Kernel>(kernel: K, simd: Neon) -> K::Output {
    kernel.run(simd)
}
