//! Damaged files of every kind: never a panic, never memory beyond the file's size and a little more.

use std::fs;
use std::io::Read;

use proptest::prelude::*;
use windlass_checkpoint::GgufFile;
use windlass_checkpoint::testing::{GgufBuilder, array, real_model};

/// A file with every kind of value and several tensors.
fn file() -> Vec<u8> {
    let tokens: Vec<String> = (0..200).map(|i| format!("token{i}")).collect();
    let nested = array(9, 2, &[array(5, 1, &[1, 0, 0, 0]), array(7, 2, &[0, 1])].concat());
    GgufBuilder::new()
        .str("general.architecture", "llama")
        .u32("general.alignment", 32)
        .f32("f", 1.5)
        .bool("b", true)
        .raw("u64", 10, &7u64.to_le_bytes())
        .raw("f64", 12, &7f64.to_le_bytes())
        .raw("nested", 9, &nested)
        .str_array("tokens", &tokens)
        .i32_array("types", &[1; 200])
        .f32_array("scores", &[0.0; 200])
        .tensor("q", &[64, 3], 3, &[1; 120])
        .tensor_f32("norm", &[16], &[1.0; 16])
        .tensor("k", &[256, 2], 12, &[2; 288])
        .build()
}

/// Opens the bytes and, where that succeeds, reads everything the file offers.
fn read_all(bytes: Vec<u8>) -> bool {
    let Ok(file) = GgufFile::from_bytes(bytes) else { return false };
    let metadata = file.metadata();
    for (key, _) in metadata.keys() {
        let _ = (metadata.str(key), metadata.bool(key), metadata.f32(key), metadata.u32(key), metadata.u64(key));
        let _ = metadata.str_array(key).ok().flatten().map(|strings| strings.map(str::len).sum::<usize>());
        let _ = metadata.i32_array(key).ok().flatten().map(|numbers| numbers.map(i64::from).sum::<i64>());
        let _ = metadata.f32_array(key).ok().flatten().map(|numbers| numbers.sum::<f32>());
    }
    for tensor in file.tensors() {
        let rows: u64 = tensor.dims[1..].iter().product();
        let row_bytes = tensor.dims[0] / tensor.kind.block_elements() * tensor.kind.block_bytes();
        assert_eq!(tensor.bytes.len() as u64, rows * row_bytes, "{}", tensor.name);
        assert_eq!(file.tensor(tensor.name).map(|found| found.bytes.get()), Some(tensor.bytes.get()));
    }
    true
}

#[test]
fn the_undamaged_file_opens() {
    assert!(read_all(file()));
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = file();
    for length in 0..whole.len() {
        assert!(!read_all(whole[..length].to_vec()), "cut to {length} of {} bytes it still opens", whole.len());
    }
}

#[test]
fn every_single_flipped_bit_is_survived() {
    let whole = file();
    for bit in 0..whole.len() * 8 {
        let mut damaged = whole.clone();
        damaged[bit / 8] ^= 1 << (bit % 8);
        read_all(damaged);
    }
}

#[test]
fn every_eight_bytes_may_be_a_huge_number() {
    let whole = file();
    let numbers = [0, 1, u64::from(u32::MAX), i64::MAX as u64, u64::MAX, u64::MAX - 31, 1 << 40, 1 << 62];
    for at in 0..whole.len() - 8 {
        for number in numbers {
            let mut damaged = whole.clone();
            damaged[at..at + 8].copy_from_slice(&u64::to_le_bytes(number));
            read_all(damaged);
        }
    }
    assert!(peak_mib().is_none_or(|peak| peak < 128), "hostile headers took {:?} MiB", peak_mib());
}

/// The real model's header and a little of its data, cut and damaged all over: its token lists are what the small
/// file above lacks.
#[test]
fn the_real_models_header_may_be_cut_and_damaged() {
    let Some(path) = real_model() else { return };
    let mut header = Vec::new();
    fs::File::open(path).unwrap().take(2 << 20).read_to_end(&mut header).unwrap();
    for step in 0..200 {
        assert!(!read_all(header[..header.len() * step / 200].to_vec()));
        let mut damaged = header.clone();
        let at = step * 8_923 % header.len();
        damaged[at] = damaged[at].wrapping_add(1 + step as u8);
        assert!(!read_all(damaged), "the data is not there");
    }
}

#[test]
fn the_real_model_reads_whole() {
    let Some(path) = real_model() else { return };
    let file = GgufFile::open(&path).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.str("general.architecture"), Ok(Some("llama")));
    assert_eq!(metadata.u32("llama.vocab_size"), Ok(Some(49_152)));
    let tokens = metadata.str_array("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!((tokens.len(), tokens.last()), (49_152, Some("ectable")));
    assert_eq!(metadata.str_array("tokenizer.ggml.merges").unwrap().unwrap().last(), Some("ect able"));
    assert_eq!(file.tensors().len(), 272);
    assert_eq!(file.tensor("token_embd.weight").unwrap().dims, [576, 49_152]);
}

/// Peak resident memory of this process; `None` where the system does not tell.
fn peak_mib() -> Option<u64> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    Some(line.trim().trim_end_matches(" kB").parse::<u64>().ok()? / 1024)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(4096) })]

    #[test]
    fn several_damaged_bytes_are_survived(damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..16)) {
        let mut bytes = file();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        read_all(bytes);
    }

    #[test]
    fn any_bytes_after_the_magic_are_survived(rest in prop::collection::vec(any::<u8>(), 0..512)) {
        read_all([&b"GGUF\x03\0\0\0"[..], &rest].concat());
    }
}
