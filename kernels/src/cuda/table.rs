//! The table of kernels: name, parameters and limits of each, as declared in `kernels/cuda/*.cu`.
//!
//! Launches are checked against it, the shim finds its kernels by it, and a test compares it with the parameters that
//! the C++ compiler sees in the sources.

use super::memory::ElementType::{self, Bf16, F32, U32 as Word};

/// What a kernel expects at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// Memory that is read.
    In(ElementType),
    /// Memory that is written, and perhaps read.
    Out(ElementType),
    /// A number.
    U32,
    /// A number.
    U64,
    /// A number.
    F32,
}

/// One kernel.
#[derive(Clone, Copy, Debug)]
pub struct KernelSpec {
    /// Its symbol.
    pub name: &'static str,
    /// The source file that declares it.
    pub file: &'static str,
    /// Threads of a block.
    pub threads: u32,
    /// Most bytes of shared memory that a launch may ask for.
    pub shared_bytes: u32,
    /// Its parameters, in order.
    pub parameters: &'static [(&'static str, Parameter)],
}

/// Declares [`Kernel`] and its table from lines of `Name = symbol(parameters), threads, shared bytes;` by file.
macro_rules! kernels {
    ($($file:literal { $($(#[$doc:meta])* $kernel:ident = $name:ident($($parameter:ident: $kind:expr),* $(,)?), $threads:expr, $shared:expr;)* })*) => {
        /// A kernel of the table.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        pub enum Kernel { $($($(#[$doc])* $kernel,)*)* }

        impl Kernel {
            /// Every kernel, in the table's order.
            pub const ALL: &'static [Kernel] = &[$($(Kernel::$kernel,)*)*];
            /// Every source file.
            pub const FILES: &'static [&'static str] = &[$($file,)*];

            /// What the table says of it.
            pub const fn spec(self) -> &'static KernelSpec {
                match self { $($(Kernel::$kernel => &KernelSpec {
                    name: stringify!($name), file: $file, threads: $threads, shared_bytes: $shared,
                    parameters: &[$((stringify!($parameter), $kind)),*],
                },)*)* }
            }
        }
    };
}

use Parameter::{F32 as Float, In, Out, U32};

kernels! {
    "norm.cu" {
        /// `out[t] = input[t] / rms(input[t]) · weight`.
        RmsNorm = rms_norm(input: In(F32), weight: In(F32), out: Out(Bf16), cols: U32, epsilon: Float), 256, 0;
        /// `residual += addend`, then its norm into `out`.
        AddRmsNorm = add_rms_norm(
            residual: Out(F32), addend: In(Bf16), weight: In(F32), out: Out(Bf16), cols: U32, epsilon: Float
        ), 256, 0;
    }
    "gather.cu" {
        /// `out[t] = table[token of t]`.
        Embed = embed(tokens: In(Word), table: In(Bf16), out: Out(F32), cols: U32, rows: U32), 128, 0;
        /// `out[i] = input[indices[i]]`.
        GatherRows = gather_rows(indices: In(Word), input: In(F32), out: Out(F32), cols: U32, rows: U32), 128, 0;
    }
}
