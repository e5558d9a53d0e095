//! The KV cache on the device, `[layer of a group][page][K|V][kv_head][64][dim]`. A page is one block of the scheduler.

use std::ops::Range;

use half::bf16;
use windlass_engine_contract::memory::KvDataType;
use windlass_kernels::cuda::ops::{self, Heads, Pages, PagesMut};
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{Device, DriverError, Event, Memory, Pinned, Stream, View, ViewMut};

/// The type of the values in pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PageType {
    Bf16,
    /// 8 bits, with a scale for each token and head.
    Bytes(EightBits),
}

impl PageType {
    /// The page type of a cache in `kind`; `None` if the kernels have none.
    pub fn of(kind: KvDataType) -> Option<PageType> {
        match kind {
            KvDataType::Bf16 => Some(PageType::Bf16),
            KvDataType::Fp8 => Some(PageType::Bytes(EightBits::E4m3)),
            KvDataType::Int8 => Some(PageType::Bytes(EightBits::Int8)),
            KvDataType::F16 | KvDataType::Int4 => None,
        }
    }
}

/// Sizes of a cache.
#[derive(Clone, Copy, Debug)]
pub(super) struct CacheShape {
    pub kind: PageType,
    pub heads: Heads,
    /// Number of layers of a group.
    pub layers: usize,
    /// Number of blocks of the scheduler. The cache has one page more, to which padding rows write.
    pub blocks: usize,
}

impl CacheShape {
    /// Rows of a layer: keys and values of all tokens and heads, each with a scale in caches of 8 bits.
    fn layer_rows(&self) -> usize {
        (self.blocks + 1) * self.heads.page_rows()
    }

    /// Bytes on the device.
    pub fn bytes(&self) -> u64 {
        (self.layers * self.layer_rows() * self.row_bytes()) as u64
    }

    /// Bytes of one head's key or value of one token.
    fn row_bytes(&self) -> usize {
        match self.kind {
            PageType::Bf16 => size_of::<bf16>() * self.heads.dim,
            PageType::Bytes(_) => self.heads.dim + size_of::<f32>(),
        }
    }

    /// Bytes of a page in all layers.
    pub fn page_bytes(&self) -> usize {
        self.layers * self.heads.page_rows() * self.row_bytes()
    }

    /// Where a page of a layer is: the range of its rows, and of its values.
    fn page_range(&self, layer: usize, page: usize) -> (Range<usize>, Range<usize>) {
        let first = layer * self.layer_rows() + page * self.heads.page_rows();
        let rows = first..first + self.heads.page_rows();
        (rows.clone(), rows.start * self.heads.dim..rows.end * self.heads.dim)
    }
}

/// A host buffer for a page on its way to a swap slot or back.
#[derive(Debug)]
pub(super) struct PageRoom {
    staging: Pinned<u8>,
    /// Signals the end of the last copy to the device.
    copied: Event,
}

impl PageRoom {
    /// Allocates the buffer for pages of a cache of this shape.
    pub fn new(device: &Device, shape: &CacheShape) -> Result<PageRoom, DriverError> {
        Ok(PageRoom { staging: device.pinned(shape.page_bytes())?, copied: Event::new(device)? })
    }

    /// Copies a page to the host, layer after layer, after all issued work.
    pub fn fetch(&self, cache: &Cache, page: usize, stream: &Stream) -> Result<Vec<u8>, DriverError> {
        let mut at = 0;
        for part in cache.page_parts(page) {
            stream.copy_to_host(&self.staging, at, part)?;
            at += part.len();
        }
        stream.synchronize()?;
        Ok(self.staging.read(0..at))
    }

    /// Overwrites a page with what [`fetch`](Self::fetch) returned, after all issued work.
    pub fn bring(&self, bytes: &[u8], cache: &mut Cache, page: usize, stream: &Stream) -> Result<(), DriverError> {
        // An earlier copy may still read the buffer.
        self.copied.synchronize()?;
        self.staging.write(0, bytes);
        let mut at = 0;
        cache.each_page_part(page, |part| {
            let bytes = part.len();
            stream.copy_to_device(part, &self.staging, at)?;
            at += bytes;
            Ok(())
        })?;
        stream.mark(&self.copied)
    }

    /// Bytes of a page in all layers.
    pub fn bytes(&self) -> usize {
        self.staging.len()
    }
}

/// The KV cache.
#[derive(Debug)]
pub(super) struct Cache {
    shape: CacheShape,
    values: Values,
}

#[derive(Debug)]
enum Values {
    Bf16(Memory<bf16>),
    Bytes { code: EightBits, codes: Memory<u8>, scales: Memory<f32> },
}

