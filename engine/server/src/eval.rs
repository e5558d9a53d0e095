//! `windlass-engine eval`: how well a checkpoint foretells a text, and how far it is from another checkpoint.
//!
//! The text is cut into windows of equal length, each read by itself; the first half of a window is context, and the
//! tokens of the second half are scored. That is how llama.cpp's `llama-perplexity` scores, so its figures compare.

use crate::cli::EvalArgs;
use crate::config::kv_data_type;
use crate::failure::Failure;
use crate::start::{load_failure, open, tokenizer};
use std::fs::File;
use std::io::{Read, stdin};
use std::path::Path;
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::request::TokenId;
use windlass_engine_model::{Agreement, LoadOptions, Perplexity, Quantization, Reader};

/// Longest text. Wikitext-2 has a few hundred kilobytes.
const MAX_TEXT_BYTES: u64 = 64 << 20;
/// Shortest window: half of it is scored.
const MIN_WINDOW_TOKENS: usize = 4;

/// Reads the text and prints a table.
pub fn run(args: &EvalArgs) -> Result<(), Failure> {
    println!("{}", evaluate(args)?);
    Ok(())
}

/// Reads the text; the table is Markdown.
pub fn evaluate(args: &EvalArgs) -> Result<String, Failure> {
    let text = text(&args.text)?;
    let changed = LoadOptions {
        quantization: quantization(args)?,
        kv_data_type: kv_data_type(&args.kv_cache_dtype)?,
        ..options(args)
    };
    let mut model = Evaluated::load(&args.model, args, &changed)?;
    let mut against = args.against.as_deref().map(|path| Evaluated::load(path, args, &options(args))).transpose()?;
    if let Some(other) = against.as_ref().filter(|other| other.reader.vocabulary() != model.reader.vocabulary()) {
        let (found, wanted) = (other.reader.vocabulary(), model.reader.vocabulary());
        let message =
            format!("--against has {found} tokens in its vocabulary and the model {wanted}: use one's own source");
        return Err(Failure::configuration(message));
    }
    let windows = Windows::cut(&args.model, &text, args)?;
    let mut agreement = Agreement::default();
    for (index, window) in windows.windows().enumerate() {
        score(&window, windows.scored_from(), &mut model, against.as_mut(), &mut agreement);
        eprintln!("window {} of {}: perplexity {:.4}", index + 1, windows.count(), model.perplexity.value());
    }
    Ok(table(&model, against.as_ref().map(|other| (other, &agreement))))
}

/// A model with its score so far.
struct Evaluated {
    name: String,
    reader: Reader,
    perplexity: Perplexity,
}

impl Evaluated {
    fn load(path: &Path, args: &EvalArgs, options: &LoadOptions) -> Result<Evaluated, Failure> {
        let reader = Reader::load(&open(path)?, args.window_tokens, options).map_err(load_failure)?;
        let name = path.file_name().unwrap_or(path.as_os_str()).to_string_lossy().into_owned();
        Ok(Evaluated { name, reader, perplexity: Perplexity::default() })
    }

    fn row(&self) -> String {
        let (value, error) = (self.perplexity.value(), self.perplexity.standard_error());
        format!("| {} | {} | {value:.4} ± {error:.4} |", self.name, self.reader.weight_type)
    }
}

/// How both models are loaded, unless flags say otherwise of the first.
fn options(args: &EvalArgs) -> LoadOptions {
    let options = LoadOptions::default();
    let threads = args.threads.unwrap_or(options.threads);
    let (activations, batch_invariant) = (args.activation_dtype.into(), !args.no_deterministic);
    LoadOptions { threads, activations, batch_invariant, ..options }
}

/// What the model's floats are to become.
fn quantization(args: &EvalArgs) -> Result<Option<Quantization>, Failure> {
    let Some(name) = args.quantization.as_deref() else { return Ok(None) };
    let wrong =
        || Failure::configuration(format!("--quantization is {name:?}; it must be one of {}", Quantization::names()));
    Quantization::named(name).map(Some).ok_or_else(wrong)
}

