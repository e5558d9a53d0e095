//! Ends an answer at a stop string, wherever tokens cut it, without ever showing a part of it.
//!
//! Each stop string is matched byte by byte with the failure function of Knuth, Morris and Pratt, so the work per byte
//! is constant and the result does not depend on how the text arrives. Text that may be the beginning of a stop string
//! is held back until it is known not to be one.

/// Watches one answer.
#[derive(Debug, Default)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    held: String,
}

/// One stop string and how much of it the text ends with.
#[derive(Debug)]
struct Pattern {
    text: String,
    /// `fallback[n]`: length of the longest proper prefix of the first `n` bytes that is also their suffix.
    fallback: Vec<usize>,
    matched: usize,
}

impl StopStrings {
    /// Watches for any of `stops`, none of them empty.
    pub fn new(stops: &[String]) -> StopStrings {
        StopStrings { patterns: stops.iter().map(|stop| Pattern::new(stop)).collect(), held: String::new() }
    }

    /// Takes the next text, appends to `shown` what can be shown, and names the stop string that is now complete.
    /// Where several end at the same byte, the longest counts. After a stop nothing more is to be pushed.
    pub fn push(&mut self, text: &str, shown: &mut String) -> Option<&str> {
        if self.patterns.is_empty() {
            shown.push_str(text);
            return None;
        }
        for (index, byte) in text.bytes().enumerate() {
            self.patterns.iter_mut().for_each(|pattern| pattern.advance(byte));
            if let Some(hit) = self.complete() {
                self.held.push_str(&text[..=index]);
                let before = self.held.len() - self.patterns[hit].text.len();
                shown.push_str(&self.held[..before]);
                return Some(&self.patterns[hit].text);
            }
        }
        self.held.push_str(text);
        let keep = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        shown.extend(self.held.drain(..self.held.len() - keep));
        None
    }

    /// The answer ended otherwise: what was held back is shown.
    pub fn finish(&mut self, shown: &mut String) {
        shown.push_str(&self.held);
        self.held.clear();
    }

    fn complete(&self) -> Option<usize> {
        let done = |(_, pattern): &(usize, &Pattern)| pattern.matched == pattern.text.len();
        self.patterns
            .iter()
            .enumerate()
            .filter(done)
            .max_by_key(|(_, pattern)| pattern.text.len())
            .map(|(index, _)| index)
    }
}

impl Pattern {
    fn new(text: &str) -> Pattern {
        let mut pattern = Pattern { text: text.to_owned(), fallback: vec![0, 0], matched: 0 };
        for &byte in &text.as_bytes()[1..] {
            pattern.advance(byte);
            pattern.fallback.push(pattern.matched);
        }
        pattern.matched = 0;
        pattern
    }

    fn advance(&mut self, byte: u8) {
        let bytes = self.text.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// Streams `pieces`; the shown text after each, and what ended it.
    fn stream(stops: &[&str], pieces: &[&str]) -> (String, Option<String>) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut watch = StopStrings::new(&stops);
        let mut shown = String::new();
        for piece in pieces {
            let hit = watch.push(piece, &mut shown).map(str::to_owned);
            if hit.is_some() {
                return (shown, hit);
            }
            assert!(stops.iter().all(|stop| !shown.contains(stop.as_str())));
        }
        watch.finish(&mut shown);
        (shown, None)
    }

    #[test]
    fn a_stop_string_across_pieces_is_found_and_not_shown() {
        assert_eq!(stream(&["END"], &["one E", "N", "D two"]), ("one ".into(), Some("END".into())));
    }

    #[test]
    fn a_false_beginning_is_shown_after_all() {
        assert_eq!(stream(&["END"], &["E", "N", "ough", " EN"]), ("ENough EN".into(), None));
    }

    #[test]
    fn the_one_that_ends_first_counts_and_of_those_the_longest() {
        assert_eq!(stream(&["b", "ab"], &["xab"]), ("x".into(), Some("ab".into())));
        assert_eq!(stream(&["abcd", "bc"], &["xabcd"]), ("xa".into(), Some("bc".into())));
    }

    #[test]
    fn characters_of_several_bytes_are_kept_whole() {
        assert_eq!(stream(&["é!"], &["caf", "é", "?", "é!"]), ("café?".into(), Some("é!".into())));
    }

    /// What the definition says, on the whole text.
    fn reference(stops: &[String], text: &str) -> (String, Option<String>) {
        let end_of = |stop: &String| text.find(stop.as_str()).map(|start| (start + stop.len(), start, stop.clone()));
        match stops.iter().filter_map(end_of).min() {
            Some((_, start, stop)) => (text[..start].to_owned(), Some(stop)),
            None => (text.to_owned(), None),
        }
    }

    proptest! {
        #[test]
        fn the_result_does_not_depend_on_the_cuts(
            stops in proptest::collection::vec("[abé]{1,4}", 0..4),
            pieces in proptest::collection::vec("[abcé]{0,5}", 0..10),
        ) {
            let slices: Vec<&str> = pieces.iter().map(String::as_str).collect();
            let names: Vec<&str> = stops.iter().map(String::as_str).collect();
            prop_assert_eq!(stream(&names, &slices), reference(&stops, &pieces.concat()));
        }
    }
}
