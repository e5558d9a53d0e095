//! Draws tokens on the device. The tokens stay there for the next step, and are copied to the host with the log
//! probabilities that were asked for.

use std::ops::Range;

use windlass_engine_core::request::Sampling;
use windlass_engine_core::sampling::{TokenLogprob, TokenLogprobs};
use windlass_kernels::cuda::ops::{self, ALL_BANNED, Asked, MOST_TOLD, NONE, NOT_FINITE, Samplers, TOLD, Told};
use windlass_kernels::cuda::{Device, DriverError, Event, Memory, Pinned, Stream, View};

use super::words::{WordRoom, Words};
use crate::sampler::Drawn;

/// The draws of the steps in flight, one set of buffers for each step.
#[derive(Debug)]
pub(super) struct Draws {
    sets: [DrawSet; 2],
    rows: usize,
}

#[derive(Debug)]
struct DrawSet {
    /// The parameters of the draws.
    parameters: WordRoom,
    /// The drawn tokens.
    drawn: Memory<u32>,
    drawn_on_host: Pinned<u32>,
    logprobs: LogprobBuffers,
    /// Signals the end of the copy to the host.
    copied: Event,
}

/// Log probabilities of the drawn tokens, as the kernels compute them: each row's sum of exponentials (`wholes`), and
/// the logits and ids of the tokens that are reported.
#[derive(Debug)]
struct LogprobBuffers {
    /// For each row the number of most likely tokens to report, if any, and the token to score, if it is known.
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

    /// Computes the log probabilities of these rows and copies them to the host.
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

    /// The token of a row, with its log probability: the known token if there is one, else `drawn`.
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

/// The parameters of one row's draw, as the kernel takes them.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct RowDraw {
    temperature: f32,
    top_p: f32,
    /// Natural logarithm of min-p.
    floor: f32,
    top_k: u32,
    seed: u64,
    /// The position that the token will have.
    position: u32,
    /// Number of most likely tokens to report with the token; `None` for no log probabilities.
    top_logprobs: Option<u32>,
    /// The token to score, if it is known.
    target: Option<u32>,
}

impl RowDraw {
    /// Draws the most likely token, without log probabilities.
    pub const LIKELIEST: RowDraw = RowDraw {
        temperature: 0.0,
        top_p: 1.0,
        floor: f32::NEG_INFINITY,
        top_k: 0,
        seed: 0,
        position: 0,
        top_logprobs: None,
        target: None,
    };

    /// The draw of a token that will have this position.
    pub fn new(sampling: &Sampling, position: u32, top_logprobs: Option<u32>) -> RowDraw {
        let Sampling { temperature, top_p, min_p, top_k, seed, .. } = *sampling;
        let (temperature, floor) = (temperature.max(0.0), min_p.ln());
        RowDraw { temperature, top_p, floor, top_k, seed, position, top_logprobs, target: None }
    }

    /// Scores a known token. The most likely token is drawn beside it, which shows whether all logits are finite.
    pub fn known(target: u32, top: u32) -> RowDraw {
        RowDraw { top_logprobs: Some(top), target: Some(target), ..RowDraw::LIKELIEST }
    }
}

