//! Processes that run chat templates, and compile forms of answers to see whether that can be done: this program,
//! started once more.
//!
//! A template can double a text with every instruction, nest a list until dropping it overflows the stack, or compare
//! two that share all of their parts for ever; so can a form. A process that does is ended by itself
//! ([`super::renderer_process`]), and only the request that it worked for has to know.

use super::chat_template::TemplateError;
use super::renderer_process::{COMMAND, End};
use crate::machine::{free_memory_bytes, resident_bytes};
use crate::structure::Source;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, Write};
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::PathBuf;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Most memory of a process that waits for its next job.
const MAX_IDLE_BYTES: u64 = 64 << 20;
/// Where less is free than so many times what it holds, it does not wait.
const IDLE_SHARE: u64 = 4;
/// How long a conversation waits for others to be rendered.
const PATIENCE: Duration = Duration::from_secs(10);
/// How long a process may be silent: several times what a job may take of a processor, on a machine that others use, too.
const MAX_SILENCE: Duration = Duration::from_secs(5);

/// How long a process may take to be gone once it has closed its line.
const MAX_ENDING: Duration = Duration::from_secs(1);
/// Between two looks whether it is.
const LOOK_EVERY: Duration = Duration::from_millis(1);
/// Signals that a process gets for what it does itself, as overflowing its stack: SIGILL, SIGABRT, SIGBUS, SIGFPE, SIGSEGV.
const OWN_SIGNALS: [i32; 5] = [4, 6, 7, 8, 11];

/// What a process is to do, a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub enum Job {
    /// Run a chat template.
    Template {
        /// The template.
        source: String,
        /// What it is told; absent to learn which variables it looks up.
        variables: Option<Map<String, Value>>,
    },
    /// Compile a form of answers.
    Form(Source),
}

/// What a process made of it, a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The names that the template looks up.
    Variables(HashSet<String>),
    /// What it wrote.
    Prompt(String),
    /// The form was compiled, or found to be none.
    Tried {
        /// Memory that the process held then.
        bytes: u64,
    },
    /// It did not.
    Error(TemplateError),
}

impl Answer {
    /// The error that it is where another answer was expected.
    pub fn unexpected(self) -> TemplateError {
        match self {
            Answer::Error(error) => error,
            Answer::Variables(_) | Answer::Prompt(_) | Answer::Tried { .. } => {
                TemplateError::Failed("it answered something else".to_owned())
            }
        }
    }
}

/// So many processes at most, started when they are needed.
pub struct Renderers {
    program: PathBuf,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Process>>,
    silence: Duration,
}

impl Renderers {
    /// No process yet, and later up to `most`, of `program`.
    pub fn new(program: PathBuf, most: usize) -> Arc<Renderers> {
        let permits = Arc::new(Semaphore::new(most));
        Arc::new(Renderers { program, permits, idle: Mutex::default(), silence: MAX_SILENCE })
    }

    /// Has a job done, after those that came before.
    pub async fn run(self: &Arc<Renderers>, job: Job) -> Result<Answer, TemplateError> {
        let permit = timeout(PATIENCE, self.permits.clone().acquire_owned()).await;
        let permit = permit.ok().and_then(Result::ok).ok_or(TemplateError::Busy)?;
        let renderers = self.clone();
        let done = tokio::task::spawn_blocking(move || {
            // Held until the process is done, though nobody may wait for it any more.
            let _permit = permit;
            renderers.run_now(&job)
        });
        done.await.unwrap_or_else(|error| Err(TemplateError::NoProcess(error.to_string())))
    }

    /// Has a job done by the thread that calls. A process that ends for reasons of its own is nobody's fault: another one
    /// tries.
    pub fn run_now(&self, job: &Job) -> Result<Answer, TemplateError> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        match self.try_with(idle, job) {
            Err(TemplateError::NoProcess(_)) => self.try_with(None, job),
            done => done,
        }
    }

    fn try_with(&self, idle: Option<Process>, job: &Job) -> Result<Answer, TemplateError> {
        let process = idle.map_or_else(|| Process::start(&self.program, self.silence), Ok);
        let mut process = process.map_err(|error| TemplateError::NoProcess(error.to_string()))?;
        let answer = process.ask(job).map_err(|error| process.last_word(&error))?;
        // Memory that one job took is not kept for the next.
        if may_wait(resident_bytes(process.child.id()), free_memory_bytes()) {
            self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(process);
        }
        Ok(answer)
    }
}

/// Whether a process that holds so much may wait for its next job, where so much is free.
fn may_wait(resident: u64, free: Option<u64>) -> bool {
    resident < MAX_IDLE_BYTES && free.is_none_or(|free| resident * IDLE_SHARE < free)
}

