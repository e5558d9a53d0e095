//! Folders of the hub's kind, whole and damaged.

use std::fs;
use std::path::Path;

use proptest::prelude::*;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_checkpoint::{Checkpoint, HubFolder};

const INDEX: &str = "model.safetensors.index.json";

fn weights() -> SafetensorsBuilder {
    SafetensorsBuilder::new()
        .entry("__metadata__", r#"{"format":"pt"}"#)
        .tensor_f32("b", &[2, 3], &[0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
        .tensor("a", "BF16", &[2], &[0x80, 0x3f, 0x00, 0x40])
}

fn folder(files: &[(&str, &[u8])]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes) in [("config.json", &b"{\"model_type\":\"llama\"}"[..])].iter().chain(files) {
        fs::write(folder.path().join(name), bytes).unwrap();
    }
    folder
}

fn refusal(files: &[(&str, &[u8])]) -> String {
    HubFolder::open(folder(files).path()).map(drop).unwrap_err().to_string()
}

fn check(path: &Path) {
    let folder = HubFolder::open(path).unwrap();
    assert_eq!(folder.config()["model_type"], "llama");
    let (a, b) = (folder.tensor("a").unwrap(), folder.tensor("b").unwrap());
    assert_eq!((a.dims, a.kind.name(), a.bytes.get()), (&[2u64][..], "bf16", &[0x80, 0x3f, 0x00, 0x40][..]));
    assert_eq!((b.dims, b.kind.name(), b.bytes.len()), (&[3u64, 2][..], "f32", 24));
    assert_eq!(folder.tensors().map(|tensor| tensor.name.to_owned()).collect::<Vec<_>>(), ["a", "b"]);
    assert!(folder.tensor("c").is_none());
    assert!(matches!(Checkpoint::open(path).unwrap(), Checkpoint::Hub(_)));
}

#[test]
fn one_file_and_shards_read_alike() {
    check(folder(&[("model.safetensors", &weights().build())]).path());
    let first = SafetensorsBuilder::new().tensor_f32("b", &[2, 3], &[0.0; 6]).build();
    let second = SafetensorsBuilder::new().tensor("a", "BF16", &[2], &[0x80, 0x3f, 0x00, 0x40]).build();
    let index = br#"{"weight_map":{"b":"x-1.safetensors","a":"x-2.safetensors"}}"#;
    check(folder(&[("x-1.safetensors", &first), ("x-2.safetensors", &second), (INDEX, index)]).path());
}

#[test]
fn folders_that_do_not_hold_together_are_refused() {
    let file = weights().build();
    let escape = br#"{"weight_map":{"b":"../x.safetensors"}}"#;
    let pickle = br#"{"weight_map":{"b":"pytorch_model.bin"}}"#;
    let twice = br#"{"weight_map":{"b":"x.safetensors","a":"y.safetensors"}}"#;
    let crowd = format!("[{}0]", "0,".repeat(1 << 19));
    let cases = [
        (refusal(&[("pytorch_model.bin", b"\x80\x02")]), "has neither model.safetensors nor"),
        (refusal(&[("config.json", crowd.as_bytes())]), "config.json has 524290 values; at most 524288 are read"),
        (refusal(&[(INDEX, b"[]")]), "it has no weight_map"),
        (refusal(&[(INDEX, b"{")]), "is not JSON"),
        (refusal(&[(INDEX, br#"{"weight_map":{}}"#)]), "its weight_map is empty"),
        (refusal(&[(INDEX, escape)]), "\"../x.safetensors\", which is no safetensors file beside it"),
        (refusal(&[(INDEX, pickle)]), "\"pytorch_model.bin\", which is no safetensors file beside it"),
        (refusal(&[(INDEX, twice), ("x.safetensors", &file)]), "cannot read"),
        (
            refusal(&[(INDEX, twice), ("x.safetensors", &file), ("y.safetensors", &file)]),
            "is in x.safetensors and in y.safetensors",
        ),
    ];
    for (message, expected) in cases {
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}

#[test]
fn hostile_headers_are_refused_by_name() {
    let one = |entry: &str| SafetensorsBuilder::new().entry("t", entry).tensor_f32("last", &[2], &[0.0; 2]).build();
    let cases: Vec<(Vec<u8>, &str)> = vec![
            (vec![1; 7], "it has 7 bytes"),
            (u64::MAX.to_le_bytes().to_vec(), "its header should have 18446744073709551615 bytes; at most 0"),
            ([&4u64.to_le_bytes()[..], b"nope"].concat(), "its header is not JSON"),
            (one(r#"{"shape":[1],"data_offsets":[0,4]}"#), "tensor \"t\": its dtype is missing"),
            (one(r#"{"dtype":"F4","shape":[1],"data_offsets":[0,4]}"#), "its dtype is \"F4\", which is unknown"),
            (
                one(r#"{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}"#),
                "tensor \"t\": invalid value: integer `-1`, expected u64 at line 1 column",
            ),
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0]}"#), "its data_offsets are no pair"),
            (one(r#"{"dtype":"F32","data_offsets":[0,4]}"#), "tensor \"t\": its shape is missing"),
            (one("[]"), "tensor \"t\": invalid"),
            (
                one(r#"{"dtype":"F32","shape":[1],"data_offsets":[8,12]}"#),
                "its data lies at 8..12 of the data, which has 8 bytes",
            ),
            (one(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,0]}"#), "its data lies at 4..0"),
            (
                one(r#"{"dtype":"F32","shape":[1],"data_offsets":[0,8]}"#),
                "its data at offset 0 has 8 bytes; its shape needs 4",
            ),
            (one(r#"{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}"#), "overflows"),
            (one(r#"{"dtype":"F32","shape":[1,1,1,1,1,1,1,1,1],"data_offsets":[0,4]}"#), "it has 9 dimensions"),
            (
                SafetensorsBuilder::new().tensor_f32("t", &[1], &[1.0]).tensor_f32("t", &[1], &[2.0]).build(),
                "tensor \"t\": it is there twice",
            ),
            (
                one(r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#),
                "tensors \"last\" and \"t\" overlap: \"t\" begins at offset 4 of the data",
            ),
            ([&weights().build()[..], &[0; 3]].concat(), "of the data belong to no tensor"),
            (
                [
                    &SafetensorsBuilder::new()
                        .entry("t", r#"{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#)
                        .build()[..],
                    &[0; 8],
                ]
                .concat(),
                "bytes 0 to 4 of the data belong to no tensor",
            ),
        ];
    for (bytes, expected) in cases {
        let message = refusal(&[("model.safetensors", &bytes)]);
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}

#[test]
fn a_file_cut_anywhere_is_refused() {
    let whole = weights().build();
    for length in 0..whole.len() {
        refusal(&[("model.safetensors", &whole[..length])]);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]

    #[test]
    fn damaged_bytes_are_survived(damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..8)) {
        let mut bytes = weights().build();
        for (at, value) in damage {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let folder = folder(&[("model.safetensors", &bytes)]);
        if let Ok(folder) = HubFolder::open(folder.path()) {
            folder.tensors().for_each(|tensor| assert!(tensor.bytes.len() <= bytes.len()));
        }
    }
}

/// What this process holds of a file that it has mapped, bytes.
fn resident_bytes(path: &Path) -> u64 {
    let maps = fs::read_to_string("/proc/self/smaps").unwrap();
    let mut lines = maps.lines().skip_while(|line| !line.ends_with(path.to_str().unwrap()));
    let resident = lines.find_map(|line| line.strip_prefix("Rss:")).unwrap();
    1024 * resident.trim().trim_end_matches(" kB").parse::<u64>().unwrap()
}

#[test]
fn bytes_that_are_released_take_no_memory_until_they_are_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let data: Vec<u8> = (0..8 << 20).map(|i: u32| (i * 7) as u8).collect();
    fs::write(&path, SafetensorsBuilder::new().tensor("t", "U8", &[8 << 20], &data).build()).unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    let checkpoint = Checkpoint::open(folder.path()).unwrap();
    let bytes = checkpoint.tensor("t").unwrap().bytes.get();
    assert!(bytes == data);
    assert!(resident_bytes(&path) >= 8 << 20);
    checkpoint.release(bytes);
    assert!(resident_bytes(&path) < 1 << 20, "{}", resident_bytes(&path));
    // Bytes of others are nothing to it.
    checkpoint.release(&data);
    assert!(bytes == data && data[7] == 49);
}
