//! The codes that stand for zero in a group of each of 16 rows, in 4 bits.

use std::array::from_fn;

use half::f16;

use super::cell::TILE_ROWS;
use crate::simd::Simd;

/// That of row r in the low nibble, that of row r + 8 in the high one.
#[derive(Clone, Copy, Debug)]
#[repr(transparent)]
pub(super) struct ZeroPoints([u8; TILE_ROWS / 2]);

impl ZeroPoints {
    /// Those of 16 rows, each below 16.
    pub(super) fn of(rows: [u8; TILE_ROWS]) -> ZeroPoints {
        ZeroPoints(from_fn(|row| rows[row] | rows[row + TILE_ROWS / 2] << 4))
    }

    #[inline(always)]
    pub(super) fn all(&self) -> [u8; TILE_ROWS] {
        let mut all = [0; TILE_ROWS];
        for (row, pair) in self.0.iter().enumerate() {
            (all[row], all[row + TILE_ROWS / 2]) = (pair & 15, pair >> 4);
        }
        all
    }

    /// What is added to `scale · code`.
    #[inline(always)]
    pub(super) fn minimums<S: Simd>(&self, simd: S, scales: &[f16; TILE_ROWS]) -> S::F {
        simd.sub(simd.splat(0.0), simd.mul(simd.load_f16(scales), simd.load_u8(&self.all())))
    }
}