struct Process {
    child: Child,
    /// Jobs out, answers in, neither for longer than a process may be silent.
    line: BufReader<UnixStream>,
}

impl Process {
    fn start(program: &PathBuf, silence: Duration) -> io::Result<Process> {
        let (ours, its) = UnixStream::pair()?;
        ours.set_read_timeout(Some(silence))?;
        ours.set_write_timeout(Some(silence))?;
        let (input, output) = (OwnedFd::from(its.try_clone()?), OwnedFd::from(its));
        let mut command = Command::new(program);
        command.arg(COMMAND).stdin(input).stdout(output).stderr(Stdio::null());
        // Signals of a terminal are for the server, which lets its streams finish.
        let child = command.process_group(0).spawn()?;
        Ok(Process { child, line: BufReader::new(ours) })
    }

    fn ask(&mut self, job: &Job) -> io::Result<Answer> {
        let mut line = serde_json::to_vec(job)?;
        line.push(b'\n');
        self.line.get_mut().write_all(&line)?;
        drop(line);
        let mut answer = String::new();
        self.line.read_line(&mut answer)?;
        Ok(serde_json::from_str(&answer)?)
    }

    /// Why it ended, or is ended now because of `error`: by what the job did to it, or by something else.
    fn last_word(&mut self, error: &io::Error) -> TemplateError {
        let silent = [io::ErrorKind::WouldBlock, io::ErrorKind::TimedOut].contains(&error.kind());
        // One that lives may be stopped. It may have ended already, too.
        let ended = if silent { None } else { self.ended() };
        let _ = self.child.kill();
        let _ = self.child.wait();
        match ended {
            None if silent => TemplateError::NoProcess("it said nothing for too long".to_owned()),
            None => TemplateError::NoProcess(error.to_string()),
            Some(status) => match End::of(status) {
                Some(End::NoRoom) => TemplateError::Busy,
                Some(end) => TemplateError::Failed(end.to_string()),
                None if status.signal().is_some_and(|signal| OWN_SIGNALS.contains(&signal)) => {
                    TemplateError::Failed("it ended its process".to_owned())
                }
                None => TemplateError::NoProcess(format!("it ended with {status}")),
            },
        }
    }

    /// How it ended. Its end of the line is closed a moment before it is gone.
    fn ended(&mut self) -> Option<ExitStatus> {
        let began = Instant::now();
        loop {
            match self.child.try_wait() {
                Ok(None) if began.elapsed() < MAX_ENDING => thread::sleep(LOOK_EVERY),
                ended => return ended.ok().flatten(),
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Reaped, so that nothing is left of it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::PermissionsExt;

    /// What comes of a job where the first process does one thing and the second another.
    fn tried(first: &str, second: &str) -> Result<Answer, TemplateError> {
        let folder = tempfile::tempdir().unwrap();
        let (program, begun) = (folder.path().join("program"), folder.path().join("begun"));
        let begun = begun.display();
        let text = format!("#!/bin/sh\nread job\nif mkdir {begun}; then {first}; else {second}; fi\n");
        fs::write(&program, text).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        let mut renderers = Renderers::new(program, 1);
        Arc::get_mut(&mut renderers).unwrap().silence = Duration::from_secs(1);
        renderers.run_now(&Job::Template { source: String::new(), variables: None })
    }

    const ANSWERS: &str = "echo '{\"Prompt\":\"a\"}'";

    #[test]
    fn a_process_that_something_else_ended_or_stopped_is_tried_again() {
        for first in ["kill -KILL $$", "kill -STOP $$", "exit 0", "exit 77", "echo rubbish"] {
            assert!(matches!(tried(first, ANSWERS), Ok(Answer::Prompt(_))), "{first}");
            assert!(matches!(tried(first, first), Err(TemplateError::NoProcess(_))), "{first}");
        }
    }

    #[test]
    fn a_process_waits_where_there_is_room_for_it() {
        for (resident, free, waits) in
            [(12, None, true), (12, Some(49), true), (12, Some(48), false), (64, None, false)]
        {
            assert_eq!(may_wait(resident << 20, free.map(|free: u64| free << 20)), waits, "{resident} {free:?}");
        }
    }

    #[test]
    fn a_job_for_which_there_is_no_memory_may_come_again() {
        assert!(matches!(tried("exit 6", ANSWERS), Err(TemplateError::Busy)));
    }

    #[test]
    fn what_a_job_does_to_its_process_is_the_jobs_fault() {
        for first in ["exit 3", "exit 4", "kill -ABRT $$", "kill -SEGV $$"] {
            assert!(matches!(tried(first, ANSWERS), Err(TemplateError::Failed(_))), "{first}");
        }
    }
}
