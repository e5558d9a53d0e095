//! Frames between the stages of a pipeline: kind (u8), length (u32), and so many bytes of payload, little-endian.
//!
//! A length is checked against a bound before the payload is read, and counts in a payload against its length. The
//! first frames carry the version; the sizes after that are the same on both sides.

use std::io::{self, Read, Write};

use windlass_engine_core::executor::Prepared;
use windlass_engine_core::plan::BlockId;

/// Version of the protocol; stages of other versions are refused.
pub(crate) const VERSION: u32 = 4;
/// Numbers of a row besides its tokens and blocks: its first position, its number of draft tokens, of tokens and of
/// blocks.
pub(crate) const ROW_NUMBERS: usize = 4;
/// First bytes of the first payload, by which other programs that connect are told apart.
pub(crate) const MAGIC: [u8; 4] = *b"WLPP";
/// Most bytes of a frame before sizes are agreed on: JSON documents and messages.
pub(crate) const MAX_GREETING_BYTES: usize = 64 << 10;

/// The kind of a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A stage introduces itself: magic, then JSON.
    Join,
    /// How many KV blocks a stage on GPUs has room for after it has loaded its weights.
    Room,
    /// The sizes to build: JSON.
    Assign,
    /// The last command is done.
    Ready,
    /// Prepare one thing that later steps need.
    Prepare,
    /// Progress of preparation.
    Prepared,
    /// Allocate the memory of K and V, or free it.
    Hold,
    /// A block to copy.
    Copy,
    /// A step, and the activations of the stage before.
    Step,
    /// The activations of a stage.
    Activations,
    /// Why a stage cannot go on: a sentence.
    Failed,
    /// There will be no more steps.
    Goodbye,
}

impl Kind {
    const ALL: [Kind; 12] = [
        Kind::Join,
        Kind::Room,
        Kind::Assign,
        Kind::Ready,
        Kind::Prepare,
        Kind::Prepared,
        Kind::Hold,
        Kind::Copy,
        Kind::Step,
        Kind::Activations,
        Kind::Failed,
        Kind::Goodbye,
    ];
}

/// Writes a frame.
pub(crate) fn write(to: &mut impl Write, kind: Kind, payload: &[u8]) -> io::Result<()> {
    let length = u32::try_from(payload.len()).map_err(|_| invalid("the frame is longer than 4 GiB"))?;
    let mut header = [kind as u8, 0, 0, 0, 0];
    header[1..].copy_from_slice(&length.to_le_bytes());
    to.write_all(&header)?;
    to.write_all(payload)?;
    to.flush()
}

/// Reads a frame of at most `bound` bytes into `payload`.
pub(crate) fn read(from: &mut impl Read, bound: usize, payload: &mut Vec<u8>) -> io::Result<Kind> {
    let mut header = [0; 5];
    from.read_exact(&mut header).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => io::Error::new(error.kind(), "the connection was closed"),
        _ => error,
    })?;
    let [kind, length @ ..] = header;
    let kind = Kind::ALL.into_iter().find(|known| *known as u8 == kind);
    let kind = kind.ok_or_else(|| invalid(format!("{} is no kind of frame", header[0])))?;
    let length = u32::from_le_bytes(length) as usize;
    if length > bound {
        return Err(invalid(format!("a frame of {length} bytes; {bound} are the most")));
    }
    payload.clear();
    // The vector grows as bytes arrive, so a false length allocates nothing.
    match from.take(length as u64).read_to_end(payload)? {
        read if read == length => Ok(kind),
        read => Err(io::Error::new(io::ErrorKind::UnexpectedEof, format!("{read} of a frame's {length} bytes"))),
    }
}

/// As [`write`]. If the other side has ended and sent a reason, that is the error.
pub(crate) fn tell(stream: &mut (impl Read + Write), kind: Kind, payload: &[u8], bound: usize) -> Result<(), String> {
    use io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset};
    write(stream, kind, payload).map_err(|error| match error.kind() {
        BrokenPipe | ConnectionAborted | ConnectionReset => last_words(stream, bound).unwrap_or(error.to_string()),
        _ => error.to_string(),
    })
}

/// The reason that the other side sent before it ended, if any.
fn last_words(from: &mut impl Read, bound: usize) -> Option<String> {
    let mut payload = Vec::new();
    while let Ok(kind) = read(from, bound, &mut payload) {
        if kind == Kind::Failed {
            return Some(String::from_utf8_lossy(&payload).into_owned());
        }
    }
    None
}

/// An error of received data.
pub(crate) fn invalid(why: impl Into<String>) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why.into())
}

/// One row of a step.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct StepRow {
    pub tokens: Vec<u32>,
    /// Number of draft tokens, a chain at the end of `tokens`; at most the number of tokens.
    pub draft_tokens: usize,
    pub first_position: u32,
    pub blocks: Vec<BlockId>,
}

/// Appends numbers to a payload.
pub(crate) fn put(payload: &mut Vec<u8>, numbers: impl IntoIterator<Item = u32>) {
    numbers.into_iter().for_each(|number| payload.extend(number.to_le_bytes()));
}

