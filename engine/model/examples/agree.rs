//! Compares a checkpoint's logits with those that another program computed of the same file.
//!
//! ```text
//! cargo run --release -p windlass-engine-model --example agree -- FOLDER [MOST_KL [LEAST_TOP_1]]
//! ```
//! FOLDER holds the checkpoint, `tokens.txt` (numbers apart by blanks: one sequence) and `logits.f32` (little-endian,
//! `[tokens, vocabulary]`). A line is printed for activations rounded as finely as they can be, and one for the default.
//! With bounds given, the first line is held to them: the mean Kullback-Leibler divergence in nats, and the share of
//! tokens after which both hold the same one for the likeliest.

use std::error::Error;
use std::path::Path;
use std::{env, fs};

use windlass_checkpoint::Checkpoint;
use windlass_engine_core::plan::BlockId;
use windlass_engine_model::{ActivationType, Agreement, Batch, KvBudget, LoadOptions, Logits, build};

const BLOCK_TOKENS: usize = 16;

fn main() -> Result<(), Box<dyn Error>> {
    let mut words = env::args().skip(1);
    let folder = words.next().ok_or("usage: agree FOLDER [MOST_KL [LEAST_TOP_1]]")?;
    let most_kl = words.next().map_or(Ok(f64::INFINITY), |word| word.parse())?;
    let least_top_1 = words.next().map_or(Ok(0.0), |word| word.parse())?;
    let reference = Reference::read(Path::new(&folder))?;
    let checkpoint = Checkpoint::open(Path::new(&folder))?;
    let fine = reference.compare(&checkpoint, ActivationType::Int16)?;
    println!("int16: {fine}");
    println!("int8: {}", reference.compare(&checkpoint, ActivationType::Int8)?);
    match fine.mean_kl() <= most_kl && fine.top_1() >= least_top_1 {
        true => Ok(()),
        false => Err(format!("{folder}: beyond mean KL {most_kl:e} or below {least_top_1} of the same").into()),
    }
}

/// What the other program computed.
struct Reference {
    tokens: Vec<u32>,
    /// `[tokens, vocabulary]`.
    logits: Vec<f32>,
}

impl Reference {
    fn read(folder: &Path) -> Result<Reference, Box<dyn Error>> {
        let tokens = fs::read_to_string(folder.join("tokens.txt"))?;
        let tokens = tokens.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let bytes = fs::read(folder.join("logits.f32"))?;
        let logits = bytes.as_chunks().0.iter().map(|bytes| f32::from_le_bytes(*bytes)).collect();
        Ok(Reference { tokens, logits })
    }

    fn compare(&self, checkpoint: &Checkpoint, activations: ActivationType) -> Result<Agreement, Box<dyn Error>> {
        let count = self.tokens.len();
        let options = LoadOptions {
            activations,
            kv: KvBudget::Blocks(count.div_ceil(BLOCK_TOKENS) as u32),
            max_sequences: count as u32,
            max_step_tokens: count as u32,
            ..LoadOptions::default()
        };
        let mut model = build(checkpoint, &options)?;
        let vocabulary = model.geometry.vocabulary as usize;
        let expected = count * vocabulary;
        if self.logits.len() != expected {
            return Err(format!("logits.f32 holds {} values, not {count} × {vocabulary}", self.logits.len()).into());
        }
        let blocks: Vec<BlockId> = (0..model.geometry.blocks).map(BlockId).collect();
        let mut batch = Batch::default();
        batch.push(self.tokens.iter().copied(), 0, &blocks, Logits::leading(count));
        model.decoder.forward(&batch);
        let found = model.decoder.logits(count);
        let (reference, found) = (self.logits.chunks_exact(vocabulary), found.chunks_exact(vocabulary));
        let mut agreement = Agreement::default();
        reference.zip(found).for_each(|(reference, found)| agreement.add(reference, found));
        Ok(agreement)
    }
}