/// Where the arrays of parameters are in the buffer.
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
    fn of(draws: &[RowDraw], logprobs: &LogprobBuffers, words: &mut Words) -> DrawRanges {
        DrawRanges {
            temperatures: words.push_floats(draws.iter().map(|draw| draw.temperature)),
            top_ps: words.push_floats(draws.iter().map(|draw| draw.top_p)),
            floors: words.push_floats(draws.iter().map(|draw| draw.floor)),
            top_ks: words.push(draws.iter().map(|draw| draw.top_k)),
            positions: words.push(draws.iter().map(|draw| draw.position)),
            seeds: words.push_longs(draws.iter().map(|draw| draw.seed)),
            targets: words.push(logprobs.asked.iter().map(|(_, target)| target.unwrap_or(NONE))),
            counts: words.push(logprobs.asked.iter().map(|(top, _)| top.unwrap_or(NONE))),
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

/// Words of the parameters of so many draws: seven arrays of one word a row, and seeds of two.
fn draw_words(rows: usize) -> usize {
    Words::room([rows; 7].into_iter().chain([2 * rows]))
}

/// Whether the device can report so many most likely tokens.
pub(super) fn tells(top: u32) -> bool {
    top as usize <= MOST_TOLD
}

impl Draws {
    /// Allocates buffers for draws of `rows` rows.
    pub fn new(device: &Device, rows: usize) -> Result<Draws, DriverError> {
        let set = || -> Result<DrawSet, DriverError> {
            Ok(DrawSet {
                parameters: WordRoom::new(device, draw_words(rows))?,
                drawn: device.allocate(rows)?,
                drawn_on_host: device.pinned(rows)?,
                logprobs: LogprobBuffers::new(device, rows)?,
                copied: Event::new(device)?,
            })
        };
        Ok(Draws { sets: [set()?, set()?], rows })
    }

    /// Bytes on the device for draws of `rows` rows.
    pub fn bytes(rows: usize) -> u64 {
        2 * (4 * (draw_words(rows) + rows) as u64 + LogprobBuffers::bytes(rows))
    }

    /// Draws a token from each of the first rows of `logits`, with the buffers of this index (0 or 1), and copies the
    /// tokens to the host.
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
        let top = |draw: &RowDraw| draw.top_logprobs.map(|top| top.min(vocabulary as u32));
        set.logprobs.asked = draws.iter().map(|draw| (top(draw), draw.target)).collect();
        let mut words = Words::default();
        let ranges = DrawRanges::of(draws, &set.logprobs, &mut words);
        set.parameters.send(&words, stream)?;
        let logits = logits.slice(0..rows * vocabulary);
        ops::sample(stream, ranges.samplers(&set.parameters), logits, vocabulary, set.drawn.slice_mut(0..rows))?;
        stream.copy_to_host(&set.drawn_on_host, 0, set.drawn.slice(0..rows))?;
        if draws.iter().any(|draw| draw.top_logprobs.is_some()) {
            let (targets, counts) = (set.parameters.view(&ranges.targets), set.parameters.view(&ranges.counts));
            set.logprobs.tell(
                Asked { drawn: set.drawn.slice(0..rows), targets, counts },
                logits,
                vocabulary,
                stream,
            )?;
        }
        stream.mark(&set.copied)
    }

    /// Signals the end of a step that draws nothing.
    pub fn skip(&mut self, buffer: usize, stream: &Stream) -> Result<(), DriverError> {
        stream.mark(&self.sets[buffer].copied)
    }

    /// The tokens of the step with this buffer, on the device. They may not be drawn yet.
    pub fn on_device(&self, buffer: usize, rows: Range<usize>) -> View<'_, u32> {
        self.sets[buffer].drawn.slice(rows)
    }

    /// Waits until the tokens of the step with this buffer are on the host.
    pub fn wait(&self, buffer: usize) -> Result<(), DriverError> {
        self.sets[buffer].copied.synchronize()
    }

    /// The tokens of the step with this buffer, after [`Draws::wait`], with their log probabilities.
    pub fn drawn(&self, buffer: usize, rows: usize) -> Vec<Drawn> {
        let set = &self.sets[buffer];
        let tokens = set.drawn_on_host.read(0..rows).into_iter().enumerate();
        let read = |(row, token)| {
            if is_token(token) { set.logprobs.read(row, token) } else { Drawn { token, logprobs: None } }
        };
        tokens.map(read).collect()
    }
}

/// Whether a drawn value is a token and not an error code.
fn is_token(drawn: u32) -> bool {
    !matches!(drawn, NOT_FINITE | ALL_BANNED)
}
