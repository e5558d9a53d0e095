//! What a server says of a file's content, and whether a content is that.

use super::checksum::Checksum;
use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use crc_fast::CrcAlgorithm;
use md5::{Digest, Md5};
use std::fmt;
use std::io::{self, Read};
use ureq::http::HeaderMap;

/// Bytes read at a time.
const CHUNK_BYTES: usize = 1 << 18;

/// The digest that a whole content must have.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proof {
    kind: Kind,
    digest: Vec<u8>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Kind {
    Sha256,
    Crc64Nvme,
    Md5,
    Crc32c,
}

impl Proof {
    /// The best that an object store's answer to HEAD holds: S3's checksums of whole objects (those of parts cannot be
    /// checked without knowing the parts), Azure's MD5, Google's hashes. `etag_is_md5`: whether an ETag of the form of an
    /// MD5 is one, where the object is not encrypted with a key that makes it another thing.
    pub fn told(headers: &HeaderMap, etag_is_md5: bool) -> Option<Proof> {
        let whole = |name: &str, kind| text(headers, name).and_then(|value| Proof::base64(kind, value));
        whole("x-amz-checksum-sha256", Kind::Sha256)
            .or_else(|| whole("x-amz-checksum-crc64nvme", Kind::Crc64Nvme))
            .or_else(|| whole("content-md5", Kind::Md5))
            .or_else(|| google(headers, "md5").and_then(|value| Proof::base64(Kind::Md5, value)))
            .or_else(|| etag(headers).filter(|_| etag_is_md5))
            .or_else(|| whole("x-amz-checksum-crc32c", Kind::Crc32c))
            .or_else(|| google(headers, "crc32c").and_then(|value| Proof::base64(Kind::Crc32c, value)))
    }

    /// A digest in base64, if it has the length of one: those of several parts end in their number.
    fn base64(kind: Kind, text: &str) -> Option<Proof> {
        let digest = BASE64_STANDARD.decode(text.trim()).ok().filter(|digest| digest.len() == kind.bytes())?;
        Some(Proof { kind, digest })
    }

    /// Whether everything that `reader` still has is the content; otherwise what its digest is.
    pub fn check(&self, reader: &mut impl Read) -> io::Result<Result<(), Proof>> {
        let found = Proof { kind: self.kind, digest: self.kind.digest(reader)? };
        Ok(if found == *self { Ok(()) } else { Err(found) })
    }
}

impl From<Checksum> for Proof {
    fn from(checksum: Checksum) -> Proof {
        Proof { kind: Kind::Sha256, digest: checksum.bytes().to_vec() }
    }
}

impl fmt::Display for Proof {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ", self.kind.name())?;
        self.digest.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Sha256 => "SHA-256",
            Kind::Crc64Nvme => "CRC-64/NVME",
            Kind::Md5 => "MD5",
            Kind::Crc32c => "CRC-32C",
        }
    }

    fn bytes(self) -> usize {
        match self {
            Kind::Sha256 => 32,
            Kind::Md5 => 16,
            Kind::Crc64Nvme => 8,
            Kind::Crc32c => 4,
        }
    }

    fn digest(self, reader: &mut impl Read) -> io::Result<Vec<u8>> {
        match self {
            Kind::Sha256 => Checksum::of(reader).map(|checksum| checksum.bytes().to_vec()),
            Kind::Md5 => {
                let mut hasher = Md5::new();
                each_chunk(reader, |chunk| hasher.update(chunk))?;
                Ok(hasher.finalize().to_vec())
            }
            Kind::Crc64Nvme => Ok(crc(reader, CrcAlgorithm::Crc64Nvme)?.to_be_bytes().to_vec()),
            Kind::Crc32c => Ok((crc(reader, CrcAlgorithm::Crc32Iscsi)? as u32).to_be_bytes().to_vec()),
        }
    }
}

fn crc(reader: &mut impl Read, algorithm: CrcAlgorithm) -> io::Result<u64> {
    let mut digest = crc_fast::Digest::new(algorithm);
    each_chunk(reader, |chunk| digest.update(chunk))?;
    Ok(digest.finalize())
}

fn each_chunk(reader: &mut impl Read, mut take: impl FnMut(&[u8])) -> io::Result<()> {
    let mut chunk = vec![0; CHUNK_BYTES];
    loop {
        match reader.read(&mut chunk)? {
            0 => return Ok(()),
            read => take(&chunk[..read]),
        }
    }
}

fn text<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    headers.get(name)?.to_str().ok()
}

