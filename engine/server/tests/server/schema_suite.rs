//! JSON-Schema-Test-Suite: whatever a schema that is taken lets an answer be, the suite calls valid.
//!
//! The required tests of draft 2020-12. A schema with a keyword that is not known must be refused, not weakened. Some
//! valid texts cannot be written, since an answer's properties come in the schema's order and numbers are spelled one
//! way: those are counted, and no fault.

use crate::common::PROGRAM;
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::{real_model, schema_suite};
use windlass_engine::structure::Structures;
use windlass_engine::text::tokenizer::Tokenizer;
use windlass_engine_api::structure::{Form, Structure};

const MINUTE: Duration = Duration::from_secs(60);

/// Of one file of the suite.
#[derive(Debug, Default)]
struct Tally {
    /// Groups of tests whose schema is taken.
    taken: u32,
    /// Groups whose schema is refused.
    refused: u32,
    /// Texts judged as the suite judges them.
    agreed: u32,
    /// Valid texts that cannot be written.
    unwritable: u32,
    /// Invalid texts that can: what must not be.
    wrong: Vec<String>,
}

/// Whether an answer of this form can be `text`.
fn can_be(constraint: &dyn windlass_engine_core::constraint::Constraint, tokenizer: &Tokenizer, text: &str) -> bool {
    let tokens = tokenizer.encode(text).unwrap();
    let end = tokenizer.special().ends[0];
    let follows = |at: usize| {
        let next = tokens.get(at).copied().unwrap_or(end);
        constraint.allowed(&tokens[..at], MINUTE).is_ok_and(|allowed| allowed.contains(next))
    };
    (0..=tokens.len()).all(follows)
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_are_valid_by_the_test_suite() {
    let (Some(folder), Some(model)) = (schema_suite(), real_model()) else { return };
    let Checkpoint::Gguf(file) = Checkpoint::open(&model).unwrap() else { panic!("the model is no GGUF file") };
    let tokenizer = Arc::new(Tokenizer::from_metadata(file.metadata()).unwrap());
    let structures = Arc::new(Structures::new(tokenizer.clone(), PROGRAM.as_ref()));
    let mut tallies: BTreeMap<String, Tally> = BTreeMap::new();
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder.join("tests/draft2020-12")).unwrap().map(|entry| entry.unwrap().path()).collect();
    files.retain(|path| path.extension().is_some_and(|extension| extension == "json"));
    for path in files {
        let keyword = path.file_stem().unwrap().to_string_lossy().into_owned();
        let groups: Vec<Value> = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        let tally = tallies.entry(keyword).or_default();
        for group in groups {
            let structure = Structure { field: "guided_json", form: Form::Json(group["schema"].clone()) };
            let Ok(grammar) = structures.compile(structure).await else {
                tally.refused += 1;
                continue;
            };
            tally.taken += 1;
            for test in group["tests"].as_array().unwrap() {
                let constraint = grammar.constraint(None);
                let written = can_be(constraint.as_ref(), &tokenizer, &test["data"].to_string());
                match (written, test["valid"].as_bool().unwrap()) {
                    (true, false) => tally.wrong.push(format!("{}: {}", group["description"], test["description"])),
                    (false, true) => tally.unwritable += 1,
                    _ => tally.agreed += 1,
                }
            }
        }
    }
    for (keyword, tally) in &tallies {
        println!(
            "{keyword}: {} schemas taken, {} refused; {} texts as the suite has them, {} valid ones unwritable, {} wrong",
            tally.taken,
            tally.refused,
            tally.agreed,
            tally.unwritable,
            tally.wrong.len()
        );
    }
    let sum = |count: fn(&Tally) -> u32| tallies.values().map(count).sum::<u32>();
    println!("taken {}, refused {}, agreed {}", sum(|t| t.taken), sum(|t| t.refused), sum(|t| t.agreed));
    let wrong: Vec<(&String, &String)> =
        tallies.iter().flat_map(|(keyword, tally)| tally.wrong.iter().map(move |wrong| (keyword, wrong))).collect();
    assert!(wrong.is_empty(), "{wrong:#?}");
    assert!(sum(|tally| tally.taken) > 100 && sum(|tally| tally.agreed) > 400, "hardly anything was tried");
}
