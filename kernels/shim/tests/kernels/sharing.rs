//! Decoding of sequences that begin with the same pages.

use windlass_kernels::cuda::ops::{self, AttentionShape};
use windlass_kernels::cuda::weights::EightBits;

use crate::attention::{Scene, shape};
use crate::common::{Random, SEEDS, device, relative_error};

impl Scene {
    /// Sequences of so many keys each, which begin with the same pages: as many as there are of the first number.
    fn of_families(random: &mut Random, shape: AttentionShape, families: &[(usize, &[usize])]) -> Scene {
        let sequences: Vec<_> = families.iter().flat_map(|(_, keys)| keys.iter().map(|&keys| (keys, 1))).collect();
        let mut scene = Scene::new(random, shape, &sequences);
        let mut first = 0;
        for (pages, keys) in families {
            let from = first * scene.max_pages;
            for sequence in first..first + keys.len() {
                scene.tables.copy_within(from..from + pages, sequence * scene.max_pages);
            }
            first += keys.len();
        }
        scene
    }

    fn common(&self) -> Vec<u32> {
        let lengths: Vec<u32> = self.sequences.iter().map(|&(keys, _)| keys as u32).collect();
        ops::shared_splits(self.shape.heads, &lengths, &self.tables[..lengths.len() * self.max_pages])
    }

    fn splits(&self) -> usize {
        ops::splits(self.sequences.iter().map(|&(keys, _)| keys).max().unwrap())
    }

    /// With what is said to be shared in pages that nobody may read for all but the first of those who share it.
    fn without_copies(mut self, common: &[u32]) -> Scene {
        for (sequence, &splits) in common.iter().enumerate() {
            let pages = splits as usize * ops::split_keys(self.sequences[sequence].0) / 64;
            self.tables[sequence * self.max_pages..][..pages].fill(0);
        }
        self
    }
}

/// Families of 1, 2, 5 and 17; 1, 3, 4, 5 and 8 heads that share a key head; common pages that end where a split ends, and that do
/// not; lengths in which splits have other sizes; windows; pages in bytes.
fn scenes(random: &mut Random) -> Vec<(Scene, u32)> {
    let seventeen: Vec<usize> = (0..17).map(|index| 140 + 23 * (index % 5)).collect();
    let window = |window: u32, shape: AttentionShape| AttentionShape { window, ..shape };
    let mut scene = |shape, families: &[(usize, &[usize])]| Scene::of_families(random, shape, families);
    let mut scenes = vec![
        (scene(shape(4, 1, 64), &[(2, &[130]), (4, &[257, 300]), (1, &[65, 70])]), 2),
        (scene(shape(6, 2, 32), &[(2, &[129, 200, 128, 150, 190])]), 4),
        (scene(shape(2, 2, 32), &[(2, &seventeen)]), 16 - 1),
        (scene(shape(8, 2, 64), &[(2, &seventeen)]), 17 - 5),
        (scene(shape(8, 1, 128), &[(3, &[193, 270, 260, 400, 256])]), 2),
        (scene(shape(5, 1, 80), &[(5, &[330, 321, 700]), (4, &[260, 257])]), 2 * 2 + 2),
        (scene(shape(4, 1, 64), &[(10, &[2000, 2100, 2300])]), 2),
        (scene(window(70, shape(4, 2, 64)), &[(6, &[400, 390, 700, 385])]), 3 * 3),
        (scene(window(200, shape(2, 1, 256)), &[(4, &[330, 600])]), 2),
    ];
    for code in [EightBits::E4m3, EightBits::Int8] {
        let scene = Scene::of_families(random, shape(3, 1, 64), &[(4, &[257, 300, 350])]).in_bytes(random, code);
        scenes.push((scene, 2 * 2));
    }
    scenes
}

#[test]
fn shared_pages_are_read_by_the_first_alone_and_give_each_what_it_has_alone() {
    let mut random = Random::new(51);
    for ((scene, expected), seed) in scenes(&mut random).into_iter().zip(SEEDS.into_iter().cycle()) {
        let (device, stream) = device(seed);
        let (common, splits, name) =
            (scene.common(), scene.splits(), format!("{:?} of {:?}", scene.shape, scene.sequences));
        assert_eq!(common.iter().sum::<u32>(), expected, "{name}");
        let alone = scene.decode_sharing(&device, &stream, splits, &vec![0; common.len()]);
        let error = relative_error(&alone, &scene.reference());
        assert!(error <= 1e-2, "{name}: {error}");
        let together = scene.without_copies(&common).decode_sharing(&device, &stream, splits, &common);
        assert!(together == alone, "{name}, sharing {common:?}");
    }
}
