//! Tokens drawn on the device: how, where they lie for the next step, and how they come to the host.

use std::sync::Arc;

use windlass_engine_core::request::Sampling;
use windlass_kernels::cuda::ops::{self, Samplers};
use windlass_kernels::cuda::{Device, DriverError, Element, Event, Memory, Pinned, Stream, View, ViewMut};

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

    pub fn view_mut(&mut self, array: usize, rows: usize) -> ViewMut<'_, T> {
        self.memory.slice_mut(array * self.stride..array * self.stride + rows)
    }
}

/// One row's draw: what decides it, and the position that its token will have.
pub(super) type RowDraw = (Arc<Sampling>, u32);

impl Draws {
    /// Room for draws of `rows` rows.
    pub fn new(device: &Device, rows: usize) -> Result<Draws, DriverError> {
        let set = || -> Result<DrawSet, DriverError> {
            Ok(DrawSet {
                floats: Arrays::new(device, 3, rows)?,
                words: Arrays::new(device, 2, rows)?,
                seeds: Arrays::new(device, 1, rows)?,
                drawn: device.allocate(rows)?,
                drawn_on_host: device.pinned(rows)?,
                copied: Event::new(device)?,
            })
        };
        Ok(Draws { sets: [set()?, set()?], rows })
    }

    /// Draws a token from each of the first rows of `logits`, for the step of this `turn` (0 or 1), and has the tokens
    /// copied to the host.
    pub fn draw(
        &mut self,
        turn: usize,
        draws: &[(&Sampling, u32)],
        logits: View<'_, f32>,
        vocabulary: usize,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let rows = draws.len();
        assert!(rows > 0 && rows <= self.rows, "{rows} draws; there is room for {}", self.rows);
        let set = &mut self.sets[turn];
        let floats =
            |of: fn(&Sampling) -> f32| -> Vec<f32> { draws.iter().map(|(sampling, _)| of(sampling)).collect() };
        set.floats.upload(0, &floats(|sampling| sampling.temperature.max(0.0)), stream)?;
        set.floats.upload(1, &floats(|sampling| sampling.top_p), stream)?;
        set.floats.upload(2, &floats(|sampling| sampling.min_p.ln()), stream)?;
        let top_ks: Vec<u32> = draws.iter().map(|(sampling, _)| sampling.top_k).collect();
        let positions: Vec<u32> = draws.iter().map(|(_, position)| *position).collect();
        set.words.upload(0, &top_ks, stream)?;
        set.words.upload(1, &positions, stream)?;
        let seeds: Vec<u64> = draws.iter().map(|(sampling, _)| sampling.seed).collect();
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

    /// The same on the host, once they were waited for.
    pub fn drawn(&self, turn: usize, rows: usize) -> Vec<u32> {
        self.sets[turn].drawn_on_host.read(0..rows)
    }
}
