//! What the host asks of each row of logits, done on the device: masks, biases and penalties, draws, log probabilities.
//!
//! A row goes to the host's sampler instead where it asks for `typical_p`, for log probabilities of logits that are changed
//! first, or for more than there is room for. That hangs on the row alone, but for the room.

use windlass_engine_core::request::Sampling;
use windlass_engine_core::sampling::{TokenLogprob, TokenLogprobs};
use windlass_kernels::cuda::ops::{self, Asked, Edits, Masks, Told};
use windlass_kernels::cuda::{Device, DriverError, Pinned, Stream, View, ViewMut};

use super::draws::Arrays;
use crate::sampler::{Draw, Edit, RowTask, allowed_words, edits};

/// Likeliest tokens that are told of a row, at most.
const MAX_TOLD: usize = 20;
/// Places of a row's log probabilities: the token's own comes first.
const STRIDE: usize = MAX_TOLD + 1;
/// Single logits that change in a step, at most.
const MAX_EDITS: usize = 1 << 17;
/// What stands for none.
const NONE: u32 = u32::MAX;

/// How a row is answered.
#[derive(Debug)]
pub(super) enum Answer {
    /// By the host, from the row's logits as the model gave them.
    OnHost,
    /// By the device.
    OnDevice(Question),
}

/// What the device is asked of a row.
#[derive(Debug, Default)]
pub(super) struct Question {
    /// The only tokens that may come, as bits.
    mask: Option<Vec<u32>>,
    edits: Vec<Edit>,
    /// The token that is known; else one is drawn.
    target: Option<u32>,
    /// How many likeliest tokens to tell of.
    count: Option<u32>,
}

/// Room for questions of a step, and for what is told.
#[derive(Debug)]
pub(super) struct Questions {
    vocabulary: usize,
    /// Which mask a row has.
    mask_rows: Arrays<u32>,
    masks: Arrays<u32>,
    /// Where rows' edits begin.
    firsts: Arrays<u32>,
    edited: Arrays<u32>,
    edits: Arrays<f32>,
    /// Counts and targets.
    asked: Arrays<u32>,
    logprobs: Arrays<f32>,
    told: Arrays<u32>,
    logprobs_on_host: Pinned<f32>,
    told_on_host: Pinned<u32>,
}

