//! Tokens drawn on the device: how, where they lie for the next step, and how they come to the host, with what the model thought of
//! them.

use std::sync::Arc;

use windlass_engine_core::request::Sampling;
use windlass_engine_core::sampling::{TokenLogprob, TokenLogprobs};
use windlass_kernels::cuda::ops::{self, ALL_BANNED, MOST_TOLD, NOT_ASKED, NOT_FINITE, Samplers, TOLD, Told};
use windlass_kernels::cuda::{Device, DriverError, Element, Event, Memory, Pinned, Stream, View};

use crate::sampler::Drawn;

/// Draws of the steps in flight, one set each.
#[derive(Debug)]
pub(super) struct Draws {
    sets: [DrawSet; 2],
    rows: usize,
}

#[derive(Debug)]
struct DrawSet {
    floats: Arrays<f32>,
    words: Arrays<u32>,
    seeds: Arrays<u64>,
    /// The tokens drawn.
    drawn: Memory<u32>,
    drawn_on_host: Pinned<u32>,
    told: Tellings,
    /// Marks the end of their copy.
    copied: Event,
}

/// Several arrays of as many elements, on the host and on the device.
#[derive(Debug)]
struct Arrays<T: Element> {
    staging: Pinned<T>,
    memory: Memory<T>,
    stride: usize,
}

impl<T: Element> Arrays<T> {
    fn new(device: &Device, arrays: usize, rows: usize) -> Result<Arrays<T>, DriverError> {
        // Each begins at a multiple of 16 bytes, as kernels expect.
        let stride = rows.next_multiple_of(4);
        Ok(Arrays { staging: device.pinned(arrays * stride)?, memory: device.allocate(arrays * stride)?, stride })
    }

    fn upload(&mut self, array: usize, values: &[T], stream: &Stream) -> Result<(), DriverError> {
        let first = array * self.stride;
        self.staging.write(first, values);
        stream.copy_to_device(self.memory.slice_mut(first..first + values.len()), &self.staging, first)
    }

    fn view(&self, array: usize, rows: usize) -> View<'_, T> {
        self.memory.slice(array * self.stride..array * self.stride + rows)
    }
}

/// What is told of the tokens drawn.
#[derive(Debug)]
struct Tellings {
    /// Of how many most likely tokens each row tells, if it does.
    asked: Vec<Option<u32>>,
    wholes: Memory<u64>,
    logits: Memory<f32>,
    tokens: Memory<u32>,
    wholes_on_host: Pinned<u64>,
    logits_on_host: Pinned<f32>,
    tokens_on_host: Pinned<u32>,
}

impl Tellings {
    fn new(device: &Device, rows: usize) -> Result<Tellings, DriverError> {
        Ok(Tellings {
            asked: Vec::with_capacity(rows),
            wholes: device.allocate(rows)?,
            logits: device.allocate(rows * TOLD)?,
            tokens: device.allocate(rows * TOLD)?,
            wholes_on_host: device.pinned(rows)?,
            logits_on_host: device.pinned(rows * TOLD)?,
            tokens_on_host: device.pinned(rows * TOLD)?,
        })
    }

    /// Bytes on the device.
    fn bytes(rows: usize) -> u64 {
        (rows * (8 + 8 * TOLD)) as u64
    }

    /// Has what is asked of these rows told, and copied to the host.
    fn tell(
        &mut self,
        drawn: View<'_, u32>,
        asked: View<'_, u32>,
        logits: View<'_, f32>,
        vocabulary: usize,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let rows = drawn.len();
        let told = Told {
            wholes: self.wholes.slice_mut(0..rows),
            logits: self.logits.slice_mut(0..rows * TOLD),
            tokens: self.tokens.slice_mut(0..rows * TOLD),
        };
        ops::tell(stream, drawn, asked, logits, vocabulary, told)?;
        stream.copy_to_host(&self.wholes_on_host, 0, self.wholes.slice(0..rows))?;
        stream.copy_to_host(&self.logits_on_host, 0, self.logits.slice(0..rows * TOLD))?;
        stream.copy_to_host(&self.tokens_on_host, 0, self.tokens.slice(0..rows * TOLD))
    }

    /// What a row was told, which drew this token.
    fn read(&self, row: usize, token: u32) -> Option<TokenLogprobs> {
        let top = self.asked[row]? as usize;
        let logits = self.logits_on_host.read(row * TOLD..(row + 1) * TOLD);
        let tokens = self.tokens_on_host.read(row * TOLD..(row + 1) * TOLD);
        let whole = self.wholes_on_host.read(row..row + 1)[0] as f64 / Told::ONE;
        let logprob = |token: u32, logit: f32, rank: u32| {
            let logprob = (f64::from(logit) - f64::from(logits[0]) - whole.ln()) as f32;
            TokenLogprob { token, logprob, rank }
        };
        let likely = tokens[2..2 + top].iter().zip(&logits[2..2 + top]);
        let top = (1..).zip(likely).map(|(rank, (&token, &logit))| logprob(token, logit, rank)).collect();
        Some(TokenLogprobs { chosen: logprob(token, logits[1], 1 + tokens[0]), top })
    }
}

