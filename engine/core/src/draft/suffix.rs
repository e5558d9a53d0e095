//! A suffix automaton for each sequence: proposes what followed the longest suffix of the sequence that occurred
//! before, whatever its length (Blumer et al., "The smallest automaton recognizing the subwords of a text", 1985).
//!
//! Takes amortized constant time for each token, where prompt lookup scans the sequence for each proposal. An
//! automaton holds the last [`MAX_TOKENS`] tokens at most; when it is full it is rebuilt from half of them.

use std::collections::HashMap;

use super::{DraftRequest, DraftTree, Proposer, continuation};
use crate::request::{RequestId, TokenId};

/// Most tokens in an automaton: about 3 MB.
const MAX_TOKENS: usize = 16_384;
/// Suffix links followed to record an occurrence: only the longest suffixes matter.
const RECORDED_STATES: usize = 16;
const ROOT: usize = 0;

/// An automaton for each live sequence.
#[derive(Debug)]
pub struct SuffixAutomaton {
    /// Shortest suffix that counts, tokens.
    min: usize,
    sequences: HashMap<RequestId, Automaton>,
}

impl SuffixAutomaton {
    /// Suffixes of at least `min` tokens count.
    pub fn new(min: usize) -> SuffixAutomaton {
        SuffixAutomaton { min: min.max(1), sequences: HashMap::new() }
    }
}

impl Proposer for SuffixAutomaton {
    fn propose(&mut self, requests: &[DraftRequest<'_>]) -> Vec<DraftTree> {
        let draft = |request: &DraftRequest<'_>| {
            let automaton = self.sequences.entry(request.request).or_default();
            automaton.extend_to(request.tokens);
            let from = automaton.repeated(self.min);
            from.map_or_else(DraftTree::default, |from| continuation(request.tokens, from, request.max_tokens))
        };
        requests.iter().map(draft).collect()
    }

    fn is_free(&self) -> bool {
        true
    }

    fn forget(&mut self, request: RequestId) {
        self.sequences.remove(&request);
    }
}

/// The suffix automaton of one text.
#[derive(Debug)]
struct Automaton {
    states: Vec<State>,
    /// State of the whole text.
    last: usize,
    /// Index in the sequence of the first token of the text.
    start: usize,
    /// Tokens in the text.
    length: usize,
}

/// A set of strings that end at the same positions of the text.
#[derive(Clone, Debug, Default)]
struct State {
    /// Length of the longest one.
    length: usize,
    /// Suffix link: the state of their longest suffix that ends at more positions.
    link: usize,
    /// Transitions by token, ascending.
    next: Vec<(TokenId, u32)>,
    /// One past a position at which they end: the last one, or an earlier one.
    end: usize,
}

impl State {
    fn to(&self, token: TokenId) -> Option<usize> {
        self.next.binary_search_by_key(&token, |(token, _)| *token).ok().map(|at| self.next[at].1 as usize)
    }

    fn set(&mut self, token: TokenId, state: usize) {
        match self.next.binary_search_by_key(&token, |(token, _)| *token) {
            Ok(at) => self.next[at].1 = state as u32,
            Err(at) => self.next.insert(at, (token, state as u32)),
        }
    }
}

impl Default for Automaton {
    fn default() -> Automaton {
        Automaton { states: vec![State::default()], last: ROOT, start: 0, length: 0 }
    }
}

impl Automaton {
    /// Appends the tokens that the sequence has beyond the text.
    fn extend_to(&mut self, tokens: &[TokenId]) {
        if tokens.len() - self.start > MAX_TOKENS {
            let start = tokens.len() - MAX_TOKENS / 2;
            *self = Automaton { start, ..Automaton::default() };
        }
        for &token in &tokens[self.start + self.length..] {
            self.record_occurrence();
            self.push(token);
        }
    }

    /// Index in the sequence after the previous occurrence of the longest repeated suffix, if that has at least `min`
    /// tokens.
    fn repeated(&self, min: usize) -> Option<usize> {
        let state = &self.states[self.states[self.last].link];
        (state.length >= min).then_some(self.start + state.end)
    }

    /// Records that the longest repeated suffixes of the text occurred once more.
    fn record_occurrence(&mut self) {
        let mut state = self.states[self.last].link;
        for _ in 0..RECORDED_STATES {
            if state == ROOT {
                return;
            }
            self.states[state].end = self.length;
            state = self.states[state].link;
        }
    }

