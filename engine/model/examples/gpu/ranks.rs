//! A model in the shape of Llama-3.1-8B, held by two GPUs together: what comes of it beside one alone, and how fast.

use windlass_checkpoint::Checkpoint;
use windlass_engine_core::executor::Executor;
use windlass_engine_model::Agreement;
use windlass_engine_model::cuda::{CudaModel, Device, Replay};

use crate::finding::{Bound, Figure, Finding};
use crate::generated::{self, Format};
use crate::model::Model;
use crate::parts::Tell;
use crate::rates::Running;
use crate::scale::Scale;
use crate::{Outcome, agreement, llama, rig};

/// Of mean KL: what two orders of sums in bf16 may make of one model (kernels.md, 4).
const MOST_KL: f64 = 1e-3;

/// Logits of a text by both, and decoding.
pub fn measure(model: &Model, tell: &mut Tell<'_>) -> Outcome<()> {
    let Some(devices) = rig::two_devices(model)? else {
        tell(Finding::Absent { name: "a model on two GPUs".into(), why: "there is one".into() });
        return Ok(());
    };
    let (scale, folder) = (Scale::of(model), tempfile::tempdir()?);
    generated::write(folder.path(), &scale.llama, Format::Bf16)?;
    let checkpoint = Checkpoint::open(folder.path())?;
    let alone = read_and_decode(&checkpoint, scale, &devices[..1], tell)?;
    let together = read_and_decode(&checkpoint, scale, &devices, tell)?;
    let mut agreement = Agreement::default();
    let vocabulary = alone.len() / scale.text_tokens;
    alone.chunks(vocabulary).zip(together.chunks(vocabulary)).for_each(|(one, two)| agreement.add(one, two));
    let wanted = format!("at most {MOST_KL:e}");
    let kl = Figure::new("logits of two GPUs: mean KL from those of one", agreement.mean_kl().max(0.0), "nats");
    tell(kl.wanted(&wanted, Bound::Most(MOST_KL)).into());
    tell(Finding::check("logits of two GPUs are those of one, as near as that", agreement.mean_kl() <= MOST_KL));
    Ok(())
}

/// Logits of a text, `[tokens, vocabulary]`, and rates.
fn read_and_decode(
    checkpoint: &Checkpoint,
    scale: &Scale,
    devices: &[Device],
    tell: &mut Tell<'_>,
) -> Outcome<Vec<f32>> {
    let options = llama::options(scale, true);
    let loaded = CudaModel::load(checkpoint, &options, devices)?.start(options.kv, Replay::Graphs)?;
    let mut running = Running::new(loaded, scale.llama.embedding_bytes());
    let text = agreement::text(scale.text_tokens, running.executor.geometry().vocabulary);
    let logits = agreement::on_gpu(&mut running.executor, &text, 0)?;
    for &sequences in scale.llama_sequences {
        let Figure { name, value, unit, .. } = running.decode(sequences, scale.decoded);
        tell(Figure::new(format!("{name}, {} GPUs", devices.len()), value, &unit).into());
    }
    Ok(logits)
}
