//! `--speculative-config`: who guesses what comes next, as vLLM spells it.

use crate::failure::Failure;
use crate::start::{load_failure, open};
use serde::Deserialize;
use std::path::{Path, PathBuf};
use windlass_checkpoint::Checkpoint;
use windlass_engine_contract::memory::Ledger;
use windlass_engine_contract::termination::Reason;
use windlass_engine_core::draft::{MAX_DRAFT_TOKENS, PromptLookup, Proposer, SuffixAutomaton};
use windlass_engine_model::cuda::Device;
use windlass_engine_model::{DraftModel, LoadError, LoadOptions};

/// Guesses in a step, where the flag gives no number.
const DEFAULT_TOKENS: u32 = 8;
/// Last tokens that prompt lookup looks for, where the flag gives no numbers.
const DEFAULT_LOOKUP: [usize; 2] = [2, 4];
/// The most that it may look for.
const MAX_LOOKUP: usize = 64;
/// Last tokens that have to be there before for the suffix automaton to go on as then.
const SUFFIX_TOKENS: usize = 2;

/// What proposes draft tokens, and the most of a step.
pub type Drafts = (Box<dyn Proposer>, u32);

/// Who guesses, and how far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Speculation {
    method: Method,
    /// Most guesses for a sequence in a step.
    tokens: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Method {
    PromptLookup { min: usize, max: usize },
    Suffix,
    DraftModel(PathBuf),
}

/// The flag's JSON. What is in no line here is refused by name.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fields {
    method: Option<String>,
    num_speculative_tokens: Option<u32>,
    prompt_lookup_min: Option<usize>,
    prompt_lookup_max: Option<usize>,
    model: Option<PathBuf>,
}

impl Speculation {
    /// Reads the flag.
    pub fn parse(text: &str) -> Result<Speculation, Failure> {
        let wrong = |why: String| Failure::configuration(format!("--speculative-config {text}: {why}"));
        let fields: Fields = serde_json::from_str(text).map_err(|error| wrong(error.to_string()))?;
        let tokens = fields.num_speculative_tokens.unwrap_or(DEFAULT_TOKENS);
        if !(1..=MAX_DRAFT_TOKENS as u32).contains(&tokens) {
            return Err(wrong(format!("num_speculative_tokens must be from 1 to {MAX_DRAFT_TOKENS}")));
        }
        Ok(Speculation { method: method(fields).map_err(wrong)?, tokens })
    }

    /// Makes the proposer for a model on a CPU with so many tokens in its vocabulary, and says the most guesses of a step;
    /// `options` are how the model was loaded.
    pub fn proposer(&self, vocabulary: u32, options: &LoadOptions) -> Result<Drafts, Failure> {
        // Its memory was checked together with the model's.
        let options = LoadOptions { memory_limit_bytes: None, ..options.clone() };
        self.make(vocabulary, |file| DraftModel::load(file, &options).map(|model| (model.vocabulary(), boxed(model))))
    }

    /// The same for a model on a GPU; `options` are the model's, with room for keys and values of its own.
    pub fn proposer_on(&self, vocabulary: u32, options: &LoadOptions, device: &Device) -> Result<Drafts, Failure> {
        let load = |file: &Checkpoint| DraftModel::load_on(file, options, device);
        self.make(vocabulary, |file| load(file).map(|model| (model.vocabulary(), boxed(model))))
    }

    fn make(
        &self,
        vocabulary: u32,
        load: impl FnOnce(&Checkpoint) -> Result<(u32, Box<dyn Proposer>), LoadError>,
    ) -> Result<Drafts, Failure> {
        let proposer: Box<dyn Proposer> = match &self.method {
            Method::PromptLookup { min, max } => Box::new(PromptLookup::new(*min, *max)),
            Method::Suffix => Box::new(SuffixAutomaton::new(SUFFIX_TOKENS)),
            Method::DraftModel(path) => {
                match load(&open(path)?).map_err(|error| of_draft(path, load_failure(error)))? {
                    (own, model) if own == vocabulary => model,
                    (own, _) => {
                        let path = path.display();
                        let message = format!("the draft model {path} has {own} tokens and the model {vocabulary}");
                        return Err(Failure::new(Reason::Unsupported, message));
                    }
                }
            }
        };
        Ok((proposer, self.tokens))
    }

    /// The same for what computes no draft model, which `device` names.
    pub fn proposer_without_model(&self, device: &str) -> Result<Drafts, Failure> {
        if self.draft_model().is_some() {
            let message = format!("--speculative-config: {device} computes no draft model: use ngram or suffix");
            return Err(Failure::new(Reason::Unsupported, message));
        }
        self.make(0, |_| unreachable!("no model is loaded"))
    }

