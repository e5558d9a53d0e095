//! Tokens drawn on the device: how, where they lie for the next step, and how they come to the host, with what the model thought of
//! them.

use windlass_engine_core::request::Sampling;
use windlass_engine_core::sampling::{TokenLogprob, TokenLogprobs};
use windlass_kernels::cuda::ops::{self, ALL_BANNED, Asked, MOST_TOLD, NONE, NOT_FINITE, Samplers, TOLD, Told};
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
pub(super) struct Arrays<T: Element> {
    staging: Pinned<T>,
    memory: Memory<T>,
    stride: usize,
}

impl<T: Element> Arrays<T> {
    pub fn new(device: &Device, arrays: usize, rows: usize) -> Result<Arrays<T>, DriverError> {
        // Each begins at a multiple of 16 bytes, as kernels expect.
        let stride = rows.next_multiple_of(4);
        Ok(Arrays { staging: device.pinned(arrays * stride)?, memory: device.allocate(arrays * stride)?, stride })
    }

    pub fn upload(&mut self, array: usize, values: &[T], stream: &Stream) -> Result<(), DriverError> {
        if values.is_empty() {
            return Ok(());
        }
        let first = array * self.stride;
        self.staging.write(first, values);
        stream.copy_to_device(self.memory.slice_mut(first..first + values.len()), &self.staging, first)
    }

    pub fn view(&self, array: usize, rows: usize) -> View<'_, T> {
        self.memory.slice(array * self.stride..array * self.stride + rows)
    }
}

/// What is told of the tokens drawn.
#[derive(Debug)]
struct Tellings {
    /// Of how many most likely tokens each row tells, if it does, and the token that is known.
    asked: Vec<(Option<u32>, Option<u32>)>,
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
                words: Arrays::new(device, 4, rows)?,
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
        2 * ((3 * 4 + 4 * 4 + 8) * stride + 4 * rows as u64 + Tellings::bytes(rows))
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
        let floats = |of: fn(&RowDraw) -> f32| -> Vec<f32> { draws.iter().map(of).collect() };
        let words = |of: fn(&RowDraw) -> u32| -> Vec<u32> { draws.iter().map(of).collect() };
        set.floats.upload(0, &floats(|draw| draw.temperature), stream)?;
        set.floats.upload(1, &floats(|draw| draw.top_p), stream)?;
        set.floats.upload(2, &floats(|draw| draw.floor), stream)?;
        set.words.upload(0, &words(|draw| draw.top_k), stream)?;
        set.words.upload(1, &words(|draw| draw.position), stream)?;
        set.seeds.upload(0, &draws.iter().map(|draw| draw.seed).collect::<Vec<u64>>(), stream)?;
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
        let told = |draw: &RowDraw| draw.told.map(|top| top.min(vocabulary as u32));
        set.told.asked = draws.iter().map(|draw| (told(draw), draw.target)).collect();
        if draws.iter().any(|draw| draw.told.is_some()) {
            let asked = |(top, target): &(Option<u32>, Option<u32>)| (top.unwrap_or(NONE), target.unwrap_or(NONE));
            let (counts, targets): (Vec<u32>, Vec<u32>) = set.told.asked.iter().map(asked).unzip();
            set.words.upload(2, &counts, stream)?;
            set.words.upload(3, &targets, stream)?;
            let (targets, counts) = (set.words.view(3, rows), set.words.view(2, rows));
            set.told.tell(Asked { drawn: set.drawn.slice(0..rows), targets, counts }, logits, vocabulary, stream)?;
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
        let read =
            |(row, token)| if is_token(token) { set.told.read(row, token) } else { Drawn { token, logprobs: None } };
        tokens.map(read).collect()
    }
}

/// Whether what was drawn is a token.
fn is_token(drawn: u32) -> bool {
    !matches!(drawn, NOT_FINITE | ALL_BANNED)
}
