//! Weight types and the packed matrix.

use half::{bf16, f16};

use crate::Pool;

/// How a weight tensor's values are stored in a file (GGUF's block formats).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // the formats' own names
pub enum WeightType {
    F32,
    F16,
    BF16,
    Q4_0,
    Q4_1,
    Q8_0,
    Q4K,
    Q6K,
}

impl WeightType {
    /// Every type.
    pub const ALL: [WeightType; 8] = [
        WeightType::F32,
        WeightType::F16,
        WeightType::BF16,
        WeightType::Q4_0,
        WeightType::Q4_1,
        WeightType::Q8_0,
        WeightType::Q4K,
        WeightType::Q6K,
    ];

    /// The format's name as GGUF tools print it.
    pub fn name(self) -> &'static str {
        match self {
            WeightType::F32 => "F32",
            WeightType::F16 => "F16",
            WeightType::BF16 => "BF16",
            WeightType::Q4_0 => "Q4_0",
            WeightType::Q4_1 => "Q4_1",
            WeightType::Q8_0 => "Q8_0",
            WeightType::Q4K => "Q4_K",
            WeightType::Q6K => "Q6_K",
        }
    }

    /// Values per block; a row holds whole blocks.
    pub fn block_elements(self) -> usize {
        match self {
            WeightType::F32 | WeightType::F16 | WeightType::BF16 => 1,
            WeightType::Q4_0 | WeightType::Q4_1 | WeightType::Q8_0 => 32,
            WeightType::Q4K | WeightType::Q6K => 256,
        }
    }

    /// Bytes per block in the file.
    pub fn block_bytes(self) -> usize {
        match self {
            WeightType::F32 => 4,
            WeightType::F16 | WeightType::BF16 => 2,
            WeightType::Q4_0 => 18,
            WeightType::Q4_1 => 20,
            WeightType::Q8_0 => 34,
            WeightType::Q4K => 144,
            WeightType::Q6K => 210,
        }
    }

    /// Bytes of a row of `cols` values in the file; `None` when `cols` is no whole number of blocks.
    pub fn row_bytes(self, cols: usize) -> Option<usize> {
        (cols.is_multiple_of(self.block_elements()))
            .then(|| (cols / self.block_elements()).checked_mul(self.block_bytes()))
            .flatten()
    }
}

/// Why bytes do not make the matrix they should.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum ShapeError {
    /// A row does not hold whole blocks.
    #[error("a row of {cols} values is no whole number of {weight_type} blocks of {block_elements}")]
    PartialBlock {
        /// The type's name.
        weight_type: &'static str,
        /// Values per row.
        cols: usize,
        /// Values per block.
        block_elements: usize,
    },
    /// The bytes are too few or too many.
    #[error("{rows} rows of {cols} {weight_type} values take {expected} bytes, not {actual}")]
    Length {
        /// The type's name.
        weight_type: &'static str,
        /// Rows asked for.
        rows: usize,
        /// Values per row.
        cols: usize,
        /// Bytes that the shape takes.
        expected: usize,
        /// Bytes given.
        actual: usize,
    },
    /// A side is zero, or the size overflows.
    #[error("{rows} rows of {cols} values are no matrix")]
    Degenerate {
        /// Rows asked for.
        rows: usize,
        /// Values per row.
        cols: usize,
    },
}

/// A weight matrix `[rows = outputs, cols = inputs]` repacked for the kernels at the file's own bits per weight.
#[derive(Debug)]
pub struct PackedMatrix {
    weight_type: WeightType,
    rows: usize,
    cols: usize,
    data: Vec<u8>,
}

impl PackedMatrix {
    /// Repacks the `bytes` of a row-major file tensor; the bytes are not needed afterwards.
    pub fn pack(
        _pool: &Pool,
        weight_type: WeightType,
        rows: usize,
        cols: usize,
        bytes: &[u8],
    ) -> Result<Self, ShapeError> {
        if rows == 0 || cols == 0 {
            return Err(ShapeError::Degenerate { rows, cols });
        }
        let row_bytes = weight_type.row_bytes(cols).ok_or(ShapeError::PartialBlock {
            weight_type: weight_type.name(),
            cols,
            block_elements: weight_type.block_elements(),
        })?;
        let expected = row_bytes.checked_mul(rows).ok_or(ShapeError::Degenerate { rows, cols })?;
        if bytes.len() != expected {
            return Err(ShapeError::Length {
                weight_type: weight_type.name(),
                rows,
                cols,
                expected,
                actual: bytes.len(),
            });
        }
        Ok(PackedMatrix { weight_type, rows, cols, data: bytes.to_vec() })
    }

