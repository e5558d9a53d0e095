//! How many inputs are multiplied together, and therefore lie side by side.

use std::ops::Range;

use crate::simd::{Kernel, Kernels, Simd};

/// The inputs whose sums sixteen registers hold beside a block of a tile, and those whose sums thirty-two hold.
pub(crate) const FEW_INPUTS: usize = 4;
pub(crate) const MANY_INPUTS: usize = 16;

/// The inputs that an unpacked panel is multiplied with at a time: with two tiles as many dot products as hide each
/// other's latency, and few enough for them and their parts to stay in registers.
pub(crate) const PANEL_INPUTS: usize = 6;

/// What the groups are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Grouping {
    /// Products straight from packed weights, of up to [`FEW_INPUTS`], or [`MANY_INPUTS`] where registers suffice.
    #[default]
    Direct,
    /// Products with panels that were unpacked.
    Panels,
}

impl Grouping {
    /// For products of so many inputs.
    pub(crate) fn of(kernels: Kernels, inputs: usize) -> Grouping {
        if inputs <= kernels.call(DirectInputs) { Grouping::Direct } else { Grouping::Panels }
    }

    /// The groups of so many inputs, one after the other: of 1, 2, 3, 4, 8 or 16 inputs, or of 1, 2, 4 or 6.
    pub(crate) fn groups(self, inputs: usize) -> impl Iterator<Item = Range<usize>> {
        let next = move |group: &Range<usize>| Some(group.end..group.end + self.size(inputs - group.end));
        std::iter::successors(Some(0..self.size(inputs)), next).take_while(|group| !group.is_empty())
    }

    /// The inputs of the next group where so many are left.
    fn size(self, left: usize) -> usize {
        match (self, left) {
            (_, 0..=2) | (Grouping::Direct, 3) => left,
            (Grouping::Direct, FEW_INPUTS..8) => FEW_INPUTS,
            (Grouping::Direct, 8..MANY_INPUTS) => 8,
            (Grouping::Direct, _) => MANY_INPUTS,
            (Grouping::Panels, 3) => 2,
            (Grouping::Panels, 4 | 5) => 4,
            (Grouping::Panels, _) => PANEL_INPUTS,
        }
    }
}

/// The most inputs that are multiplied straight from packed weights.
struct DirectInputs;

impl Kernel for DirectInputs {
    type Output = usize;

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) -> usize {
        if S::MANY_REGISTERS { MANY_INPUTS } else { FEW_INPUTS }
    }
}

/// Whether columns of weights are merged for products of many inputs, where those may be: it saves what a block's scale costs
/// where products of bytes are sums at once, and needs registers for many. (Where there are none it is the reference.)
pub(crate) struct MergesColumns;

impl Kernel for MergesColumns {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) -> bool {
        (S::WIDE_PRODUCTS && S::MANY_REGISTERS) || !S::REGISTERS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn groups_have_every_input_once_and_a_size_that_products_know() {
        for (grouping, sizes) in [(Grouping::Direct, &[1, 2, 3, 4, 8, 16][..]), (Grouping::Panels, &[1, 2, 4, 6])] {
            for inputs in 0..40 {
                let groups: Vec<_> = grouping.groups(inputs).collect();
                assert!(groups.iter().all(|group| sizes.contains(&group.len())), "{groups:?}");
                assert!(groups.into_iter().flatten().eq(0..inputs));
            }
        }
    }
}
