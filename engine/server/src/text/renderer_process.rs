//! The process that runs chat templates and tries forms for a server: jobs come in on standard input, a line each, and answers go out on
//! standard output. It ends itself where a job takes too much of anything, and when the server is gone.

use super::chat_template::TemplateError;
use super::renderers::{Answer, Job};
use super::template_program::Program;
use crate::machine::{self, ThreadTime, resident_bytes};
use crate::structure;
use std::fmt;
use std::io::{self, BufRead, Write};
use std::os::unix::process::ExitStatusExt;
use std::process::{ExitStatus, exit};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread::{self, Thread};
use std::time::Duration;

/// The subcommand that becomes such a process.
pub const COMMAND: &str = "render-templates";

/// Most memory that the process may hold: several times what a conversation of the largest body takes.
const MAX_RESIDENT_BYTES: u64 = 256 << 20;
/// Longest time on a processor for one job.
const MAX_TIME: Duration = Duration::from_secs(1);
/// The stack that a job has: [`crate::structure`] compiles what passed here with a larger one.
pub const STACK_BYTES: usize = 16 << 20;
/// Between two looks at a job that goes on.
const LOOK_EVERY: Duration = Duration::from_millis(2);

/// Why a process ended itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The job took too much memory.
    Memory = 3,
    /// The job took too much time.
    Time = 4,
    /// The job took more than the stack.
    Stack,
    /// There is less memory than a job may take, and this one took its share.
    NoRoom = 6,
}

/// Signals of a process that has overflowed its stack.
const SIGABRT: i32 = 6;
const SIGSEGV: i32 = 11;

impl End {
    /// What an exit status says.
    pub fn of(status: ExitStatus) -> Option<End> {
        match (status.code(), status.signal()) {
            (_, Some(SIGABRT | SIGSEGV)) => Some(End::Stack),
            (code, _) => [End::Memory, End::Time, End::NoRoom].into_iter().find(|end| code == Some(*end as i32)),
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            End::Memory => write!(f, "it takes more than {} MiB of memory", MAX_RESIDENT_BYTES >> 20),
            End::Time => write!(f, "it takes longer than {MAX_TIME:?}"),
            End::Stack => write!(f, "it nests too deeply"),
            End::NoRoom => write!(f, "there is no memory for it now"),
        }
    }
}

/// Works until standard input ends.
pub fn work() -> io::Result<()> {
    machine::end_before_others();
    let worker = thread::Builder::new().stack_size(STACK_BYTES).spawn(work_jobs)?;
    worker.join().map_err(|_| io::Error::other("a job panicked"))?
}

fn work_jobs() -> io::Result<()> {
    let watch = Watch::start()?;
    let (mut known, mut answers) = (None, io::stdout().lock());
    for line in io::stdin().lock().lines() {
        let job: Job = serde_json::from_str(&line?)?;
        watch.begin();
        let mut answer = serde_json::to_vec(&answer(&mut known, &job))?;
        watch.end();
        answer.push(b'\n');
        answers.write_all(&answer)?;
        answers.flush()?;
    }
    Ok(())
}

/// Keeps the last template compiled: mostly there is only one.
fn answer(known: &mut Option<(String, Program)>, job: &Job) -> Answer {
    let done = match job {
        Job::Template { source, variables } => program(known, source).and_then(|program| match variables {
            None => Ok(Answer::Variables(program.variables())),
            Some(variables) => program.run(variables).map(Answer::Prompt),
        }),
        Job::Form(source) => {
            structure::try_out(source);
            Ok(Answer::Tried { bytes: resident_bytes(std::process::id()) })
        }
    };
    done.unwrap_or_else(Answer::Error)
}

fn program<'a>(known: &'a mut Option<(String, Program)>, source: &str) -> Result<&'a Program, TemplateError> {
    let program = match known.take().filter(|(known, _)| known == source) {
        Some((_, program)) => program,
        None => Program::new(source)?,
    };
    Ok(&known.insert((source.to_owned(), program)).1)
}

/// A thread that looks at this one while it does a job.
struct Watch {
    turns: Arc<Turns>,
    thread: Thread,
}

/// Counts beginnings and ends of jobs: odd while one is done.
#[derive(Default)]
struct Turns(AtomicU64);

impl Turns {
    fn turn(&self) {
        self.0.fetch_add(1, Ordering::AcqRel);
    }

    /// Which job is being done, if one is.
    fn job(&self) -> Option<u64> {
        Some(self.0.load(Ordering::Acquire)).filter(|turns| !turns.is_multiple_of(2))
    }
}

impl Watch {
    fn start() -> io::Result<Watch> {
        let turns = Arc::new(Turns::default());
        let seen = turns.clone();
        let time = ThreadTime::of_this_thread();
        let thread = thread::Builder::new().spawn(move || watch(&seen, &time))?.thread().clone();
        Ok(Watch { turns, thread })
    }

    fn begin(&self) {
        self.turns.turn();
        self.thread.unpark();
    }

    fn end(&self) {
        self.turns.turn();
    }
}

fn watch(turns: &Turns, time: &ThreadTime) {
    loop {
        thread::park();
        let (mut watched, mut began, mut most) = (None, Duration::ZERO, MAX_RESIDENT_BYTES);
        while let Some(job) = turns.job() {
            let resident = resident_bytes(std::process::id());
            if watched.replace(job) != Some(job) {
                (began, most) = (time.spent(), most_bytes(resident, machine::free_memory_bytes()));
            }
            if resident > most {
                let end = if most < MAX_RESIDENT_BYTES { End::NoRoom } else { End::Memory };
                exit(end as i32);
            }
            if time.spent().saturating_sub(began) > MAX_TIME {
                exit(End::Time as i32);
            }
            thread::sleep(LOOK_EVERY);
        }
    }
}

/// What the process may hold at most in a job, where it holds so much and so much is free: half of that is for others,
/// whatever they do meanwhile.
fn most_bytes(resident: u64, free: Option<u64>) -> u64 {
    free.map_or(MAX_RESIDENT_BYTES, |free| MAX_RESIDENT_BYTES.min(resident + free / 2))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_job_leaves_others_half_of_what_is_free() {
        const MIB: u64 = 1 << 20;
        for (resident, free, most) in [(10, None, 256), (10, Some(4096), 256), (10, Some(100), 60), (10, Some(0), 10)] {
            assert_eq!(most_bytes(resident * MIB, free.map(|free: u64| free * MIB)), most * MIB, "{free:?}");
        }
    }

    #[test]
    fn a_template_is_compiled_once() {
        let mut known = None;
        let job = |source: &str, name: &str| {
            let variables = serde_json::json!({"name": name}).as_object().cloned();
            Job::Template { source: source.into(), variables }
        };
        for (source, name, expected) in
            [("{{ name }}", "a", "a"), ("{{ name }}", "b", "b"), ("<{{ name }}>", "c", "<c>")]
        {
            let Answer::Prompt(prompt) = answer(&mut known, &job(source, name)) else { panic!("{source}") };
            assert_eq!(prompt, expected);
        }
        assert!(matches!(answer(&mut known, &job("{%", "d")), Answer::Error(TemplateError::Invalid(_))));
    }
}
