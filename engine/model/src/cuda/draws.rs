//! Tokens drawn on the device: how, where they lie for the next step, and how they come to the host, with what the model thought of
//! them.

use std::ops::Range;

use windlass_engine_core::request::Sampling;
use windlass_engine_core::sampling::{TokenLogprob, TokenLogprobs};
use windlass_kernels::cuda::ops::{self, ALL_BANNED, Asked, MOST_TOLD, NONE, NOT_FINITE, Samplers, TOLD, Told};
use windlass_kernels::cuda::{Device, DriverError, Event, Memory, Pinned, Stream, View};

use super::words::{WordRoom, Words};
use crate::sampler::Drawn;

/// Draws of the steps in flight, one set each.
#[derive(Debug)]
pub(super) struct Draws {
    sets: [DrawSet; 2],
    rows: usize,
}

#[derive(Debug)]
struct DrawSet {
    /// How each is drawn, and what is to be told of it.
    asked: WordRoom,
    /// The tokens drawn.
    drawn: Memory<u32>,
    drawn_on_host: Pinned<u32>,
    told: LogprobBuffers,
    /// Marks the end of their copy.
    copied: Event,
}

/// What is told of the tokens drawn.
#[derive(Debug)]
struct LogprobBuffers {
    /// Of how many most likely tokens each row tells, if it does, and the token that is known.
    asked: Vec<(Option<u32>, Option<u32>)>,
    wholes: Memory<u64>,
    logits: Memory<f32>,
    tokens: Memory<u32>,
    wholes_on_host: Pinned<u64>,
    logits_on_host: Pinned<f32>,
    tokens_on_host: Pinned<u32>,
}

impl LogprobBuffers {
    fn new(device: &Device, rows: usize) -> Result<LogprobBuffers, DriverError> {
        Ok(LogprobBuffers {
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
        asked: Asked<'_>,
        logits: View<'_, f32>,
        vocabulary: usize,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let rows = asked.drawn.len();
        let told = Told {
            wholes: self.wholes.slice_mut(0..rows),
            logits: self.logits.slice_mut(0..rows * TOLD),
            tokens: self.tokens.slice_mut(0..rows * TOLD),
        };
        ops::tell(stream, asked, logits, vocabulary, told)?;
        stream.copy_to_host(&self.wholes_on_host, 0, self.wholes.slice(0..rows))?;
        stream.copy_to_host(&self.logits_on_host, 0, self.logits.slice(0..rows * TOLD))?;
        stream.copy_to_host(&self.tokens_on_host, 0, self.tokens.slice(0..rows * TOLD))
    }

    /// A row's token, drawn unless it is known, with what was told of it.
    fn read(&self, row: usize, drawn: u32) -> Drawn {
        let (top, target) = self.asked[row];
        let token = target.unwrap_or(drawn);
        Drawn { token, logprobs: top.map(|top| self.read_logprobs(row, token, top as usize)) }
    }

    fn read_logprobs(&self, row: usize, token: u32, top: usize) -> TokenLogprobs {
        let logits = self.logits_on_host.read(row * TOLD..(row + 1) * TOLD);
        let tokens = self.tokens_on_host.read(row * TOLD..(row + 1) * TOLD);
        let whole = self.wholes_on_host.read(row..row + 1)[0] as f64 / Told::ONE;
        let logprob = |token: u32, logit: f32, rank: u32| {
            let logprob = (f64::from(logit) - f64::from(logits[0]) - whole.ln()) as f32;
            TokenLogprob { token, logprob, rank }
        };
        let likely = tokens[2..2 + top].iter().zip(&logits[2..2 + top]);
        let top = (1..).zip(likely).map(|(rank, (&token, &logit))| logprob(token, logit, rank)).collect();
        TokenLogprobs { chosen: logprob(token, logits[1], 1 + tokens[0]), top }
    }
}

/// One row's draw, in the numbers that the device takes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RowDraw {
    temperature: f32,
    top_p: f32,
    /// The logarithm of min-p.
    floor: f32,
    top_k: u32,
    seed: u64,
    /// The position that the token will have.
    position: u32,
    /// Of how many most likely tokens to tell beside it; absent for telling nothing.
    told: Option<u32>,
    /// The token that is told of, where it is known.
    target: Option<u32>,
}

impl RowDraw {
    /// The likeliest token, of which nothing is told.
    pub const LIKELIEST: RowDraw = RowDraw {
        temperature: 0.0,
        top_p: 1.0,
        floor: f32::NEG_INFINITY,
        top_k: 0,
        seed: 0,
        position: 0,
        told: None,
        target: None,
    };

    /// The draw of a token that will have this position.
    pub fn new(sampling: &Sampling, position: u32, told: Option<u32>) -> RowDraw {
        let Sampling { temperature, top_p, min_p, top_k, seed, .. } = *sampling;
        let (temperature, floor) = (temperature.max(0.0), min_p.ln());
        RowDraw { temperature, top_p, floor, top_k, seed, position, told, target: None }
    }

