//! Holds tokenizers against recorded ones: `vocabularies FOLDER`, where the folder has GGUF files with a vocabulary each
//! and beside them what Hugging Face's tokenizers made of some texts: `NAME.gguf.inp`, texts between lines of
//! `__ggml_vocab_test__`, and `NAME.gguf.out`, their token ids line by line. llama.cpp's sources have such a folder.
//!
//! Prints a line per vocabulary and ends with an error if any differs in any text.

use std::error::Error;
use std::path::{Path, PathBuf};
use std::time::Instant;
use std::{env, fs};

use windlass_checkpoint::GgufFile;
use windlass_engine::text::tokenizer::Tokenizer;

/// What lies between two texts.
const SEPARATOR: &str = "\n__ggml_vocab_test__\n";

fn main() -> Result<(), Box<dyn Error>> {
    let folder = env::args().nth(1).ok_or("which folder?")?;
    let mut files: Vec<PathBuf> =
        fs::read_dir(folder)?.map(|entry| Ok(entry?.path())).collect::<Result<_, Box<dyn Error>>>()?;
    files.retain(|path| path.extension().is_some_and(|extension| extension == "gguf"));
    files.sort();
    let mut differences = 0;
    for file in files {
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        match compare(&file) {
            Ok(None) => println!("{name}: no recorded texts"),
            Ok(Some(result)) => {
                differences += result.differences;
                println!(
                    "{name}: {} of {} texts differ, ready after {:?}",
                    result.differences, result.texts, result.ready
                );
            }
            Err(error) => println!("{name}: {error}"),
        }
    }
    if differences > 0 { Err(format!("{differences} texts differ").into()) } else { Ok(()) }
}

struct Comparison {
    texts: usize,
    differences: usize,
    ready: std::time::Duration,
}

fn compare(path: &Path) -> Result<Option<Comparison>, Box<dyn Error>> {
    let beside = |extension: &str| fs::read_to_string(format!("{}.{extension}", path.display()));
    let file = GgufFile::open(path)?;
    let began = Instant::now();
    let tokenizer = Tokenizer::from_metadata(file.metadata())?;
    let ready = began.elapsed();
    let (Ok(texts), Ok(expected)) = (beside("inp"), beside("out")) else { return Ok(None) };
    let texts = texts.strip_suffix(SEPARATOR).unwrap_or(&texts).split(SEPARATOR);
    let mut comparison = Comparison { texts: 0, differences: 0, ready };
    for (text, line) in texts.zip(expected.lines()) {
        let expected: Vec<u32> = line.split_whitespace().map(str::parse).collect::<Result<_, _>>()?;
        let found = tokenizer.encode(text)?;
        comparison.texts += 1;
        if found != expected {
            comparison.differences += 1;
            println!("  {text:?}\n    expected {expected:?}\n    found    {found:?}");
        }
    }
    Ok(Some(comparison))
}
