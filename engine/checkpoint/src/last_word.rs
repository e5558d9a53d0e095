//! What a process says when the system ends it: it was refused memory, or a file is not what it was.

#![allow(unsafe_code)]

use std::ffi::{CStr, CString};
use std::io;
use std::sync::OnceLock;

/// Where in a word of refused memory its bytes are told.
pub const BYTES: char = '#';
/// Digits of the largest number.
const MAX_DIGITS: usize = 20;

/// What a process leaves behind.
#[derive(Debug)]
pub struct LastWord {
    /// For the standard error stream.
    pub said: String,
    /// What is written to which file.
    pub left: Option<(CString, String)>,
    /// How the process ends.
    pub exit_code: u8,
}

static FILE_WORD: OnceLock<LastWord> = OnceLock::new();
static MEMORY_WORD: OnceLock<(LastWord, fn() -> usize)> = OnceLock::new();

/// Ends the process with `word` where a mapped file lacks what is read of it: it was cut short, or its disk failed, and what was
/// read of it cannot be relied on. The first word counts.
///
/// # Errors
/// If the system takes no handler of SIGBUS.
pub fn say_on_lost_file(word: LastWord) -> io::Result<()> {
    if FILE_WORD.set(word).is_err() {
        return Ok(());
    }
    handle(libc::SIGBUS, on_lost_file)
}

/// Ends the process with `word` where the thread that aborts it was refused memory, by what `refused_bytes` says of that: it must be
/// safe in a signal handler. They are told in the place of [`BYTES`]. Other ends by SIGABRT are as they were. The first word counts.
///
/// # Errors
/// If the system takes no handler of SIGABRT.
pub fn say_on_lost_memory(word: LastWord, refused_bytes: fn() -> usize) -> io::Result<()> {
    if MEMORY_WORD.set((word, refused_bytes)).is_err() {
        return Ok(());
    }
    handle(libc::SIGABRT, on_abort)
}

