//! What the host asks of each row of logits, done on the device: masks, biases and penalties before a draw, log probabilities of
//! tokens that are known.
//!
//! A row goes to the host's sampler instead where it asks for `typical_p`, for log probabilities of logits that are changed
//! first, or for more than there is room for. That hangs on the row alone, but for the room.

use windlass_kernels::cuda::ops::{self, Edits, Masks, NONE};
use windlass_kernels::cuda::{Device, DriverError, Stream, ViewMut};

use super::draws::{RowDraw, tells};
use super::words::{WordRoom, Words};
use crate::sampler::{Draw, Edit, RowTask, allowed_words, edits};

/// Single logits that change in a step, at most.
const MAX_EDITS: usize = 1 << 17;

/// How a row is answered.
#[derive(Debug)]
pub(super) enum Answer {
    /// By the host, from the row's logits as the model gave them.
    OnHost,
    /// By the device.
    OnDevice(Question),
}

/// What the device is asked of a row.
#[derive(Debug)]
pub(super) struct Question {
    /// The only tokens that may come, as bits.
    mask: Option<Vec<u32>>,
    edits: Vec<Edit>,
    draw: RowDraw,
}

/// How each of a step's logits is answered.
pub(super) fn answers(tasks: &[RowTask<'_>], vocabulary: usize) -> Vec<Answer> {
    let mut room = MAX_EDITS;
    tasks.iter().map(|task| Answer::of(task, vocabulary, &mut room)).collect()
}

/// Each row's draw. One that the host answers draws the likeliest token, which nobody reads.
pub(super) fn draws(answers: &[Answer]) -> Vec<RowDraw> {
    answers.iter().map(|answer| answer.question().map_or(RowDraw::LIKELIEST, |question| question.draw)).collect()
}

impl Answer {
    fn of(task: &RowTask<'_>, vocabulary: usize, room: &mut usize) -> Answer {
        let question = match task {
            RowTask::Draw(draw) => Question::of_draw(draw, vocabulary),
            RowTask::Score { target, top } => Question::of_score(*target, *top, vocabulary),
        };
        match question.filter(|question| question.edits.len() <= *room) {
            None => Answer::OnHost,
            Some(question) => {
                *room -= question.edits.len();
                Answer::OnDevice(question)
            }
        }
    }

    /// Whether the host has nothing to do but to read the token.
    pub fn is_on_device(&self) -> bool {
        self.question().is_some()
    }

    fn question(&self) -> Option<&Question> {
        match self {
            Answer::OnHost => None,
            Answer::OnDevice(question) => Some(question),
        }
    }
}

impl Question {
    fn of_draw(draw: &Draw<'_>, vocabulary: usize) -> Option<Question> {
        let (mask, edits) = (allowed_words(draw, vocabulary.div_ceil(32)), edits(draw));
        let unchanged = mask.is_none() && edits.is_empty();
        let can = draw.sampling.typical_p >= 1.0 && draw.logprobs.is_none_or(|top| unchanged && tells(top));
        can.then(|| Question { mask, edits, draw: RowDraw::new(draw.sampling, draw.position, draw.logprobs) })
    }

    fn of_score(target: u32, top: u32, vocabulary: usize) -> Option<Question> {
        let can = (target as usize) < vocabulary && tells(top);
        can.then(|| Question { mask: None, edits: Vec::new(), draw: RowDraw::known(target, top) })
    }
}

/// Room for what changes a step's logits.
#[derive(Debug)]
pub(super) struct Changes {
    vocabulary: usize,
    room: WordRoom,
}

impl Changes {
    /// Room for those of `rows` rows.
    pub fn new(device: &Device, rows: usize, vocabulary: usize) -> Result<Changes, DriverError> {
        Ok(Changes { vocabulary, room: WordRoom::new(device, words(rows, vocabulary))? })
    }

    /// Bytes of it on the device.
    pub fn bytes(rows: usize, vocabulary: usize) -> u64 {
        4 * words(rows, vocabulary) as u64
    }

    /// Masks and edits the rows of `logits`, where any row asks for it.
    pub fn apply(&mut self, answers: &[Answer], logits: ViewMut<'_, f32>, stream: &Stream) -> Result<(), DriverError> {
        let questions: Vec<Option<&Question>> = answers.iter().map(Answer::question).collect();
        let masks: Vec<&[u32]> = questions.iter().filter_map(|question| question.as_ref()?.mask.as_deref()).collect();
        let edits: Vec<&Edit> = questions.iter().flatten().flat_map(|question| &question.edits).collect();
        if masks.is_empty() && edits.is_empty() {
            return Ok(());
        }
        let mut words = Words::default();
        let [rows, bits] = [words.push(mask_rows(&questions)), words.push(masks.concat())];
        let [firsts, tokens] = [words.push(firsts(&questions)), words.push(edits.iter().map(|edit| edit.token))];
        let values = words.push_floats(edits.iter().flat_map(|edit| edit.values()));
        self.room.send(&words, stream)?;
        let (room, vocabulary) = (&self.room, self.vocabulary);
        let masks = Masks { rows: room.view(&rows), bits: room.view(&bits) };
        let edits = Edits { firsts: room.view(&firsts), tokens: room.view(&tokens), values: room.view(&values) };
        ops::adjust_logits(stream, masks, edits, vocabulary, logits)
    }
}

/// Words of the changes of so many rows: which mask each has, masks, where edits begin, their tokens and their values.
fn words(rows: usize, vocabulary: usize) -> usize {
    let edits = max_edits(rows);
    Words::room([rows, rows * vocabulary.div_ceil(32), rows + 1, edits, 4 * edits])
}

/// Room for edits: none where there are no logits.
fn max_edits(rows: usize) -> usize {
    if rows == 0 { 0 } else { MAX_EDITS }
}

/// Which mask each row has.
fn mask_rows(questions: &[Option<&Question>]) -> Vec<u32> {
    let mut masks = 0..;
    let is_masked = |question: &Option<&Question>| question.is_some_and(|question| question.mask.is_some());
    let row = |question| if is_masked(question) { masks.next().unwrap_or(NONE) } else { NONE };
    questions.iter().map(row).collect()
}

/// Where each row's edits begin, and where the last one's end.
fn firsts(questions: &[Option<&Question>]) -> Vec<u32> {
    let counts = questions.iter().map(|question| question.map_or(0, |question| question.edits.len() as u32));
    let ends = counts.scan(0, |end, count| {
        *end += count;
        Some(*end)
    });
    [0].into_iter().chain(ends).collect()
}
