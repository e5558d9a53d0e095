//! How much ranks exchange.

use half::bf16;

use super::Ground;
use super::reached::TURNS;

/// How much the ranks of a group exchange at once, at most.
#[derive(Clone, Debug)]
pub struct ExchangeSizes {
    /// Tokens of a step.
    pub tokens: usize,
    /// Values of a token.
    pub hidden: usize,
    /// Rows of columns.
    pub rows: usize,
    /// Columns of each rank.
    pub columns: Vec<usize>,
    /// Values from which on a sum takes two shots: [`ExchangeSizes::two_shots_from`], or another number. The bits are the
    /// same. What is carried has one.
    pub two_shots_from: usize,
    /// How ranks come to what the others hold.
    pub ground: Ground,
}

impl ExchangeSizes {
    /// Values from which on a sum over so many ranks is faster in two shots. vLLM goes over at 512 KiB of bf16 with 4 ranks
    /// and at 256 KiB with up to 8 (`csrc/custom_all_reduce.cuh`). Its second shot carries bf16; here it carries f32, for the
    /// bits of one shot, and saves `(ranks - 3) / (ranks - 2)` of that: so it pays at as many values more, and with up to
    /// three ranks never. No GPU has measured it.
    pub fn two_shots_from(ranks: usize) -> usize {
        match ranks {
            0..=3 => usize::MAX,
            4 => (512 << 10) / size_of::<bf16>() * 2,
            _ => (256 << 10) / size_of::<bf16>() * (ranks - 2) / (ranks - 3),
        }
    }

    /// Bytes that they take of a rank's device, but for a few numbers.
    pub fn device_bytes(&self, rank: usize) -> u64 {
        match self.ground {
            Ground::Devices => self.reached_bytes(rank),
            Ground::Carried(_) => (self.columns.len() * self.carried_floats() * size_of::<f32>()) as u64,
            Ground::Host(_) => 0,
        }
    }

    fn reached_bytes(&self, rank: usize) -> u64 {
        let values = self.values();
        let floats = values + self.share() + self.rows * self.columns[rank];
        (values * TURNS * size_of::<bf16>() + floats * size_of::<f32>()) as u64
    }

    /// Values of the largest sum.
    pub(super) fn values(&self) -> usize {
        self.tokens * self.hidden
    }

    /// Values of a rank's share of the largest sum in two shots.
    pub(super) fn share(&self) -> usize {
        match self.values() {
            values if values < self.two_shots_from => 0,
            values => 8 * (values / 8).div_ceil(self.columns.len()),
        }
    }

    /// Floats of what a rank has carried at once.
    pub(super) fn carried_floats(&self) -> usize {
        self.values().max(self.carried_columns(self.rows))
    }

    /// Floats that a rank's columns of so many rows have while they are carried: as many as the widest rank's, and whole
    /// eights, at which what follows them may lie.
    pub(super) fn carried_columns(&self, rows: usize) -> usize {
        (rows * self.columns.iter().max().copied().unwrap_or(0)).next_multiple_of(8)
    }
}
