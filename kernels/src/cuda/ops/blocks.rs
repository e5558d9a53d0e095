//! How a product is divided into blocks, and the kernels that have such.

use super::word;
use crate::cuda::weights::{EightBits, Group, ROW_TILE, Superblock};
use crate::cuda::{DeviceFacts, Kernel};

/// What a block of a product computes. A token's result has the same bits whichever it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Block {
    /// 16 rows for 8 tokens: its warps share the columns.
    T8,
    /// 16 rows for 16 tokens.
    T16,
    /// 16 rows for 32 tokens.
    T32,
    /// 16 rows for 64 tokens.
    T64,
    /// 128 rows for 64 tokens: its warps share rows and tokens.
    Many,
}

/// Rows of a block for many tokens.
const MANY_ROWS: usize = 128;

/// For so many multiprocessors there must be one block for many tokens, or blocks of 16 rows are taken: they fetch three to five
/// times as many bytes for a product of 16 rows and 8 tokens, but there are eight times as many of them. An estimate, until a GPU
/// has measured it.
const MULTIPROCESSORS_FOR_MANY: usize = 2;

impl Block {
    /// For so many tokens and rows on a device.
    pub fn new(facts: &DeviceFacts, rows: usize, tokens: usize) -> Block {
        let block = Block::for_tokens(tokens);
        block.or_many(facts, rows, tokens.div_ceil(block.tokens()))
    }

    /// Of 16 rows.
    pub fn for_tokens(tokens: usize) -> Block {
        match tokens {
            0..=8 => Block::T8,
            9..=16 => Block::T16,
            17..=32 => Block::T32,
            _ => Block::T64,
        }
    }

    /// The one for many tokens instead of one for as many, where enough multiprocessors would have one.
    pub fn or_many(self, facts: &DeviceFacts, rows: usize, parts: usize) -> Block {
        let blocks = rows.div_ceil(MANY_ROWS) * parts;
        let enough = blocks * MULTIPROCESSORS_FOR_MANY >= facts.multiprocessors as usize;
        if self == Block::T64 && enough { Block::Many } else { self }
    }

    pub fn tokens(self) -> usize {
        match self {
            Block::T8 => 8,
            Block::T16 => 16,
            Block::T32 => 32,
            Block::T64 | Block::Many => 64,
        }
    }

    /// So many of rows and of tokens.
    pub fn grid(self, rows: usize, parts: usize) -> [u32; 3] {
        let own = if self == Block::Many { MANY_ROWS } else { ROW_TILE };
        [word(rows.div_ceil(own)), word(parts), 1]
    }

    pub fn bf16(self) -> Kernel {
        match self {
            Block::T8 => Kernel::LinearBf16T8,
            Block::T16 => Kernel::LinearBf16T16,
            Block::T32 => Kernel::LinearBf16T32,
            Block::T64 => Kernel::LinearBf16T64,
            Block::Many => Kernel::ManyBf16,
        }
    }

    pub fn int8(self) -> Kernel {
        match self {
            Block::T8 => Kernel::LinearInt8G32T8,
            Block::T16 => Kernel::LinearInt8G32T16,
            Block::T32 => Kernel::LinearInt8G32T32,
            Block::T64 => Kernel::LinearInt8G32T64,
            Block::Many => Kernel::ManyInt8G32,
        }
    }

