//! Passes steps through the pipeline stages of other processes. Each stage has a thread here, which waits for it.
//!
//! Every stage computes a step of its own, and the next step is ready when it ends. Commands stay in order.

use std::convert::identity;
use std::io;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use windlass_engine_core::executor::{Geometry, Prepared};
use windlass_engine_core::plan::{BlockMove, PlanRow, RowOutput, StepPlan, Ticket};

use super::{Command, Reply, reply};
use crate::batch::Batch;
use crate::panic::guarded;
use crate::pipeline::{Peer, PipelineError};
use crate::step::batch_builder::BatchBuilder;
use crate::step::{PassedStep, uncomputable};

/// A message from stage to stage.
pub(crate) enum StageMessage {
    /// A step to compute.
    Step(Box<PassedStep>),
    /// Prepare one thing that later steps need.
    Prepare(Reply<Prepared>, Replies<Prepared>),
    /// Allocate the memory of K and V if true, else free it.
    HoldKv(bool, Reply<()>, Replies<()>),
    /// A stage was lost: no more steps can be computed.
    Lost(String),
}

/// The pending replies of stages that run the same command at the same time.
pub(crate) struct Replies<T>(Vec<Receiver<Result<T, String>>>);

impl<T> Replies<T> {
    /// Adds a pending reply: returns where the stage sends it.
    fn one_more(mut self) -> (Reply<T>, Self) {
        let (says, said) = channel();
        self.0.push(said);
        (says, self)
    }

    /// Waits for all replies, and combines them with `own` by `both`.
    pub fn join(self, own: Result<T, String>, both: impl Fn(T, T) -> T) -> Result<T, String> {
        let gone = |_| "the thread of a stage has ended".to_owned();
        self.0.into_iter().try_fold(own?, |all, said| Ok(both(all, said.recv().map_err(gone)??)))
    }
}

/// The threads of the stages before the last.
pub(crate) struct Chain {
    /// Their output.
    pub messages: Receiver<StageMessage>,
    /// They end when the sender of commands is dropped.
    pub threads: Vec<JoinHandle<()>>,
}

/// Starts threads that pass commands through the `earlier` stages. `check` says whether a device can compute a row.
pub(crate) fn chain(
    geometry: Geometry,
    check: fn(&PlanRow) -> Result<(), String>,
    commands: Receiver<Command>,
    earlier: Vec<Peer>,
) -> io::Result<Chain> {
    let (enters, mut messages) = channel();
    let entry = Entry { batch_builder: BatchBuilder::new(geometry), check };
    let mut threads =
        vec![spawn("entry", move || commands.iter().for_each(|command| send(entry.pass(command), &enters)))?];
    for (stage, mut peer) in earlier.into_iter().enumerate() {
        let (leaves, next) = channel();
        let enters = std::mem::replace(&mut messages, next);
        threads.push(spawn(&format!("stage-{stage}"), move || relay(&mut peer, &enters, &leaves))?);
    }
    Ok(Chain { messages, threads })
}

fn spawn(name: &str, task: impl FnOnce() + Send + 'static) -> io::Result<JoinHandle<()>> {
    thread::Builder::new().name(name.to_owned()).spawn(task)
}

/// The entry of the pipeline, which turns plans into batches for all stages.
struct Entry {
    batch_builder: BatchBuilder,
    check: fn(&PlanRow) -> Result<(), String>,
}

impl Entry {
    fn pass(&self, command: Command) -> StageMessage {
        match command {
            Command::Step(ticket, plan) => guarded(|| StageMessage::Step(Box::new(self.begin(ticket, plan)))),
            Command::Prepare(reply) => Ok(StageMessage::Prepare(reply, Replies(Vec::new()))),
            Command::HoldKv(held, reply) => Ok(StageMessage::HoldKv(held, reply, Replies(Vec::new()))),
        }
        .unwrap_or_else(StageMessage::Lost)
    }

    fn begin(&self, ticket: Ticket, plan: StepPlan) -> PassedStep {
        let mut batch = Batch::default();
        let fill = |row: &PlanRow| self.fill(row, &mut batch).map_or_else(identity, |()| RowOutput::Computed);
        let rows = plan.rows.iter().map(fill).collect();
        PassedStep { ticket, plan, batch, rows, activations: Vec::new(), busy: Duration::ZERO }
    }

    fn fill(&self, row: &PlanRow, batch: &mut Batch) -> Result<(), RowOutput> {
        self.batch_builder.check(row).and_then(|()| (self.check)(row)).map_err(uncomputable)?;
        if row.draft().is_some_and(|draft| !draft.is_chain()) {
            let right = "guesses one after the other are";
            return Err(uncomputable(format!("guesses that branch are not computed by several nodes; {right}")));
        }
        self.batch_builder.fill(row, batch)
    }
}

/// Lets a stage run messages in order, and passes them on.
fn relay(peer: &mut Peer, from: &Receiver<StageMessage>, to: &Sender<StageMessage>) {
    if let Some(why) = from.iter().find_map(|message| guarded(|| pass(peer, message, to)).flatten().err()) {
        send(StageMessage::Lost(why.clone()), to);
        // Earlier stages do not learn of it: what they send is refused here.
        from.iter().for_each(|message| refuse(message, &why));
    }
}

/// Sends a message. If the receiver is gone, it has reported why.
fn send(message: StageMessage, to: &Sender<StageMessage>) {
    let _ = to.send(message);
}

/// Replies to a message that cannot be run.
fn refuse(message: StageMessage, why: &str) {
    // The asking thread may have dropped the receiver.
    match message {
        StageMessage::Prepare(to, _) => drop(to.send(Err(why.to_owned()))),
        StageMessage::HoldKv(_, to, _) => drop(to.send(Err(why.to_owned()))),
        StageMessage::Step(_) | StageMessage::Lost(_) => {}
    }
}

/// Lets a stage run one message. A command for all stages is passed on even if it fails here: the last stage combines
/// the replies.
fn pass(peer: &mut Peer, message: StageMessage, to: &Sender<StageMessage>) -> Result<(), String> {
    match message {
        StageMessage::Step(mut step) => {
            compute(peer, &mut step).map_err(|error| error.to_string())?;
            send(StageMessage::Step(step), to);
            Ok(())
        }
        StageMessage::Prepare(requester, replies) => {
            let (own, replies) = replies.one_more();
            let asked = peer.prepare();
            send(StageMessage::Prepare(requester, replies), to);
            reply(asked.and_then(|()| peer.prepared()), &own)
        }
        StageMessage::HoldKv(held, requester, replies) => {
            let (own, replies) = replies.one_more();
            let asked = peer.hold_kv(held);
            send(StageMessage::HoldKv(held, requester, replies), to);
            reply(asked.and_then(|()| peer.done()), &own)
        }
        StageMessage::Lost(why) => Err(why),
    }
}

/// Computes a step in a stage. There is no tier in a pipeline, so blocks are copied but not swapped.
fn compute(peer: &mut Peer, step: &mut PassedStep) -> Result<(), PipelineError> {
    let started = Instant::now();
    for moved in &step.plan.moves {
        if let BlockMove::Copy { from, to } = *moved {
            peer.copy_block(from, to)?;
        }
    }
    if !step.batch.is_empty() {
        step.activations = peer.forward(&step.batch, &step.activations)?;
    }
    step.busy = step.busy.max(started.elapsed());
    Ok(())
}
