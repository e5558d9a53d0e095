//! A process that computes an earlier stage for the leader of a pipeline.

use std::error::Error;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;
use std::time::{Duration, Instant};

use socket2::{SockRef, TcpKeepalive};
use windlass_engine_core::draft::{DraftTree, MAX_DRAFT_TOKENS};
use windlass_engine_core::executor::{Geometry, Prepared};

use super::greeting::{Assign, Join};
use super::wire::{self, Kind, Payload};
use super::{PipelineError, frame_bound};
use crate::batch::bounds;
use crate::batch::{Batch, Logits};
use crate::decoder::StageModel;
use crate::panic::message;

/// Pause between attempts to reach the leader.
const RETRY: Duration = Duration::from_millis(200);
/// How long the host of a silent leader counts as alive.
const KEEP_ALIVE: Duration = Duration::from_secs(30);

/// A connection to the leader.
#[derive(Debug)]
pub(crate) struct Worker {
    stream: TcpStream,
    leader: SocketAddr,
    payload: Vec<u8>,
}

impl Worker {
    /// Joins the pipeline of the leader at `leader` (host and port); waits up to `patience` for the leader.
    pub fn join(leader: &str, own: &Join, patience: Duration) -> Result<Worker, PipelineError> {
        let deadline = Instant::now() + patience;
        let (stream, leader) = loop {
            match connect(leader) {
                Ok(connected) => break connected,
                Err(_) if Instant::now() < deadline => thread::sleep(RETRY),
                Err(source) => {
                    let (leader, seconds) = (leader.to_owned(), patience.as_secs());
                    return Err(PipelineError::NoLeader { leader, seconds, source });
                }
            }
        };
        let mut worker = Worker { stream, leader, payload: Vec::new() };
        worker.send(Kind::Join, &own.to_payload())?;
        Ok(worker)
    }

    /// Tells the leader how many KV blocks there is room for.
    pub fn offer(&mut self, blocks: u32) -> Result<(), PipelineError> {
        let mut payload = Vec::new();
        wire::put(&mut payload, [blocks]);
        self.send(Kind::Room, &payload)
    }

    /// Waits until all stages have joined, and returns the sizes to build.
    pub fn assignment(&mut self) -> Result<Assign, PipelineError> {
        match self.receive(wire::MAX_GREETING_BYTES)? {
            Kind::Assign => Assign::parse(&self.payload).map_err(|why| self.failed(why)),
            kind => Err(self.unexpected(kind)),
        }
    }

    /// Tells the leader why this stage ends.
    pub fn give_up(&mut self, why: &str) {
        // The leader may have ended first.
        let _ = wire::write(&mut self.stream, Kind::Failed, why.as_bytes());
    }

    /// Computes steps until the leader says goodbye.
    pub fn work<M: StageModel>(mut self, mut model: M, geometry: &Geometry) -> Result<(), PipelineError> {
        let bound = frame_bound(geometry, model.hidden());
        self.send(Kind::Ready, &[])?;
        let mut batch = Batch::default();
        loop {
            let answer = match self.receive(bound)? {
                Kind::Goodbye => return Ok(()),
                Kind::Prepare => prepare(&mut model).map(|prepared| Some((Kind::Prepared, prepared))),
                Kind::Hold => hold_kv(&self.payload, &mut model).map(|()| Some((Kind::Ready, Vec::new()))),
                Kind::Copy => copy_block(&self.payload, &mut model, geometry).map(|()| None),
                Kind::Step => forward(&self.payload, &mut batch, &mut model, geometry)
                    .map(|activations| Some((Kind::Activations, floats(&activations)))),
                kind => return Err(self.unexpected(kind)),
            };
            match answer {
                Ok(None) => {}
                Ok(Some((kind, payload))) => self.send(kind, &payload)?,
                Err(why) => {
                    self.give_up(&why);
                    return Err(PipelineError::Step(why));
                }
            }
        }
    }

    fn send(&mut self, kind: Kind, payload: &[u8]) -> Result<(), PipelineError> {
        let told = wire::tell(&mut self.stream, kind, payload, wire::MAX_GREETING_BYTES);
        told.map_err(|why| self.failed(why))
    }

    fn receive(&mut self, bound: usize) -> Result<Kind, PipelineError> {
        wire::read(&mut self.stream, bound, &mut self.payload).map_err(|error| self.failed(error))
    }

    fn unexpected(&self, kind: Kind) -> PipelineError {
        match kind {
            Kind::Failed => self.failed(String::from_utf8_lossy(&self.payload)),
            kind => self.failed(format!("it sent {kind:?}, which is not due")),
        }
    }

    fn failed(&self, why: impl ToString) -> PipelineError {
        PipelineError::Leader { address: self.leader, why: why.to_string() }
    }
}

