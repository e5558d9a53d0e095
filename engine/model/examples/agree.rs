//! Compares a checkpoint's logits with those that another program computed of the same file.
//!
//! ```text
//! cargo run --release -p windlass-engine-model --example agree -- CHECKPOINT REFERENCE [MOST_KL [LEAST_TOP_1]]
//! ```
//! REFERENCE is what `llama-perplexity --save-all-logits` writes, or a folder with `tokens.txt` (numbers apart by blanks: one
//! sequence) and `logits.f32` (little-endian, `[tokens, vocabulary]`). A line is printed for activations rounded as finely as
//! they can be, one for the default, and one for products that may hang on the number of tokens (`--no-deterministic`). With bounds
//! given, the first line is held to them: the mean Kullback-Leibler divergence in nats, and the share of tokens after which both
//! hold the same one for the likeliest.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use saved_logits::{SavedLogits, Window, centred};
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::KvDataType;
use windlass_engine_model::{ActivationType, Agreement, LoadOptions, Reader};

#[path = "../tests/model/common/saved_logits.rs"]
mod saved_logits;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = env::args().skip(1);
    let mut word = || words.next().ok_or("usage: agree CHECKPOINT REFERENCE [MOST_KL [LEAST_TOP_1]]");
    let (checkpoint, reference) = (word()?, word()?);
    let most_kl = words.next().map_or(Ok(f64::INFINITY), |word| word.parse())?;
    let least_top_1 = words.next().map_or(Ok(0.0), |word| word.parse())?;
    let reference = read(Path::new(&reference)).map_err(|problem| format!("{reference}: {problem}"))?;
    let model = Checkpoint::open(Path::new(&checkpoint))?;
    let with = |activations| LoadOptions { activations, ..LoadOptions::default() };
    let fine = compare(&reference, &model, with(ActivationType::Int16))?;
    println!("int16: {fine}");
    println!("int8: {}", compare(&reference, &model, with(ActivationType::Int8))?);
    let varying = LoadOptions { batch_invariant: false, ..LoadOptions::default() };
    println!("no-deterministic: {}", compare(&reference, &model, varying)?);
    match fine.mean_kl() <= most_kl && fine.top_1() >= least_top_1 {
        true => Ok(()),
        false => Err(format!("{checkpoint}: beyond mean KL {most_kl:e} or below {least_top_1} of the same").into()),
    }
}

/// What the other program computed.
fn read(path: &Path) -> Result<Vec<Window>, Box<dyn Error>> {
    match path.is_dir() {
        true => Ok(vec![sequence(path)?]),
        false => Ok(SavedLogits::parse(&fs::read(path)?)?.windows),
    }
}

fn sequence(folder: &Path) -> Result<Window, Box<dyn Error>> {
    let tokens = fs::read_to_string(folder.join("tokens.txt"))?;
    let tokens: Vec<u32> = tokens.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
    let bytes = fs::read(folder.join("logits.f32"))?;
    let logits: Vec<f32> = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
    let vocabulary = (logits.len() / tokens.len().max(1)).max(1);
    Ok(Window { tokens, first: 0, rows: logits.chunks_exact(vocabulary).map(<[f32]>::to_vec).collect() })
}

fn compare(windows: &[Window], model: &Checkpoint, options: LoadOptions) -> Result<Agreement, Box<dyn Error>> {
    let longest = windows.iter().map(|window| window.tokens.len()).max().ok_or("there are no tokens")?;
    // As the other programs hold theirs, or finer than they.
    let kv_data_type = KvDataType::F16;
    let options = LoadOptions { kv_data_type, ..options };
    let mut reader = Reader::load(model, longest, &options)?;
    let mut agreement = Agreement::default();
    for Window { tokens, first, rows } in windows {
        let vocabulary = reader.vocabulary();
        if let Some(row) = rows.iter().find(|row| row.len() != vocabulary) {
            return Err(format!("the reference has {} tokens and the checkpoint {vocabulary}", row.len()).into());
        }
        let steps = tokens.chunks(Reader::STEP_TOKENS).enumerate();
        let found: Vec<f32> = steps.flat_map(|(i, step)| reader.read(step, i * Reader::STEP_TOKENS)).collect();
        let found = found.chunks_exact(vocabulary).skip(*first);
        rows.iter().zip(found).for_each(|(row, found)| agreement.add(&centred(row), &centred(found)));
    }
    Ok(agreement)
}
