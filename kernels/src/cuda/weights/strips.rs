//! File tensors made ready for a device by all of a pool's threads, each a strip of rows at a time: a strip is whole tiles, and
//! what is made of strips one after the other is what is made of all rows at once.

use half::bf16;

use super::ROW_TILE;
use crate::{PackedMatrix, Pool, ShapeError, WeightType};

/// Rows of a strip: milliseconds of a thread's work, so that threads end at much the same time.
const STRIP_ROWS: usize = 4 * ROW_TILE;

/// A matrix as it lies on a device, in words: its codes, and its scales.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Words {
    pub(super) codes: Vec<u32>,
    pub(super) scales: Vec<u32>,
    /// Whether there are minimums that the scales do not tell.
    pub(super) affine: bool,
}

impl Words {
    fn append(mut self, next: Words) -> Words {
        self.codes.extend(next.codes);
        self.scales.extend(next.scales);
        Words { affine: self.affine || next.affine, ..self }
    }
}

/// What `make` makes of whole rows, their number and their bytes; `None` where it makes nothing of some.
pub(super) fn words(
    pool: &Pool,
    row_bytes: usize,
    bytes: &[u8],
    make: impl Fn(usize, &[u8]) -> Option<Result<Words, ShapeError>> + Sync,
) -> Option<Result<Words, ShapeError>> {
    let mut strips: Vec<_> = bytes.chunks(STRIP_ROWS * row_bytes).map(|strip| (strip, None)).collect();
    pool.for_each(strips.iter_mut(), |(strip, words)| *words = make(strip.len() / row_bytes, strip));
    let (codes, scales) = strips.iter().fold((0, 0), |(codes, scales), (_, words)| match words {
        Some(Ok(words)) => (codes + words.codes.len(), scales + words.scales.len()),
        _ => (codes, scales),
    });
    let room = Words { codes: Vec::with_capacity(codes), scales: Vec::with_capacity(scales), affine: false };
    strips.into_iter().try_fold(Ok(room), |all: Result<Words, ShapeError>, (_, words)| {
        let words = words?;
        Some(all.and_then(|all| Ok(all.append(words?))))
    })
}

/// The values of a file tensor, rounded.
pub(super) fn as_bf16(
    pool: &Pool,
    from: WeightType,
    rows: usize,
    cols: usize,
    bytes: &[u8],
) -> Result<Vec<bf16>, ShapeError> {
    let row_bytes = crate::weights::validated_row_bytes(from, rows, cols, bytes.len())?;
    let mut values = vec![bf16::ZERO; rows * cols];
    if matches!(from, WeightType::F32 | WeightType::F16 | WeightType::BF16) {
        let strips = bytes.chunks(STRIP_ROWS * row_bytes).zip(values.chunks_mut(STRIP_ROWS * cols));
        pool.for_each(strips, |(bytes, values)| round_floats(from, bytes, values));
        return Ok(values);
    }
    let packed = PackedMatrix::pack(pool, from, rows, cols, bytes)?;
    pool.for_each(values.chunks_mut(cols).enumerate(), |(index, values)| {
        let mut row = vec![0.0; cols];
        packed.dequantize_row(index, &mut row);
        values.iter_mut().zip(row).for_each(|(to, value)| *to = bf16::from_f32(value));
    });
    Ok(values)
}

fn round_floats(from: WeightType, bytes: &[u8], to: &mut [bf16]) {
    match from {
        WeightType::BF16 => {
            to.iter_mut().zip(bytes.as_chunks().0).for_each(|(to, bytes)| *to = bf16::from_le_bytes(*bytes));
        }
        _ => to.iter_mut().zip(crate::floats(from, bytes)).for_each(|(to, value)| *to = bf16::from_f32(value)),
    }
}
