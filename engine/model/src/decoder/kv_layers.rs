//! Where K and V of each layer are: the group whose blocks have them, and the index of the layer in these blocks.

use windlass_engine_core::executor::KvGroups;

use crate::config::DecoderConfig;

/// The layers of a decoder by group.
#[derive(Clone, Debug)]
pub(crate) struct KvLayers {
    locations: Vec<KvLocation>,
    /// Number of groups.
    pub groups: usize,
    /// Number of layers that a block has room for.
    pub per_block: usize,
}

/// Where K and V of one layer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct KvLocation {
    /// The group, whose block table names the blocks.
    pub group: usize,
    /// Index among the layers of a block.
    pub index: usize,
}

impl KvLayers {
    /// Assigns layers to groups in order: layers with full attention first, unless there is one group only.
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

    /// Where K and V of a layer are.
    pub fn location(&self, layer: usize) -> KvLocation {
        self.locations[layer]
    }
}
