//! What is said while the proof runs: on standard output, and in a file that has every line as soon as it is said.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// The name of the file.
const NAME: &str = "log.txt";

/// Where lines go.
#[derive(Debug)]
pub struct Log {
    file: Mutex<File>,
    began: Instant,
}

impl Log {
    /// In a folder, behind what other runs said there.
    pub fn open(folder: &Path) -> io::Result<Log> {
        fs::create_dir_all(folder)?;
        let file = File::options().create(true).append(true).open(folder.join(NAME))?;
        Ok(Log { file: Mutex::new(file), began: Instant::now() })
    }

    /// A line, with the seconds since the beginning. A disk that is full ends no proof.
    pub fn say(&self, line: &str) {
        let line = format!("{:7.2} {line}\n", self.began.elapsed().as_secs_f64());
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let _ = file.write_all(line.as_bytes());
        let _ = io::stdout().write_all(line.as_bytes());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_in_the_file_as_soon_as_it_is_said() {
        let folder = tempfile::tempdir().unwrap();
        let log = Log::open(folder.path()).unwrap();
        log.say("one");
        assert!(fs::read_to_string(folder.path().join(NAME)).unwrap().ends_with(" one\n"));
        drop(log);
        Log::open(folder.path()).unwrap().say("two");
        assert_eq!(fs::read_to_string(folder.path().join(NAME)).unwrap().lines().count(), 2);
    }
}
