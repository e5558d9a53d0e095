//! The leader's connection to an earlier stage of the pipeline.

use std::io;
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use windlass_engine_core::executor::{Geometry, Prepared};
use windlass_engine_core::plan::BlockId;

use super::greeting::{Assign, Join};
use super::wire::{self, Kind};
use super::{PipelineError, frame_bound};
use crate::batch::Batch;

/// Longest time of a step in a stage before the stage counts as lost.
const STEP_TIMEOUT: Duration = Duration::from_secs(60);
/// Longest time until a new connection has introduced itself.
const GREETING_TIMEOUT: Duration = Duration::from_secs(5);
/// How often the leader looks for new connections.
const POLL: Duration = Duration::from_millis(20);

/// A stage that has joined.
#[derive(Debug)]
pub(crate) struct Peer {
    stage: u32,
    address: SocketAddr,
    stream: TcpStream,
    /// Most bytes of a frame from it.
    bound: usize,
    payload: Vec<u8>,
}

/// Where earlier stages join, and how long to wait for them.
#[derive(Debug)]
pub struct Gathering {
    /// The socket that they connect to.
    pub listener: TcpListener,
    /// Number of stages of the pipeline, the leader's included.
    pub stages: u32,
    /// How long they may take to join and to load.
    pub patience: Duration,
}

impl Gathering {
    /// Waits until every earlier stage has joined with the same model as `own`, and returns them in order.
    pub(crate) fn gather(&self, own: &Join) -> Result<Vec<Peer>, PipelineError> {
        let listen = |source| PipelineError::Listen { source };
        self.listener.set_nonblocking(true).map_err(listen)?;
        let (deadline, earlier) = (Instant::now() + self.patience, self.stages as usize - 1);
        let mut peers: Vec<Peer> = Vec::new();
        while peers.len() < earlier {
            match self.listener.accept() {
                Ok((stream, address)) => match self.greet(stream, address, own, &peers) {
                    Ok(peer) => peers.push(peer),
                    // It is not a stage.
                    Err(PipelineError::Stranger) => {}
                    Err(error) => return Err(error),
                },
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    thread::sleep(POLL);
                }
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    let joined = peers.iter().map(|peer| peer.stage + 1).collect();
                    let (stages, seconds) = (self.stages, self.patience.as_secs());
                    return Err(PipelineError::Missing { joined, stages, seconds });
                }
                Err(source) => return Err(listen(source)),
            }
        }
        peers.sort_by_key(|peer| peer.stage);
        Ok(peers)
    }

    fn greet(&self, stream: TcpStream, address: SocketAddr, own: &Join, known: &[Peer]) -> Result<Peer, PipelineError> {
        let stranger = |_| PipelineError::Stranger;
        stream.set_nonblocking(false).map_err(stranger)?;
        stream.set_nodelay(true).map_err(stranger)?;
        stream.set_read_timeout(Some(GREETING_TIMEOUT)).map_err(stranger)?;
        let (bound, mut payload) = (wire::MAX_GREETING_BYTES, Vec::new());
        match wire::read(&mut &stream, bound, &mut payload).map_err(stranger)? {
            Kind::Join if payload.starts_with(&wire::MAGIC) => {}
            _ => return Err(PipelineError::Stranger),
        }
        let join = Join::parse(&payload);
        let stage = join.as_ref().map_or(0, |join| join.node_rank.saturating_sub(1));
        let mut peer = Peer { stage, address, stream, bound, payload };
        let refusal = match &join {
            Err(why) => Some(why.clone()),
            Ok(join) => own
                .difference(join)
                .or_else(|| known.iter().any(|known| known.stage == stage).then(|| "its place is taken".to_owned())),
        };
        match refusal {
            None => Ok(peer),
            Some(why) => {
                // It may be gone already; the error is returned here.
                let _ = wire::write(&mut peer.stream, Kind::Failed, why.as_bytes());
                Err(peer.failed(why))
            }
        }
    }
}

impl Peer {
    /// Waits until a stage on GPUs has loaded its weights, and returns how many KV blocks it has room for beside them.
    pub fn room_blocks(&mut self, patience: Duration) -> Result<u32, PipelineError> {
        self.wait_at_most(patience)?;
        self.expect(Kind::Room)?;
        wire::Payload(&self.payload).number().map_err(|error| self.failed(error))
    }