    /// Outputs.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Inputs.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The type of the file's values.
    pub fn weight_type(&self) -> WeightType {
        self.weight_type
    }

    /// Resident bytes.
    pub fn bytes(&self) -> usize {
        self.data.len()
    }

    /// Writes row `row` as f32 into `out`, which holds `cols` values: the gather of a token embedding.
    ///
    /// # Panics
    /// When `row` is out of range or `out` has another length.
    pub fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        assert!(row < self.rows, "row {row} of {}", self.rows);
        assert_eq!(out.len(), self.cols, "a row has {} values", self.cols);
        let row_bytes = self.data.len() / self.rows;
        let bytes = &self.data[row * row_bytes..][..row_bytes];
        dequantize(self.weight_type, bytes, out);
    }
}

fn dequantize(weight_type: WeightType, bytes: &[u8], out: &mut [f32]) {
    let half = |bytes: &[u8], at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
    let blocks = bytes.chunks_exact(weight_type.block_bytes());
    for (block, out) in blocks.zip(out.chunks_exact_mut(weight_type.block_elements())) {
        match weight_type {
            WeightType::F32 => out[0] = f32::from_le_bytes([block[0], block[1], block[2], block[3]]),
            WeightType::F16 => out[0] = half(block, 0),
            WeightType::BF16 => out[0] = bf16::from_le_bytes([block[0], block[1]]).to_f32(),
            WeightType::Q4_0 => {
                for i in 0..16 {
                    out[i] = half(block, 0) * (f32::from(block[2 + i] & 15) - 8.0);
                    out[i + 16] = half(block, 0) * (f32::from(block[2 + i] >> 4) - 8.0);
                }
            }
            WeightType::Q4_1 => {
                for i in 0..16 {
                    out[i] = half(block, 0) * f32::from(block[4 + i] & 15) + half(block, 2);
                    out[i + 16] = half(block, 0) * f32::from(block[4 + i] >> 4) + half(block, 2);
                }
            }
            WeightType::Q8_0 => {
                for i in 0..32 {
                    out[i] = half(block, 0) * f32::from(block[2 + i] as i8);
                }
            }
            WeightType::Q4K => {
                let (d, dmin) = (half(block, 0), half(block, 2));
                for sub in 0..8 {
                    let (scale, min) = q4k_scale_min(&block[4..16], sub);
                    for i in 0..32 {
                        let byte = block[16 + sub / 2 * 32 + i];
                        let code = if sub % 2 == 0 { byte & 15 } else { byte >> 4 };
                        out[sub * 32 + i] = d * f32::from(scale) * f32::from(code) - dmin * f32::from(min);
                    }
                }
            }
            WeightType::Q6K => {
                let d = half(block, 208);
                for (i, out) in out.iter_mut().enumerate() {
                    let (part, lane, quarter) = (i / 128, i % 32, i % 128 / 32);
                    let low = block[part * 64 + quarter % 2 * 32 + lane] >> (quarter / 2 * 4) & 15;
                    let high = block[128 + part * 32 + lane] >> (quarter * 2) & 3;
                    let scale = block[192 + i / 16] as i8;
                    *out = d * f32::from(scale) * (f32::from(low | high << 4) - 32.0);
                }
            }
        }
    }
}

/// The 6-bit scale and minimum of sub-block `sub` from a Q4_K block's 12 packed bytes.
fn q4k_scale_min(packed: &[u8], sub: usize) -> (u8, u8) {
    if sub < 4 {
        return (packed[sub] & 63, packed[sub + 4] & 63);
    }
    let high = |byte: u8| byte >> 6 << 4;
    (packed[sub + 4] & 15 | high(packed[sub - 4]), packed[sub + 4] >> 4 | high(packed[sub]))
}
