//! Where each layer's keys and values are: in which group's blocks, and which layer it is there.

use windlass_engine_core::executor::KvGroups;

use crate::config::DecoderConfig;

/// The layers of a decoder, divided into groups.
#[derive(Clone, Debug)]
pub(crate) struct KvLayers {
    locations: Vec<KvLocation>,
    /// Groups there are.
    pub groups: usize,
    /// Layers that a block has room for.
    pub per_block: usize,
}

/// One layer's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvLocation {
    /// Its group, whose table names its blocks.
    pub group: usize,
    /// Its number among the layers of a block.
    pub index: usize,
}

impl KvLayers {
    /// Divides layers in their order: those that read everything first, unless all are in one group.
    pub fn new(config: &DecoderConfig, groups: &KvGroups) -> KvLayers {
        let is_apart = |layer: &usize| groups.count() > 1 && config.window(*layer).is_some();
        let windowed = (0..config.layers).filter(is_apart).count();
        let per_block = groups.layers_of((config.layers - windowed) as u32, windowed as u32) as usize;
        let mut next = [0, groups.full as usize * per_block];
        let locations = (0..config.layers).map(|layer| {
            let next = &mut next[usize::from(is_apart(&layer))];
            *next += 1;
            KvLocation { group: (*next - 1) / per_block, index: (*next - 1) % per_block }
        });
        KvLayers { locations: locations.collect(), groups: groups.count() as usize, per_block }
    }

    /// Where a layer's keys and values are.
    pub fn location(&self, layer: usize) -> KvLocation {
        self.locations[layer]
    }
}