/// One row's draw.
#[derive(Clone, Debug)]
pub(super) struct RowDraw {
    /// What decides it.
    pub sampling: Arc<Sampling>,
    /// The position that its token will have.
    pub position: u32,
    /// Of how many most likely tokens to tell beside it; absent for telling nothing.
    pub told: Option<u32>,
}

/// Whether the device tells of so many most likely tokens.
pub(super) fn tells(top: u32) -> bool {
    top as usize <= MOST_TOLD
}

impl Draws {
    /// Room for draws of `rows` rows.
    pub fn new(device: &Device, rows: usize) -> Result<Draws, DriverError> {
        let set = || -> Result<DrawSet, DriverError> {
            Ok(DrawSet {
                floats: Arrays::new(device, 3, rows)?,
                words: Arrays::new(device, 3, rows)?,
                seeds: Arrays::new(device, 1, rows)?,
                drawn: device.allocate(rows)?,
                drawn_on_host: device.pinned(rows)?,
                told: Tellings::new(device, rows)?,
                copied: Event::new(device)?,
            })
        };
        Ok(Draws { sets: [set()?, set()?], rows })
    }

    /// Bytes on the device for draws of `rows` rows.
    pub fn bytes(rows: usize) -> u64 {
        let stride = rows.next_multiple_of(4) as u64;
        2 * ((3 * 4 + 3 * 4 + 8) * stride + 4 * rows as u64 + Tellings::bytes(rows))
    }

    /// Draws a token from each of the first rows of `logits`, for the step of this `turn` (0 or 1), and has the tokens
    /// copied to the host.
    pub fn draw(
        &mut self,
        turn: usize,
        draws: &[RowDraw],
        logits: View<'_, f32>,
        vocabulary: usize,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let rows = draws.len();
        assert!(rows > 0 && rows <= self.rows, "{rows} draws; there is room for {}", self.rows);
        let set = &mut self.sets[turn];
        let floats = |of: fn(&Sampling) -> f32| -> Vec<f32> { draws.iter().map(|draw| of(&draw.sampling)).collect() };
        set.floats.upload(0, &floats(|sampling| sampling.temperature.max(0.0)), stream)?;
        set.floats.upload(1, &floats(|sampling| sampling.top_p), stream)?;
        set.floats.upload(2, &floats(|sampling| sampling.min_p.ln()), stream)?;
        let top_ks: Vec<u32> = draws.iter().map(|draw| draw.sampling.top_k).collect();
        let positions: Vec<u32> = draws.iter().map(|draw| draw.position).collect();
        set.words.upload(0, &top_ks, stream)?;
        set.words.upload(1, &positions, stream)?;
        let seeds: Vec<u64> = draws.iter().map(|draw| draw.sampling.seed).collect();
        set.seeds.upload(0, &seeds, stream)?;
        let samplers = Samplers {
            temperatures: set.floats.view(0, rows),
            top_ps: set.floats.view(1, rows),
            floors: set.floats.view(2, rows),
            top_ks: set.words.view(0, rows),
            positions: set.words.view(1, rows),
            seeds: set.seeds.view(0, rows),
        };
        let logits = logits.slice(0..rows * vocabulary);
        ops::sample(stream, samplers, logits, vocabulary, set.drawn.slice_mut(0..rows))?;
        stream.copy_to_host(&set.drawn_on_host, 0, set.drawn.slice(0..rows))?;
        let least = |top: u32| top.min(vocabulary as u32);
        set.told.asked = draws.iter().map(|draw| draw.told.map(least)).collect();
        if set.told.asked.iter().any(Option::is_some) {
            let asked: Vec<u32> = set.told.asked.iter().map(|top| top.unwrap_or(NOT_ASKED)).collect();
            set.words.upload(2, &asked, stream)?;
            set.told.tell(set.drawn.slice(0..rows), set.words.view(2, rows), logits, vocabulary, stream)?;
        }
        stream.mark(&set.copied)
    }

    /// Marks the end of a step that draws nothing.
    pub fn skip(&mut self, turn: usize, stream: &Stream) -> Result<(), DriverError> {
        stream.mark(&self.sets[turn].copied)
    }

    /// Tokens that the step of this turn drew or will have drawn, on the device.
    pub fn on_device(&self, turn: usize, rows: std::ops::Range<usize>) -> View<'_, u32> {
        self.sets[turn].drawn.slice(rows)
    }

    /// Waits until they are on the host.
    pub fn wait(&self, turn: usize) -> Result<(), DriverError> {
        self.sets[turn].copied.synchronize()
    }

    /// The same on the host, once they were waited for, with what was told of those that are tokens.
    pub fn drawn(&self, turn: usize, rows: usize) -> Vec<Drawn> {
        let set = &self.sets[turn];
        let tokens = set.drawn_on_host.read(0..rows).into_iter().enumerate();
        let told = |row, token| if is_token(token) { set.told.read(row, token) } else { None };
        tokens.map(|(row, token)| Drawn { token, logprobs: told(row, token) }).collect()
    }
}

/// Whether what was drawn is a token.
fn is_token(drawn: u32) -> bool {
    !matches!(drawn, NOT_FINITE | ALL_BANNED)
}
