//! The table of kernels: name, parameters and limits of each, as declared in `kernels/cuda/*.cu`.
//!
//! Launches are checked against it, the shim finds its kernels by it, and a test compares it with the parameters that
//! the C++ compiler sees in the sources.

use super::memory::ElementType::{self, Address, Bf16, F32, U8, U32 as Word, U64 as Long};

/// What a kernel expects at one place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parameter {
    /// Memory that is read.
    In(ElementType),
    /// Memory that is written, and perhaps read.
    Out(ElementType),
    /// A matrix of which tiles of so many rows are copied.
    Tiles(ElementType, u32),
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
    /// Most blocks of a cluster that it may run in.
    pub cluster: u32,
    /// Its parameters, in order.
    pub parameters: Signature,
    /// The compute capabilities that it is made for; none where it is made for all.
    pub only_on: &'static [(u32, u32)],
}

/// A kernel's parameters, as it declares them.
type Signature = &'static [(&'static str, Parameter)];

/// A list of parameters: `(name: kind, …)`, or `[list]` where several kernels share one.
macro_rules! parameters {
    (($($parameter:ident: $kind:expr),* $(,)?)) => { &[$((stringify!($parameter), $kind)),*] };
    ([$shared:expr]) => { $shared };
}

/// Declares [`Kernel`] and its table from lines of `Name = symbol parameters, threads, shared bytes;` by file. With `on (major,
/// minor)` behind the bytes the kernel is empty elsewhere, and with `clusters of N` behind that so many blocks may run in one.
macro_rules! kernels {
    ($($file:literal { $(
        $(#[$doc:meta])* $kernel:ident = $name:ident $parameters:tt, $threads:expr, $shared:expr $(, on $only:expr)? $(, clusters of $cluster:expr)?;
    )* })*) => {
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
                match self { $($(Kernel::$kernel => {
                    const SPEC: KernelSpec = KernelSpec {
                        name: stringify!($name), file: $file, threads: $threads, shared_bytes: $shared,
                        parameters: parameters!($parameters), only_on: &[$($only)?], cluster: 1 $(* $cluster)?,
                    };
                    &SPEC
                })*)* }
            }
        }
    };
}

// Behind the macro that it uses.
mod signatures;

use Parameter::{F32 as Float, In, Out, Tiles, U32};
use signatures::*;

/// Most parameters of a kernel that are tiles.
pub const MOST_TILES: usize = {
    let (mut most, mut kernel) = (0, 0);
    while kernel < Kernel::ALL.len() {
        let tiles = tiles_of(Kernel::ALL[kernel].spec());
        most = if tiles > most { tiles } else { most };
        kernel += 1;
    }
    most
};

const fn tiles_of(spec: &KernelSpec) -> usize {
    let (mut tiles, mut parameter) = (0, 0);
    while parameter < spec.parameters.len() {
        if let Tiles(..) = spec.parameters[parameter].1 {
            tiles += 1;
        }
        parameter += 1;
    }
    tiles
}

/// Bytes of shared memory of the product of many tokens: four stages of two tiles of 128 x 32.
pub const GEMM_SHARED_BYTES: u32 = 4 * 2 * 128 * 32 * 2;

/// Tokens, and rows, of a block of the product of many tokens on Hopper.
pub const GEMM_HOPPER_TILE: u32 = 128;

/// Blocks of a cluster of Hopper's products: they have the same tokens and neighbouring rows.
pub const GEMM_HOPPER_CLUSTER: [u32; 3] = [1, 2, 1];

/// Tokens of a block of theirs that each of those copies to both.
pub const GEMM_HOPPER_SHARE: u32 = GEMM_HOPPER_TILE / GEMM_HOPPER_BLOCKS;

/// Blocks of such a cluster.
const GEMM_HOPPER_BLOCKS: u32 = GEMM_HOPPER_CLUSTER[0] * GEMM_HOPPER_CLUSTER[1] * GEMM_HOPPER_CLUSTER[2];

/// Bytes of shared memory of that product: three stages of two tiles of 64 columns of 2 bytes, which begin at a multiple of 1024.
pub const GEMM_HOPPER_SHARED_BYTES: u32 = 3 * 2 * GEMM_HOPPER_TILE * 64 * 2 + (1024 - 16);

/// The same of that product in the bits of few tokens' products, which has six stages.
pub const MANY_HOPPER_SHARED_BYTES: u32 = 6 * 2 * GEMM_HOPPER_TILE * 64 * 2 + (1024 - 16);

/// The same by blocks of half as many tokens: four stages, so that a multiprocessor has two blocks.
pub const MANY_HOPPER_T64_SHARED_BYTES: u32 = 4 * (GEMM_HOPPER_SHARE + GEMM_HOPPER_TILE) * 64 * 2 + (1024 - 16);

/// What Hopper itself has alone: wgmma.
pub const HOPPER: (u32, u32) = (9, 0);

/// Bytes of shared memory of the product of many tokens in 8 bits: four stages of 64 tokens and 128 rows of 64 bytes.
pub const W8A8_MANY_SHARED_BYTES: u32 = 4 * (64 + 128) * 64;

/// The same on Hopper: six stages of two tiles of 128 columns, which begin at a multiple of 1024.
pub const W8A8_HOPPER_SHARED_BYTES: u32 = 6 * 2 * GEMM_HOPPER_TILE * 128 + (1024 - 16);

/// Tiles of 16 rows of a block of the product of many tokens with weights of 4 bits on Hopper.
pub const INT4_HOPPER_TILES: u32 = GEMM_HOPPER_TILE / 16;