/// Reads one window with both models and scores its tokens from `scored_from` on.
fn score(
    window: &[TokenId],
    scored_from: usize,
    model: &mut Evaluated,
    mut against: Option<&mut Evaluated>,
    agreement: &mut Agreement,
) {
    let width = model.reader.vocabulary();
    // The last token is only foretold.
    let read = &window[..window.len() - 1];
    for (index, tokens) in read.chunks(Reader::STEP_TOKENS).enumerate() {
        let position = index * Reader::STEP_TOKENS;
        let found = model.reader.read(tokens, position);
        let reference = against.as_mut().map(|other| other.reader.read(tokens, position));
        for (row, logits) in found.chunks_exact(width).enumerate() {
            let next = position + row + 1;
            if next <= scored_from {
                continue;
            }
            model.perplexity.add(logits, window[next]);
            if let (Some(other), Some(reference)) = (against.as_mut(), &reference) {
                let reference = &reference[row * width..][..width];
                other.perplexity.add(reference, window[next]);
                agreement.add(reference, logits);
            }
        }
    }
}

/// A text's tokens in windows of equal length; what does not fill the last one is left out.
struct Windows {
    tokens: Vec<TokenId>,
    length: usize,
    /// Stands in the place of each window's first token, where the model wants one there.
    prefix: Option<TokenId>,
}

impl Windows {
    fn cut(model: &Path, text: &str, args: &EvalArgs) -> Result<Windows, Failure> {
        let (tokenizer, length) = (tokenizer(&open(model)?)?, args.window_tokens);
        if length < MIN_WINDOW_TOKENS {
            let message = format!("--window-tokens is {length}; it must be at least {MIN_WINDOW_TOKENS}");
            return Err(Failure::configuration(message));
        }
        let mut tokens = tokenizer.encode_prompt(text).map_err(|error| Failure::new(Reason::ModelInvalid, error))?;
        tokens.truncate(args.windows.unwrap_or(usize::MAX).saturating_mul(length));
        match tokens.len() / length {
            0 => Err(Failure::configuration(format!("the text has {} tokens and a window {length}", tokens.len()))),
            _ => Ok(Windows { tokens, length, prefix: tokenizer.special().prefix }),
        }
    }

    fn count(&self) -> usize {
        self.tokens.len() / self.length
    }

    fn windows(&self) -> impl Iterator<Item = Vec<TokenId>> {
        self.tokens.chunks_exact(self.length).map(|window| {
            let mut window = window.to_vec();
            window[0] = self.prefix.unwrap_or(window[0]);
            window
        })
    }

    /// The last token of a window that is only context.
    fn scored_from(&self) -> usize {
        self.length / 2
    }
}

fn text(path: &Path) -> Result<String, Failure> {
    let failed = |error| Failure::configuration(format!("cannot read the text {}: {error}", path.display()));
    let source: Box<dyn Read> =
        if path == Path::new("-") { Box::new(stdin()) } else { Box::new(File::open(path).map_err(failed)?) };
    let mut text = String::new();
    source.take(MAX_TEXT_BYTES).read_to_string(&mut text).map_err(failed)?;
    Ok(text)
}

fn table(model: &Evaluated, against: Option<(&Evaluated, &Agreement)>) -> String {
    let tokens = model.perplexity.tokens();
    let Some((other, agreement)) = against else {
        return format!("| {tokens} tokens | weights | perplexity |\n|---|---|---|\n{}", model.row());
    };
    let (kl, top) = (agreement.mean_kl(), 100.0 * agreement.top_1());
    format!(
        "| {tokens} tokens | weights | perplexity | mean KL | same first choice |\n|---|---|---|---|---|\n\
         {} {kl:.3e} | {top:.2} % |\n{} | |",
        model.row(),
        other.row(),
    )
}
