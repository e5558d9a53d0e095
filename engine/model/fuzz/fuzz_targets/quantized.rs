//! Any text as `config.json`, any as the header of its weights, and any bytes as codes, scales and tables: what the folder of
//! another tool's quantized matrices makes of a model. One in a line, one in the next, and the rest.
#![no_main]

use libfuzzer_sys::fuzz_target;
use windlass_checkpoint::{Checkpoint, HubFolder};
use windlass_engine_model::{KvBudget, LoadOptions, build};

/// Most bytes that data is filled up to.
const MOST_DATA: usize = 1 << 17;

fuzz_target!(|input: &[u8]| {
    let mut parts = input.splitn(3, |byte| *byte == b'\n');
    let (Some(config), Some(header), Some(data)) = (parts.next(), parts.next(), parts.next()) else { return };
    let Ok(config) = std::str::from_utf8(config) else { return };
    let Ok(folder) = HubFolder::from_bytes(config, weights(header, data)) else { return };
    let options = LoadOptions { threads: 1, kv: KvBudget::Blocks(8), ..LoadOptions::default() };
    let _ = build(&Checkpoint::from(folder), &options).map(drop);
});

/// A file whose lengths fit: another target has those that do not, and few folders would come past them.
fn weights(header: &[u8], data: &[u8]) -> Vec<u8> {
    let mut data = data.to_vec();
    data.resize(data_bytes(header).unwrap_or(data.len()).min(MOST_DATA), 0);
    [&(header.len() as u64).to_le_bytes(), header, &data].concat()
}

/// Where the header says that data ends.
fn data_bytes(header: &[u8]) -> Option<usize> {
    let header: serde_json::Value = serde_json::from_slice(header).ok()?;
    let ends = header.as_object()?.values().filter_map(|entry| entry["data_offsets"][1].as_u64());
    ends.max().and_then(|end| usize::try_from(end).ok())
}