/// Bytes of shared memory of that product: five stages of 64 columns of the tokens in bf16, and of the rows' codes and scales, which
/// begin at a multiple of 1024.
pub const INT4_HOPPER_SHARED_BYTES: u32 = 5 * (GEMM_HOPPER_TILE * (128 + 32) + INT4_HOPPER_TILES * 128) + (1024 - 16);

/// Bytes of shared memory that attention over heads of up to `dim` values of `size` bytes needs: one or two pages of keys
/// and values, each row with 16 bytes more, and what room their scales have; afterwards, when decoding, what four warps
/// have of 16 rows.
pub const fn attention_shared_bytes(dim: usize, size: usize) -> u32 {
    let scales = 2 * 4 * if size == 1 { 64 } else { 4 };
    let page = 2 * 64 * (dim * size + 16) + scales;
    let (pages, parts) = (if page > 48 << 10 { page } else { 2 * page }, 4 * 16 * dim * 4);
    if pages > parts { pages as u32 } else { parts as u32 }
}

/// Bytes of shared memory of attention by warpgroups over heads of up to `dim` values: two stages of 128 keys and two of as many
/// values in bf16, which begin at a multiple of 1024.
pub const fn attention_hopper_shared_bytes(dim: u32) -> u32 {
    2 * 2 * 128 * dim * 2 + (1024 - 16)
}

/// The same over pages in bytes: stages have 1024 bytes more, of scales, and beside them there are four of 128 rows of 128 bytes,
/// with as many scales.
pub const fn attention_hopper_bytes_shared_bytes(dim: u32) -> u32 {
    attention_hopper_shared_bytes(dim) + 4 * 1024 + 4 * (128 * 128 + 1024)
}

