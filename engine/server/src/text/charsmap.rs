//! SentencePiece's table of characters (`precompiled_charsmap`), checked before the `tokenizers` crate takes it: that one
//! follows the table's offsets wherever they lead, with every prompt.
//!
//! The length of a trie in bytes (u32), the trie as a double array of u32 (Aoe 1989, as in Darts), then replacements that end
//! with a zero byte each. A unit has the byte it is reached by, how far its children are and whether it has a value; that is
//! where in the replacements one begins.

use super::tokenizer::TokenizerError;

/// Refuses a table with an offset that leads out of it.
pub fn check(table: &[u8]) -> Result<(), TokenizerError> {
    check_table(table).map_err(|problem| TokenizerError::Invalid(format!("precompiled_charsmap: {problem}")))
}

fn check_table(table: &[u8]) -> Result<(), String> {
    let (length, rest) = table.split_first_chunk().ok_or("it ends within its first number")?;
    let length = u32::from_le_bytes(*length) as usize;
    let (trie, replacements) =
        rest.split_at_checked(length).ok_or_else(|| format!("a trie of {length} bytes; {} are there", rest.len()))?;
    let (units, []) = trie.as_chunks::<4>() else {
        return Err(format!("a trie of {length} bytes, which are no whole units"));
    };
    let units: Vec<Unit> = units.iter().map(|unit| Unit(u32::from_le_bytes(*unit))).collect();
    let replacements =
        str::from_utf8(replacements).map_err(|error| format!("its replacements are no text: {error}"))?;
    check_trie(&units, replacements)
}

/// Looks at every unit that some text leads to.
fn check_trie(units: &[Unit], replacements: &str) -> Result<(), String> {
    let root = units.first().ok_or("its trie is empty")?;
    let mut seen = vec![false; units.len()];
    let mut nodes = vec![root.children(0)];
    while let Some(children) = nodes.pop() {
        // Any byte may come next, and the reader looks where it would be.
        if children | 255 >= units.len() {
            return Err(format!("it leads to unit {} of {}", children | 255, units.len()));
        }
        for byte in 1..=255 {
            let at = children ^ byte;
            if units[at].label() == byte as u32 && !std::mem::replace(&mut seen[at], true) {
                let next = units[at].children(at);
                check_value(units, units[at], next, replacements)?;
                nodes.push(next);
            }
        }
    }
    Ok(())
}

fn check_value(units: &[Unit], unit: Unit, children: usize, replacements: &str) -> Result<(), String> {
    let value = units.get(children).filter(|_| unit.has_value()).map(|unit| unit.value());
    match value.filter(|value| !replacements.is_char_boundary(*value)) {
        Some(value) => Err(format!("a replacement begins at byte {value} of {}", replacements.len())),
        None => Ok(()),
    }
}

/// A unit of a double array.
#[derive(Clone, Copy)]
struct Unit(u32);

impl Unit {
    /// The byte that leads here; more than that in a unit that is a value.
    fn label(self) -> u32 {
        self.0 & (1 << 31 | 0xff)
    }

    fn has_value(self) -> bool {
        self.0 >> 8 & 1 == 1
    }

    fn value(self) -> usize {
        (self.0 & !(1 << 31)) as usize
    }

    /// Where the children of the unit at `at` are: that of byte `b` at this, exclusive or `b`.
    fn children(self, at: usize) -> usize {
        let far = (self.0 & 1 << 9) >> 6;
        at ^ ((self.0 >> 10) as usize) << far
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A table with so many units, of which these are set.
    fn table(units: usize, set: &[(usize, u32)], replacements: &[u8]) -> Vec<u8> {
        let mut trie = vec![0_u32; units];
        set.iter().for_each(|(at, unit)| trie[*at] = *unit);
        let trie: Vec<u8> = trie.into_iter().flat_map(u32::to_le_bytes).collect();
        [&(trie.len() as u32).to_le_bytes()[..], &trie, replacements].concat()
    }

    /// "a" becomes what begins at `replacement`; the unit of "a" has its value and its children at `children`.
    fn of_a(units: usize, children: u32, replacement: u32) -> Vec<u8> {
        let a = 256 ^ usize::from(b'a');
        let unit = (a as u32 ^ children) << 10 | 1 << 8 | u32::from(b'a');
        let root = (0, 256 << 10);
        let leaf = (children as usize, 1 << 31 | replacement);
        let set = [root, (a, unit), leaf];
        table(units, &set[..if leaf.0 < units { 3 } else { 2 }], "b\0\u{e9}\0".as_bytes())
    }

    #[test]
    fn a_sound_table_is_taken_and_does_what_it_says() {
        use tokenizers::normalizers::Precompiled;
        let sound = of_a(768, 512, 0);
        check(&sound).unwrap();
        assert_eq!(Precompiled::from(&sound).unwrap().transform("a"), Some("b"));
    }

    #[test]
    fn offsets_that_lead_out_of_a_table_are_refused() {
        let refusal = |table: &[u8]| check(table).unwrap_err().to_string();
        for (table, why) in [
            (vec![1, 0], "it ends within its first number"),
            (vec![0; 4], "its trie is empty"),
            (vec![255; 4], "a trie of 4294967295 bytes; 0 are there"),
            (vec![2, 0, 0, 0, 0, 0], "which are no whole units"),
            (table(300, &[(0, 256 << 10)], b""), "it leads to unit 511 of 300"),
            (of_a(512, 512, 0), "it leads to unit 767 of 512"),
            (of_a(768, 512, 6), "a replacement begins at byte 6 of 5"),
            // Within the two bytes of é.
            (of_a(768, 512, 3), "a replacement begins at byte 3 of 5"),
            (table(256, &[], &[0xff]), "its replacements are no text"),
        ] {
            assert!(refusal(&table).contains(why), "{:?} should contain {why:?}", refusal(&table));
        }
    }

    /// A unit that leads back to itself is followed once.
    #[test]
    fn a_trie_that_leads_back_ends() {
        let a = usize::from(b'a');
        check(&table(256, &[(a, (a as u32) << 10 | u32::from(b'a'))], b"")).unwrap();
    }
}
