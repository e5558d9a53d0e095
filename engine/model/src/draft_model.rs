//! A draft model: a small model that proposes draft tokens for a large one of the same vocabulary (Leviathan et al.
//! 2023, "Fast Inference from Transformers via Speculative Decoding").
//!
//! Decoding is greedy. K and V of as many sequences as the pool has room for are kept between calls, so that only their
//! new tokens are computed; other sequences are recomputed.

use std::collections::HashMap;
use std::fmt;

use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_core::draft::{DraftRequest, DraftTree, Proposer};
use windlass_engine_core::executor::Geometry;
use windlass_engine_core::plan::BlockId;
use windlass_engine_core::request::{RequestId, Sampling, TokenId};

use crate::batch::{Batch, Logits};
use crate::cpu::{Built, CpuDecoder};
use crate::decoder::Model;
use crate::error::LoadError;
use crate::load::{self, build};
use crate::sampler::{Draw, RowTask};
use crate::sizes::LoadOptions;

/// A draft model, with K and V of recent sequences.
pub struct DraftModel<M: Model> {
    decoder: M,
    geometry: Geometry,
    batch: Batch,
    free: Vec<BlockId>,
    sequences: HashMap<RequestId, CachedTokens>,
    calls: u64,
    /// Whether the device has failed. Then nothing is proposed; the large model will report the failure.
    is_lost: bool,
}

/// The computed tokens of one sequence.
#[derive(Debug, Default)]
struct CachedTokens {
    blocks: Vec<BlockId>,
    /// Tokens whose keys and values are in the blocks.
    tokens: Vec<TokenId>,
    /// The call of `propose` that used it last.
    last_call: u64,
}

/// A sequence while its draft tokens are generated.
struct Drafting {
    index: usize,
    request: RequestId,
    /// The known tokens, then the draft tokens.
    tokens: Vec<TokenId>,
    known: usize,
    max_tokens: usize,
}

impl DraftModel<CpuDecoder> {
    /// Loads the model on the CPU. `options` bound the size of its steps, and by the pool how many sequences it keeps.
    pub fn load(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<DraftModel<CpuDecoder>, LoadError> {
        let Built { decoder, geometry, .. } = build(checkpoint, &own(options))?;
        Ok(DraftModel::new(decoder, geometry))
    }

    /// The memory that it would take, by the checkpoint's headers. `options` are those of the large model.
    pub fn ledger(checkpoint: &Checkpoint, options: &LoadOptions) -> Result<Ledger, LoadError> {
        load::ledger(checkpoint, &own(options))
    }
}

impl<M: Model + Send> DraftModel<M> {
    /// A draft model that has computed nothing yet.
    pub(crate) fn new(decoder: M, geometry: Geometry) -> DraftModel<M> {
        let free = (0..geometry.blocks).map(BlockId).collect();
        let (batch, sequences) = (Batch::default(), HashMap::new());
        DraftModel { decoder, geometry, batch, free, sequences, calls: 0, is_lost: false }
    }

    /// Number of token ids.
    pub fn vocabulary(&self) -> u32 {
        self.geometry.vocabulary
    }

    /// Prepares drafting for a request and gets blocks for it; `None` if the sequence is too long for the model.
    fn begin(&mut self, index: usize, ask: &DraftRequest<'_>) -> Option<Drafting> {
        let longest = (ask.tokens.len() + ask.max_tokens).min(self.geometry.max_sequence_tokens as usize);
        let max_tokens = longest.checked_sub(ask.tokens.len()).filter(|max_tokens| *max_tokens > 0)?;
        if ask.tokens.iter().any(|token| *token >= self.geometry.vocabulary) {
            return None;
        }
        self.make_room(ask.request, longest.div_ceil(self.geometry.block_tokens as usize))?;
        let cached = self.sequences.get_mut(&ask.request)?;
        // The last token is always computed, for its logits.
        let common = cached.tokens.iter().zip(&ask.tokens[..ask.tokens.len() - 1]).take_while(|(a, b)| a == b).count();
        cached.tokens.truncate(common);
        Some(Drafting { index, request: ask.request, tokens: ask.tokens.to_vec(), known: ask.tokens.len(), max_tokens })
    }

