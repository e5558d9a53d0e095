//! Processes that run chat templates: this program, started once more.
//!
//! A template can double a text with every instruction, nest a list until dropping it overflows the stack, or compare
//! two that share all of their parts for ever. A process that does is ended by itself ([`super::renderer_process`]), and
//! only the request that it worked for has to know.

use super::chat_template::TemplateError;
use super::renderer_process::{COMMAND, End};
use crate::machine::resident_bytes;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::HashSet;
use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Semaphore;
use tokio::time::timeout;

/// Most memory of a process that waits for its next job.
const MAX_IDLE_BYTES: u64 = 64 << 20;
/// How long a conversation waits for others to be rendered.
const PATIENCE: Duration = Duration::from_secs(10);

/// What a process is to do, a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub struct Job {
    /// The template.
    pub source: String,
    /// What it is told; absent to learn which variables it looks up.
    pub variables: Option<Map<String, Value>>,
}

/// What a process made of it, a line of JSON.
#[derive(Debug, Serialize, Deserialize)]
pub enum Answer {
    /// The names that the template looks up.
    Variables(HashSet<String>),
    /// What it wrote.
    Prompt(String),
    /// It did not.
    Error(TemplateError),
}

impl Answer {
    /// The error that it is where another answer was expected.
    pub fn unexpected(self) -> TemplateError {
        match self {
            Answer::Error(error) => error,
            Answer::Variables(_) | Answer::Prompt(_) => TemplateError::Failed("it answered something else".to_owned()),
        }
    }
}

/// So many processes at most, started when they are needed.
pub struct Renderers {
    program: PathBuf,
    permits: Arc<Semaphore>,
    idle: Mutex<Vec<Process>>,
}

impl Renderers {
    /// No process yet, and later up to `most`, of `program`.
    pub fn new(program: PathBuf, most: usize) -> Arc<Renderers> {
        Arc::new(Renderers { program, permits: Arc::new(Semaphore::new(most)), idle: Mutex::default() })
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

    /// Has a job done by the thread that calls.
    pub fn run_now(&self, job: &Job) -> Result<Answer, TemplateError> {
        let idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let process = idle.map_or_else(|| Process::start(&self.program), Ok);
        let mut process = process.map_err(|error| TemplateError::NoProcess(error.to_string()))?;
        match process.ask(job) {
            Ok(answer) => {
                // Memory that one job took is not kept for the next.
                if resident_bytes(process.child.id()) < MAX_IDLE_BYTES {
                    self.idle.lock().unwrap_or_else(PoisonError::into_inner).push(process);
                }
                Ok(answer)
            }
            Err(_) => Err(TemplateError::Failed(process.last_word())),
        }
    }
}

struct Process {
    child: Child,
    jobs: ChildStdin,
    answers: BufReader<ChildStdout>,
}

impl Process {
    fn start(program: &PathBuf) -> io::Result<Process> {
        let mut command = Command::new(program);
        command.arg(COMMAND).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        // Signals of a terminal are for the server, which lets its streams finish.
        let mut child = command.process_group(0).spawn()?;
        let pipes = child.stdin.take().zip(child.stdout.take());
        let (jobs, answers) = pipes.ok_or_else(|| io::Error::other("it has no pipes"))?;
        Ok(Process { child, jobs, answers: BufReader::new(answers) })
    }

    fn ask(&mut self, job: &Job) -> io::Result<Answer> {
        let mut line = serde_json::to_vec(job)?;
        line.push(b'\n');
        self.jobs.write_all(&line)?;
        let mut answer = String::new();
        self.answers.read_line(&mut answer)?;
        Ok(serde_json::from_str(&answer)?)
    }

    /// Why it ended.
    fn last_word(&mut self) -> String {
        // It may have ended already.
        let _ = self.child.kill();
        let end = self.child.wait().ok().and_then(|status| End::of(status.code()?));
        end.map_or_else(|| "it ended its process".to_owned(), |end| end.to_string())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // Reaped, so that nothing is left of it.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
