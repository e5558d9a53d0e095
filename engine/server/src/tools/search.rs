//! Words that separate calls from text, found wherever pieces of text cut them.

/// What comes next in a text that grows.
#[derive(Debug, PartialEq, Eq)]
pub enum Next {
    /// The word; it was taken.
    Taken,
    /// Something else.
    Other,
    /// The beginning of the word, or nothing yet.
    Unknown,
}

/// Takes the text before the first `word`, and the word. Without one: `Err` with what certainly belongs to none.
pub fn take_until(input: &mut String, word: &str) -> Result<String, String> {
    match input.find(word) {
        Some(at) => {
            let before = input[..at].to_owned();
            input.drain(..at + word.len());
            Ok(before)
        }
        None => {
            let kept = overlap(input, word);
            Err(input.drain(..input.len() - kept).collect())
        }
    }
}

/// Bytes at the end of `text` that begin `word`.
fn overlap(text: &str, word: &str) -> usize {
    let longest = text.len().min(word.len() - 1);
    (1..=longest).rev().find(|&bytes| word.is_char_boundary(bytes) && text.ends_with(&word[..bytes])).unwrap_or(0)
}

/// Takes `word` if it comes next, after white space.
pub fn take_next(input: &mut String, word: &str, ended: bool) -> Next {
    let trimmed = input.trim_start();
    if trimmed.starts_with(word) {
        let taken = input.len() - trimmed.len() + word.len();
        input.drain(..taken);
        return Next::Taken;
    }
    if !ended && word.starts_with(trimmed) { Next::Unknown } else { Next::Other }
}

/// Whether `word` comes next, after white space; `None` while that is open.
pub fn next_word(input: &str, word: &str) -> Option<bool> {
    let trimmed = input.trim_start();
    match trimmed.starts_with(word) {
        true => Some(true),
        false if word.starts_with(trimmed) => None,
        false => Some(false),
    }
}

/// Drops white space; what comes then, if anything does.
pub fn next_char(input: &mut String) -> Option<char> {
    let blank = input.len() - input.trim_start().len();
    input.drain(..blank);
    input.chars().next()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_word_is_found_across_pieces_and_its_beginning_held_back() {
        let mut input = "text <to".to_owned();
        assert_eq!(take_until(&mut input, "<tool>"), Err("text ".to_owned()));
        input.push_str("ol> rest");
        assert_eq!(take_until(&mut input, "<tool>"), Ok(String::new()));
        assert_eq!(input, " rest");
    }

    #[test]
    fn what_comes_next_may_take_more_text_to_know() {
        for (text, ended, expected) in [
            (" \n</t>x", false, Next::Taken),
            (" </", false, Next::Unknown),
            (" </", true, Next::Other),
            ("", false, Next::Unknown),
            (" x", false, Next::Other),
        ] {
            assert_eq!(take_next(&mut text.to_owned(), "</t>", ended), expected, "{text:?}");
        }
    }
}
