//! The bytes of a file, mapped. The only unsafe code outside the kernels.

#![allow(unsafe_code)]

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::ops::{Deref, Range};
use std::sync::{Arc, OnceLock};

use memmap2::{Mmap, UncheckedAdvice};

use crate::data::{Arrival, Data};

/// Bytes that are awaited first of a file that is on its way, for its header.
const FIRST_BYTES: usize = 1 << 20;
/// No header is longer; one that is not understood by then is damaged.
const MOST_HEADER_BYTES: usize = 256 << 20;

/// A checkpoint's bytes.
#[derive(Debug)]
pub(crate) struct Bytes {
    place: Place,
    /// Who writes them, where they are not all there.
    arrival: Option<Arc<dyn Arrival>>,
}

#[derive(Debug)]
enum Place {
    Mapped(Mmap),
    Owned(Vec<u8>),
}

/// What a process leaves behind when a mapped file is not what it was: it was cut short, or its disk failed, and what was read
/// of it cannot be relied on.
#[derive(Debug)]
pub struct LastWord {
    /// For the standard error stream.
    pub said: String,
    /// What is written to which file.
    pub left: Option<(CString, String)>,
    /// How the process ends.
    pub exit_code: u8,
}

static LAST_WORD: OnceLock<LastWord> = OnceLock::new();

/// Ends the process with `word` where a mapped file lacks what is read of it. The first word counts.
pub fn say_on_lost_file(word: LastWord) -> io::Result<()> {
    if LAST_WORD.set(word).is_err() {
        return Ok(());
    }
    // SAFETY: the handler does only what signal-safety(7) allows, and all that it reads was written before.
    let installed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = on_lost_file as extern "C" fn(libc::c_int) as libc::sighandler_t;
        action.sa_flags = libc::SA_ONSTACK;
        libc::sigaction(libc::SIGBUS, &raw const action, std::ptr::null_mut())
    };
    if installed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel has a thread do that reads a page which cannot be had.
extern "C" fn on_lost_file(_: libc::c_int) {
    let Some(LastWord { said, left, exit_code }) = LAST_WORD.get() else { return };
    // SAFETY: the strings live as long as the process, and these functions may be called in a signal handler. Whether
    // anything is written makes no difference to how it ends.
    unsafe {
        libc::write(libc::STDERR_FILENO, said.as_ptr().cast(), said.len());
        if let Some((path, text)) = left {
            let file = libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC, 0o644);
            libc::write(file, text.as_ptr().cast(), text.len());
        }
        libc::_exit((*exit_code).into())
    }
}

impl Bytes {
    /// Maps the whole file, read-only; `arrival` knows how much of it is there.
    pub fn map(file: &File, arrival: Option<Arc<dyn Arrival>>) -> io::Result<Bytes> {
        if file.metadata()?.len() == 0 {
            return Ok(Bytes::from(Vec::new()));
        }
        // SAFETY: the mapping is read-only and private to this process. Its bytes stay as they are only while nobody
        // writes or truncates the file: that is what a checkpoint in service means (caches replace files by rename),
        // and the mapping lives only until the weights are packed. No reader relies on a string staying valid UTF-8:
        // each is checked again where it becomes a `str`. A file that is on its way is written once from its beginning
        // on, and nothing of it is read before `Arrival::wait` has said that it is there.
        let place = unsafe { Mmap::map(file) }.map(Place::Mapped)?;
        Ok(Bytes { place, arrival })
    }

    /// Has `read` look at the beginning of the file: at all of it or, where it is on its way, at as much as it takes.
    pub fn read_beginning<T, E>(&self, read: impl Fn(&[u8]) -> Result<T, E>) -> Result<T, E> {
        let mut end = if self.arrival.is_some() { FIRST_BYTES.min(self.len()) } else { self.len() };
        loop {
            match read(self.data(0..end).get()) {
                Err(_) if end < self.len().min(MOST_HEADER_BYTES) => end = self.len().min(4 * end),
                done => return done,
            }
        }
    }

    /// Some of the bytes.
    pub fn data(&self, range: Range<usize>) -> Data<'_> {
        Data::of(self, range, self.arrival.as_deref())
    }

    /// Gives the memory of `part` back to the system; whoever reads it again has it from the file. Does nothing for bytes
    /// in memory, or for those of others.
    pub fn release(&self, part: &[u8]) {
        let Place::Mapped(map) = &self.place else { return };
        let offset = part.as_ptr().addr().checked_sub(map.as_ptr().addr());
        let Some(offset) = offset.filter(|offset| offset + part.len() <= map.len()) else { return };
        // SAFETY: pages of a file that nobody has written to hold the same when they are read in again.
        let advised = unsafe { map.unchecked_advise_range(UncheckedAdvice::DontNeed, offset, part.len()) };
        // Memory that is not given back is held until the map ends: no reason not to load.
        let _ = advised;
    }
}

impl Deref for Bytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.place {
            Place::Mapped(map) => map,
            Place::Owned(bytes) => bytes,
        }
    }
}

impl From<Vec<u8>> for Bytes {
    fn from(bytes: Vec<u8>) -> Bytes {
        Bytes { place: Place::Owned(bytes), arrival: None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStrExt;
    use std::process::Command;

    /// Tells this program that it is the one which dies.
    const DIES_AT: &str = "WINDLASS_TEST_DIES_AT";

    #[test]
    fn a_file_that_is_cut_short_leaves_a_last_word() {
        let Some(folder) = std::env::var_os(DIES_AT) else { return watch() };
        let path = |name: &str| std::path::Path::new(&folder).join(name);
        let left = CString::new(path("word").as_os_str().as_bytes()).unwrap();
        let word = LastWord { said: "gone\n".into(), left: Some((left, "cut short".into())), exit_code: 12 };
        say_on_lost_file(word).unwrap();
        std::fs::write(path("file"), vec![7; 1 << 20]).unwrap();
        let file = File::options().read(true).write(true).open(path("file")).unwrap();
        let bytes = Bytes::map(&file, None).unwrap();
        file.set_len(0).unwrap();
        println!("{}", bytes[1 << 19]);
    }

    fn watch() {
        let folder = tempfile::tempdir().unwrap();
        let mut program = Command::new(std::env::current_exe().unwrap());
        let test = "map::tests::a_file_that_is_cut_short_leaves_a_last_word";
        let ended = program.args(["--exact", test, "--nocapture"]).env(DIES_AT, folder.path()).output().unwrap();
        assert_eq!(ended.status.code(), Some(12), "{ended:?}");
        assert!(ended.stderr.ends_with(b"gone\n"), "{ended:?}");
        assert_eq!(std::fs::read_to_string(folder.path().join("word")).unwrap(), "cut short");
    }
}
