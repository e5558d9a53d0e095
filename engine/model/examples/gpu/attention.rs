//! Attention over paged keys and values: bytes of the cache a second where sequences decode, operations where prompts are read.

use half::bf16;
use windlass_engine_model::cuda::Device;
use windlass_kernels::cuda::Memory;
use windlass_kernels::cuda::ops::{
    self, AttentionShape, Chunks, DecodeRoom, DecodeRows, Heads, PAGE_TOKENS, Pages, splits,
};
use windlass_kernels::cuda::weights::EightBits;

use crate::finding::{Bound, Ceiling, Figure};
use crate::model::Model;
use crate::parts::Tell;
use crate::rig::Rig;
use crate::{Outcome, noise};

/// How pages hold values.
const KINDS: [(&str, Option<EightBits>); 3] =
    [("bf16", None), ("fp8", Some(EightBits::E4m3)), ("int8", Some(EightBits::Int8))];

pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let rig = Rig::open(model)?;
    for (kind, code) in KINDS {
        for &(sequences, keys) in rig.scale.contexts {
            let decode = Decode::new(&rig, code, sequences, keys)?;
            let rate = decode.bytes as f64 / decode.seconds(&rig)?;
            let what = format!("decode, {kind} pages, {sequences} sequences of {keys}");
            let bound = (decode.bytes >= 200_000_000).then_some(Bound::LeastShare(85.0));
            tell(Figure::rate(what, Ceiling::Copy, rate).wanted("85 % from 200 MB on", bound).into());
        }
        for &tokens in rig.scale.prompts {
            let rate = operations(rig.scale.heads, tokens) / prefill_seconds(&rig, code, tokens)?;
            let what = format!("prefill of {tokens}, {kind} pages");
            tell(Figure::rate(what, Ceiling::Bf16, rate).wanted("75 %", Bound::LeastShare(75.0)).into());
        }
    }
    Ok(())
}

/// Of a layer.
struct Cache {
    code: Option<EightBits>,
    halves: Memory<bf16>,
    codes: Memory<u8>,
    scales: Memory<f32>,
}

impl Cache {
    fn new(rig: &Rig, code: Option<EightBits>, pages: usize) -> Outcome<Cache> {
        let (heads, device) = (rig.scale.heads, &rig.device);
        let (halves, bytes) = if code.is_none() { (pages, 0) } else { (0, pages) };
        let codes = noise::codes(code.unwrap_or(EightBits::Int8), 1 << 20);
        Ok(Cache {
            code,
            halves: noise::memory(device, &rig.stream, halves * heads.page_values(), &noise::halves(1 << 20))?,
            codes: noise::memory(device, &rig.stream, bytes * heads.page_values(), &codes)?,
            scales: noise::memory(device, &rig.stream, bytes * heads.page_rows(), &vec![0.01; 1 << 20])?,
        })
    }

    fn pages(&self) -> Pages<'_> {
        match self.code {
            None => Pages::Bf16(self.halves.view()),
            Some(code) => Pages::Bytes { code, codes: self.codes.view(), scales: self.scales.view() },
        }
    }
}

fn shape(heads: Heads) -> AttentionShape {
    AttentionShape { heads, scale: 1.0 / (heads.dim as f32).sqrt(), window: 0, cap: 0.0 }
}

/// A step of some sequences with a token each, none of whose pages another one has.
struct Decode {
    shape: AttentionShape,
    cache: Cache,
    /// Of each set of sequences, one after the other.
    tables: Memory<u32>,
    lengths: Memory<u32>,
    tokens: Memory<u32>,
    common: Memory<u32>,
    query: Memory<bf16>,
    sets: usize,
    keys: usize,
    /// That a step reads of the cache.
    bytes: usize,
}

impl Decode {
    fn new(rig: &Rig, code: Option<EightBits>, sequences: usize, keys: usize) -> Outcome<Decode> {
        let (heads, device) = (rig.scale.heads, &rig.device);
        let row_bytes = if code.is_none() { 2 * heads.dim } else { heads.dim + size_of::<f32>() };
        let bytes = sequences * keys * 2 * heads.kv_heads * row_bytes;
        let (sets, pages) = (rig.sets(bytes), sequences * keys.div_ceil(PAGE_TOKENS));
        Ok(Decode {
            shape: shape(heads),
            cache: Cache::new(rig, code, sets * pages)?,
            tables: counted(device, sets * pages)?,
            lengths: device.upload(&vec![keys as u32; sequences])?,
            tokens: counted(device, sequences)?,
            common: device.upload(&vec![0; sequences])?,
            query: device.upload(&noise::halves(sequences * heads.query_width()))?,
            sets,
            keys,
            bytes,
        })
    }

    fn seconds(&self, rig: &Rig) -> Outcome<f64> {
        let (splits, pages) = (splits(self.keys), self.tables.len() / self.sets);
        let mut room = DecodeRoom::new(&rig.device, self.lengths.len(), self.shape.heads, splits)?;
        let mut out = rig.device.allocate::<bf16>(self.query.len())?;
        rig.seconds(self.sets, |stream, set| {
            let rows = DecodeRows {
                tables: self.tables.slice(set * pages..(set + 1) * pages),
                lengths: self.lengths.view(),
                tokens: self.tokens.view(),
                common: self.common.view(),
                splits,
            };
            let (query, pages) = (self.query.view(), self.cache.pages());
            ops::attention_decode(stream, &self.shape, rows, query, pages, &mut room, out.view_mut())
        })
    }
}

/// 0, 1, 2 and so on.
fn counted(device: &Device, count: usize) -> Outcome<Memory<u32>> {
    Ok(device.upload(&(0..count as u32).collect::<Vec<_>>())?)
}

/// Scores and sums of a prompt, of which each token sees those before it.
fn operations(Heads { heads, dim, .. }: Heads, tokens: usize) -> f64 {
    4.0 * (heads * dim) as f64 * (tokens * (tokens + 1) / 2) as f64
}

/// Of a prompt that is alone. Its keys and values stay in the cache: arithmetic bounds it.
fn prefill_seconds(rig: &Rig, code: Option<EightBits>, tokens: usize) -> Outcome<f64> {
    let (heads, device, pages) = (rig.scale.heads, &rig.device, tokens.div_ceil(PAGE_TOKENS));
    let (cache, tables) = (Cache::new(rig, code, pages)?, counted(device, pages)?);
    let (sequences, firsts): (Vec<_>, Vec<_>) = ops::prefill_tiles(heads, &[tokens as u32]).into_iter().unzip();
    let (sequences, firsts) = (device.upload(&sequences)?, device.upload(&firsts)?);
    let (zero, count) = (device.upload(&[0_u32])?, device.upload(&[tokens as u32])?);
    let query = device.upload(&noise::halves(tokens * heads.query_width()))?;
    let mut out = device.allocate::<bf16>(query.len())?;
    rig.seconds(1, |stream, _| {
        let chunks = Chunks {
            tables: tables.view(),
            tile_sequences: sequences.view(),
            tile_firsts: firsts.view(),
            first_tokens: zero.view(),
            token_counts: count.view(),
            first_positions: zero.view(),
            seen: None,
        };
        ops::attention_prefill(stream, &shape(heads), chunks, query.view(), cache.pages(), out.view_mut())
    })
}