    /// The draft model's file, if one guesses.
    pub fn draft_model(&self) -> Option<&Path> {
        match &self.method {
            Method::DraftModel(path) => Some(path),
            Method::PromptLookup { .. } | Method::Suffix => None,
        }
    }

    /// What a proposer with weights takes, by their header; `options` are how the model is loaded.
    pub fn ledger(&self, options: &LoadOptions) -> Result<Ledger, Failure> {
        let Some(path) = self.draft_model() else { return Ok(Ledger::default()) };
        DraftModel::ledger(&open(path)?, options).map_err(|error| of_draft(path, load_failure(error)))
    }
}

fn boxed(proposer: impl Proposer + 'static) -> Box<dyn Proposer> {
    Box::new(proposer)
}

/// Says which model it was.
pub fn of_draft(path: &Path, failure: Failure) -> Failure {
    Failure { message: format!("the draft model {}: {}", path.display(), failure.message), ..failure }
}

fn method(fields: Fields) -> Result<Method, String> {
    let Fields { method, prompt_lookup_min, prompt_lookup_max, model, .. } = fields;
    let name = method.unwrap_or_else(|| if model.is_some() { "draft_model" } else { "ngram" }.to_owned());
    let looks_up = prompt_lookup_min.is_some() || prompt_lookup_max.is_some();
    match name.as_str() {
        "ngram" if model.is_none() => lookup(prompt_lookup_min, prompt_lookup_max),
        "suffix" if model.is_none() && !looks_up => Ok(Method::Suffix),
        "draft_model" if !looks_up => {
            model.map(Method::DraftModel).ok_or("method draft_model needs model, a file or folder".to_owned())
        }
        "ngram" | "suffix" => Err(format!("method {name} takes no model, and prompt_lookup_* are ngram's")),
        "draft_model" => Err("prompt_lookup_* are ngram's".to_owned()),
        _ => Err(format!("method {name:?} is not supported: use ngram, suffix or draft_model")),
    }
}

/// One number alone counts for both.
fn lookup(min: Option<usize>, max: Option<usize>) -> Result<Method, String> {
    let (min, max) = match (min, max) {
        (None, None) => (DEFAULT_LOOKUP[0], DEFAULT_LOOKUP[1]),
        (min, max) => (min.or(max).unwrap_or_default(), max.or(min).unwrap_or_default()),
    };
    match 1 <= min && min <= max && max <= MAX_LOOKUP {
        true => Ok(Method::PromptLookup { min, max }),
        false => Err(format!(
            "prompt_lookup_min is {min} and prompt_lookup_max {max}: 1 to {MAX_LOOKUP}, the first not above the second"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn vllms_spellings_are_understood() {
        let lookup = |min, max| Method::PromptLookup { min, max };
        for (text, method, tokens) in [
            (r#"{"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 4}"#, lookup(4, 4), 5),
            (r#"{"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2}"#, lookup(2, 4), 8),
            (r#"{"method": "suffix"}"#, Method::Suffix, 8),
            (r#"{"model": "/m.gguf", "num_speculative_tokens": 3}"#, Method::DraftModel("/m.gguf".into()), 3),
        ] {
            assert_eq!(Speculation::parse(text).unwrap(), Speculation { method, tokens }, "{text}");
        }
    }

    #[test]
    fn what_cannot_be_done_is_refused_by_name() {
        for (text, expected) in [
            ("ngram", "expected"),
            (r#"{"method": "eagle3"}"#, "eagle3"),
            (r#"{"method": "ngram", "num_speculative_tokens": 0}"#, "num_speculative_tokens"),
            (r#"{"method": "ngram", "num_speculative_tokens": 33}"#, "num_speculative_tokens"),
            (r#"{"method": "ngram", "prompt_lookup_min": 5, "prompt_lookup_max": 4}"#, "prompt_lookup_min"),
            (r#"{"method": "ngram", "prompt_lookup_max": 65}"#, "prompt_lookup_max"),
            (r#"{"method": "ngram", "model": "m"}"#, "model"),
            (r#"{"method": "draft_model"}"#, "needs model"),
            (r#"{"method": "ngram", "draft_tensor_parallel_size": 1}"#, "draft_tensor_parallel_size"),
        ] {
            let failure = Speculation::parse(text).unwrap_err();
            assert!(failure.message.contains(expected), "{text}: {failure}");
        }
    }
}
