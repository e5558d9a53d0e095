//! GPT-2's reversible writing of bytes as printable characters, in which byte-level vocabularies spell their tokens.
//!
//! Printable Latin-1 bytes stand for themselves; the 68 others take the characters from U+0100 on, in order.

/// The byte that `character` stands for.
fn byte_of(character: char) -> Option<u8> {
    let code = u32::from(character);
    match code {
        0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff => Some(code as u8),
        0x100..=0x120 => Some((code - 0x100) as u8),
        0x121..=0x142 => Some((code - 0x121 + 0x7f) as u8),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Appends the bytes that a token's spelling stands for. A spelling with characters outside the alphabet (a token that
/// was added as plain text) stands for its own UTF-8.
pub fn append_bytes(spelling: &str, bytes: &mut Vec<u8>) {
    let start = bytes.len();
    for character in spelling.chars() {
        match byte_of(character) {
            Some(byte) => bytes.push(byte),
            None => {
                bytes.truncate(start);
                return bytes.extend_from_slice(spelling.as_bytes());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_alphabet_covers_every_byte_once() {
        let mut bytes: Vec<u8> = (0..0x200).filter_map(char::from_u32).filter_map(byte_of).collect();
        bytes.sort_unstable();
        assert_eq!(bytes, (0..=255).collect::<Vec<u8>>());
    }

    #[test]
    fn spellings_become_bytes() {
        for (spelling, expected) in [("Ġthe", " the"), ("Ċ", "\n"), ("Ã©", "é"), ("日", "日")] {
            let mut bytes = Vec::new();
            append_bytes(spelling, &mut bytes);
            assert_eq!(bytes, expected.as_bytes(), "{spelling}");
        }
    }
}
