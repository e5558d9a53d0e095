//! Sampling on the device: applies token masks, biases and penalties to logits before a draw, and scores known tokens.
//!
//! The host's sampler gets a row instead if it asks for `typical_p`, for log probabilities of changed logits, or for
//! more than there is room for. Except for the room, this depends on the row alone.

use windlass_kernels::cuda::ops::{self, Edits, Masks, NONE};
use windlass_kernels::cuda::{Device, DriverError, Stream, ViewMut};

use super::draws::{RowDraw, tells};
use super::words::{WordRoom, Words};
use crate::sampler::{Draw, Edit, RowTask, allowed_words, edits};

/// Most single logits that are changed in a step.
const MAX_EDITS: usize = 1 << 17;

/// Where a row is sampled.
#[derive(Debug)]
pub(super) enum SamplingTask {
    /// On the host, from the row's logits as the model computed them.
    OnHost,
    /// On the device.
    OnDevice(DeviceTask),
}

/// The work of the device for a row.
#[derive(Debug)]
pub(super) struct DeviceTask {
    /// The token mask as bits; `None` if all tokens are allowed.
    mask: Option<Vec<u32>>,
    edits: Vec<Edit>,
    draw: RowDraw,
}

/// The sampling task of each of a step's rows of logits.
pub(super) fn sampling_tasks(tasks: &[RowTask<'_>], vocabulary: usize) -> Vec<SamplingTask> {
    let mut room = MAX_EDITS;
    tasks.iter().map(|task| SamplingTask::of(task, vocabulary, &mut room)).collect()
}

/// The draw of each row. For a row that the host samples, the device draws the most likely token, which nobody reads.
pub(super) fn draws(sampling_tasks: &[SamplingTask]) -> Vec<RowDraw> {
    sampling_tasks
        .iter()
        .map(|sampling_task| sampling_task.device_task().map_or(RowDraw::LIKELIEST, |device_task| device_task.draw))
        .collect()
}

impl SamplingTask {
    fn of(task: &RowTask<'_>, vocabulary: usize, room: &mut usize) -> SamplingTask {
        let device_task = match task {
            RowTask::Draw(draw) => DeviceTask::of_draw(draw, vocabulary),
            RowTask::Score { target, top } => DeviceTask::of_score(*target, *top, vocabulary),
        };
        match device_task.filter(|device_task| device_task.edits.len() <= *room) {
            None => SamplingTask::OnHost,
            Some(device_task) => {
                *room -= device_task.edits.len();
                SamplingTask::OnDevice(device_task)
            }
        }
    }

    /// Whether the device samples the row, so that the host only reads the token.
    pub fn is_on_device(&self) -> bool {
        self.device_task().is_some()
    }

    fn device_task(&self) -> Option<&DeviceTask> {
        match self {
            SamplingTask::OnHost => None,
            SamplingTask::OnDevice(device_task) => Some(device_task),
        }
    }
}

impl DeviceTask {
    fn of_draw(draw: &Draw<'_>, vocabulary: usize) -> Option<DeviceTask> {
        let (mask, edits) = (allowed_words(draw, vocabulary.div_ceil(32)), edits(draw));
        let unchanged = mask.is_none() && edits.is_empty();
        let can = draw.sampling.typical_p >= 1.0 && draw.logprobs.is_none_or(|top| unchanged && tells(top));
        can.then(|| DeviceTask { mask, edits, draw: RowDraw::new(draw.sampling, draw.position, draw.logprobs) })
    }

    fn of_score(target: u32, top: u32, vocabulary: usize) -> Option<DeviceTask> {
        let can = (target as usize) < vocabulary && tells(top);
        can.then(|| DeviceTask { mask: None, edits: Vec::new(), draw: RowDraw::known(target, top) })
    }
}

/// Buffers for the changes of a step's logits.
#[derive(Debug)]
pub(super) struct Changes {
    vocabulary: usize,
    room: WordRoom,
}

impl Changes {
    /// Allocates buffers for the changes of `rows` rows.
    pub fn new(device: &Device, rows: usize, vocabulary: usize) -> Result<Changes, DriverError> {
        Ok(Changes { vocabulary, room: WordRoom::new(device, words(rows, vocabulary))? })
    }

    /// Bytes on the device.
    pub fn bytes(rows: usize, vocabulary: usize) -> u64 {
        4 * words(rows, vocabulary) as u64
    }

    /// Masks and changes the rows of `logits`, if any row asks for it.
    pub fn apply(
        &mut self,
        sampling_tasks: &[SamplingTask],
        logits: ViewMut<'_, f32>,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let device_tasks: Vec<Option<&DeviceTask>> = sampling_tasks.iter().map(SamplingTask::device_task).collect();
        let masks: Vec<&[u32]> =
            device_tasks.iter().filter_map(|device_task| device_task.as_ref()?.mask.as_deref()).collect();
        let edits: Vec<&Edit> = device_tasks.iter().flatten().flat_map(|device_task| &device_task.edits).collect();
        if masks.is_empty() && edits.is_empty() {
            return Ok(());
        }
        let mut words = Words::default();
        let [rows, bits] = [words.push(mask_rows(&device_tasks)), words.push(masks.concat())];
        let [firsts, tokens] = [words.push(firsts(&device_tasks)), words.push(edits.iter().map(|edit| edit.token))];
        let values = words.push_floats(edits.iter().flat_map(|edit| edit.values()));
        self.room.send(&words, stream)?;
        let (room, vocabulary) = (&self.room, self.vocabulary);
        let masks = Masks { rows: room.view(&rows), bits: room.view(&bits) };
        let edits = Edits { firsts: room.view(&firsts), tokens: room.view(&tokens), values: room.view(&values) };
        ops::adjust_logits(stream, masks, edits, vocabulary, logits)
    }
}

/// Words of the changes of so many rows: the mask index of each, the masks, the first edit of each, and the tokens and
/// values of edits.
fn words(rows: usize, vocabulary: usize) -> usize {
    let edits = max_edits(rows);
    Words::room([rows, rows * vocabulary.div_ceil(32), rows + 1, edits, 4 * edits])
}

/// Most edits; 0 without logits.
fn max_edits(rows: usize) -> usize {
    if rows == 0 { 0 } else { MAX_EDITS }
}

/// The index of each row's mask.
fn mask_rows(device_tasks: &[Option<&DeviceTask>]) -> Vec<u32> {
    let mut masks = 0..;
    let is_masked =
        |device_task: &Option<&DeviceTask>| device_task.is_some_and(|device_task| device_task.mask.is_some());
    let row = |device_task| if is_masked(device_task) { masks.next().unwrap_or(NONE) } else { NONE };
    device_tasks.iter().map(row).collect()
}

/// The index of each row's first edit, and the number of edits.
fn firsts(device_tasks: &[Option<&DeviceTask>]) -> Vec<u32> {
    let counts =
        device_tasks.iter().map(|device_task| device_task.map_or(0, |device_task| device_task.edits.len() as u32));
    let ends = counts.scan(0, |end, count| {
        *end += count;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}
