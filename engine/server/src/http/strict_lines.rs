//! A connection on which heads of HTTP/1.1 are read as the standard writes them.
//!
//! The parser takes a bare line feed for the end of a header, and a length beside chunks for none; proxies in front may
//! take both otherwise, and then differ about where a request ends. Both are given to the parser as what it refuses.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What no head may hold, so that the parser answers 400 and closes.
const REFUSED: u8 = 0;
/// Bytes of a header's beginning that are looked at.
const MAX_LINE_BYTES: usize = 64;

/// Passes everything on; what is read is looked at.
#[derive(Debug)]
pub struct StrictLines<T> {
    inner: T,
    place: Place,
}

/// Where in the stream of requests the next byte is.
#[derive(Debug)]
enum Place {
    Head(Head),
    /// So many bytes before the next head.
    Body(u64),
    /// So many bytes before the next chunk's size.
    Chunk(u64),
    /// The line with a chunk's size.
    Size(Line),
    /// Headers after the last chunk.
    Trailers(Line),
    /// Another protocol, or what the parser refuses.
    Unknown,
}

#[derive(Debug, Default)]
struct Head {
    line: Line,
    lines: usize,
    length: Option<u64>,
    chunked: bool,
}

/// The beginning of a line.
#[derive(Debug, Default)]
struct Line {
    start: Vec<u8>,
    /// The last byte was a carriage return.
    returned: bool,
}

/// How a line went on.
enum Step {
    Inside,
    /// It ended, with this at its beginning.
    Ended(Vec<u8>),
    /// It ended as no line may.
    Bare,
}

impl Line {
    fn take(&mut self, byte: u8) -> Step {
        match (byte, self.returned) {
            (b'\n', true) => {
                let mut start = std::mem::take(self).start;
                if start.last() == Some(&b'\r') {
                    start.pop();
                }
                Step::Ended(start)
            }
            (b'\n', false) => Step::Bare,
            _ => {
                if self.start.len() < MAX_LINE_BYTES {
                    self.start.push(byte);
                }
                self.returned = byte == b'\r';
                Step::Inside
            }
        }
    }
}

impl Head {
    /// Notes a header of these that say where the body ends.
    fn note(&mut self, line: &[u8]) {
        self.lines += 1;
        let Some(colon) = line.iter().position(|byte| *byte == b':') else { return };
        let (name, value) = (&line[..colon], line[colon + 1..].trim_ascii());
        if name.eq_ignore_ascii_case(b"content-length") {
            self.length = str::from_utf8(value).ok().and_then(|value| value.parse().ok());
        }
        self.chunked |= name.eq_ignore_ascii_case(b"transfer-encoding");
    }

    fn end(&self) -> Place {
        match self.length {
            _ if self.chunked => Place::Size(Line::default()),
            Some(length @ 1..) => Place::Body(length),
            _ => Place::Head(Head::default()),
        }
    }
}

impl Place {
    /// Looks at `bytes` and goes on behind them. What must not be there is made into what is refused.
    fn pass(&mut self, bytes: &mut [u8]) {
        let mut at = 0;
        while at < bytes.len() {
            if let Place::Body(left) | Place::Chunk(left) = self {
                let passed = (*left).min((bytes.len() - at) as u64);
                *left -= passed;
                at += passed as usize;
            } else {
                self.take(&mut bytes[at]);
                at += 1;
            }
            match self {
                Place::Body(0) => *self = Place::Head(Head::default()),
                Place::Chunk(0) => *self = Place::Size(Line::default()),
                Place::Unknown => return,
                _ => (),
            }
        }
    }

