//! Beam search: the most likely answers that a search of a given width finds, as vLLM defines it.
//!
//! A search is a group of requests with one prompt, one for each answer. Each round computes the most likely next
//! tokens of every beam. The best continuations become the next beams, those that end are set aside, and in the end
//! the best of all are the answers. A beam with two continuations shares its full blocks with the new beam; the
//! partial block that both write is copied.
//!
//! The beams of a group step together, so a beam that is computed waits for the others. Its blocks may be taken
//! meanwhile; it is then recomputed when it continues.

use super::Scheduler;
use crate::plan::SequenceFailure;
use crate::request::{BeamSearch, FinishReason, RequestId, TokenId};
use crate::sampling::{TokenLogprob, TokenLogprobs};
use crate::sequence::{Running, Sequence};
use crate::update::RequestUpdate;

/// One beam search.
#[derive(Debug)]
pub(super) struct BeamGroup {
    beams: BeamSearch,
    /// Number of logprobs to report with each token of an answer.
    top_logprobs: Option<u32>,
    /// Requests of the group, the leader first.
    members: Vec<RequestId>,
    /// Sequences without blocks: they wait for the end of the round, or for a beam.
    parked: Vec<Sequence>,
    /// Beams of this round.
    live: Vec<Beam>,
    /// Answers that have ended.
    ended: Vec<Beam>,
}

/// A partial or complete answer.
#[derive(Clone, Debug)]
struct Beam {
    /// Request whose sequence holds these tokens; of an ended beam, all but the last one.
    request: RequestId,
    tokens: Vec<TokenId>,
    logprobs: Vec<TokenLogprobs>,
    /// Log probability.
    score: f64,
    reason: FinishReason,
    /// The most likely next tokens, once computed.
    candidates: Option<TokenLogprobs>,
}

impl BeamGroup {
    fn new(leader: &Sequence, beams: BeamSearch) -> BeamGroup {
        let (tokens, logprobs) = (leader.tokens.clone(), Vec::new());
        let first =
            Beam { request: leader.id, tokens, logprobs, score: 0.0, reason: FinishReason::Length, candidates: None };
        BeamGroup {
            beams,
            top_logprobs: leader.logprobs(),
            members: Vec::new(),
            parked: Vec::new(),
            live: vec![first],
            ended: Vec::new(),
        }
    }

    /// Score by which beams are compared.
    fn rank(&self, beam: &Beam, tokens: usize) -> f64 {
        beam.score / (tokens as f64).powf(self.beams.length_penalty)
    }

    fn rank_ended(&self, beam: &Beam) -> f64 {
        // vLLM counts the prompt, but not the stop token.
        self.rank(beam, beam.tokens.len() - usize::from(beam.reason == FinishReason::Stop))
    }

    /// Ends the round: sets ended beams aside and keeps the best open ones. On a tie the earlier one wins.
    fn select_beams(&mut self, stops: &[TokenId], last: bool) {
        let width = self.beams.width as usize;
        let mut open: Vec<Beam> = Vec::new();
        for beam in std::mem::take(&mut self.live) {
            for option in beam.candidates.iter().flat_map(|candidates| &candidates.top).take(2 * width) {
                let next = beam.followed_by(option, self.top_logprobs);
                match stops.contains(&option.token) {
                    true => self.ended.push(Beam { reason: FinishReason::Stop, ..next }),
                    false => open.push(next),
                }
            }
        }
        open.sort_by(|a, b| b.score.total_cmp(&a.score));
        open.truncate(width);
        if last {
            self.ended.append(&mut open);
        }
        let mut ended = std::mem::take(&mut self.ended);
        ended.sort_by(|a, b| self.rank_ended(b).total_cmp(&self.rank_ended(a)));
        ended.truncate(width);
        (self.ended, self.live) = (ended, open);
    }

    /// Whether no open beam can beat the ended ones. `longest` is the most tokens of a beam.
    fn is_decided(&self, longest: usize) -> bool {
        let Some(worst) = self.ended.last().filter(|_| self.ended.len() == self.beams.width as usize) else {
            return self.live.is_empty();
        };
        let worst = self.rank_ended(worst);
        self.live.iter().all(|beam| {
            // At best the rest has probability 1, and is short or long, whichever scores better.
            let soon = self.rank(beam, beam.tokens.len());
            soon.max(self.rank(beam, longest)) <= worst
        })
    }
}

impl Beam {
    fn followed_by(&self, option: &TokenLogprob, top_logprobs: Option<u32>) -> Beam {
        let mut next = Beam { candidates: None, ..self.clone() };
        next.tokens.push(option.token);
        next.score += f64::from(option.logprob);
        if let (Some(top_logprobs), Some(candidates)) = (top_logprobs, &self.candidates) {
            let top = candidates.top.iter().take(top_logprobs as usize).copied().collect();
            next.logprobs.push(TokenLogprobs { chosen: *option, top });
        }
        next
    }
}