    /// Makes sure that a sequence has so many blocks. Sequences that are not in this call give up theirs, the least
    /// recently used first.
    fn make_room(&mut self, request: RequestId, blocks: usize) -> Option<()> {
        loop {
            let cached = self.sequences.entry(request).or_default();
            cached.last_call = self.calls;
            let missing = blocks.saturating_sub(cached.blocks.len());
            if missing <= self.free.len() {
                cached.blocks.extend(self.free.drain(self.free.len() - missing..));
                return Some(());
            }
            let others = self.sequences.iter().filter(|(_, cached)| cached.last_call < self.calls);
            let (&oldest, _) = others.min_by_key(|(_, cached)| cached.last_call)?;
            self.forget(oldest);
        }
    }

    /// Computes all tokens of a sequence but the last.
    fn catch_up(&mut self, request: RequestId, tokens: &[TokenId]) -> Result<(), M::Error> {
        let Some(cached) = self.sequences.get_mut(&request) else { return Ok(()) };
        let new = &tokens[cached.tokens.len()..tokens.len() - 1];
        for chunk in new.chunks(self.geometry.max_step_tokens as usize) {
            self.batch.clear();
            self.batch.push(chunk.iter().copied(), cached.tokens.len() as u32, &cached.blocks, Logits::NONE);
            self.decoder.forward(&self.batch)?;
            cached.tokens.extend(chunk);
        }
        Ok(())
    }

    /// Appends the next draft token to each sequence, of which all tokens but the last are computed. There are at most
    /// as many as a step has rows.
    fn advance(&mut self, drafting: &mut [&mut Drafting]) -> Result<(), M::Error> {
        self.batch.clear();
        for one in drafting.iter() {
            let (Some(cached), Some(&last)) = (self.sequences.get_mut(&one.request), one.tokens.last()) else {
                continue;
            };
            self.batch.push([last], cached.tokens.len() as u32, &cached.blocks, Logits::LAST);
            cached.tokens.push(last);
        }
        self.decoder.forward(&self.batch)?;
        let tasks = vec![RowTask::Draw(most_likely()); drafting.len()];
        for (one, drawn) in drafting.iter_mut().zip(self.decoder.sample(&tasks)?) {
            match drawn {
                Ok(drawn) => one.tokens.push(drawn.token),
                Err(_) => one.max_tokens = one.tokens.len() - one.known,
            }
        }
        Ok(())
    }

    /// Generates all draft tokens of every sequence.
    fn extend_all(&mut self, drafting: &mut [Drafting]) -> Result<(), M::Error> {
        for one in &*drafting {
            self.catch_up(one.request, &one.tokens)?;
        }
        loop {
            let is_unfinished = |one: &&mut Drafting| one.tokens.len() < one.known + one.max_tokens;
            let mut unfinished: Vec<&mut Drafting> = drafting.iter_mut().filter(is_unfinished).collect();
            if unfinished.is_empty() {
                return Ok(());
            }
            for some in unfinished.chunks_mut(self.geometry.max_step_rows as usize) {
                self.advance(some)?;
            }
        }
    }
}

/// Options of a draft model beside a large model: it is too small for tensor parallelism, has a context length of its
/// own, and recomputes instead of swapping.
pub(crate) fn own(options: &LoadOptions) -> LoadOptions {
    LoadOptions { tensor_parallel: 1, expert_parallel: false, max_model_tokens: None, swap: None, ..options.clone() }
}

impl<M: Model + Send> Proposer for DraftModel<M> {
    fn propose(&mut self, asks: &[DraftRequest<'_>]) -> Vec<DraftTree> {
        self.calls += 1;
        let mut drafting: Vec<Drafting> =
            asks.iter().enumerate().filter_map(|(index, ask)| self.begin(index, ask)).collect();
        let mut trees = vec![DraftTree::default(); asks.len()];
        self.is_lost |= self.extend_all(&mut drafting).is_err();
        if self.is_lost {
            return trees;
        }
        for one in drafting {
            trees[one.index] = DraftTree::chain(one.tokens[one.known..].iter().copied());
        }
        trees
    }

    fn is_free(&self) -> bool {
        false
    }

    fn forget(&mut self, request: RequestId) {
        if let Some(cached) = self.sequences.remove(&request) {
            self.free.extend(cached.blocks);
        }
    }
}

impl<M: Model> fmt::Debug for DraftModel<M> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "DraftModel({} sequences)", self.sequences.len())
    }
}

fn most_likely() -> Draw<'static> {
    const GREEDY: &Sampling = &Sampling::GREEDY;
    Draw { sampling: GREEDY, banned: &[], prompt: &[], generated: &[], allowed: None, position: 0, logprobs: None }
}
