//! What the reader gives back of a good file, and what it says of a bad one.

use std::fs;

use windlass_checkpoint::testing::{GgufBuilder, array, string};
use windlass_checkpoint::{GgufError, GgufFile, MetadataError, OpenError, ValueType};

const F32: u32 = 0;
const Q4_1: u32 = 3;

fn small() -> GgufBuilder {
    GgufBuilder::new()
        .str("general.architecture", "llama")
        .u32("llama.block_count", 30)
        .f32("llama.rope.freq_base", 100_000.0)
        .bool("tokenizer.ggml.add_bos_token", true)
        .str_array("tokenizer.ggml.tokens", &["<s>", "", "Ġwörld"])
        .i32_array("tokenizer.ggml.token_type", &[3, -1, 1])
        .f32_array("tokenizer.ggml.scores", &[0.5, -1.5])
        .tensor("b", &[32, 2], Q4_1, &[7; 40])
        .tensor_f32("a", &[3], &[1.0, 2.0, 3.0])
}

fn open(builder: GgufBuilder) -> Result<GgufFile, GgufError> {
    GgufFile::from_bytes(builder.build())
}

#[test]
fn metadata_comes_back_typed() {
    let file = open(small()).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.str("general.architecture"), Ok(Some("llama")));
    assert_eq!(metadata.u32("llama.block_count"), Ok(Some(30)));
    assert_eq!(metadata.u64("llama.block_count"), Ok(Some(30)));
    assert_eq!(metadata.f32("llama.rope.freq_base"), Ok(Some(100_000.0)));
    assert_eq!(metadata.bool("tokenizer.ggml.add_bos_token"), Ok(Some(true)));
    let tokens = metadata.str_array("tokenizer.ggml.tokens").unwrap().unwrap();
    assert_eq!(tokens.len(), 3);
    assert_eq!(tokens.collect::<Vec<_>>(), ["<s>", "", "Ġwörld"]);
    let types = metadata.i32_array("tokenizer.ggml.token_type").unwrap().unwrap();
    assert_eq!(types.collect::<Vec<_>>(), [3, -1, 1]);
    assert_eq!(metadata.f32_array("tokenizer.ggml.scores").unwrap().unwrap().collect::<Vec<_>>(), [0.5, -1.5]);
    assert_eq!(metadata.keys().len(), 7);
}

#[test]
fn absent_and_mistyped_values_say_so() {
    let file = open(small().raw("negative", 5, &(-3i32).to_le_bytes())).unwrap();
    let metadata = file.metadata();
    assert_eq!(metadata.u32("nowhere"), Ok(None));
    let missing = metadata.require("nowhere", |m, key| m.u32(key)).unwrap_err();
    assert_eq!(missing, MetadataError::Missing { key: "nowhere".into() });
    let mistyped = metadata.u32("general.architecture").unwrap_err();
    assert_eq!(mistyped.to_string(), "metadata key \"general.architecture\" must be an integer; it is a string");
    let found = MetadataError::Range { key: "negative".into(), expected: "0 to 4294967295", found: -3 };
    assert_eq!(metadata.u32("negative"), Err(found));
    let wrong_array = metadata.str_array("tokenizer.ggml.scores").unwrap_err();
    assert_eq!(
        wrong_array,
        MetadataError::Type {
            key: "tokenizer.ggml.scores".into(),
            expected: "an array of strings",
            found: ValueType::Array
        }
    );
}

#[test]
fn every_integer_width_keeps_its_value_and_sign() {
    let cases: [(u32, Vec<u8>, Option<u32>); 8] = [
        (0, vec![200], Some(200)),
        (1, vec![0x80], None),
        (2, 65_535u16.to_le_bytes().into(), Some(65_535)),
        (3, (-1i16).to_le_bytes().into(), None),
        (4, u32::MAX.to_le_bytes().into(), Some(u32::MAX)),
        (5, i32::MAX.to_le_bytes().into(), Some(i32::MAX as u32)),
        (10, (1u64 << 40).to_le_bytes().into(), None),
        (11, 5i64.to_le_bytes().into(), Some(5)),
    ];
    for (value_type, bytes, expected) in cases {
        let file = open(GgufBuilder::new().raw("n", value_type, &bytes)).unwrap();
        assert_eq!(file.metadata().u32("n").ok().flatten(), expected, "type {value_type}");
    }
}