impl Scheduler {
    /// Adds a request to its group. Returns the leader once all are there: then the prompt is computed.
    pub(super) fn join_group(&mut self, sequence: Sequence, beams: BeamSearch) -> Option<Sequence> {
        let group = self.beam_groups.entry(beams.leader).or_insert_with(|| BeamGroup::new(&sequence, beams));
        group.members.push(sequence.id);
        group.parked.push(sequence);
        (group.members.len() == beams.width as usize).then(|| group.parked.remove(0))
    }

    /// All sequences that wait outside the queue.
    pub(super) fn parked(&self) -> impl Iterator<Item = &Sequence> {
        self.beam_groups.values().flat_map(|group| &group.parked)
    }

    /// Stores the candidates of a beam. Once all beams have theirs, the round ends.
    pub(super) fn add_candidates(&mut self, leader: RequestId, request: RequestId, candidates: Option<TokenLogprobs>) {
        let Some(group) = self.beam_groups.get_mut(&leader) else { return };
        if let Some(beam) = group.live.iter_mut().find(|beam| beam.request == request) {
            beam.candidates = candidates;
        }
        if group.live.iter().all(|beam| beam.candidates.is_some()) {
            self.end_round(leader);
        }
    }

    /// Releases the blocks of one beam that waits for others. False if there is none.
    pub(super) fn park_idle_beam(&mut self) -> bool {
        let idle = |run: &Running| run.sequence.beams.is_some() && run.uncomputed() == 0 && !run.is_sampling();
        let Some(index) = self.running.iter().position(idle) else { return false };
        let sequence = self.remove_running(index);
        self.preemptions += 1;
        if let Some(group) = sequence.beams.and_then(|beams| self.beam_groups.get_mut(&beams.leader)) {
            group.parked.push(sequence);
        }
        true
    }

    /// One request of a group finished before its answer: finishes the others.
    pub(super) fn finish_group(&mut self, leader: RequestId, reason: FinishReason, failure: Option<&SequenceFailure>) {
        let Some(mut group) = self.beam_groups.remove(&leader) else { return };
        for id in group.members.clone() {
            let Some(sequence) = self.take_sequence(&mut group, id) else { continue };
            self.final_updates.push(match failure {
                Some(failure) => sequence.fail(failure.clone()),
                None => sequence.finish(reason),
            });
        }
    }

    /// Takes a sequence that waits outside the queue.
    pub(super) fn take_parked(&mut self, id: RequestId) -> Option<Sequence> {
        self.beam_groups.values_mut().find_map(|group| {
            let index = group.parked.iter().position(|sequence| sequence.id == id)?;
            Some(group.parked.remove(index))
        })
    }

    /// Takes the sequence of a member, wherever it is.
    fn take_sequence(&mut self, group: &mut BeamGroup, id: RequestId) -> Option<Sequence> {
        if let Some(index) = group.parked.iter().position(|sequence| sequence.id == id) {
            return Some(group.parked.remove(index));
        }
        match self.running.iter().position(|run| run.sequence.id == id) {
            Some(index) => Some(self.remove_running(index)),
            None => self.waiting.take(id),
        }
    }

    fn end_round(&mut self, leader: RequestId) {
        let Some(mut group) = self.beam_groups.remove(&leader) else { return };
        let Some((stops, limit)) = group.members.first().and_then(|first| self.terms(&group, *first)) else { return };
        let computed = group.live.first().map_or(0, |beam| beam.tokens.len());
        group.select_beams(&stops, computed + 1 == limit);
        if group.is_decided(limit) {
            return self.finish_search(group);
        }
        self.continue_beams(&mut group, computed);
        self.beam_groups.insert(leader, group);
    }

    /// Stop tokens, and the most tokens of a beam, prompt included.
    fn terms(&self, group: &BeamGroup, id: RequestId) -> Option<(Vec<TokenId>, usize)> {
        let running = self.running.iter().map(|run| &run.sequence);
        let mut sequences = group.parked.iter().chain(running).chain(self.waiting.iter());
        sequences.find(|sequence| sequence.id == id).map(Sequence::stop_conditions)
    }

    /// Gives each request its answer, the best one to the leader.
    fn finish_search(&mut self, mut group: BeamGroup) {
        let mut answers = std::mem::take(&mut group.ended).into_iter();
        for id in group.members.clone() {
            let (Some(sequence), answer) = (self.take_sequence(&mut group, id), answers.next()) else { continue };
            if let Some(beam) = &answer {
                self.answers.observe(beam.tokens.len() - sequence.prompt_tokens, beam.reason == FinishReason::Stop);
            }
            let update: RequestUpdate = match answer {
                Some(Beam { tokens, logprobs, reason, .. }) => {
                    let generated = tokens[sequence.prompt_tokens..].to_vec();
                    sequence.finish_with(reason, generated, logprobs)
                }
                None => sequence.fail(SequenceFailure::Unsatisfiable(format!(
                    "a search with {} beams finds fewer answers than that; lower `n`",
                    group.beams.width
                ))),
            };
            self.final_updates.push(update);
        }
    }

