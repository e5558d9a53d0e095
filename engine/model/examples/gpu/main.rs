//! What a GPU makes of the engine, in ten minutes at most; `tests/gpu/run` calls it.
//!
//! - `gpu prove [OPTION…] PROGRAMS REPORTS` runs tests and measurements, which are stages of a share of the time each, and
//!   writes a dated JSON and Markdown report into REPORTS, whatever comes of them. It fails where one of them does.
//!   `--model FILE.gguf` names a model; without, it is one of random weights in the shape of SmolLM2-135M. `--seconds N` is
//!   the time for all, `--only STAGE,…` leaves out what is not named. `--dry-run` goes the same way with tiny models on the
//!   CPU shim: it shows that the programs work, and nothing of a GPU.
//! - `gpu measure PART FILE.gguf|--generated|--dry-run` is one of those stages.
//! - `gpu serve ENGINE FILE.gguf|--generated|--dry-run` is another: the engine itself, asked over HTTP.
//! - `gpu find` only says whether there is a GPU.

mod agreement;
mod attention;
mod ceilings;
#[path = "../../tests/model/common/driver.rs"]
#[allow(dead_code, missing_docs, clippy::unwrap_used)] // of the tests, for whom a failed unwrap is the failure
mod driver;
mod experts;
mod finding;
mod generated;
mod llama;
mod log;
mod model;
mod modules;
mod noise;
mod parts;
mod plan;
mod probe;
mod products;
mod prove;
mod ranks;
mod rates;
mod replays;
mod report;
mod rig;
mod rows;
mod sampler;
mod scale;
mod served;
mod small;
mod stage;
#[path = "../../tests/model/common/tiny.rs"]
#[allow(dead_code, missing_docs)]
mod tiny;

use std::path::Path;
use std::process::ExitCode;

use windlass_engine_model::cuda::devices;

use model::Model;
use parts::{PARTS, Part};
use prove::Proof;

type Outcome<T> = Result<T, Box<dyn std::error::Error>>;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let passed = match &arguments[..] {
        [word] if word == "find" => find(),
        [word, part, model] if word == "measure" => measure(part, &Model::named(model)),
        [word, engine, model] if word == "serve" => serve(engine, &Model::named(model)),
        [word, rest @ ..] if word == "prove" => prove(rest),
        _ => Err("usage: gpu prove [--dry-run] [--model FILE.gguf] [--seconds N] [--only STAGE,...] PROGRAMS REPORTS \
                  | gpu measure PART FILE.gguf|--generated|--dry-run | gpu serve ENGINE FILE.gguf|--generated|--dry-run | gpu find"
            .into()),
    };
    match passed {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("gpu: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Says what there is to compute on, or why there is nothing.
fn find() -> Outcome<bool> {
    match devices()? {
        0 => Err("the CUDA driver knows no GPU on this machine".into()),
        count => {
            println!("{count} GPUs; computing on the first");
            Ok(true)
        }
    }
}

fn measure(part: &str, model: &Model) -> Outcome<bool> {
    let names = || PARTS.map(|part| part.name).join(", ");
    let part = Part::named(part).ok_or_else(|| format!("there is no part {part}; the parts are {}", names()))?;
    (part.measure)(model, &mut |finding| println!("{}", finding.line()))?;
    Ok(true)
}

fn serve(engine: &str, model: &Model) -> Outcome<bool> {
    served::measure(Path::new(engine), model, &mut |finding| println!("{}", finding.line()))?;
    Ok(true)
}

fn prove(words: &[String]) -> Outcome<bool> {
    let report = Proof::read(words)?.run()?;
    println!("{}", report.markdown());
    Ok(report.passed())
}
