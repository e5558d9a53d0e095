//! The way of a step through the stages of other processes: each has a thread here, which waits for it.
//!
//! So every stage computes a step of its own, and the next one lies ready for it. What is ordered stays in order.

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

/// What goes from stage to stage.
pub(crate) enum StageMessage {
    /// A step to compute.
    Step(Box<PassedStep>),
    /// A piece of what later steps would wait for is to be made.
    Prepare(Reply<Prepared>, Replies<Prepared>),
    /// Memory of keys and values is to be taken, or given back.
    HoldKv(bool, Reply<()>, Replies<()>),
    /// A stage was lost, and with it all that follows.
    Lost(String),
}

/// What stages will say that do the same at the same time.
pub(crate) struct Replies<T>(Vec<Receiver<Result<T, String>>>);

impl<T> Replies<T> {
    /// Where one more stage says it.
    fn one_more(mut self) -> (Reply<T>, Self) {
        let (says, said) = channel();
        self.0.push(said);
        (says, self)
    }

    /// Waits for all of them, and joins what they say with what is known.
    pub fn join(self, own: Result<T, String>, both: impl Fn(T, T) -> T) -> Result<T, String> {
        let gone = |_| "the thread of a stage has ended".to_owned();
        self.0.into_iter().try_fold(own?, |all, said| Ok(both(all, said.recv().map_err(gone)??)))
    }
}

/// The threads before the last stage.
pub(crate) struct Chain {
    /// What comes out of them.
    pub messages: Receiver<StageMessage>,
    /// They end when there are no more orders.
    pub threads: Vec<JoinHandle<()>>,
}

/// Has orders go through the `earlier` stages. `check` says whether a row can be computed on such devices.
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

/// Where plans become batches, which all stages compute.
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

/// Has a stage do what comes, one thing after the other, and passes it on.
fn relay(peer: &mut Peer, from: &Receiver<StageMessage>, to: &Sender<StageMessage>) {
    if let Some(why) = from.iter().find_map(|message| guarded(|| pass(peer, message, to)).flatten().err()) {
        send(StageMessage::Lost(why.clone()), to);
        // Those before it do not hear of it: what they send on is for nobody.
        from.iter().for_each(|message| refuse(message, &why));
    }
}

/// If what comes behind is gone, it has said why.
fn send(message: StageMessage, to: &Sender<StageMessage>) {
    let _ = to.send(message);
}

/// Tells who waits for it why nothing comes of it.
fn refuse(message: StageMessage, why: &str) {
    // Whoever asked may have gone.
    match message {
        StageMessage::Prepare(to, _) => drop(to.send(Err(why.to_owned()))),
        StageMessage::HoldKv(_, to, _) => drop(to.send(Err(why.to_owned()))),
        StageMessage::Step(_) | StageMessage::Lost(_) => {}
    }
}

/// What is asked of all stages at once goes on also where it fails here: the last one joins what they say.
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

/// There is no tier, so blocks are copied and not moved otherwise.
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