    /// Assigns the new beams to the sequences of the group: the first continuation of a beam to the sequence that
    /// holds the beam, others to sequences without one. All beams have `computed` tokens computed.
    fn continue_beams(&mut self, group: &mut BeamGroup, computed: usize) {
        let mut kept: Vec<RequestId> = Vec::new();
        let mut forks: Vec<usize> = Vec::new();
        for (index, beam) in group.live.iter().enumerate() {
            match kept.contains(&beam.request) {
                false => kept.push(beam.request),
                true => forks.push(index),
            }
        }
        let mut idle: Vec<RequestId> = group.members.iter().copied().filter(|id| !kept.contains(id)).collect();
        for index in forks {
            let (parent, id) = (group.live[index].request, idle.pop());
            let Some(mut sequence) = id.and_then(|id| self.take_sequence(group, id)) else { continue };
            sequence.tokens.clone_from(&group.live[index].tokens);
            group.live[index].request = sequence.id;
            self.fork_beam(sequence, parent, computed);
        }
        for id in idle {
            if let Some(sequence) = self.take_sequence(group, id) {
                group.parked.push(sequence);
            }
        }
        let continued = group.live.iter().filter(|beam| kept.contains(&beam.request));
        let grown: Vec<(RequestId, Option<TokenId>)> =
            continued.map(|beam| (beam.request, beam.tokens.last().copied())).collect();
        for (id, token) in grown {
            self.grow_beam(group, id, token);
        }
    }

    /// Continues a beam in place, or queues it to be recomputed if its blocks were taken.
    fn grow_beam(&mut self, group: &mut BeamGroup, id: RequestId, token: Option<TokenId>) {
        if let Some(index) = self.running.iter().position(|run| run.sequence.id == id) {
            self.running[index].sequence.tokens.extend(token);
        } else if let Some(mut sequence) = self.take_sequence(group, id) {
            sequence.tokens.extend(token);
            self.waiting.put_back(sequence);
        }
    }

    /// Forks a sequence from its parent, or queues it to be recomputed if the parent, blocks or rows are short.
    fn fork_beam(&mut self, sequence: Sequence, parent: RequestId, computed: usize) {
        let parent = self.running.iter().position(|run| run.sequence.id == parent).filter(|_| self.free_rows() > 0);
        let scope = sequence.cache_scope;
        let forked = parent.and_then(|parent| {
            let table = self.kv.fork(&self.running[parent].table, computed, scope, self.running.len())?;
            Some((table, self.running[parent].id))
        });
        match forked {
            Some((table, parent)) => {
                self.copy_sources.push(parent);
                self.add_running(sequence, table, computed, self.now);
            }
            None => self.waiting.put_back(sequence),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::request::Request;

    /// A search of `width` beams for at most three tokens after a prompt of two.
    fn group(width: u32, length_penalty: f64) -> BeamGroup {
        let beams = BeamSearch { leader: RequestId(0), width, length_penalty };
        let request = Request { beams: Some(beams), ..Request::greedy(RequestId(0), vec![1, 2], 3) };
        BeamGroup::new(&Sequence::new(request, 0.0), beams)
    }

    fn beam(tokens: usize, score: f64, reason: FinishReason) -> Beam {
        Beam { request: RequestId(0), tokens: vec![1; tokens], logprobs: Vec::new(), score, reason, candidates: None }
    }

    /// The first is chosen, the others are as likely as they come.
    fn candidates(tokens: &[TokenId]) -> TokenLogprobs {
        let scored = (1..).zip(tokens).map(|(rank, &token)| TokenLogprob { token, logprob: -(rank as f32), rank });
        let top: Vec<TokenLogprob> = scored.collect();
        TokenLogprobs { chosen: top[0], top }
    }

    #[test]
    fn the_token_that_ends_an_answer_is_not_counted() {
        let group = group(1, 1.0);
        let rank = |tokens, reason| group.rank_ended(&beam(tokens, -12.0, reason));
        assert_eq!(
            [rank(4, FinishReason::Length), rank(4, FinishReason::Stop), rank(3, FinishReason::Stop)],
            [-3.0, -4.0, -6.0]
        );
    }

    #[test]
    fn twice_as_many_continuations_as_beams_are_looked_at() {
        for (width, offered, open) in [(1, [7, 8, 9], 0), (1, [7, 9, 8], 1), (2, [7, 8, 9], 1), (3, [9, 9, 9], 3)] {
            let mut group = group(width, 1.0);
            group.live[0].candidates = Some(candidates(&offered));
            group.select_beams(&[7, 8], false);
            assert_eq!(group.live.len(), open, "{width} {offered:?}");
        }
    }

    #[test]
    fn a_search_is_decided_where_nothing_open_can_be_better() {
        for (ended, live, decided) in [(vec![-2.0], -9.0, true), (vec![-2.0], -1.0, false), (vec![], -9.0, false)] {
            let mut group = group(1, 0.0);
            group.ended = ended.iter().map(|&score| beam(3, score, FinishReason::Length)).collect();
            group.live = vec![beam(3, live, FinishReason::Length)];
            assert_eq!(group.is_decided(5), decided, "{ended:?} {live}");
        }
        let mut nothing_left = group(1, 0.0);
        nothing_left.live.clear();
        assert!(nothing_left.is_decided(5));
    }
}
