//! Cells of unscaled floats.

use half::{bf16, f16};

use super::cell::{Cell, TILE_ROWS};
use crate::Activations;
use crate::simd::Simd;

/// A cell of unscaled floats: a column, or the pair of bf16 that processors multiply at once.
pub(crate) trait FloatCell: Cell {
    /// What one input has for the cell's columns.
    type Value: Copy;

    /// Inputs that stand for one token.
    fn planes(activations: &Activations) -> usize;
    /// The values of an input, one for each cell of a tile: plane `input % planes` of token `input / planes`.
    fn values(activations: &Activations, input: usize) -> &[Self::Value];
    /// `sum` and the products of the cell's columns with `value`.
    fn multiply<S: Simd>(&self, simd: S, value: Self::Value, sum: S::F) -> S::F;
}

macro_rules! float_cell {
    ($value:ty, $bytes:literal, $load:ident) => {
        impl Cell for [$value; TILE_ROWS] {
            const COLS: usize = 1;

            fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
                let rows = rows.map(|row| row.as_chunks::<$bytes>().0);
                for (col, cell) in cells.iter_mut().enumerate() {
                    *cell = rows.map(|row| <$value>::from_le_bytes(row[col]));
                }
            }

            fn value(&self, row: usize, _col: usize) -> f32 {
                f32::from(self[row])
            }
        }

        impl FloatCell for [$value; TILE_ROWS] {
            type Value = f32;

            fn planes(_activations: &Activations) -> usize {
                1
            }
            fn values(activations: &Activations, token: usize) -> &[f32] {
                activations.values(token)
            }
            #[inline(always)]
            fn multiply<S: Simd>(&self, simd: S, value: f32, sum: S::F) -> S::F {
                simd.fma(simd.$load(self), simd.splat(value), sum)
            }
        }
    };
}

float_cell!(f32, 4, load);
float_cell!(f16, 2, load_f16);

/// Two columns; where a row ends on an odd one, the last pair's second value is zero.
impl Cell for [[bf16; 2]; TILE_ROWS] {
    const COLS: usize = 2;

    fn pack_tile(cells: &mut [Self], rows: &[&[u8]; TILE_ROWS]) {
        let rows = rows.map(|row| row.as_chunks().0);
        let value = |bytes: &[u8; 2]| without_subnormals(bf16::from_le_bytes(*bytes));
        for (pair, cell) in cells.iter_mut().enumerate() {
            *cell = rows.map(|row| [value(&row[2 * pair]), row.get(2 * pair + 1).map_or(bf16::ZERO, value)]);
        }
    }

    fn value(&self, row: usize, col: usize) -> f32 {
        self[row][col].to_f32()
    }
}

impl FloatCell for [[bf16; 2]; TILE_ROWS] {
    type Value = [bf16; 2];

    fn planes(activations: &Activations) -> usize {
        activations.planes()
    }
    fn values(activations: &Activations, input: usize) -> &[[bf16; 2]] {
        activations.pairs(input)
    }
    #[inline(always)]
    fn multiply<S: Simd>(&self, simd: S, value: [bf16; 2], sum: S::F) -> S::F {
        simd.add_pairs(sum, self, value)
    }
}

/// Values below 2⁻¹²⁶ count as zeros, as they do for the instructions that multiply pairs.
#[inline(always)]
pub(crate) fn without_subnormals(value: bf16) -> bf16 {
    let bits = value.to_bits();
    bf16::from_bits(if bits & 0x7f80 == 0 { bits & 0x8000 } else { bits })
}