kernels! {
    "norm.cu" {
        /// `out[t] = input[t] / rms(input[t]) · weight`.
        RmsNorm = rms_norm(input: In(F32), weight: In(F32), out: Out(Bf16), cols: U32, epsilon: Float), 256, 0;
        /// The same in signed 8 bits, with a scale for each token.
        RmsNormInt8 = rms_norm_int8[NORM_CODES], 256, 0;
        /// The same in e4m3.
        RmsNormFp8 = rms_norm_fp8[NORM_CODES], 256, 0;
        /// `residual += addend`, then its norm into `out`.
        AddRmsNorm = add_rms_norm(
            residual: Out(F32), addend: In(Bf16), weight: In(F32), out: Out(Bf16), cols: U32, epsilon: Float
        ), 256, 0;
        /// `residual += addend / rms(addend) · weight`.
        AddNormed = add_normed(residual: Out(F32), addend: In(Bf16), weight: In(F32), cols: U32, epsilon: Float), 256, 0;
    }
    "gather.cu" {
        /// `out[t] = table[token of t] · factor`, a table in bf16.
        EmbedBf16 = embed_bf16(
            tokens: In(Word), table: In(Bf16), out: Out(F32), cols: U32, rows: U32, first: U32, factor: Float
        ), 128, 0;
        /// The same, a table of 4 bits.
        EmbedInt4 = embed_int4[EMBED_GROUPED], 128, 0;
        /// The same, a table of 5 bits.
        EmbedInt5 = embed_int5[EMBED_GROUPED], 128, 0;
        /// The same, a table of signed 8 bits in groups of 32.
        EmbedInt8G32 = embed_int8_g32[EMBED_PACKED], 128, 0;
        /// The same, a table of 8 bits.
        Embed8Bit = embed_8bit(
            tokens: In(Word), codes: In(U8), scales: In(F32), out: Out(F32), cols: U32, rows: U32, first: U32,
            factor: Float, group: U32, e4m3: U32
        ), 128, 0;
        /// `out[i] = input[indices[i]]`.
        GatherRows = gather_rows(indices: In(Word), input: In(F32), out: Out(F32), cols: U32, rows: U32), 128, 0;
        /// `out[t][c] = input[t][order[c]]`, or 0 where the order names no input.
        SortColumns = sort_columns(order: In(Word), input: In(Bf16), out: Out(Bf16), cols: U32, inputs: U32), 128, 0;
    }
    "linear.cu" {
        /// `out = input · weightsᵀ` for blocks of 8 tokens, weights in bf16.
        LinearBf16T8 = linear_bf16_8[LINEAR_BF16], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, weights in bf16.
        LinearBf16T16 = linear_bf16_16[LINEAR_BF16], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, weights in bf16.
        LinearBf16T32 = linear_bf16_32[LINEAR_BF16], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, weights in bf16.
        LinearBf16T64 = linear_bf16_64[LINEAR_BF16], 256, 0;
        /// The same, weights of 4 bits in groups of 32.
        LinearInt4G32T8 = linear_int4_g32_8[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 32.
        LinearInt4G32T16 = linear_int4_g32_16[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 32.
        LinearInt4G32T32 = linear_int4_g32_32[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 32.
        LinearInt4G32T64 = linear_int4_g32_64[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 64.
        LinearInt4G64T8 = linear_int4_g64_8[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 64.
        LinearInt4G64T16 = linear_int4_g64_16[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 64.
        LinearInt4G64T32 = linear_int4_g64_32[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 64.
        LinearInt4G64T64 = linear_int4_g64_64[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 128.
        LinearInt4G128T8 = linear_int4_g128_8[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 128.
        LinearInt4G128T16 = linear_int4_g128_16[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 128.
        LinearInt4G128T32 = linear_int4_g128_32[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 128.
        LinearInt4G128T64 = linear_int4_g128_64[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 5 bits in groups of 32.
        LinearInt5G32T8 = linear_int5_g32_8[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 5 bits in groups of 32.
        LinearInt5G32T16 = linear_int5_g32_16[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 5 bits in groups of 32.
        LinearInt5G32T32 = linear_int5_g32_32[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 5 bits in groups of 32.
        LinearInt5G32T64 = linear_int5_g32_64[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 8 bits (e4m3).
        LinearFp8T8 = linear_fp8_8[LINEAR_8BIT], 256, 0;
        /// The same, weights of 8 bits (e4m3).
        LinearFp8T16 = linear_fp8_16[LINEAR_8BIT], 256, 0;
        /// The same, weights of 8 bits (e4m3).
        LinearFp8T32 = linear_fp8_32[LINEAR_8BIT], 256, 0;
        /// The same, weights of 8 bits (e4m3).
        LinearFp8T64 = linear_fp8_64[LINEAR_8BIT], 256, 0;
        /// The same, weights of 8 bits (signed).
        LinearInt8T8 = linear_int8_8[LINEAR_8BIT], 256, 0;
        /// The same, weights of 8 bits (signed).
        LinearInt8T16 = linear_int8_16[LINEAR_8BIT], 256, 0;
        /// The same, weights of 8 bits (signed).
        LinearInt8T32 = linear_int8_32[LINEAR_8BIT], 256, 0;
        /// The same, weights of 8 bits (signed).
        LinearInt8T64 = linear_int8_64[LINEAR_8BIT], 256, 0;
        /// The same, weights of signed 8 bits in groups of 32.
        LinearInt8G32T8 = linear_int8_g32_8[LINEAR_PACKED], 256, 0;
        /// The same, weights of signed 8 bits in groups of 32.
        LinearInt8G32T16 = linear_int8_g32_16[LINEAR_PACKED], 256, 0;
        /// The same, weights of signed 8 bits in groups of 32.
        LinearInt8G32T32 = linear_int8_g32_32[LINEAR_PACKED], 256, 0;
        /// The same, weights of signed 8 bits in groups of 32.
        LinearInt8G32T64 = linear_int8_g32_64[LINEAR_PACKED], 256, 0;
    }
    "superblocks.cu" {
        /// `out = input · weightsᵀ` for blocks of 8 tokens, weights of 2 bits in superblocks.
        LinearQ2KT8 = linear_q2k_8[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, weights of 2 bits in superblocks.
        LinearQ2KT16 = linear_q2k_16[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, weights of 2 bits in superblocks.
        LinearQ2KT32 = linear_q2k_32[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, weights of 2 bits in superblocks.
        LinearQ2KT64 = linear_q2k_64[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, weights of 3 bits in superblocks.
        LinearQ3KT8 = linear_q3k_8[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, weights of 3 bits in superblocks.
        LinearQ3KT16 = linear_q3k_16[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, weights of 3 bits in superblocks.
        LinearQ3KT32 = linear_q3k_32[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, weights of 3 bits in superblocks.
        LinearQ3KT64 = linear_q3k_64[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, weights of 4 bits in superblocks.
        LinearQ4KT8 = linear_q4k_8[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, weights of 4 bits in superblocks.
        LinearQ4KT16 = linear_q4k_16[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, weights of 4 bits in superblocks.
        LinearQ4KT32 = linear_q4k_32[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, weights of 4 bits in superblocks.
        LinearQ4KT64 = linear_q4k_64[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, weights of 5 bits in superblocks.
        LinearQ5KT8 = linear_q5k_8[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, weights of 5 bits in superblocks.
        LinearQ5KT16 = linear_q5k_16[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, weights of 5 bits in superblocks.
        LinearQ5KT32 = linear_q5k_32[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, weights of 5 bits in superblocks.
        LinearQ5KT64 = linear_q5k_64[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, weights of 6 bits in superblocks.
        LinearQ6KT8 = linear_q6k_8[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, weights of 6 bits in superblocks.
        LinearQ6KT16 = linear_q6k_16[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, weights of 6 bits in superblocks.
        LinearQ6KT32 = linear_q6k_32[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, weights of 6 bits in superblocks.
        LinearQ6KT64 = linear_q6k_64[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, weights that 4 bits name in superblocks.
        LinearIq4XsT8 = linear_iq4xs_8[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, weights that 4 bits name in superblocks.
        LinearIq4XsT16 = linear_iq4xs_16[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, weights that 4 bits name in superblocks.
        LinearIq4XsT32 = linear_iq4xs_32[LINEAR_PACKED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, weights that 4 bits name in superblocks.
        LinearIq4XsT64 = linear_iq4xs_64[LINEAR_PACKED], 256, 0;
        /// `out[t] = table[token of t] · factor`, a table of 2 bits in superblocks.
        EmbedQ2K = embed_q2k[EMBED_PACKED], 256, 0;
        /// `out[t] = table[token of t] · factor`, a table of 3 bits in superblocks.
        EmbedQ3K = embed_q3k[EMBED_PACKED], 256, 0;
        /// `out[t] = table[token of t] · factor`, a table that 4 bits name in superblocks.
        EmbedIq4Xs = embed_iq4xs[EMBED_PACKED], 256, 0;
        /// `out[t] = table[token of t] · factor`, a table of 4 bits in superblocks.
        EmbedQ4K = embed_q4k[EMBED_PACKED], 256, 0;
        /// `out[t] = table[token of t] · factor`, a table of 5 bits in superblocks.
        EmbedQ5K = embed_q5k[EMBED_PACKED], 256, 0;
        /// `out[t] = table[token of t] · factor`, a table of 6 bits in superblocks.
        EmbedQ6K = embed_q6k[EMBED_PACKED], 256, 0;
    }
    "many.cu" {
        /// `out = input · weightsᵀ` for blocks of 128 rows and 64 tokens, weights in bf16.
        ManyBf16 = many_bf16[LINEAR_BF16], 256, 0;
        /// The same, weights of 4 bits in groups of 32.
        ManyInt4G32 = many_int4_g32[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 64.
        ManyInt4G64 = many_int4_g64[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 4 bits in groups of 128.
        ManyInt4G128 = many_int4_g128[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 5 bits in groups of 32.
        ManyInt5G32 = many_int5_g32[LINEAR_GROUPED], 256, 0;
        /// The same, weights of 8 bits (e4m3).
        ManyFp8 = many_fp8[LINEAR_8BIT], 256, 0;
        /// The same, weights of 8 bits (signed).
        ManyInt8 = many_int8[LINEAR_8BIT], 256, 0;
        /// The same, weights of signed 8 bits in groups of 32.
        ManyInt8G32 = many_int8_g32[LINEAR_PACKED], 256, 0;
    }
    "many_superblocks.cu" {
        /// `out = input · weightsᵀ` for blocks of 128 rows and 64 tokens, weights of 4 bits in superblocks.
        ManyQ4K = many_q4k[LINEAR_PACKED], 256, 0;
        /// The same, weights of 5 bits in superblocks.
        ManyQ5K = many_q5k[LINEAR_PACKED], 256, 0;
        /// The same, weights of 6 bits in superblocks.
        ManyQ6K = many_q6k[LINEAR_PACKED], 256, 0;
        /// The same, weights of 2 bits in superblocks.
        ManyQ2K = many_q2k[LINEAR_PACKED], 256, 0;
        /// The same, weights of 3 bits in superblocks.
        ManyQ3K = many_q3k[LINEAR_PACKED], 256, 0;
        /// The same, weights that 4 bits name in superblocks.
        ManyIq4Xs = many_iq4xs[LINEAR_PACKED], 256, 0;
    }
    "rounded.cu" {
        /// Each 32 values of a token in bytes, with a scale of their own.
        RoundInputs = round_inputs(input: In(Bf16), codes: Out(U8), scales: Out(F32), tokens: U32, cols: U32), 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of 4 bits.
        RoundedQ40T8 = rounded_q4_0_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of 4 bits.
        RoundedQ40T16 = rounded_q4_0_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of 4 bits.
        RoundedQ40T32 = rounded_q4_0_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of 4 bits.
        RoundedQ40T64 = rounded_q4_0_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of 4 bits with minimums.
        RoundedQ41T8 = rounded_q4_1_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of 4 bits with minimums.
        RoundedQ41T16 = rounded_q4_1_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of 4 bits with minimums.
        RoundedQ41T32 = rounded_q4_1_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of 4 bits with minimums.
        RoundedQ41T64 = rounded_q4_1_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of 5 bits.
        RoundedQ50T8 = rounded_q5_0_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of 5 bits.
        RoundedQ50T16 = rounded_q5_0_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of 5 bits.
        RoundedQ50T32 = rounded_q5_0_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of 5 bits.
        RoundedQ50T64 = rounded_q5_0_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of 5 bits with minimums.
        RoundedQ51T8 = rounded_q5_1_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of 5 bits with minimums.
        RoundedQ51T16 = rounded_q5_1_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of 5 bits with minimums.
        RoundedQ51T32 = rounded_q5_1_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of 5 bits with minimums.
        RoundedQ51T64 = rounded_q5_1_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of signed 8 bits.
        RoundedQ80T8 = rounded_q8_0_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of signed 8 bits.
        RoundedQ80T16 = rounded_q8_0_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of signed 8 bits.
        RoundedQ80T32 = rounded_q8_0_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of signed 8 bits.
        RoundedQ80T64 = rounded_q8_0_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of 2 bits in superblocks.
        RoundedQ2KT8 = rounded_q2k_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of 2 bits in superblocks.
        RoundedQ2KT16 = rounded_q2k_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of 2 bits in superblocks.
        RoundedQ2KT32 = rounded_q2k_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of 2 bits in superblocks.
        RoundedQ2KT64 = rounded_q2k_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of 3 bits in superblocks.
        RoundedQ3KT8 = rounded_q3k_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of 3 bits in superblocks.
        RoundedQ3KT16 = rounded_q3k_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of 3 bits in superblocks.
        RoundedQ3KT32 = rounded_q3k_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of 3 bits in superblocks.
        RoundedQ3KT64 = rounded_q3k_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of 4 bits in superblocks.
        RoundedQ4KT8 = rounded_q4k_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of 4 bits in superblocks.
        RoundedQ4KT16 = rounded_q4k_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of 4 bits in superblocks.
        RoundedQ4KT32 = rounded_q4k_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of 4 bits in superblocks.
        RoundedQ4KT64 = rounded_q4k_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of 5 bits in superblocks.
        RoundedQ5KT8 = rounded_q5k_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of 5 bits in superblocks.
        RoundedQ5KT16 = rounded_q5k_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of 5 bits in superblocks.
        RoundedQ5KT32 = rounded_q5k_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of 5 bits in superblocks.
        RoundedQ5KT64 = rounded_q5k_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights of 6 bits in superblocks.
        RoundedQ6KT8 = rounded_q6k_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights of 6 bits in superblocks.
        RoundedQ6KT16 = rounded_q6k_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights of 6 bits in superblocks.
        RoundedQ6KT32 = rounded_q6k_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights of 6 bits in superblocks.
        RoundedQ6KT64 = rounded_q6k_64[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 8 tokens, inputs in bytes, weights that 4 bits name in superblocks.
        RoundedIq4XsT8 = rounded_iq4xs_8[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, inputs in bytes, weights that 4 bits name in superblocks.
        RoundedIq4XsT16 = rounded_iq4xs_16[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 32 tokens, inputs in bytes, weights that 4 bits name in superblocks.
        RoundedIq4XsT32 = rounded_iq4xs_32[ROUNDED], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, inputs in bytes, weights that 4 bits name in superblocks.
        RoundedIq4XsT64 = rounded_iq4xs_64[ROUNDED], 256, 0;
    }
    "many_rounded.cu" {
        /// `out = input · weightsᵀ` for blocks of 128 rows and 64 tokens, inputs in bytes, weights of 4 bits.
        ManyRoundedQ40 = many_rounded_q4_0[ROUNDED], 256, 0;
        /// The same, weights of 4 bits with minimums.
        ManyRoundedQ41 = many_rounded_q4_1[ROUNDED], 256, 0;
        /// The same, weights of 5 bits.
        ManyRoundedQ50 = many_rounded_q5_0[ROUNDED], 256, 0;
        /// The same, weights of 5 bits with minimums.
        ManyRoundedQ51 = many_rounded_q5_1[ROUNDED], 256, 0;
        /// The same, weights of signed 8 bits.
        ManyRoundedQ80 = many_rounded_q8_0[ROUNDED], 256, 0;
        /// The same, weights of 2 bits in superblocks.
        ManyRoundedQ2K = many_rounded_q2k[ROUNDED], 256, 0;
        /// The same, weights of 3 bits in superblocks.
        ManyRoundedQ3K = many_rounded_q3k[ROUNDED], 256, 0;
        /// The same, weights of 4 bits in superblocks.
        ManyRoundedQ4K = many_rounded_q4k[ROUNDED], 256, 0;
        /// The same, weights of 5 bits in superblocks.
        ManyRoundedQ5K = many_rounded_q5k[ROUNDED], 256, 0;
        /// The same, weights of 6 bits in superblocks.
        ManyRoundedQ6K = many_rounded_q6k[ROUNDED], 256, 0;
        /// The same, weights that 4 bits name in superblocks.
        ManyRoundedIq4Xs = many_rounded_iq4xs[ROUNDED], 256, 0;
    }
    "gemm.cu" {
        /// `out = input · weightsᵀ` for many tokens, weights in bf16.
        GemmBf16 = gemm_bf16[GEMM], 256, GEMM_SHARED_BYTES;
    }
    "gemm_hopper.cu" {
        /// The same by warpgroups, from tiles that are copied beside them.
        GemmHopperBf16 = gemm_hopper_bf16(
            weights: Tiles(Bf16, GEMM_HOPPER_TILE), input: Tiles(Bf16, GEMM_HOPPER_SHARE), halves: Out(Bf16),
            floats: Out(F32), action: U32, tokens: U32, rows: U32, cols: U32
        ), 288, GEMM_HOPPER_SHARED_BYTES, on HOPPER, clusters of GEMM_HOPPER_BLOCKS;
        /// The same of each tile's expert.
        GemmHopperExperts = gemm_hopper_experts(
            weights: Tiles(Bf16, GEMM_HOPPER_TILE), input: Tiles(Bf16, GEMM_HOPPER_SHARE), tiles: In(Word),
            halves: Out(Bf16), floats: Out(F32), action: U32, stride: U32, rows: U32, cols: U32
        ), 288, GEMM_HOPPER_SHARED_BYTES, on HOPPER, clusters of GEMM_HOPPER_BLOCKS;
    }
    "many_hopper.cu" {
        /// `out = input · weightsᵀ` for many tokens by warpgroups, weights in bf16, in the bits of `linear.cu`.
        ManyHopperBf16 = many_hopper_bf16[MANY_HOPPER], 288, MANY_HOPPER_SHARED_BYTES, on HOPPER, clusters of GEMM_HOPPER_BLOCKS;
        /// The same by blocks of half as many tokens.
        ManyHopperBf16T64 = many_hopper_bf16_64[MANY_HOPPER], 288, MANY_HOPPER_T64_SHARED_BYTES, on HOPPER;
    }
    "int4_hopper.cu" {
        /// `out = input · weightsᵀ` for many tokens by warpgroups, weights of 4 bits.
        Int4Hopper = int4_hopper(
            codes: Tiles(Word, INT4_HOPPER_TILES), scales: Tiles(Word, INT4_HOPPER_TILES),
            input: Tiles(Bf16, GEMM_HOPPER_SHARE), halves: Out(Bf16), floats: Out(F32), action: U32, tokens: U32, rows: U32,
            cols: U32, group: U32
        ), 288, INT4_HOPPER_SHARED_BYTES, on HOPPER, clusters of GEMM_HOPPER_BLOCKS;
        /// The same of each tile's expert.
        Int4HopperExperts = int4_hopper_experts(
            codes: Tiles(Word, INT4_HOPPER_TILES), scales: Tiles(Word, INT4_HOPPER_TILES),
            input: Tiles(Bf16, GEMM_HOPPER_SHARE), tiles: In(Word), halves: Out(Bf16), floats: Out(F32), action: U32,
            stride: U32, rows: U32, cols: U32, group: U32
        ), 288, INT4_HOPPER_SHARED_BYTES, on HOPPER, clusters of GEMM_HOPPER_BLOCKS;
    }
    "w8a8.cu" {
        /// Each token, or each one that is named, in signed 8 bits, with a scale of its own.
        QuantizeInt8 = quantize_int8[QUANTIZE], 256, 0;
        /// The same in e4m3.
        QuantizeFp8 = quantize_fp8[QUANTIZE], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, both in signed 8 bits.
        W8a8Int8Few = w8a8_int8_few[W8A8], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, both in signed 8 bits.
        W8a8Int8Many = w8a8_int8_many[W8A8], 256, W8A8_MANY_SHARED_BYTES;
        /// `out = input · weightsᵀ` for blocks of 16 tokens, both in e4m3.
        W8a8Fp8Few = w8a8_fp8_few[W8A8], 256, 0;
        /// `out = input · weightsᵀ` for blocks of 64 tokens, both in e4m3.
        W8a8Fp8Many = w8a8_fp8_many[W8A8], 256, W8A8_MANY_SHARED_BYTES;
    }
    "w8a8_hopper.cu" {
        /// `out = input · weightsᵀ` for many tokens by warpgroups, both in signed 8 bits: as `w8a8.cu` gives it, bit for bit.
        W8a8HopperInt8 = w8a8_hopper_int8[W8A8_HOPPER], 288, W8A8_HOPPER_SHARED_BYTES, on HOPPER, clusters of GEMM_HOPPER_BLOCKS;
        /// The same in e4m3, with other bits.
        W8a8HopperFp8 = w8a8_hopper_fp8[W8A8_HOPPER], 288, W8A8_HOPPER_SHARED_BYTES, on HOPPER, clusters of GEMM_HOPPER_BLOCKS;
        /// `out = input · weightsᵀ` of each tile's expert, both in signed 8 bits.
        W8a8HopperInt8Experts = w8a8_hopper_int8_experts[W8A8_HOPPER_EXPERTS], 288, W8A8_HOPPER_SHARED_BYTES, on HOPPER, clusters of GEMM_HOPPER_BLOCKS;
        /// The same in e4m3.
        W8a8HopperFp8Experts = w8a8_hopper_fp8_experts[W8A8_HOPPER_EXPERTS], 288, W8A8_HOPPER_SHARED_BYTES, on HOPPER, clusters of GEMM_HOPPER_BLOCKS;
    }
    "experts.cu" {
        /// The experts of each token, and their weights.
        ChooseExperts = choose_experts(
            scores: In(F32), chosen: Out(Word), weights: Out(F32), tokens: U32, experts: U32, used: U32, shared: U32,
            sum_to_one: U32
        ), 128, 0;
        /// Tokens sorted by expert.
        GroupTokens = group_tokens(
            chosen: In(Word), tokens: Out(Word), places: Out(Word), tiles: Out(Word), pairs: U32,
            first: U32, experts: U32, used: U32, width: U32, tile_count: U32
        ), 512, 0;
        /// `residual += Σ weight · what an expert gave`.
        MixExperts = mix_experts(
            given: In(Bf16), places: In(Word), weights: In(F32), shared: In(Bf16), halves: Out(Bf16), residual: Out(F32),
            used: U32, cols: U32
        ), 128, 0;
    }
    "activation.cu" {
        /// `out = silu(gate) · up`.
        SiluMul = silu_mul(gate_up: In(Bf16), out: Out(Bf16), cols: U32, by_eights: U32), 256, 0;
        /// `out = gelu(gate) · up`.
        GeluMul = gelu_mul(gate_up: In(Bf16), out: Out(Bf16), cols: U32, by_eights: U32), 256, 0;
        /// `silu(gate) · up` in signed 8 bits, with a scale for each token.
        SiluMulInt8 = silu_mul_int8[GATE_CODES], 256, 0;
        /// The same in e4m3.
        SiluMulFp8 = silu_mul_fp8[GATE_CODES], 256, 0;
        /// `gelu(gate) · up` in signed 8 bits, with a scale for each token.
        GeluMulInt8 = gelu_mul_int8[GATE_CODES], 256, 0;
        /// The same in e4m3.
        GeluMulFp8 = gelu_mul_fp8[GATE_CODES], 256, 0;
        /// `values = cap · tanh(values / cap)`.
        SoftCap = soft_cap(values: Out(F32), count: U32, cap: Float), 256, 0;
    }
    "heads.cu" {
        /// Bias, norm and rotation of heads, and the append of keys and values.
        PlaceHeads = place_heads[&placing(Bf16)], 128, 0;
        /// The same into pages in e4m3.
        PlaceHeadsFp8 = place_heads_fp8[&placing(U8)], 128, 0;
        /// The same into pages of signed bytes.
        PlaceHeadsInt8 = place_heads_int8[&placing(U8)], 128, 0;
        /// Moves keys and values of tokens.
        MoveTokens = move_tokens[&moving(Bf16)], 128, 0;
        /// The same in pages of bytes.
        MoveTokensBytes = move_tokens_bytes[&moving(U8)], 128, 0;
    }
    "attention.cu" {
        /// Attention of one token for each sequence, over heads of up to 32.
        AttentionDecodeD32 = attention_decode_32[&decoding(Bf16)], 128, attention_shared_bytes(32, 2);
        /// Attention of one token for each sequence, over heads of up to 64.
        AttentionDecodeD64 = attention_decode_64[&decoding(Bf16)], 128, attention_shared_bytes(64, 2);
        /// Attention of one token for each sequence, over heads of up to 96.
        AttentionDecodeD96 = attention_decode_96[&decoding(Bf16)], 128, attention_shared_bytes(96, 2);
        /// Attention of one token for each sequence, over heads of up to 128.
        AttentionDecodeD128 = attention_decode_128[&decoding(Bf16)], 128, attention_shared_bytes(128, 2);
        /// Attention of one token for each sequence, over heads of up to 256.
        AttentionDecodeD256 = attention_decode_256[&decoding(Bf16)], 128, attention_shared_bytes(256, 2);
        /// Attention of one token for each sequence, over heads of up to 32, pages in e4m3.
        AttentionDecodeFp8D32 = attention_decode_fp8_32[&decoding(U8)], 128, attention_shared_bytes(32, 1);
        /// Attention of one token for each sequence, over heads of up to 64, pages in e4m3.
        AttentionDecodeFp8D64 = attention_decode_fp8_64[&decoding(U8)], 128, attention_shared_bytes(64, 1);
        /// Attention of one token for each sequence, over heads of up to 96, pages in e4m3.
        AttentionDecodeFp8D96 = attention_decode_fp8_96[&decoding(U8)], 128, attention_shared_bytes(96, 1);
        /// Attention of one token for each sequence, over heads of up to 128, pages in e4m3.
        AttentionDecodeFp8D128 = attention_decode_fp8_128[&decoding(U8)], 128, attention_shared_bytes(128, 1);
        /// Attention of one token for each sequence, over heads of up to 256, pages in e4m3.
        AttentionDecodeFp8D256 = attention_decode_fp8_256[&decoding(U8)], 128, attention_shared_bytes(256, 1);
        /// Attention of one token for each sequence, over heads of up to 32, pages of signed bytes.
        AttentionDecodeInt8D32 = attention_decode_int8_32[&decoding(U8)], 128, attention_shared_bytes(32, 1);
        /// Attention of one token for each sequence, over heads of up to 64, pages of signed bytes.
        AttentionDecodeInt8D64 = attention_decode_int8_64[&decoding(U8)], 128, attention_shared_bytes(64, 1);
        /// Attention of one token for each sequence, over heads of up to 96, pages of signed bytes.
        AttentionDecodeInt8D96 = attention_decode_int8_96[&decoding(U8)], 128, attention_shared_bytes(96, 1);
        /// Attention of one token for each sequence, over heads of up to 128, pages of signed bytes.
        AttentionDecodeInt8D128 = attention_decode_int8_128[&decoding(U8)], 128, attention_shared_bytes(128, 1);
        /// Attention of one token for each sequence, over heads of up to 256, pages of signed bytes.
        AttentionDecodeInt8D256 = attention_decode_int8_256[&decoding(U8)], 128, attention_shared_bytes(256, 1);
        /// Attention of many tokens for each sequence, over heads of up to 32.
        AttentionPrefillD32 = attention_prefill_32[&prefilling(Bf16)], 128, attention_shared_bytes(32, 2);
        /// Attention of many tokens for each sequence, over heads of up to 64.
        AttentionPrefillD64 = attention_prefill_64[&prefilling(Bf16)], 128, attention_shared_bytes(64, 2);
        /// Attention of many tokens for each sequence, over heads of up to 96.
        AttentionPrefillD96 = attention_prefill_96[&prefilling(Bf16)], 128, attention_shared_bytes(96, 2);
        /// Attention of many tokens for each sequence, over heads of up to 128.
        AttentionPrefillD128 = attention_prefill_128[&prefilling(Bf16)], 128, attention_shared_bytes(128, 2);
        /// Attention of many tokens for each sequence, over heads of up to 256.
        AttentionPrefillD256 = attention_prefill_256[&prefilling(Bf16)], 128, attention_shared_bytes(256, 2);
        /// Attention of many tokens for each sequence, over heads of up to 32, pages in e4m3.
        AttentionPrefillFp8D32 = attention_prefill_fp8_32[&prefilling(U8)], 128, attention_shared_bytes(32, 1);
        /// Attention of many tokens for each sequence, over heads of up to 64, pages in e4m3.
        AttentionPrefillFp8D64 = attention_prefill_fp8_64[&prefilling(U8)], 128, attention_shared_bytes(64, 1);
        /// Attention of many tokens for each sequence, over heads of up to 96, pages in e4m3.
        AttentionPrefillFp8D96 = attention_prefill_fp8_96[&prefilling(U8)], 128, attention_shared_bytes(96, 1);
        /// Attention of many tokens for each sequence, over heads of up to 128, pages in e4m3.
        AttentionPrefillFp8D128 = attention_prefill_fp8_128[&prefilling(U8)], 128, attention_shared_bytes(128, 1);
        /// Attention of many tokens for each sequence, over heads of up to 256, pages in e4m3.
        AttentionPrefillFp8D256 = attention_prefill_fp8_256[&prefilling(U8)], 128, attention_shared_bytes(256, 1);
        /// Attention of many tokens for each sequence, over heads of up to 32, pages of signed bytes.
        AttentionPrefillInt8D32 = attention_prefill_int8_32[&prefilling(U8)], 128, attention_shared_bytes(32, 1);
        /// Attention of many tokens for each sequence, over heads of up to 64, pages of signed bytes.
        AttentionPrefillInt8D64 = attention_prefill_int8_64[&prefilling(U8)], 128, attention_shared_bytes(64, 1);
        /// Attention of many tokens for each sequence, over heads of up to 96, pages of signed bytes.
        AttentionPrefillInt8D96 = attention_prefill_int8_96[&prefilling(U8)], 128, attention_shared_bytes(96, 1);
        /// Attention of many tokens for each sequence, over heads of up to 128, pages of signed bytes.
        AttentionPrefillInt8D128 = attention_prefill_int8_128[&prefilling(U8)], 128, attention_shared_bytes(128, 1);
        /// Attention of many tokens for each sequence, over heads of up to 256, pages of signed bytes.
        AttentionPrefillInt8D256 = attention_prefill_int8_256[&prefilling(U8)], 128, attention_shared_bytes(256, 1);
        /// Adds up the splits of decoding.
        AttentionMerge = attention_merge(
            partial: In(F32), partial_log: In(F32), lengths: In(Word), row_tokens: In(Word), out: Out(Bf16), heads: U32,
            dim: U32, splits: U32
        ), 128, 0;
    }
    "attention_hopper.cu" {
        /// Attention of many tokens for each sequence by warpgroups, over heads of up to 64.
        AttentionHopperD64 = attention_hopper_64[PREFILLING_HOPPER], 384, attention_hopper_shared_bytes(64), on HOPPER;
        /// The same, over heads of up to 128.
        AttentionHopperD128 = attention_hopper_128[PREFILLING_HOPPER], 384, attention_hopper_shared_bytes(128), on HOPPER;
    }
    "attention_hopper_bytes.cu" {
        /// Attention of many tokens for each sequence by warpgroups, over heads of up to 64, pages in e4m3.
        AttentionHopperFp8D64 = attention_hopper_fp8_64[PREFILLING_HOPPER_BYTES], 384, attention_hopper_bytes_shared_bytes(64), on HOPPER;
        /// The same, over heads of up to 128.
        AttentionHopperFp8D128 = attention_hopper_fp8_128[PREFILLING_HOPPER_BYTES], 384, attention_hopper_bytes_shared_bytes(128), on HOPPER;
        /// Attention of many tokens for each sequence by warpgroups, over heads of up to 64, pages of signed bytes.
        AttentionHopperInt8D64 = attention_hopper_int8_64[PREFILLING_HOPPER_BYTES], 384, attention_hopper_bytes_shared_bytes(64), on HOPPER;
        /// The same, over heads of up to 128.
        AttentionHopperInt8D128 = attention_hopper_int8_128[PREFILLING_HOPPER_BYTES], 384, attention_hopper_bytes_shared_bytes(128), on HOPPER;
    }
    "reduce.cu" {
        /// `residual += Σ over the ranks of what each holds`.
        AddReduced = add_reduced[&exchanging(F32)], 256, 0;
        /// `out = Σ over the ranks of what each holds`.
        Reduced = reduced[&exchanging(Bf16)], 256, 0;
        /// A rank's share of those sums.
        ReducedShare = reduced_share[&exchanging(F32)], 256, 0;
        /// `residual += the shares of all ranks`.
        AddShares = add_shares[&exchanging(F32)], 256, 0;
        /// `out = the shares of all ranks`.
        RoundShares = round_shares[&exchanging(Bf16)], 256, 0;
        /// One shot's sums of floats.
        ReducedFloats = reduced_floats[&exchanging(F32)], 256, 0;
        /// The columns that the ranks hold, side by side.
        GatherColumns = gather_columns(
            parts: In(Address), flags: In(Address), left: In(Word), rounds: Out(Word), out: Out(F32), firsts: In(Word),
            rank: U32, ranks: U32, rows: U32, cols: U32
        ), 256, 0;
        /// `residual += Σ over the ranks of what was carried here`.
        AddGathered = add_gathered(all: In(Bf16), residual: Out(F32), ranks: U32, count: U32), 256, 0;
        /// `out = Σ over the ranks of what was carried here`.
        RoundGathered = round_gathered(all: In(Bf16), out: Out(Bf16), ranks: U32, count: U32), 256, 0;
        /// Sums of floats that were carried here.
        FloatsGathered = floats_gathered(all: In(F32), out: Out(F32), ranks: U32, count: U32), 256, 0;
        /// The columns that were carried here, side by side.
        ColumnsGathered = columns_gathered(
            all: In(F32), out: Out(F32), firsts: In(Word), ranks: U32, rows: U32, cols: U32, stride: U32
        ), 256, 0;
    }
    "sample.cu" {
        /// Masks, biases and penalties.
        AdjustLogits = adjust_logits(
            logits: Out(F32), mask_rows: In(Word), masks: In(Word), first_edits: In(Word), edit_tokens: In(Word),
            edit_values: In(F32), vocabulary: U32
        ), 1024, 0;
        /// Draws a token from each row of logits.
        Sample = sample(
            logits: In(F32), temperatures: In(F32), top_ks: In(Word), top_ps: In(F32), floors: In(F32), seeds: In(Long),
            positions: In(Word), out: Out(Word), vocabulary: U32
        ), 1024, 0;
        /// What the model thinks of the tokens drawn or known, and of its most likely ones.
        Tell = tell(
            logits: In(F32), drawn: In(Word), targets: In(Word), asked: In(Word), wholes: Out(Long),
            told_logits: Out(F32), told_tokens: Out(Word), vocabulary: U32
        ), 1024, 0;
    }
}