/// Appends activations to a payload.
pub(crate) fn put_floats(payload: &mut Vec<u8>, values: &[f32]) {
    values.iter().for_each(|value| payload.extend(value.to_le_bytes()));
}

/// Reads a payload from its start.
pub(crate) struct Payload<'a>(pub &'a [u8]);

impl Payload<'_> {
    pub fn number(&mut self) -> io::Result<u32> {
        let (number, rest) = self.0.split_first_chunk().ok_or_else(|| invalid("a frame ends within a number"))?;
        self.0 = rest;
        Ok(u32::from_le_bytes(*number))
    }

    /// Reads a count, then so many numbers.
    pub fn numbers(&mut self) -> io::Result<Vec<u32>> {
        let count = self.number()? as usize;
        let (bytes, rest) = count
            .checked_mul(4)
            .and_then(|bytes| self.0.split_at_checked(bytes))
            .ok_or_else(|| invalid(format!("a frame ends before its {count} numbers")))?;
        self.0 = rest;
        Ok(words(bytes).map(u32::from_le_bytes).collect())
    }

    /// Reads the progress of preparation.
    pub fn prepared(&mut self) -> io::Result<Prepared> {
        Ok(Prepared { done: self.number()?, all: self.number()?, advanced: self.number()? != 0 })
    }

    /// Reads the block that is copied, and the one that is overwritten.
    pub fn copy(&mut self) -> io::Result<[BlockId; 2]> {
        Ok([BlockId(self.number()?), BlockId(self.number()?)])
    }

    pub fn row(&mut self) -> io::Result<StepRow> {
        let (first_position, draft_tokens) = (self.number()?, self.number()? as usize);
        let (tokens, blocks) = (self.numbers()?, self.numbers()?);
        if draft_tokens > tokens.len() {
            return Err(invalid(format!("{draft_tokens} of {} tokens are guesses", tokens.len())));
        }
        Ok(StepRow { tokens, draft_tokens, first_position, blocks: blocks.into_iter().map(BlockId).collect() })
    }

    /// Reads the rest of the payload.
    pub fn floats(&mut self) -> io::Result<Vec<f32>> {
        let bytes = std::mem::take(&mut self.0);
        match bytes.len().is_multiple_of(4) {
            true => Ok(words(bytes).map(f32::from_le_bytes).collect()),
            false => Err(invalid("a frame ends within a number")),
        }
    }
}

fn words(bytes: &[u8]) -> impl Iterator<Item = [u8; 4]> {
    bytes.as_chunks().0.iter().copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn frame(kind: Kind, payload: &[u8]) -> Vec<u8> {
        let mut bytes = Vec::new();
        write(&mut bytes, kind, payload).unwrap();
        bytes
    }

    #[test]
    fn frames_come_back_as_they_went() {
        for kind in Kind::ALL {
            let (bytes, mut payload) = (frame(kind, &[1, 2, 3]), vec![9]);
            assert_eq!(read(&mut &bytes[..], 3, &mut payload).unwrap(), kind);
            assert_eq!(payload, [1, 2, 3]);
        }
    }

    #[test]
    fn what_is_no_frame_is_refused() {
        let refusal = |bytes: &[u8], bound| read(&mut &bytes[..], bound, &mut Vec::new()).unwrap_err().to_string();
        assert_eq!(refusal(&frame(Kind::Step, &[0; 5]), 4), "a frame of 5 bytes; 4 are the most");
        assert_eq!(refusal(b"GET / HTTP/1.1", 1 << 30), "71 is no kind of frame");
        assert_eq!(refusal(&frame(Kind::Step, &[0; 5])[..8], 5), "3 of a frame's 5 bytes");
        assert_eq!(refusal(&[0; 3], 5), "the connection was closed");
    }

    #[test]
    fn payloads_are_read_to_their_end_and_no_further() {
        let mut bytes = Vec::new();
        put(&mut bytes, [7, 8]);
        put(&mut bytes, [40, 1, 2, 5, 6, 2, 3, 4]);
        put_floats(&mut bytes, &[0.5]);
        let mut payload = Payload(&bytes);
        assert_eq!(payload.copy().unwrap(), [BlockId(7), BlockId(8)]);
        let blocks = vec![BlockId(3), BlockId(4)];
        let row = StepRow { tokens: vec![5, 6], draft_tokens: 1, first_position: 40, blocks };
        assert_eq!(payload.row().unwrap(), row);
        assert_eq!(payload.floats().unwrap(), [0.5]);
        assert!(payload.number().is_err());
        let mut wrong = Vec::new();
        put(&mut wrong, [40, 3, 2, 5, 6, 0]);
        assert_eq!(Payload(&wrong).row().unwrap_err().to_string(), "3 of 2 tokens are guesses");
        // A count beyond the payload allocates nothing.
        let mut short = Vec::new();
        put(&mut short, [u32::MAX, 1]);
        assert_eq!(Payload(&short).numbers().unwrap_err().to_string(), "a frame ends before its 4294967295 numbers");
        assert!(Payload(&[0; 6]).floats().is_err());
    }
}