    pub fn superblocks(self, kind: Superblock) -> Kernel {
        match (kind, self) {
            (Superblock::Q2K, Block::T8) => Kernel::LinearQ2KT8,
            (Superblock::Q2K, Block::T16) => Kernel::LinearQ2KT16,
            (Superblock::Q2K, Block::T32) => Kernel::LinearQ2KT32,
            (Superblock::Q2K, Block::T64) => Kernel::LinearQ2KT64,
            (Superblock::Q2K, Block::Many) => Kernel::ManyQ2K,
            (Superblock::Q3K, Block::T8) => Kernel::LinearQ3KT8,
            (Superblock::Q3K, Block::T16) => Kernel::LinearQ3KT16,
            (Superblock::Q3K, Block::T32) => Kernel::LinearQ3KT32,
            (Superblock::Q3K, Block::T64) => Kernel::LinearQ3KT64,
            (Superblock::Q3K, Block::Many) => Kernel::ManyQ3K,
            (Superblock::Q4K, Block::T8) => Kernel::LinearQ4KT8,
            (Superblock::Q4K, Block::T16) => Kernel::LinearQ4KT16,
            (Superblock::Q4K, Block::T32) => Kernel::LinearQ4KT32,
            (Superblock::Q4K, Block::T64) => Kernel::LinearQ4KT64,
            (Superblock::Q4K, Block::Many) => Kernel::ManyQ4K,
            (Superblock::Q5K, Block::T8) => Kernel::LinearQ5KT8,
            (Superblock::Q5K, Block::T16) => Kernel::LinearQ5KT16,
            (Superblock::Q5K, Block::T32) => Kernel::LinearQ5KT32,
            (Superblock::Q5K, Block::T64) => Kernel::LinearQ5KT64,
            (Superblock::Q5K, Block::Many) => Kernel::ManyQ5K,
            (Superblock::Q6K, Block::T8) => Kernel::LinearQ6KT8,
            (Superblock::Q6K, Block::T16) => Kernel::LinearQ6KT16,
            (Superblock::Q6K, Block::T32) => Kernel::LinearQ6KT32,
            (Superblock::Q6K, Block::T64) => Kernel::LinearQ6KT64,
            (Superblock::Q6K, Block::Many) => Kernel::ManyQ6K,
            (Superblock::IQ4XS, Block::T8) => Kernel::LinearIq4XsT8,
            (Superblock::IQ4XS, Block::T16) => Kernel::LinearIq4XsT16,
            (Superblock::IQ4XS, Block::T32) => Kernel::LinearIq4XsT32,
            (Superblock::IQ4XS, Block::T64) => Kernel::LinearIq4XsT64,
            (Superblock::IQ4XS, Block::Many) => Kernel::ManyIq4Xs,
        }
    }

    pub fn eight_bits(self, code: EightBits) -> Kernel {
        match (code, self) {
            (EightBits::E4m3, Block::T8) => Kernel::LinearFp8T8,
            (EightBits::E4m3, Block::T16) => Kernel::LinearFp8T16,
            (EightBits::E4m3, Block::T32) => Kernel::LinearFp8T32,
            (EightBits::E4m3, Block::T64) => Kernel::LinearFp8T64,
            (EightBits::E4m3, Block::Many) => Kernel::ManyFp8,
            (EightBits::Int8, Block::T8) => Kernel::LinearInt8T8,
            (EightBits::Int8, Block::T16) => Kernel::LinearInt8T16,
            (EightBits::Int8, Block::T32) => Kernel::LinearInt8T32,
            (EightBits::Int8, Block::T64) => Kernel::LinearInt8T64,
            (EightBits::Int8, Block::Many) => Kernel::ManyInt8,
        }
    }

    pub fn int4(self, group: Group) -> Kernel {
        use Group::{G32, G64, G128};
        match (group, self) {
            (G32, Block::T8) => Kernel::LinearInt4G32T8,
            (G32, Block::T16) => Kernel::LinearInt4G32T16,
            (G32, Block::T32) => Kernel::LinearInt4G32T32,
            (G32, Block::T64) => Kernel::LinearInt4G32T64,
            (G32, Block::Many) => Kernel::ManyInt4G32,
            (G64, Block::T8) => Kernel::LinearInt4G64T8,
            (G64, Block::T16) => Kernel::LinearInt4G64T16,
            (G64, Block::T32) => Kernel::LinearInt4G64T32,
            (G64, Block::T64) => Kernel::LinearInt4G64T64,
            (G64, Block::Many) => Kernel::ManyInt4G64,
            (G128, Block::T8) => Kernel::LinearInt4G128T8,
            (G128, Block::T16) => Kernel::LinearInt4G128T16,
            (G128, Block::T32) => Kernel::LinearInt4G128T32,
            (G128, Block::T64) => Kernel::LinearInt4G128T64,
            (G128, Block::Many) => Kernel::ManyInt4G128,
        }
    }

    pub fn int5(self) -> Kernel {
        match self {
            Block::T8 => Kernel::LinearInt5G32T8,
            Block::T16 => Kernel::LinearInt5G32T16,
            Block::T32 => Kernel::LinearInt5G32T32,
            Block::T64 => Kernel::LinearInt5G32T64,
            Block::Many => Kernel::ManyInt5G32,
        }
    }
}