    /// Sends the sizes to build.
    pub fn assign(&mut self, stages: u32, geometry: &Geometry, hidden: usize) -> Result<(), PipelineError> {
        let assign = Assign::new(self.stage, stages, geometry);
        self.send(Kind::Assign, assign.to_json().as_bytes())?;
        self.bound = frame_bound(geometry, hidden);
        Ok(())
    }

    /// Waits until the stage is built.
    pub fn ready(&mut self, patience: Duration) -> Result<(), PipelineError> {
        self.wait_at_most(patience)?;
        self.expect(Kind::Ready)?;
        self.wait_at_most(STEP_TIMEOUT)
    }

    /// Asks it to prepare one thing that later steps need.
    pub fn prepare(&mut self) -> Result<(), PipelineError> {
        self.send(Kind::Prepare, &[])
    }

    /// Waits until it is prepared, and returns its progress.
    pub fn prepared(&mut self) -> Result<Prepared, PipelineError> {
        self.expect(Kind::Prepared)?;
        wire::Payload(&self.payload).prepared().map_err(|error| self.failed(error))
    }

    /// Asks it to allocate the memory of K and V if `held`, else to free it.
    pub fn hold_kv(&mut self, held: bool) -> Result<(), PipelineError> {
        let mut payload = Vec::new();
        wire::put(&mut payload, [u32::from(held)]);
        self.send(Kind::Hold, &payload)
    }

    /// Waits until it has run the last command.
    pub fn done(&mut self) -> Result<(), PipelineError> {
        self.expect(Kind::Ready)
    }

    /// Copies a block in the stage.
    pub fn copy_block(&mut self, from: BlockId, to: BlockId) -> Result<(), PipelineError> {
        let mut payload = Vec::new();
        wire::put(&mut payload, [from.0, to.0]);
        self.send(Kind::Copy, &payload)
    }

    /// Computes its layers: returns the activations after them, given those before them. The first stage embeds the
    /// tokens itself.
    pub fn forward(&mut self, batch: &Batch, activations: &[f32]) -> Result<Vec<f32>, PipelineError> {
        self.send(Kind::Step, &step_payload(batch, activations))?;
        self.expect(Kind::Activations)?;
        wire::Payload(&self.payload).floats().map_err(|error| self.failed(error))
    }

    fn send(&mut self, kind: Kind, payload: &[u8]) -> Result<(), PipelineError> {
        wire::tell(&mut self.stream, kind, payload, self.bound).map_err(|why| self.failed(why))
    }

    fn expect(&mut self, wanted: Kind) -> Result<(), PipelineError> {
        let kind = wire::read(&mut self.stream, self.bound, &mut self.payload).map_err(|error| self.failed(error))?;
        match kind {
            Kind::Failed => Err(self.failed(String::from_utf8_lossy(&self.payload))),
            kind if kind == wanted => Ok(()),
            kind => Err(self.failed(format!("it sent {kind:?} where {wanted:?} was due"))),
        }
    }

    fn wait_at_most(&self, patience: Duration) -> Result<(), PipelineError> {
        self.stream.set_read_timeout(Some(patience)).map_err(|error| self.failed(error))
    }

    fn failed(&self, why: impl ToString) -> PipelineError {
        PipelineError::Stage { node_rank: self.stage + 1, address: self.address, why: why.to_string() }
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        // It may be gone already.
        let _ = wire::write(&mut self.stream, Kind::Goodbye, &[]);
    }
}

/// The payload of a step: its rows, and the activations that it starts from.
pub(super) fn step_payload(batch: &Batch, activations: &[f32]) -> Vec<u8> {
    let mut payload = Vec::new();
    wire::put(&mut payload, [batch.rows().len() as u32]);
    let mut tokens = batch.tokens();
    for row in batch.rows() {
        let (own, rest) = tokens.split_at(row.tokens);
        tokens = rest;
        wire::put(&mut payload, [row.first_position, row.draft_tokens as u32, own.len() as u32]);
        wire::put(&mut payload, own.iter().copied());
        wire::put(&mut payload, [row.blocks.len() as u32]);
        wire::put(&mut payload, row.blocks.iter().copied());
    }
    wire::put_floats(&mut payload, activations);
    payload
}