/// How each of a step's rows is answered.
pub(super) fn answers(tasks: &[RowTask<'_>], vocabulary: usize) -> Vec<Answer> {
    let mut room = MAX_EDITS;
    tasks.iter().map(|task| Answer::of(task, vocabulary, &mut room)).collect()
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
}

impl Question {
    fn of_draw(draw: &Draw<'_>, vocabulary: usize) -> Option<Question> {
        let (mask, edits) = (allowed_words(draw, vocabulary.div_ceil(32)), edits(draw));
        let changed = mask.is_some() || !edits.is_empty();
        let count = draw.logprobs.map(|top| top.min(vocabulary as u32));
        let can = draw.sampling.typical_p >= 1.0 && count.is_none_or(|count| !changed && count <= MAX_TOLD as u32);
        can.then_some(Question { mask, edits, target: None, count })
    }

    fn of_score(target: u32, top: u32, vocabulary: usize) -> Option<Question> {
        let count = top.min(vocabulary as u32);
        let can = (target as usize) < vocabulary && count <= MAX_TOLD as u32;
        can.then_some(Question { target: Some(target), count: Some(count), ..Question::default() })
    }
}

/// What decides each row's draw, and the position that its token will have. A row that draws nothing takes the likeliest, which
/// shows whether its logits are numbers.
pub(super) fn draws<'a>(tasks: &'a [RowTask<'_>], greedy: &'a Sampling) -> Vec<(&'a Sampling, u32)> {
    let draw = |task: &'a RowTask<'_>| match task {
        RowTask::Draw(draw) => (draw.sampling, draw.position),
        RowTask::Score { .. } => (greedy, 0),
    };
    tasks.iter().map(draw).collect()
}

impl Questions {
    /// Room for questions of `rows` rows.
    pub fn new(device: &Device, rows: usize, vocabulary: usize) -> Result<Questions, DriverError> {
        let edits = edits_of(rows);
        Ok(Questions {
            vocabulary,
            mask_rows: Arrays::new(device, 1, rows)?,
            masks: Arrays::new(device, 1, rows * vocabulary.div_ceil(32))?,
            firsts: Arrays::new(device, 1, rows + 1)?,
            edited: Arrays::new(device, 1, edits)?,
            edits: Arrays::new(device, 1, 4 * edits)?,
            asked: Arrays::new(device, 2, rows)?,
            logprobs: Arrays::new(device, 1, rows * STRIDE)?,
            told: Arrays::new(device, 1, rows * STRIDE)?,
            logprobs_on_host: device.pinned(rows * STRIDE)?,
            told_on_host: device.pinned(rows * STRIDE)?,
        })
    }

    /// Bytes of it on the device.
    pub fn bytes(rows: usize, vocabulary: usize) -> u64 {
        let masks = rows * (1 + vocabulary.div_ceil(32));
        4 * (masks + rows + 5 * edits_of(rows) + 2 * rows + 2 * rows * STRIDE) as u64
    }

    /// Masks and edits the rows of `logits`, where any row asks for it.
    pub fn adjust(&mut self, answers: &[Answer], logits: ViewMut<'_, f32>, stream: &Stream) -> Result<(), DriverError> {
        let questions: Vec<Option<&Question>> = answers.iter().map(Answer::question).collect();
        let masks: Vec<&[u32]> = questions.iter().filter_map(|question| question.as_ref()?.mask.as_deref()).collect();
        let edits: Vec<&Edit> = questions.iter().flatten().flat_map(|question| &question.edits).collect();
        if masks.is_empty() && edits.is_empty() {
            return Ok(());
        }
        self.mask_rows.upload(0, &mask_rows(&questions), stream)?;
        self.masks.upload(0, &masks.concat(), stream)?;
        self.firsts.upload(0, &firsts(&questions), stream)?;
        self.edited.upload(0, &edits.iter().map(|edit| edit.token).collect::<Vec<u32>>(), stream)?;
        self.edits.upload(0, &edits.iter().flat_map(|edit| edit.values()).collect::<Vec<f32>>(), stream)?;
        let rows = answers.len();
        let bits = self.masks.view(0, masks.len() * self.vocabulary.div_ceil(32));
        let masks = Masks { rows: self.mask_rows.view(0, rows), bits };
        let (tokens, values) = (self.edited.view(0, edits.len()), self.edits.view(0, 4 * edits.len()));
        let edits = Edits { firsts: self.firsts.view(0, rows + 1), tokens, values };
        ops::adjust_logits(stream, masks, edits, self.vocabulary, logits)
    }

    /// Has log probabilities told, where any row asks for them, and copied to the host.
    pub fn tell(
        &mut self,
        answers: &[Answer],
        logits: View<'_, f32>,
        drawn: View<'_, u32>,
        stream: &Stream,
    ) -> Result<(), DriverError> {
        let rows = answers.len();
        let of_each = |of: fn(&Question) -> Option<u32>| -> Vec<u32> {
            answers.iter().map(|answer| answer.question().and_then(of).unwrap_or(NONE)).collect()
        };
        let counts = of_each(|question| question.count);
        if counts.iter().all(|&count| count == NONE) {
            return Ok(());
        }
        self.asked.upload(0, &counts, stream)?;
        self.asked.upload(1, &of_each(|question| question.target), stream)?;
        let asked = Asked { counts: self.asked.view(0, rows), targets: self.asked.view(1, rows), drawn };
        let told =
            Told { logprobs: self.logprobs.view_mut(0, rows * STRIDE), tokens: self.told.view_mut(0, rows * STRIDE) };
        ops::tell_logprobs(stream, logits, self.vocabulary, asked, told)?;
        stream.copy_to_host(&self.logprobs_on_host, 0, self.logprobs.view(0, rows * STRIDE))?;
        stream.copy_to_host(&self.told_on_host, 0, self.told.view(0, rows * STRIDE))
    }

    /// What was told of a row's `token`, once the stream was waited for; none where nothing was asked.
    pub fn told(&self, row: usize, question: &Question, token: u32) -> Option<TokenLogprobs> {
        let places = STRIDE * row..STRIDE * row + 1 + question.count? as usize;
        let logprobs = self.logprobs_on_host.read(places.clone());
        let told = self.told_on_host.read(places);
        let chosen = TokenLogprob { token, logprob: logprobs[0], rank: told[0] };
        let likeliest = (1..).zip(told[1..].iter().zip(&logprobs[1..]));
        let top = likeliest.map(|(rank, (&token, &logprob))| TokenLogprob { token, logprob, rank }).collect();
        Some(TokenLogprobs { chosen, top })
    }
}

impl Answer {
    fn question(&self) -> Option<&Question> {
        match self {
            Answer::OnHost => None,
            Answer::OnDevice(question) => Some(question),
        }
    }
}

/// Room for edits: none where there are no logits.
fn edits_of(rows: usize) -> usize {
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
