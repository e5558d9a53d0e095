//! `system_fingerprint`: what an engine's answers depend on besides the request, in one word.
//!
//! The word is [`PREFIX`] and the first [`DIGITS`] hexadecimal digits of the SHA-256 of [`Fingerprint::text`]. It is in
//! every response, in `/stats` and in `windlass:build_info`; it changes where any line of the text does, and engines of
//! the same service that differ in it may answer the same request differently.

/// What every fingerprint begins with.
pub const PREFIX: &str = "fp_";
/// Hexadecimal digits that follow.
pub const DIGITS: usize = 16;

/// What goes into a fingerprint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fingerprint {
    /// Hexadecimal SHA-256 over the tensors, by name: name, type, shape, and CRC-64/NVME of the data. It tells files
    /// apart, and vouches for none: whoever wants to can make another file with the same checksums.
    pub weights: String,
    /// Hexadecimal SHA-256 over the vocabulary's tokens in order, and the chat template in use.
    pub tokenizer: String,
    /// Flags that change answers, as `name=value`, sorted.
    pub flags: Vec<String>,
    /// The engine's version.
    pub version: String,
    /// `cpu`, `cuda` or `sim`.
    pub device: String,
}

impl Fingerprint {
    /// The text that is digested, a line for each part.
    pub fn text(&self) -> String {
        let Fingerprint { weights, tokenizer, flags, version, device } = self;
        let flags = flags.join(" ");
        format!("weights {weights}\ntokenizer {tokenizer}\nflags {flags}\nversion {version}\ndevice {device}\n")
    }

    /// The word, from the hexadecimal SHA-256 of [`Fingerprint::text`].
    pub fn word(digest: &str) -> String {
        format!("{PREFIX}{}", digest.get(..DIGITS).unwrap_or(digest))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_is_in_the_text() {
        let parts = Fingerprint {
            weights: "aa".into(),
            tokenizer: "bb".into(),
            flags: vec!["x=1".into(), "y=2".into()],
            version: "0.1.0".into(),
            device: "cpu".into(),
        };
        assert_eq!(parts.text(), "weights aa\ntokenizer bb\nflags x=1 y=2\nversion 0.1.0\ndevice cpu\n");
        assert_eq!(Fingerprint::word("0123456789abcdef0123"), "fp_0123456789abcdef");
    }
}