impl Cache {
    pub fn new(device: &Device, shape: CacheShape) -> Result<Cache, DriverError> {
        let rows = shape.layers * shape.layer_rows();
        let values = match shape.kind {
            PageType::Bf16 => Values::Bf16(device.allocate(rows * shape.heads.dim)?),
            PageType::Bytes(code) => {
                Values::Bytes { code, codes: device.allocate(rows * shape.heads.dim)?, scales: device.allocate(rows)? }
            }
        };
        Ok(Cache { shape, values })
    }

    /// Copies a page in all layers.
    pub fn copy(&mut self, from: usize, to: usize, stream: &Stream) -> Result<(), DriverError> {
        let CacheShape { heads, layers, .. } = self.shape;
        let (layer, page, dim) = (self.shape.layer_rows(), heads.page_rows(), heads.dim);
        for index in 0..layers {
            let [from, to] = [from, to].map(|at| index * layer + at * page);
            let values = from * dim..(from + page) * dim;
            match &mut self.values {
                Values::Bf16(pages) => stream.copy_within(pages.view_mut(), values, to * dim)?,
                Values::Bytes { codes, scales, .. } => {
                    stream.copy_within(codes.view_mut(), values, to * dim)?;
                    stream.copy_within(scales.view_mut(), from..from + page, to)?;
                }
            }
        }
        Ok(())
    }

    /// The parts of a page in all layers as bytes, in the order in which they are copied to the host.
    fn page_parts(&self, page: usize) -> impl Iterator<Item = View<'_, u8>> {
        (0..self.shape.layers)
            .flat_map(move |layer| {
                let (rows, values) = self.shape.page_range(layer, page);
                match &self.values {
                    Values::Bf16(pages) => [Some(pages.slice(values).cast()), None],
                    Values::Bytes { codes, scales, .. } => {
                        [Some(codes.slice(values).cast()), Some(scales.slice(rows).cast())]
                    }
                }
            })
            .flatten()
    }

    /// Calls `write` with each part of a page, in the same order.
    fn each_page_part(
        &mut self,
        page: usize,
        mut write: impl FnMut(ViewMut<'_, u8>) -> Result<(), DriverError>,
    ) -> Result<(), DriverError> {
        for layer in 0..self.shape.layers {
            let (rows, values) = self.shape.page_range(layer, page);
            match &mut self.values {
                Values::Bf16(pages) => write(pages.slice_mut(values).cast())?,
                Values::Bytes { codes, scales, .. } => {
                    write(codes.slice_mut(values).cast())?;
                    write(scales.slice_mut(rows).cast())?;
                }
            }
        }
        Ok(())
    }

    /// Copies K and V of tokens in all layers, in order. `moves` has for each token the slot that is read and the slot
    /// that is overwritten.
    pub fn move_tokens(&mut self, moves: View<'_, u32>, stream: &Stream) -> Result<(), DriverError> {
        let CacheShape { heads, layers, .. } = self.shape;
        let pages = match &mut self.values {
            Values::Bf16(pages) => PagesMut::Bf16(pages.view_mut()),
            Values::Bytes { code, codes, scales } => {
                PagesMut::Bytes { code: *code, codes: codes.view_mut(), scales: scales.view_mut() }
            }
        };
        ops::move_tokens(stream, heads, layers, moves, pages)
    }

    /// The pages of a layer.
    pub fn pages(&self, layer: usize) -> Pages<'_> {
        let (rows, dim) = (self.shape.layer_rows(), self.shape.heads.dim);
        let (first, end) = (layer * rows, (layer + 1) * rows);
        match &self.values {
            Values::Bf16(pages) => Pages::Bf16(pages.slice(first * dim..end * dim)),
            Values::Bytes { code, codes, scales } => Pages::Bytes {
                code: *code,
                codes: codes.slice(first * dim..end * dim),
                scales: scales.slice(first..end),
            },
        }
    }

    /// The pages of a layer, mutable.
    pub fn pages_mut(&mut self, layer: usize) -> PagesMut<'_> {
        let (rows, dim) = (self.shape.layer_rows(), self.shape.heads.dim);
        let (first, end) = (layer * rows, (layer + 1) * rows);
        match &mut self.values {
            Values::Bf16(pages) => PagesMut::Bf16(pages.slice_mut(first * dim..end * dim)),
            Values::Bytes { code, codes, scales } => PagesMut::Bytes {
                code: *code,
                codes: codes.slice_mut(first * dim..end * dim),
                scales: scales.slice_mut(first..end),
            },
        }
    }
}
