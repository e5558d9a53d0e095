//! The share of a device's memory that an engine may take.

use std::str::FromStr;

/// A share of a device's memory, above 0 and at most 1.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MemoryShare(f64);

impl MemoryShare {
    /// All of the memory.
    pub const ALL: MemoryShare = MemoryShare(1.0);

    /// The share of so many bytes.
    pub fn of(self, bytes: u64) -> u64 {
        (bytes as f64 * self.0) as u64
    }
}

impl FromStr for MemoryShare {
    type Err = String;

    fn from_str(text: &str) -> Result<MemoryShare, String> {
        let share = text.parse().ok().filter(|share| *share > 0.0 && *share <= 1.0);
        share.map(MemoryShare).ok_or_else(|| "a share is more than 0 and at most 1, such as 0.45".to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_more_than_nothing_and_at_most_all() {
        for (text, bytes) in [("1", Some(1000)), ("0.45", Some(450)), ("1e-3", Some(1))] {
            assert_eq!(text.parse::<MemoryShare>().ok().map(|share| share.of(1000)), bytes, "{text}");
        }
        for text in ["0", "-0.5", "1.01", "90", "NaN", "inf", "", "90%"] {
            assert!(text.parse::<MemoryShare>().unwrap_err().contains("at most 1"), "{text}");
        }
    }
}
