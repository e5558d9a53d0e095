//! A product's result, which workers write in disjoint columns.

#![allow(unsafe_code)]

use std::marker::PhantomData;
use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use super::PANEL_TILES;
use crate::weights::cell::TILE_ROWS;

/// `[tokens, rows]` row-major, handed out one panel of columns at a time.
pub(super) struct Output<'a> {
    start: *mut f32,
    tokens: usize,
    rows: usize,
    /// Whether a panel's columns were handed out.
    taken: Vec<AtomicBool>,
    borrow: PhantomData<&'a mut [f32]>,
}

// SAFETY: it stands for an exclusive borrow, of which each part goes to one holder only.
unsafe impl Sync for Output<'_> {}

/// The columns of one panel in every token.
pub(super) struct Columns<'a> {
    output: &'a Output<'a>,
    rows: Range<usize>,
}

impl<'a> Output<'a> {
    pub(super) fn new(out: &'a mut [f32], tokens: usize, rows: usize) -> Self {
        assert_eq!(out.len(), tokens * rows, "out is [tokens, rows]");
        let panels = rows.div_ceil(PANEL_TILES * TILE_ROWS);
        let taken = (0..panels).map(|_| AtomicBool::new(false)).collect();
        Output { start: out.as_mut_ptr(), tokens, rows, taken, borrow: PhantomData }
    }

    /// The columns of a panel's `rows`.
    ///
    /// # Panics
    /// When they were taken before, or are not those of one panel.
    pub(super) fn columns(&'a self, rows: Range<usize>) -> Columns<'a> {
        let panel = rows.start / (PANEL_TILES * TILE_ROWS);
        let end = self.rows.min((panel + 1) * PANEL_TILES * TILE_ROWS);
        assert!(rows == (panel * PANEL_TILES * TILE_ROWS..end), "the columns of one panel");
        assert!(!self.taken[panel].swap(true, Ordering::Relaxed), "panel {panel} is multiplied once");
        Columns { output: self, rows }
    }
}

impl Columns<'_> {
    /// Rows of the panel that the matrix has.
    pub(super) fn count(&self) -> usize {
        self.rows.len()
    }

    /// Takes in the panel's results of an input. A token's is the sum over its planes, which are inputs one after the other.
    pub(super) fn put(&mut self, planes: usize, input: usize, tiles: &[[f32; TILE_ROWS]; PANEL_TILES]) {
        match input % planes {
            0 => self.write(input / planes, tiles),
            _ => self.add(input / planes, tiles),
        }
    }

    /// Writes the panel's results for `token`; what lies beyond the matrix is dropped.
    fn write(&mut self, token: usize, tiles: &[[f32; TILE_ROWS]; PANEL_TILES]) {
        match self.of_token(token).as_chunks_mut() {
            ([first, second], _) => [*first, *second] = *tiles,
            ([first], rest) => {
                *first = tiles[0];
                rest.copy_from_slice(&tiles[1][..rest.len()]);
            }
            (_, rest) => rest.copy_from_slice(&tiles[0][..rest.len()]),
        }
    }

    /// Adds to what was written for `token`.
    fn add(&mut self, token: usize, tiles: &[[f32; TILE_ROWS]; PANEL_TILES]) {
        for (sum, value) in self.of_token(token).iter_mut().zip(tiles.as_flattened()) {
            *sum += value;
        }
    }

    fn of_token(&mut self, token: usize) -> &mut [f32] {
        assert!(token < self.output.tokens, "token {token} of {}", self.output.tokens);
        // SAFETY: the range lies in the borrowed slice since `token` and `rows` are inside its shape; no other holder
        // has these columns, because `columns` gave each panel out once.
        unsafe {
            let start = self.output.start.add(token * self.output.rows + self.rows.start);
            std::slice::from_raw_parts_mut(start, self.rows.len())
        }
    }
}
