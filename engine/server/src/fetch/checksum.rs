//! SHA-256, as text and over files.

use crate::failure::Failure;
use sha2::{Digest, Sha256};
use std::fmt;
use std::io::{self, Read};

/// Bytes read at a time.
const CHUNK_BYTES: usize = 1 << 18;

/// A SHA-256 digest.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Checksum([u8; 32]);

impl Checksum {
    /// Reads 64 hexadecimal digits.
    pub fn parse(text: &str) -> Result<Checksum, Failure> {
        let wrong = || Failure::configuration(format!("--sha256 must be 64 hexadecimal digits; it is {text:?}"));
        let digits = text.as_bytes();
        if digits.len() != 64 || !digits.iter().all(u8::is_ascii_hexdigit) {
            return Err(wrong());
        }
        let mut bytes = [0; 32];
        for (byte, pair) in bytes.iter_mut().zip(text.as_bytes().chunks_exact(2)) {
            let pair = std::str::from_utf8(pair).map_err(|_| wrong())?;
            *byte = u8::from_str_radix(pair, 16).map_err(|_| wrong())?;
        }
        Ok(Checksum(bytes))
    }

    /// The digest of everything that `reader` still has.
    pub fn of(reader: &mut impl Read) -> io::Result<Checksum> {
        let mut hasher = Sha256::new();
        let mut chunk = vec![0; CHUNK_BYTES];
        loop {
            match reader.read(&mut chunk)? {
                0 => return Ok(Checksum::finish(hasher)),
                read => hasher.update(&chunk[..read]),
            }
        }
    }

    /// The digest of `bytes`.
    pub fn of_bytes(bytes: &[u8]) -> Checksum {
        Checksum::finish(Sha256::new_with_prefix(bytes))
    }

    /// Its bytes.
    pub fn bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// The digest of what was fed to `hasher`.
    pub fn finish(hasher: Sha256) -> Checksum {
        Checksum(hasher.finalize().into())
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The digest of "abc" in FIPS 180-2, appendix B.1.
    const ABC: &str = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad";

    #[test]
    fn a_digest_round_trips() {
        assert_eq!(Checksum::of(&mut &b"abc"[..]).unwrap().to_string(), ABC);
        assert!(Checksum::parse(&ABC.to_uppercase()).is_ok_and(|parsed| parsed.to_string() == ABC));
        for bad in ["", "ba78", &ABC.replace('b', "x"), &format!("+{}", &ABC[1..])] {
            assert!(Checksum::parse(bad).is_err(), "{bad}");
        }
    }
}