    /// Telling of a token that is known. The likeliest is drawn beside it, which shows whether all logits are numbers.
    pub fn known(target: u32, top: u32) -> RowDraw {
        RowDraw { told: Some(top), target: Some(target), ..RowDraw::LIKELIEST }
    }
}

/// Where the numbers of draws lie.
struct DrawRanges {
    temperatures: Range<usize>,
    top_ps: Range<usize>,
    floors: Range<usize>,
    top_ks: Range<usize>,
    positions: Range<usize>,
    seeds: Range<usize>,
    targets: Range<usize>,
    counts: Range<usize>,
}

impl DrawRanges {
    fn of(draws: &[RowDraw], told: &LogprobBuffers, words: &mut Words) -> DrawRanges {
        DrawRanges {
            temperatures: words.push_floats(draws.iter().map(|draw| draw.temperature)),
            top_ps: words.push_floats(draws.iter().map(|draw| draw.top_p)),
            floors: words.push_floats(draws.iter().map(|draw| draw.floor)),
            top_ks: words.push(draws.iter().map(|draw| draw.top_k)),
            positions: words.push(draws.iter().map(|draw| draw.position)),
            seeds: words.push_longs(draws.iter().map(|draw| draw.seed)),
            targets: words.push(told.asked.iter().map(|(_, target)| target.unwrap_or(NONE))),
            counts: words.push(told.asked.iter().map(|(top, _)| top.unwrap_or(NONE))),
        }
    }

    fn samplers<'a>(&self, asked: &'a WordRoom) -> Samplers<'a> {
        Samplers {
            temperatures: asked.view(&self.temperatures),
            top_ps: asked.view(&self.top_ps),
            floors: asked.view(&self.floors),
            top_ks: asked.view(&self.top_ks),
            positions: asked.view(&self.positions),
            seeds: asked.view(&self.seeds),
        }
    }
}

/// Words of the numbers of so many draws: seven of one, and seeds of two.
fn draw_words(rows: usize) -> usize {
    Words::room([rows; 7].into_iter().chain([2 * rows]))
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
                asked: WordRoom::new(device, draw_words(rows))?,
                drawn: device.allocate(rows)?,
                drawn_on_host: device.pinned(rows)?,
                told: LogprobBuffers::new(device, rows)?,
                copied: Event::new(device)?,
            })
        };
        Ok(Draws { sets: [set()?, set()?], rows })
    }

    /// Bytes on the device for draws of `rows` rows.
    pub fn bytes(rows: usize) -> u64 {
        2 * (4 * (draw_words(rows) + rows) as u64 + LogprobBuffers::bytes(rows))
    }

    /// Draws a token from each of the first rows of `logits`, for the step of this `buffer` (0 or 1), and has the tokens
    /// copied to the host.
    pub fn draw(
        &mut self,
        buffer: usize,
        draws: &[RowDraw],
        logits: View<'_, f32>,
        vocabulary: usize,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let rows = draws.len();
        assert!(rows > 0 && rows <= self.rows, "{rows} draws; there is room for {}", self.rows);
        let set = &mut self.sets[buffer];
        let told = |draw: &RowDraw| draw.told.map(|top| top.min(vocabulary as u32));
        set.told.asked = draws.iter().map(|draw| (told(draw), draw.target)).collect();
        let mut words = Words::default();
        let ranges = DrawRanges::of(draws, &set.told, &mut words);
        set.asked.send(&words, stream)?;
        let logits = logits.slice(0..rows * vocabulary);
        ops::sample(stream, ranges.samplers(&set.asked), logits, vocabulary, set.drawn.slice_mut(0..rows))?;
        stream.copy_to_host(&set.drawn_on_host, 0, set.drawn.slice(0..rows))?;
        if draws.iter().any(|draw| draw.told.is_some()) {
            let (targets, counts) = (set.asked.view(&ranges.targets), set.asked.view(&ranges.counts));
            set.told.tell(Asked { drawn: set.drawn.slice(0..rows), targets, counts }, logits, vocabulary, stream)?;
        }
        stream.mark(&set.copied)
    }

    /// Marks the end of a step that draws nothing.
    pub fn skip(&mut self, buffer: usize, stream: &Stream) -> Result<(), DriverError> {
        stream.mark(&self.sets[buffer].copied)
    }

    /// Tokens that the step of this turn drew or will have drawn, on the device.
    pub fn on_device(&self, buffer: usize, rows: Range<usize>) -> View<'_, u32> {
        self.sets[buffer].drawn.slice(rows)
    }

    /// Waits until they are on the host.
    pub fn wait(&self, buffer: usize) -> Result<(), DriverError> {
        self.sets[buffer].copied.synchronize()
    }

    /// The same on the host, once they were waited for, with what was told of those that are tokens.
    pub fn drawn(&self, buffer: usize, rows: usize) -> Vec<Drawn> {
        let set = &self.sets[buffer];
        let tokens = set.drawn_on_host.read(0..rows).into_iter().enumerate();
        let read =
            |(row, token)| if is_token(token) { set.told.read(row, token) } else { Drawn { token, logprobs: None } };
        tokens.map(read).collect()
    }
}

/// Whether what was drawn is a token.
fn is_token(drawn: u32) -> bool {
    !matches!(drawn, NOT_FINITE | ALL_BANNED)
}
