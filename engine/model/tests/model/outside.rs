//! Checkpoints that other tools wrote of a tiny model, against the logits that transformers computed of them
//! (`tests/outside/run tiny` records both). Each folder of `data/outside` is a case.

use std::fs;
use std::path::{Path, PathBuf};

use crate::common::oracle::{compare, our_logits_with};
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_model::{ActivationType, LoadOptions, survey};

/// Tokens per step here: fewer than there are, and no divisor of a block.
const CHUNK: usize = 7;

fn cases() -> Vec<PathBuf> {
    let data = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/model/data/outside");
    let entries = fs::read_dir(data).unwrap().map(|entry| entry.unwrap().path());
    entries.filter(|path| path.is_dir()).collect()
}

fn read(path: PathBuf) -> Vec<u8> {
    fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

/// The tokens of a case, and transformers' logits after each.
fn recorded(folder: &Path) -> (Vec<u32>, Vec<Vec<f32>>) {
    let tokens = String::from_utf8(read(folder.join("tokens.txt"))).unwrap();
    let tokens: Vec<u32> = tokens.split_whitespace().map(|token| token.parse().unwrap()).collect();
    let logits = read(folder.join("logits.f32"));
    let logits: Vec<f32> = logits.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let vocabulary = logits.len() / tokens.len();
    (tokens, logits.chunks_exact(vocabulary).map(<[f32]>::to_vec).collect())
}

/// Largest mean KL and relative error of logits. Codes keep their values, and what is left is keys and values in f16;
/// eight-bit floats become other numbers.
fn bounds(name: &str) -> (f64, f64) {
    match name.contains("fp8") {
        true => (1e-3, 0.03),
        false => (1e-5, 0.003),
    }
}

#[test]
fn checkpoints_of_other_tools_have_the_logits_that_transformers_gives_them() {
    let cases = cases();
    assert!(!cases.is_empty());
    for folder in cases {
        let name = folder.file_name().unwrap().to_str().unwrap();
        let checkpoint = Checkpoint::open(&folder).unwrap_or_else(|error| panic!("{name}: {error}"));
        let (tokens, reference) = recorded(&folder);
        let (activations, kv_data_type) = (ActivationType::Int16, KvDataType::F16);
        let options = LoadOptions { activations, kv_data_type, ..LoadOptions::default() };
        let agreement = compare(&reference, &our_logits_with(&checkpoint, &tokens, CHUNK, &options));
        println!("{name}: {agreement}");
        let (most_kl, most_error) = bounds(name);
        assert!(agreement.mean_kl() <= most_kl && agreement.relative_error() <= most_error, "{name}: {agreement}");
    }
}

/// As of a model that is elsewhere: its headers, and zeros where the rest would be.
#[test]
fn what_a_model_is_needs_nothing_but_headers() {
    for folder in cases() {
        let headers = tempfile::tempdir().unwrap();
        fs::copy(folder.join("config.json"), headers.path().join("config.json")).unwrap();
        let mut weights = read(folder.join("model.safetensors"));
        let header = u64::from_le_bytes(*weights.first_chunk().unwrap()) as usize;
        weights[8 + header..].fill(0);
        fs::write(headers.path().join("model.safetensors"), weights).unwrap();
        let [whole, of_headers] = [folder.as_path(), headers.path()].map(|path: &Path| {
            let found = survey(&Checkpoint::open(path).unwrap(), None);
            found
                .map(|found| (found.shape, found.weight_type))
                .unwrap_or_else(|error| panic!("{}: {error}", path.display()))
        });
        assert_eq!(whole, of_headers, "{}", folder.display());
    }
}
