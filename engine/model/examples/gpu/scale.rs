//! How much is measured.

/// Sizes of everything.
pub struct Scale {
    /// Of each of two buffers that are copied: on a GPU many times any cache.
    pub copy_bytes: usize,
    /// Rows and columns of a matrix, and so many matrices that each is gone from the cache when its turn comes.
    pub matrix: (usize, usize),
    pub matrices: usize,
    /// Tokens of products that are measured in both ways.
    pub prompts: &'static [usize],
    /// Times that a measurement is repeated.
    pub rounds: usize,
    /// Tokens of each text that is compared.
    pub text_tokens: usize,
    /// Times that one text is repeated.
    pub replays: usize,
    /// Sequences that decode together.
    pub sequences: &'static [u32],
    /// Tokens that each of them gets.
    pub decoded: usize,
}

impl Scale {
    /// For a GPU: 128 MiB a matrix.
    pub const FULL: Scale = Scale {
        copy_bytes: 1 << 30,
        matrix: (8192, 8192),
        matrices: 4,
        prompts: &[64, 128, 512, 2048],
        rounds: 20,
        text_tokens: 64,
        replays: 100,
        sequences: &[1, 8, 32, 64],
        decoded: 64,
    };
    /// For the shim.
    pub const DRY: Scale = Scale {
        copy_bytes: 1 << 16,
        matrix: (64, 64),
        matrices: 2,
        prompts: &[3, 130],
        rounds: 2,
        text_tokens: 4,
        replays: 2,
        sequences: &[1, 3],
        decoded: 3,
    };
}