#[test]
fn tensors_come_back_by_name_with_their_data() {
    let file = open(small()).unwrap();
    assert_eq!(file.tensors().map(|tensor| tensor.name).collect::<Vec<_>>(), ["a", "b"]);
    let b = file.tensor("b").unwrap();
    assert_eq!((b.dims, b.kind.name(), b.bytes.get()), (&[32, 2][..], "q4_1", &[7; 40][..]));
    assert_eq!(file.tensor("a").unwrap().bytes[4..8], 2f32.to_le_bytes());
    assert!(file.tensor("c").is_none());
    assert_eq!(open(small().version(2)).unwrap().version(), 2);
}

#[test]
fn another_alignment_moves_the_data() {
    let file = open(small().u32("general.alignment", 64).alignment(64)).unwrap();
    assert_eq!(file.tensor("b").unwrap().bytes.get(), [7; 40]);
    assert_eq!(file.tensor("a").unwrap().bytes[..4], 1f32.to_le_bytes());
}

/// A one-tensor file with the given dims and type.
fn with_dims(dims: &[u64], type_id: u32) -> GgufBuilder {
    GgufBuilder::new().tensor("t", dims, type_id, &[0; 64])
}

#[test]
fn hostile_headers_are_refused_by_name() {
    let nested = (0..5).fold(array(0, 1, &[1]), |inner, _| array(9, 1, &inner));
    let long_name = "n".repeat(65);
    let cases: Vec<(GgufBuilder, &str)> = vec![
        (small().version(1), "version 1 is not supported"),
        (small().version(3u32.swap_bytes()), "big-endian"),
        (small().u32("llama.block_count", 1), "\"llama.block_count\" appears twice"),
        (small().str("", "x"), "a metadata key of 0 bytes"),
        (small().raw("x", 13, &[0]), "\"x\" has the unknown value type 13"),
        (small().raw("x", 9, &array(13, 0, &[])), "\"x\" has the unknown value type 13"),
        (small().raw("x", 7, &[2]), "\"x\" has the Boolean 2"),
        (small().raw("x", 9, &array(7, 2, &[1, 9])), "\"x\" has the Boolean 9"),
        (small().raw("x", 9, &nested), "\"x\" nests arrays deeper than 4"),
        (small().raw("x", 9, &array(4, usize::MAX, &[])), "an array's length is 18446744073709551615"),
        (small().raw("x", 9, &array(8, 1 << 40, &[])), "an array's length is 1099511627776"),
        (small().raw("x", 9, &array(9, 1 << 40, &[])), "an array's length is 1099511627776"),
        (small().raw("x", 8, &u64::MAX.to_le_bytes()), "a metadata string at offset"),
        (small().raw("x", 8, &[&1u64.to_le_bytes()[..], &[0xff]].concat()), "is not UTF-8"),
        (small().u32("general.alignment", 0), "general.alignment is 0"),
        (small().u32("general.alignment", 48), "general.alignment is 48"),
        (small().u32("general.alignment", 4), "general.alignment is 4"),
        (small().u32("general.alignment", 1 << 30), "general.alignment is 1073741824"),
        (small().str("general.alignment", "32"), "\"general.alignment\" must be an integer"),
        (small().u32("split.count", 3).u32("split.no", 1), "part 2 of 3 of a split checkpoint"),
        (with_dims(&[], F32), "has 0 dimensions"),
        (with_dims(&[1; 5], F32), "has 5 dimensions"),
        (with_dims(&[4, 0], F32), "[4, 0]"),
        (with_dims(&[1 << 32, 1 << 32], F32), "product below 2^63"),
        (with_dims(&[1 << 62, 2], F32), "product below 2^63"),
        (with_dims(&[1 << 61], F32), "needs 9223372036854775808 bytes"),
        (with_dims(&[1 << 62], F32), "product below 2^63"),
        (with_dims(&[u64::MAX], 24), "product below 2^63"),
        (with_dims(&[33], Q4_1), "type q4_1, has rows of 33 elements; 32 must divide that"),
        (with_dims(&[4], 4), "unknown type 4"),
        (with_dims(&[4], 1000), "unknown type 1000"),
        (with_dims(&[17], F32), "needs 68 bytes at offset 0 of the data, which has 64"),
        (small().tensor_at("c", &[1], F32, &[0; 4], 33), "offset 33, which is no multiple of the alignment 32"),
        (small().tensor_at("c", &[1], F32, &[0; 4], 1 << 40), "at offset 1099511627776"),
        (small().tensor_at("c", &[1], F32, &[0; 4], u64::MAX - 31), "at offset 18446744073709551584"),
        (
            small().tensor_at("c", &[1], F32, &[0; 4], 32),
            "tensors \"b\" and \"c\" overlap: \"c\" begins at offset 32 of the data",
        ),
        (small().tensor_at("c", &[1], F32, &[0; 8192], 4096), "to 4096 of the data belong to no tensor"),
        (small().tensor_f32("a", &[1], &[0.0]), "tensor \"a\" appears twice"),
        (small().tensor_f32("", &[1], &[0.0]), "a tensor name of 0 bytes"),
        (small().tensor_f32(&long_name, &[1], &[0.0]), "a tensor name of 65 bytes"),
    ];
    for (builder, expected) in cases {
        let message = open(builder).map(drop).expect_err(expected).to_string();
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}

/// Overwrites the count at `offset` of the fixed header.
fn with_count(offset: usize, count: u64) -> Vec<u8> {
    let mut bytes = small().build();
    bytes[offset..offset + 8].copy_from_slice(&count.to_le_bytes());
    bytes
}

#[test]
fn counts_beyond_the_file_are_refused_before_anything_is_read() {
    for count in [100, 65_536, 65_537, 1 << 40, u64::MAX] {
        for (offset, what) in [(8, "the number of tensors"), (16, "the number of metadata entries")] {
            let error = GgufFile::from_bytes(with_count(offset, count)).map(drop).unwrap_err();
            assert!(matches!(error, GgufError::Count { what: found, .. } if found == what), "{count}: {error}");
        }
    }
}

#[test]
fn what_is_no_gguf_says_how_it_starts() {
    for (bytes, expected) in [(&b"PK\x03\x04rest"[..], "[50, 4b, 03, 04]"), (b"GG", "[47, 47]"), (b"", "[]")] {
        let message = GgufFile::from_bytes(bytes.to_vec()).map(drop).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn a_folder_must_hold_exactly_one() {
    let folder = tempfile::tempdir().unwrap();
    assert!(matches!(GgufFile::open(folder.path()), Err(OpenError::NoneInFolder { .. })));
    fs::write(folder.path().join("notes.txt"), "no").unwrap();
    fs::write(folder.path().join("model.gguf"), small().build()).unwrap();
    assert_eq!(GgufFile::open(folder.path()).unwrap().tensors().len(), 2);
    fs::write(folder.path().join("other.gguf"), small().build()).unwrap();
    let message = GgufFile::open(folder.path()).map(drop).unwrap_err().to_string();
    assert!(message.contains("2 .gguf files") && message.contains("model.gguf, other.gguf"), "{message}");
}

#[test]
fn paths_that_are_no_checkpoint_say_which() {
    let folder = tempfile::tempdir().unwrap();
    let missing = folder.path().join("missing.gguf");
    assert!(matches!(GgufFile::open(&missing), Err(OpenError::Io { path, .. }) if path == missing));
    let empty = folder.path().join("empty.gguf");
    fs::write(&empty, "").unwrap();
    assert!(matches!(GgufFile::open(&empty), Err(OpenError::Invalid { source: GgufError::Magic { .. }, .. })));
}

#[test]
fn a_string_array_starts_again_from_a_clone() {
    let file = open(GgufBuilder::new().raw("x", 9, &array(8, 2, &[string("a"), string("b")].concat()))).unwrap();
    let mut strings = file.metadata().str_array("x").unwrap().unwrap();
    let again = strings.clone();
    assert_eq!((strings.next(), strings.next(), strings.next()), (Some("a"), Some("b"), None));
    assert_eq!(again.collect::<Vec<_>>(), ["a", "b"]);
}

/// One part of a checkpoint of three, with one tensor; the first also has the metadata.
fn part(number: u32, tensors: i32) -> GgufBuilder {
    let first = if number == 0 { small().without_tensor("a").without_tensor("b") } else { GgufBuilder::new() };
    let tensor = format!("part.{number}");
    first
        .u32("split.no", number)
        .u32("split.count", 3)
        .raw("split.tensors.count", 5, &tensors.to_le_bytes())
        .tensor_f32(&tensor, &[1], &[number as f32])
}

fn write_parts(folder: &std::path::Path, parts: [GgufBuilder; 3]) {
    for (index, part) in parts.iter().enumerate() {
        fs::write(folder.join(format!("m-{:05}-of-00003.gguf", index + 1)), part.build()).unwrap();
    }
}

#[test]
fn the_parts_of_a_split_checkpoint_are_one() {
    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path(), [part(0, 3), part(1, 3), part(2, 3)]);
    for path in [folder.path().to_owned(), folder.path().join("m-00002-of-00003.gguf")] {
        let file = GgufFile::open(&path).unwrap();
        assert_eq!(
            file.metadata().u32("llama.block_count"),
            open(small()).unwrap().metadata().u32("llama.block_count")
        );
        let names: Vec<&str> = file.tensors().map(|tensor| tensor.name).collect();
        assert_eq!(names, ["part.0", "part.1", "part.2"]);
        assert_eq!(file.tensor("part.2").unwrap().bytes[..], 2f32.to_le_bytes());
    }
}

#[test]
fn parts_that_do_not_belong_together_are_refused() {
    let refusal = |parts: [GgufBuilder; 3]| {
        let folder = tempfile::tempdir().unwrap();
        write_parts(folder.path(), parts);
        GgufFile::open(folder.path()).map(drop).unwrap_err().to_string()
    };
    let cases = [
        (refusal([part(0, 4), part(1, 4), part(2, 4)]), "its parts hold 3 tensors and should hold 4"),
        (refusal([part(0, 3), part(2, 3), part(1, 3)]), "it says it is part 3 of 3 and is named as part 2 of 3"),
        (
            refusal([part(0, 3), part(1, 3), part(2, 3).without_tensor("part.2").tensor_f32("part.0", &[1], &[0.0])]),
            "tensor \"part.0\" appears twice",
        ),
    ];
    for (message, expected) in cases {
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
    let folder = tempfile::tempdir().unwrap();
    write_parts(folder.path(), [part(0, 3), part(1, 3), part(2, 3)]);
    fs::remove_file(folder.path().join("m-00003-of-00003.gguf")).unwrap();
    let missing = GgufFile::open(folder.path()).map(drop).unwrap_err().to_string();
    assert!(missing.contains("m-00003-of-00003.gguf"), "{missing}");
    let renamed = folder.path().join("m.gguf");
    fs::rename(folder.path().join("m-00001-of-00003.gguf"), &renamed).unwrap();
    let message = GgufFile::open(&renamed).map(drop).unwrap_err().to_string();
    assert!(message.contains("must be a file whose name ends in -00001-of-00003.gguf"), "{message}");
}
