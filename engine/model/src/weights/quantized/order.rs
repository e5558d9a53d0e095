//! Inputs in an order of their own (`desc_act` of GPTQ): sorted by group, so that neighbours share a scale.

use std::ops::Range;

use windlass_kernels::NO_INPUT;

/// Consecutive columns of one group: the smallest block of the kernel formats.
const BLOCK: usize = 32;

/// The input of each column of a packed row.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Order {
    /// The input of each column, counted from `first`; `NO_INPUT` after the end of a group, up to the end of its last
    /// block.
    pub inputs: Vec<u32>,
    /// The group of every block of columns.
    groups: Vec<usize>,
    first: usize,
}

impl Order {
    /// The order of all inputs, given the group of each.
    pub fn new(groups: &[usize]) -> Order {
        Order::of((0..groups.len() as u32).zip(groups.iter().copied()).collect(), 0)
    }

    /// The order of some of the inputs. Any number of inputs may be of one group.
    pub fn some(&self, inputs: &Range<usize>) -> Order {
        let places = self.inputs.iter().enumerate().filter(|(_, input)| inputs.contains(&(**input as usize)));
        let inputs_of = places.map(|(place, input)| (input - inputs.start as u32, self.group(place)));
        Order::of(inputs_of.collect(), inputs.start)
    }

    /// Sorts inputs by group.
    fn of(mut inputs: Vec<(u32, usize)>, first: usize) -> Order {
        inputs.sort_by_key(|(_, group)| *group);
        let mut order = Order { inputs: Vec::new(), groups: Vec::new(), first };
        for same in inputs.chunk_by(|(_, one), (_, other)| one == other) {
            order.inputs.extend(same.iter().map(|(input, _)| input));
            order.inputs.resize(order.inputs.len().next_multiple_of(BLOCK), NO_INPUT);
            order.groups.resize(order.inputs.len() / BLOCK, same[0].1);
        }
        order
    }

    /// Whether every input is at its own column.
    pub fn is_sorted(&self) -> bool {
        self.inputs.is_sorted()
    }

    /// The group of a column.
    pub fn group(&self, place: usize) -> usize {
        self.groups[place / BLOCK]
    }

    /// The input of a column, if it has one.
    pub fn column(&self, place: usize) -> Option<usize> {
        Some(self.inputs[place]).filter(|input| *input != NO_INPUT).map(|input| self.first + input as usize)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn some_inputs_are_sorted_and_their_groups_fill_whole_blocks() {
        let groups: Vec<usize> = (0..128).map(|input| input % 2).collect();
        let all = Order::new(&groups);
        assert_eq!(all.inputs, (0..128).step_by(2).chain((1..128).step_by(2)).collect::<Vec<u32>>());
        let some = all.some(&(40..104));
        assert_eq!(some.inputs, (0..64).step_by(2).chain((1..64).step_by(2)).collect::<Vec<u32>>());
        assert_eq!([some.column(0), some.column(63), some.column(32)], [Some(40), Some(103), Some(41)]);
        let few = all.some(&(3..8));
        assert_eq!(
            (few.inputs.len(), &few.inputs[..4], &few.inputs[32..36]),
            (64, &[1, 3, NO_INPUT, NO_INPUT][..], &[0, 2, 4, NO_INPUT][..])
        );
        assert_eq!([few.group(31), few.group(32)], [0, 1]);
        assert_eq!([few.column(1), few.column(2), few.column(34)], [Some(6), None, Some(7)]);
    }
}