/// `n03x6A==` of `x-goog-hash: crc32c=n03x6A==,md5=…`, or of one of several such headers.
fn google<'a>(headers: &'a HeaderMap, name: &str) -> Option<&'a str> {
    let values = headers.get_all("x-goog-hash").iter().filter_map(|value| value.to_str().ok());
    let mut pairs = values.flat_map(|value| value.split(',')).filter_map(|pair| pair.trim().split_once('='));
    pairs.find(|(key, _)| *key == name).map(|(_, value)| value)
}

/// The MD5 that S3 calls an object's version, where that was not uploaded in parts or encrypted with a user's key.
fn etag(headers: &HeaderMap) -> Option<Proof> {
    let encryption = text(headers, "x-amz-server-side-encryption").unwrap_or_default();
    if encryption.starts_with("aws:kms") || headers.contains_key("x-amz-server-side-encryption-customer-algorithm") {
        return None;
    }
    let digits = text(headers, "etag")?.trim_matches('"').as_bytes();
    let pairs = digits.as_chunks::<2>().0.iter().map(|pair| u8::from_str_radix(str::from_utf8(pair).ok()?, 16).ok());
    let digest = pairs.collect::<Option<Vec<u8>>>().filter(|_| digits.len() == 2 * Kind::Md5.bytes())?;
    Some(Proof { kind: Kind::Md5, digest })
}

#[cfg(test)]
mod tests {
    use super::*;
    use ureq::http::{HeaderName, HeaderValue};

    /// "123456789", whose check values are those of the catalogue of CRCs; its MD5 and SHA-256 are those of `md5sum`
    /// and `sha256sum`.
    const CHECK: &[u8] = b"123456789";
    const SHA256: &str = "FeKw08M4keuw8e9gnsQZQgwg4yDOlMZfvIwzEkSOsiU=";
    const MD5: &str = "JfnnlDI7RTiF9RgfG2JNCw==";
    const CRC64: &str = "rosUhgp5mIg=";
    const CRC32C: &str = "4waSgw==";

    fn told(headers: &[(&'static str, &str)], etag_is_md5: bool) -> Option<Proof> {
        let header = |(name, value): &(&'static str, &str)| {
            (HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
        };
        Proof::told(&HeaderMap::from_iter(headers.iter().map(header)), etag_is_md5)
    }

    #[test]
    fn every_kind_of_digest_knows_its_content_from_others() {
        for (headers, kind) in [
            (&[("x-amz-checksum-sha256", SHA256)][..], "SHA-256"),
            (&[("x-amz-checksum-crc64nvme", CRC64)], "CRC-64/NVME"),
            (&[("x-amz-checksum-crc32c", CRC32C)], "CRC-32C"),
            (&[("content-md5", MD5)], "MD5"),
            (&[("x-goog-hash", "crc32c=4waSgw==,md5=JfnnlDI7RTiF9RgfG2JNCw==")], "MD5"),
            (&[("x-goog-hash", "crc32c=4waSgw==")], "CRC-32C"),
            (&[("etag", "\"25f9e794323b453885f5181f1b624d0b\"")], "MD5"),
        ] {
            let proof = told(headers, true).unwrap_or_else(|| panic!("{headers:?}"));
            assert!(proof.to_string().starts_with(kind), "{headers:?}: {proof}");
            assert_eq!(proof.check(&mut &CHECK[..]).unwrap(), Ok(()), "{headers:?}");
            let other = proof.check(&mut &b"123456780"[..]).unwrap().unwrap_err();
            assert!(other != proof && other.to_string().starts_with(kind), "{other}");
        }
    }

    #[test]
    fn what_is_no_digest_of_the_whole_is_not_taken_for_one() {
        let etag = ("etag", "\"25f9e794323b453885f5181f1b624d0b\"");
        for headers in [
            &[("etag", "\"25f9e794323b453885f5181f1b624d0b-3\"")][..],
            &[("etag", "\"0x8DCA\"")],
            &[etag, ("x-amz-server-side-encryption", "aws:kms")],
            &[etag, ("x-amz-server-side-encryption-customer-algorithm", "AES256")],
            &[("x-amz-checksum-sha256", "FeKw08M4keuw8e9gnsQZQgwg4yDOlMZfvIwzEkSOsiU=-2")],
            &[("x-amz-checksum-crc64nvme", "rosUhg==")],
            &[],
        ] {
            assert_eq!(told(headers, true), None, "{headers:?}");
        }
        assert_eq!(told(&[etag], false), None);
    }
}