fn connect(leader: &str) -> std::io::Result<(TcpStream, SocketAddr)> {
    let Some(address) = leader.to_socket_addrs()?.next() else {
        return Err(std::io::Error::new(std::io::ErrorKind::NotFound, "the name has no address"));
    };
    let stream = TcpStream::connect(address)?;
    stream.set_nodelay(true)?;
    SockRef::from(&stream).set_tcp_keepalive(&TcpKeepalive::new().with_time(KEEP_ALIVE).with_interval(KEEP_ALIVE))?;
    Ok((stream, address))
}

fn floats(values: &[f32]) -> Vec<u8> {
    let mut payload = Vec::new();
    wire::put_floats(&mut payload, values);
    payload
}

fn prepare<M: StageModel>(model: &mut M) -> Result<Vec<u8>, String> {
    let Prepared { done, all, advanced } = compute(|| model.prepare())?;
    let mut payload = Vec::new();
    wire::put(&mut payload, [done, all, u32::from(advanced)]);
    Ok(payload)
}

fn hold_kv<M: StageModel>(payload: &[u8], model: &mut M) -> Result<(), String> {
    let held = Payload(payload).number().map_err(|error| error.to_string())?;
    compute(|| model.hold_kv(held != 0))
}

fn copy_block<M: StageModel>(payload: &[u8], model: &mut M, geometry: &Geometry) -> Result<(), String> {
    let [from, to] = Payload(payload).copy().map_err(|error| error.to_string())?;
    match [from, to].into_iter().find(|block| block.0 >= geometry.blocks) {
        Some(block) => Err(format!("a copy names block {}; there are {}", block.0, geometry.blocks)),
        None => compute(|| model.copy_block(from, to)),
    }
}

/// Computes a step. Its rows are checked like those of our own scheduler.
fn forward<M: StageModel>(
    payload: &[u8],
    batch: &mut Batch,
    model: &mut M,
    geometry: &Geometry,
) -> Result<Vec<f32>, String> {
    let mut payload = Payload(payload);
    let wrong = |error: std::io::Error| error.to_string();
    batch.clear();
    for _ in 0..payload.number().map_err(wrong)? {
        let row = payload.row().map_err(wrong)?;
        bounds::check(geometry, row.first_position, row.tokens.len(), &row.blocks)?;
        row.tokens.iter().try_for_each(|&token| bounds::check_token(geometry, token))?;
        if row.draft_tokens > MAX_DRAFT_TOKENS {
            return Err(format!("{} guesses in a row; {MAX_DRAFT_TOKENS} are the most", row.draft_tokens));
        }
        let (known, draft_tokens) = row.tokens.split_at(row.tokens.len() - row.draft_tokens);
        let draft = DraftTree::chain(draft_tokens.iter().copied());
        batch.push_drafted(known.iter().copied(), &draft, row.first_position, &row.blocks, Logits::NONE);
    }
    let (tokens, hidden) = (batch.tokens().len(), model.hidden());
    let activations = payload.floats().map_err(wrong)?;
    if tokens == 0 || tokens > geometry.max_step_tokens as usize {
        return Err(format!("a step of {tokens} tokens; {} are the most", geometry.max_step_tokens));
    }
    let expected = if model.embeds() { 0 } else { tokens * hidden };
    if activations.len() != expected {
        return Err(format!("{} activations came with {tokens} tokens, not {expected}", activations.len()));
    }
    compute(|| {
        model.forward_behind(batch, &activations)?;
        model.activations(tokens)
    })
}

fn compute<T, E: Error>(task: impl FnOnce() -> Result<T, E>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(task)) {
        Ok(done) => done.map_err(|error| error.to_string()),
        Err(panic) => Err(message(panic.as_ref())),
    }
}

#[cfg(test)]
mod tests {
    use std::iter;
    use std::net::TcpListener;

    use super::*;

    #[test]
    fn a_leader_that_refuses_is_heard_though_it_is_gone_before_the_next_frame() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let leader = listener.local_addr().unwrap();
        let mut worker = {
            let (stream, _) = connect(&leader.to_string()).unwrap();
            Worker { stream, leader, payload: Vec::new() }
        };
        let (mut stream, _) = listener.accept().unwrap();
        wire::write(&mut stream, Kind::Failed, b"it has another model").unwrap();
        wire::write(&mut stream, Kind::Goodbye, &[]).unwrap();
        drop(stream);
        let refusal = iter::repeat_with(|| worker.offer(1)).find_map(Result::err).unwrap().to_string();
        assert_eq!(refusal, format!("the leader of the pipeline, at {leader}, failed: it has another model"));
    }
}
