//! `eval` on the real model: equal models agree, and what cannot be scored is refused.

use clap::Parser;
use std::fs;
use windlass_checkpoint::testing::real_model;
use windlass_engine::cli::{Cli, Command};
use windlass_engine::eval::evaluate;

/// Plain prose.
const TEXT: &str = "The harbour lay quiet under the morning fog. Boats rocked against their moorings, and the smell of \
    salt and tar hung in the air. An old man walked along the pier with a basket of nets on his shoulder, humming a tune \
    that nobody else remembered. When the sun came through, the water turned from grey to green, and the gulls began to \
    cry above the roofs of the town. ";

/// The table of `eval MODEL TEXT` with more flags, or the message.
fn eval(flags: &str) -> Option<Result<String, String>> {
    let model = real_model()?;
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
        println!("{kind}\n{table}");
        let cell = |index| table.lines().nth(2)?.split(" | ").nth(index)?.trim_end_matches(" |").parse::<f64>().ok();
        let kl = cell(3).expect("a mean KL");
        assert!(kl > 0.0 && kl < bound, "{kind}: {table}");
    }
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
