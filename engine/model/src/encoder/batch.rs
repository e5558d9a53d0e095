//! Batches of texts of different lengths, as rectangular tensors.

use candle_core::{Device, Result, Tensor};

/// A text as an encoder reads it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EncoderInput {
    /// Its tokens, with the special ones.
    pub tokens: Vec<u32>,
    /// For each token 0 if it is of the first text, 1 if of the second; empty if all are of the first.
    pub types: Vec<u32>,
}

impl EncoderInput {
    /// Number of tokens.
    pub fn len(&self) -> usize {
        self.tokens.len()
    }

    /// Whether it has no tokens.
    pub fn is_empty(&self) -> bool {
        self.tokens.is_empty()
    }
}

/// Texts, one a row, padded at the end.
pub(super) struct Padded {
    /// `[texts, longest]`
    pub tokens: Tensor,
    /// `[texts, longest]`
    pub types: Tensor,
    /// 1 for tokens, 0 for padding, `[texts, longest]`.
    pub mask: Tensor,
}

impl Padded {
    pub(super) fn new(texts: &[EncoderInput], padding: u32) -> Result<Padded> {
        let longest = texts.iter().map(EncoderInput::len).max().unwrap_or(0);
        let rectangle = |value: &dyn Fn(&EncoderInput, usize) -> u32| {
            let cells = texts.iter().flat_map(|text| (0..longest).map(move |at| value(text, at)));
            Tensor::from_vec(cells.collect::<Vec<u32>>(), (texts.len(), longest), &Device::Cpu)
        };
        Ok(Padded {
            tokens: rectangle(&|text, at| text.tokens.get(at).copied().unwrap_or(padding))?,
            types: rectangle(&|text, at| text.types.get(at).copied().unwrap_or(0))?,
            mask: rectangle(&|text, at| u32::from(at < text.len()))?,
        })
    }
}