    /// Appends a token to the text.
    fn push(&mut self, token: TokenId) {
        self.length += 1;
        let new = self.add(State { length: self.length, end: self.length, ..State::default() });
        let mut above = Some(self.last);
        while let Some(state) = above.filter(|state| self.states[*state].to(token).is_none()) {
            self.states[state].set(token, new);
            above = (state != ROOT).then(|| self.states[state].link);
        }
        self.states[new].link = above.map_or(ROOT, |above| self.split(above, token));
        self.last = new;
    }

    /// The state reached by `token` from `above`, split off if it also holds strings longer than those of `above` by
    /// more than one.
    fn split(&mut self, above: usize, token: TokenId) -> usize {
        let old = self.states[above].to(token).unwrap_or(ROOT);
        let length = self.states[above].length + 1;
        if self.states[old].length == length {
            return old;
        }
        let shorter = self.add(State { length, ..self.states[old].clone() });
        self.states[old].link = shorter;
        let mut state = above;
        while self.states[state].to(token) == Some(old) {
            self.states[state].set(token, shorter);
            if state == ROOT {
                break;
            }
            state = self.states[state].link;
        }
        shorter
    }

    fn add(&mut self, state: State) -> usize {
        self.states.push(state);
        self.states.len() - 1
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Length of the longest suffix of `tokens` that occurred before, by brute force.
    fn longest_repeat(tokens: &[TokenId]) -> usize {
        let length = |end: usize| {
            tokens[..end].iter().rev().zip(tokens.iter().rev()).take_while(|(one, other)| one == other).count()
        };
        (1..tokens.len()).map(length).max().unwrap_or(0)
    }

    #[test]
    fn it_finds_the_longest_repeated_end_of_any_text() {
        for (seed, letters) in [(1, 2), (2, 3), (3, 5), (4, 40)] {
            let (mut state, mut tokens, mut automaton) = (seed, Vec::new(), Automaton::default());
            for _ in 0..400 {
                state = u64::wrapping_mul(state, 6_364_136_223_846_793_005).wrapping_add(1);
                tokens.push((state >> 33) as u32 % letters);
                automaton.extend_to(&tokens);
                let longest = longest_repeat(&tokens);
                assert_eq!(automaton.states[automaton.states[automaton.last].link].length, longest, "{tokens:?}");
                if let Some(from) = automaton.repeated(1) {
                    let length = longest.min(from);
                    assert_eq!(tokens[from - length..from], tokens[tokens.len() - length..], "{from} in {tokens:?}");
                    assert!(from < tokens.len());
                }
            }
            assert!(automaton.states.len() <= 2 * tokens.len());
        }
    }

    #[test]
    fn of_several_occurrences_the_last_one_is_followed() {
        let tokens = [1, 2, 3, 1, 2, 4, 1, 2];
        let request = DraftRequest { request: RequestId(0), tokens: &tokens, max_tokens: 2 };
        let mut proposer = SuffixAutomaton::new(2);
        assert_eq!(proposer.propose(&[request]), [DraftTree::chain([4, 1])]);
        assert_eq!(SuffixAutomaton::new(3).propose(&[request]), [DraftTree::default()]);
        proposer.forget(RequestId(0));
        assert!(proposer.sequences.is_empty() && proposer.is_free());
    }

    #[test]
    fn a_letter_that_repeats_takes_a_state_each_time() {
        let mut automaton = Automaton::default();
        automaton.extend_to(&[7; 100]);
        assert_eq!(automaton.states.len(), 101);
    }

    #[test]
    fn a_long_text_takes_no_more_than_its_bound() {
        let tokens: Vec<TokenId> = (0..3 * MAX_TOKENS as u32).map(|index| index % 1009).collect();
        let mut automaton = Automaton::default();
        for (length, start) in
            [(MAX_TOKENS, 0), (MAX_TOKENS + 1, MAX_TOKENS / 2 + 1), (MAX_TOKENS + 2, MAX_TOKENS / 2 + 1)]
        {
            automaton.extend_to(&tokens[..length]);
            assert_eq!((automaton.start, automaton.length), (start, length - start), "built again from half of them");
        }
        let mut automaton = Automaton::default();
        (1..=tokens.len()).step_by(997).for_each(|length| automaton.extend_to(&tokens[..length]));
        automaton.extend_to(&tokens);
        assert!(automaton.length <= MAX_TOKENS && automaton.states.len() <= 2 * MAX_TOKENS);
        let from = automaton.repeated(1).expect("it repeats");
        assert_eq!(tokens[from], tokens.len() as u32 % 1009);
    }
}
