//! Keys and values that move within pages.

use half::bf16;
use windlass_kernels::cuda::ops::{self, Heads, PagesMut};
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{Device, Element, Memory};

use crate::common::{Random, SEEDS, device};

const LAYERS: usize = 3;
const PAGES: usize = 5;

/// Slots whose keys and values go to others: within a page, to another one, and from where another's have just been taken.
const MOVES: [[u32; 2]; 6] = [[70, 3], [71, 70], [200, 71], [201, 200], [319, 5], [64, 201]];

/// Rows of so many values, one for each layer, slot and head, once the moves were made.
fn moved<T: Element>(rows: &[T], kv_heads: usize, width: usize) -> Vec<T> {
    let mut rows = rows.to_vec();
    let row = |layer: usize, slot: u32, head: usize| {
        let page = layer * PAGES + slot as usize / 64;
        (((page * 2 * kv_heads) + head) * 64 + slot as usize % 64) * width
    };
    for [from, to] in MOVES {
        for (layer, head) in (0..LAYERS).flat_map(|layer| (0..2 * kv_heads).map(move |head| (layer, head))) {
            let from = row(layer, from, head);
            rows.copy_within(from..from + width, row(layer, to, head));
        }
    }
    rows
}

/// As many values of any bits.
fn filled<T: Element>(device: &Device, count: usize, value: impl FnMut(usize) -> T) -> (Vec<T>, Memory<T>) {
    let values: Vec<T> = (0..count).map(value).collect();
    let memory = device.upload(&values).unwrap();
    (values, memory)
}

#[test]
fn keys_and_values_move_in_all_layers_one_token_after_the_other() {
    let mut random = Random::new(41);
    for (seed, (kv_heads, dim)) in SEEDS.into_iter().cycle().zip([(1, 16), (3, 80), (2, 128), (5, 256), (2, 24)]) {
        let (device, stream) = device(seed);
        let heads = Heads { heads: kv_heads, kv_heads, dim };
        let count = LAYERS * PAGES * heads.page_values();
        let moves = device.upload(MOVES.as_flattened()).unwrap();
        let (values, mut pages) = filled(&device, count, |_| bf16::from_bits(random.next() as u16 & 0x3fff));
        ops::move_tokens(&stream, heads, LAYERS, moves.view(), PagesMut::Bf16(pages.view_mut())).unwrap();
        assert_eq!(pages.read(&stream).unwrap(), moved(&values, kv_heads, dim), "{heads:?}");
        if !dim.is_multiple_of(16) {
            continue;
        }
        for code in [EightBits::E4m3, EightBits::Int8] {
            let (values, mut codes) = filled(&device, count, |_| random.next() as u8);
            let (factors, mut scales) = filled(&device, count / dim, |_| random.value(1.0));
            let pages = PagesMut::Bytes { code, codes: codes.view_mut(), scales: scales.view_mut() };
            ops::move_tokens(&stream, heads, LAYERS, moves.view(), pages).unwrap();
            assert_eq!(codes.read(&stream).unwrap(), moved(&values, kv_heads, dim), "{heads:?} in {code:?}");
            assert_eq!(scales.read(&stream).unwrap(), moved(&factors, kv_heads, 1), "scales of {heads:?}");
        }
    }
}
