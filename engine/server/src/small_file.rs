//! Files that people write: read whole, never more than is sensible, and nothing that is no file.

use std::fs::{self, File};
use std::io::{self, Read};
use std::path::Path;

/// A regular file of at most `most_bytes`.
pub fn read(file: &Path, most_bytes: u64) -> io::Result<Vec<u8>> {
    // Before it is opened: a pipe may wait for ever for somebody who writes.
    if !fs::metadata(file)?.is_file() {
        return Err(io::Error::other("it is no file"));
    }
    let mut bytes = Vec::new();
    File::open(file)?.take(most_bytes + 1).read_to_end(&mut bytes)?;
    match bytes.len() as u64 > most_bytes {
        true => Err(io::Error::other(format!("it has more than {most_bytes} bytes"))),
        false => Ok(bytes),
    }
}

/// The same of text.
pub fn read_text(file: &Path, most_bytes: u64) -> io::Result<String> {
    String::from_utf8(read(file, most_bytes)?).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_read_as_far_as_is_sensible_and_nothing_else_is() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("a");
        fs::write(&file, "12345").unwrap();
        assert_eq!(read_text(&file, 5).unwrap(), "12345");
        assert!(read(&file, 4).unwrap_err().to_string().contains("more than 4 bytes"));
        for other in [folder.path(), Path::new("/dev/zero")] {
            assert_eq!(read(other, 5).unwrap_err().to_string(), "it is no file");
        }
        assert_eq!(read(&folder.path().join("b"), 5).unwrap_err().kind(), io::ErrorKind::NotFound);
    }
}
