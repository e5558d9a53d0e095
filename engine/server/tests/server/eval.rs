//! `eval`: equal models agree, those that were rounded nearly, and what cannot be scored is refused.

use crate::llama::Llama;
use clap::Parser;
use std::fs;
use std::path::Path;
use windlass_checkpoint::testing::real_model;
use windlass_engine::cli::{Cli, Command};
use windlass_engine::eval::evaluate;

/// Plain prose.
const TEXT: &str = "The harbour lay quiet under the morning fog. Boats rocked against their moorings, and the smell of \
    salt and tar hung in the air. An old man walked along the pier with a basket of nets on his shoulder, humming a tune \
    that nobody else remembered. When the sun came through, the water turned from grey to green, and the gulls began to \
    cry above the roofs of the town. ";

/// The table of `eval MODEL TEXT` of the real model with more flags, or the message.
fn eval(flags: &str) -> Option<Result<String, String>> {
    eval_of(&real_model()?, flags)
}

fn eval_of(model: &Path, flags: &str) -> Option<Result<String, String>> {
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(&text, TEXT.repeat(2)).unwrap();
    let flags = flags.replace("MODEL", model.to_str().unwrap());
    let line = format!("windlass-engine eval {} {} {flags}", model.display(), text.display());
    let Command::Eval(args) = Cli::try_parse_from(line.split_whitespace()).unwrap().command else { return None };
    Some(evaluate(&args).map_err(|failure| failure.message))
}

#[test]
fn a_model_agrees_with_itself_and_foretells_prose() {
    let Some(table) = eval("--window-tokens 64 --windows 2 --against MODEL") else { return };
    let table = table.unwrap();
    assert!(table.starts_with("| 62 tokens |"), "{table}");
    assert!(table.contains("| 0.000e0 | 100.00 % |"), "{table}");
    let perplexity = |row: &str| row.split(" | ").nth(2)?.split(' ').next()?.parse::<f64>().ok();
    let found: Vec<f64> = table.lines().filter_map(perplexity).collect();
    assert!(found.len() == 2 && found[0] == found[1] && (2.0..200.0).contains(&found[0]), "{table}");
}

#[test]
fn keys_and_values_of_fewer_bits_change_as_much_as_they_are_rounded() {
    // Activations of 8 bits round otherwise once their input differs at all, which hides what the cache does.
    for (kind, bound) in [("f16", 1e-4), ("int8", 1e-3), ("fp8", 1e-2), ("int4", 1.0)] {
        let flags = "--window-tokens 128 --windows 1 --activation-dtype int16 --kv-cache-dtype";
        let flags = format!("{flags} {kind} --against MODEL");
        let Some(table) = eval(&flags) else { return };
        let table = table.unwrap();
        let [kl, _] = compared(&table);
        assert!(kl > 0.0 && kl < bound, "{kind}: {table}");
    }
}

/// Mean KL, and how many first choices are the same, as a part of 1.
fn compared(table: &str) -> [f64; 2] {
    let row: Vec<&str> = table.lines().nth(2).unwrap().split(" | ").collect();
    let number = |cell: &str| cell.trim_end_matches([' ', '|', '%']).parse::<f64>().unwrap();
    [number(row[3]), number(row[4]) / 100.0]
}

#[test]
fn a_checkpoint_is_as_far_from_its_source_as_it_was_rounded_or_changed() {
    let folder = tempfile::tempdir().unwrap();
    for (name, noise) in [("source", 0.0), ("changed", 0.03)] {
        fs::create_dir(folder.path().join(name)).unwrap();
        Llama { vocabulary: 320, noise }.write(&folder.path().join(name));
    }
    let source = folder.path().join("source");
    let changed = format!("--against {}", folder.path().join("changed").display());
    for (flags, least, most) in [
        ("--against MODEL", 0.0, 0.0),
        ("--quantization int8 --against MODEL", 1e-6, 1e-3),
        ("--quantization int4-g64 --against MODEL", 1e-4, 0.1),
        (&changed[..], 1e-6, 0.1),
    ] {
        let table = eval_of(&source, &format!("--window-tokens 128 --windows 2 {flags}")).unwrap().unwrap();
        let [kl, same] = compared(&table);
        assert!((least..=most).contains(&kl), "{flags}: {table}");
        let expected = if most == 0.0 { 1.0..=1.0 } else { 0.5 + f64::EPSILON..=1.0 };
        assert!(expected.contains(&same), "{flags}: {table}");
    }
}

#[test]
fn checkpoints_of_different_vocabularies_are_not_compared() {
    let folder = tempfile::tempdir().unwrap();
    let [one, other] = [320, 352].map(|vocabulary| {
        let path = folder.path().join(vocabulary.to_string());
        fs::create_dir(&path).unwrap();
        Llama { vocabulary, noise: 0.0 }.write(&path);
        path
    });
    let message = eval_of(&one, &format!("--window-tokens 16 --against {}", other.display())).unwrap().unwrap_err();
    assert!(message.contains("--against has 352 tokens in its vocabulary and the model 320"), "{message}");
}

#[test]
fn what_cannot_be_scored_is_refused() {
    for (flags, expected) in [
        ("--window-tokens 2", "--window-tokens is 2; it must be at least 4"),
        ("--window-tokens 4096", "the text has"),
        ("--quantization int3", "--quantization is \"int3\"; it must be one of int8, fp8, int4"),
        ("--kv-cache-dtype fp8_e5m2", "--kv-cache-dtype"),
        ("--quantization int8", "cannot be quantized to int8"),
        ("--quantization fp8", "cannot be quantized to fp8"),
    ] {
        let Some(refused) = eval(flags) else { return };
        let message = refused.unwrap_err();
        assert!(message.contains(expected), "{message:?} should contain {expected:?}");
    }
}