    fn take(&mut self, byte: &mut u8) {
        match self {
            Place::Head(head) => match head.line.take(*byte) {
                Step::Inside => (),
                Step::Ended(line) if line == b"PRI * HTTP/2.0" => *self = Place::Unknown,
                // Before a request empty lines are passed over.
                Step::Ended(line) if line.is_empty() && head.lines == 0 => (),
                Step::Ended(line) if line.is_empty() && head.chunked && head.length.is_some() => self.refuse(byte),
                Step::Ended(line) if line.is_empty() => *self = head.end(),
                Step::Ended(line) => head.note(&line),
                Step::Bare => self.refuse(byte),
            },
            Place::Size(line) => match line.take(*byte) {
                Step::Inside => (),
                Step::Ended(line) => *self = after_size(&line),
                Step::Bare => self.refuse(byte),
            },
            Place::Trailers(line) => match line.take(*byte) {
                Step::Inside => (),
                Step::Ended(line) if line.is_empty() => *self = Place::Head(Head::default()),
                Step::Ended(_) => (),
                Step::Bare => self.refuse(byte),
            },
            Place::Body(_) | Place::Chunk(_) | Place::Unknown => (),
        }
    }

    fn refuse(&mut self, byte: &mut u8) {
        *byte = REFUSED;
        *self = Place::Unknown;
    }
}

/// What follows the line with a chunk's size; the chunk's own end counts with it.
fn after_size(line: &[u8]) -> Place {
    let digits = line.split(|byte| *byte == b';').next().unwrap_or_default().trim_ascii();
    let size = str::from_utf8(digits).ok().and_then(|digits| u64::from_str_radix(digits, 16).ok());
    match size {
        Some(0) => Place::Trailers(Line::default()),
        Some(size) => size.checked_add(2).map_or(Place::Unknown, Place::Chunk),
        None => Place::Unknown,
    }
}

impl<T> StrictLines<T> {
    /// Looks at what is read of `inner`.
    pub fn new(inner: T) -> StrictLines<T> {
        StrictLines { inner, place: Place::Head(Head::default()) }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for StrictLines<T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(context, buffer))?;
        self.place.pass(&mut buffer.filled_mut()[before..]);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for StrictLines<T> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(context, slices)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes as the parser gets them, read whole or one by one.
    fn passed(bytes: &[u8], step: usize) -> Vec<u8> {
        let (mut place, mut bytes) = (Place::Head(Head::default()), bytes.to_vec());
        bytes.chunks_mut(step).for_each(|part| place.pass(part));
        bytes
    }

    const CHUNKED: &str = "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n";

    #[test]
    fn what_the_standard_writes_passes() {
        let requests = [
            "GET / HTTP/1.1\r\nHost: a\r\n\r\n\r\nGET / HTTP/1.1\r\n\r\n".to_owned(),
            "POST / HTTP/1.1\r\ncontent-length:  4 \r\n\r\na\n\n\nGET / HTTP/1.1\r\n\r\n".to_owned(),
            format!("{CHUNKED}A;x=y\r\n{{\n}}\n\n\n\n\n\n\n\r\n0\r\nX: y\r\n\r\nGET / HTTP/1.1\r\n\r\n"),
            "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\n\n\n".to_owned(),
        ];
        for request in requests {
            for step in [1, 7, 1000] {
                assert_eq!(passed(request.as_bytes(), step), request.as_bytes(), "{request:?}");
            }
        }
    }

    #[test]
    fn a_line_that_ends_otherwise_is_refused_wherever_it_is() {
        for request in [
            "GET / HTTP/1.1\nHost: a\r\n\r\n".to_owned(),
            "GET / HTTP/1.1\r\nX: a\nTransfer-Encoding: chunked\r\n\r\n".to_owned(),
            "GET / HTTP/1.1\r\nHost: a\r\n\n".to_owned(),
            "POST / HTTP/1.1\r\nContent-Length: 2\r\n\r\n{}GET / HTTP/1.1\nHost: a\r\n\r\n".to_owned(),
            format!("{CHUNKED}1\r\na\r\n0\r\nX: y\n\r\n"),
            format!("{CHUNKED}0\r\n\r\nGET / HTTP/1.1\n"),
            "POST / HTTP/1.1\r\nTransfer-Encoding: chunked\r\nContent-Length: 2\r\n\r\n{}".to_owned(),
        ] {
            for step in [1, 7, 1000] {
                let refused = passed(request.as_bytes(), step);
                assert_eq!(refused.iter().filter(|byte| **byte == REFUSED).count(), 1, "{request:?}");
            }
        }
    }
}