fn handle(signal: libc::c_int, handler: extern "C" fn(libc::c_int)) -> io::Result<()> {
    // SAFETY: the handlers do only what signal-safety(7) allows, and all that they read was written before.
    let installed = unsafe {
        let mut action: libc::sigaction = std::mem::zeroed();
        action.sa_sigaction = handler as libc::sighandler_t;
        action.sa_flags = libc::SA_ONSTACK;
        libc::sigaction(signal, &raw const action, std::ptr::null_mut())
    };
    if installed == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// What the kernel has a thread do that reads a page which cannot be had.
extern "C" fn on_lost_file(_: libc::c_int) {
    if let Some(word) = FILE_WORD.get() {
        word.leave(None);
    }
}

/// What a thread does that aborts. It ends by the signal itself once this returns.
extern "C" fn on_abort(_: libc::c_int) {
    let Some((word, refused_bytes)) = MEMORY_WORD.get() else { return };
    match refused_bytes() {
        0 => {}
        bytes => word.leave(Some(bytes)),
    }
}

impl LastWord {
    /// Ends the process. Whether anything is written makes no difference to how it ends.
    fn leave(&self, bytes: Option<usize>) -> ! {
        let mut digits = [0; MAX_DIGITS];
        let digits = bytes.map(|bytes| decimal(bytes, &mut digits));
        write(libc::STDERR_FILENO, &self.said, digits);
        if let Some((path, text)) = &self.left {
            write(open(path), text, digits);
        }
        // SAFETY: this may be called in a signal handler.
        unsafe { libc::_exit(self.exit_code.into()) }
    }
}

fn open(path: &CStr) -> libc::c_int {
    // SAFETY: the path ends with a zero, and this may be called in a signal handler.
    unsafe { libc::open(path.as_ptr(), libc::O_WRONLY | libc::O_CREAT | libc::O_TRUNC, 0o644) }
}

/// Writes a text, with these digits for [`BYTES`].
fn write(file: libc::c_int, text: &str, digits: Option<&[u8]>) {
    let (text, hole) = (text.as_bytes(), text.bytes().position(|byte| byte == BYTES as u8));
    let parts = match (hole, digits) {
        (Some(hole), Some(digits)) => [&text[..hole], digits, &text[hole + 1..]],
        _ => [text, &[], &[]],
    };
    for part in parts {
        // SAFETY: the bytes are there, and this may be called in a signal handler.
        unsafe { libc::write(file, part.as_ptr().cast(), part.len()) };
    }
}

/// A number in its digits, without memory of its own.
fn decimal(mut number: usize, digits: &mut [u8; MAX_DIGITS]) -> &[u8] {
    let mut start = MAX_DIGITS;
    loop {
        start -= 1;
        digits[start] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            return &digits[start..];
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::map::Bytes;
    use std::fs::{self, File};
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::process::ExitStatusExt;
    use std::path::Path;
    use std::process::{self, Command, ExitStatus};

    /// Tells this program that it is the one which dies, and where.
    const DIES_AT: &str = "WINDLASS_TEST_DIES_AT";

    fn word(folder: &Path) -> LastWord {
        let left = CString::new(folder.join("word").as_os_str().as_bytes()).unwrap();
        LastWord { said: "gone\n".into(), left: Some((left, "it was # bytes".into())), exit_code: 12 }
    }

    /// How this program ends where a test of it dies, and what it leaves.
    fn watch(test: &str) -> (ExitStatus, String, Option<String>) {
        let folder = tempfile::tempdir().unwrap();
        let mut program = Command::new(std::env::current_exe().unwrap());
        let test = format!("last_word::tests::{test}");
        let ended = program.args(["--exact", &test, "--nocapture"]).env(DIES_AT, folder.path()).output().unwrap();
        let said = String::from_utf8(ended.stderr).unwrap();
        (ended.status, said, fs::read_to_string(folder.path().join("word")).ok())
    }

    #[test]
    fn a_file_that_is_cut_short_leaves_a_last_word() {
        let Some(folder) = std::env::var_os(DIES_AT) else {
            let (status, said, left) = watch("a_file_that_is_cut_short_leaves_a_last_word");
            assert_eq!((status.code(), left.as_deref()), (Some(12), Some("it was # bytes")), "{said}");
            return assert!(said.ends_with("gone\n"), "{said}");
        };
        say_on_lost_file(word(Path::new(&folder))).unwrap();
        let path = Path::new(&folder).join("file");
        fs::write(&path, vec![7; 1 << 20]).unwrap();
        let file = File::options().read(true).write(true).open(path).unwrap();
        let bytes = Bytes::map(&file, None).unwrap();
        file.set_len(0).unwrap();
        println!("{}", bytes[1 << 19]);
    }

    #[test]
    fn a_process_that_was_refused_memory_tells_how_much() {
        let Some(folder) = std::env::var_os(DIES_AT) else {
            let (status, said, left) = watch("a_process_that_was_refused_memory_tells_how_much");
            return assert_eq!(
                (status.code(), left.as_deref()),
                (Some(12), Some("it was 9007199254740993 bytes")),
                "{said}"
            );
        };
        say_on_lost_memory(word(Path::new(&folder)), || 9_007_199_254_740_993).unwrap();
        process::abort();
    }

    #[test]
    fn a_process_that_aborts_for_something_else_ends_as_ever() {
        let Some(folder) = std::env::var_os(DIES_AT) else {
            let (status, said, left) = watch("a_process_that_aborts_for_something_else_ends_as_ever");
            return assert_eq!((status.signal(), left), (Some(libc::SIGABRT), None), "{said}");
        };
        say_on_lost_memory(word(Path::new(&folder)), || 0).unwrap();
        process::abort();
    }

    #[test]
    fn numbers_have_their_digits() {
        for number in [0, 7, 10, 1 << 20, usize::MAX] {
            assert_eq!(decimal(number, &mut [0; MAX_DIGITS]), number.to_string().as_bytes());
        }
    }
}
