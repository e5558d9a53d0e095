//! Eight-bit floats as a file has them, for devices that multiply them so.

use half::bf16;

use super::floats::e4m3;

/// A matrix of e4m3 (Micikevicius et al. 2022), row after row.
#[derive(Clone, Debug, PartialEq)]
pub struct Float8 {
    /// All of them numbers.
    pub codes: Vec<u8>,
    /// What every `group` codes of a row are multiplied with.
    pub scales: Vec<f32>,
    /// A multiple of 128, or a whole row.
    pub group: usize,
}

impl Float8 {
    /// Its values as little-endian bf16, in rows of `cols`.
    pub(crate) fn to_bf16(&self, cols: usize) -> Vec<u8> {
        let groups = self.codes.chunks_exact(cols).flat_map(|row| row.chunks(self.group));
        let values = groups.zip(&self.scales).flat_map(|(codes, scale)| codes.iter().map(move |code| (code, scale)));
        values.flat_map(|(code, scale)| bf16::from_f32(e4m3((*code).into()) * scale).to_le_bytes()).collect()
    }
}
