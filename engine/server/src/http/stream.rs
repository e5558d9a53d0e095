//! Server-sent events: pieces as they come, a comment now and then while none do, an error where it ends badly.

use super::respond::{EventBuffer, Events};
use super::unread;
use crate::answer::{Answer, Interrupted, Piece};
use crate::config::Patience;
use axum::body::{Body, Bytes};
use axum::http::{HeaderValue, header};
use axum::response::Response;
use futures::stream::{BoxStream, ReadyChunks};
use futures::{Stream, StreamExt};
use tokio::time::{Instant, Interval, interval_at};
use windlass_engine_api::generation::StreamOptions;
use windlass_engine_api::usage::Usage;

/// Most pieces put into one write when the client is behind.
const MAX_PIECES_PER_WRITE: usize = 64;

/// A piece with the index of its choice.
type Indexed = (u32, Result<Piece, Interrupted>);

/// A streamed response with one choice per answer. After a silence a comment says that it is alive; a client that stops
/// reading ends its answers.
pub fn respond(answers: Vec<Answer>, events: impl Events, options: StreamOptions, patience: &Patience) -> Response {
    let keep_alive = patience.keep_alive;
    let stream = EventStream {
        pieces: merge(answers).ready_chunks(MAX_PIECES_PER_WRITE),
        keep_alive: interval_at(Instant::now() + keep_alive, keep_alive),
        events,
        options,
        usage: Usage::default(),
        done: false,
    };
    let mut response = Response::new(Body::from_stream(unread::watch(Box::pin(stream.into_bytes()), patience.read)));
    let headers = response.headers_mut();
    headers.insert(header::CONTENT_TYPE, HeaderValue::from_static("text/event-stream; charset=utf-8"));
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-cache"));
    // Keeps nginx from collecting events before it passes them on.
    headers.insert("x-accel-buffering", HeaderValue::from_static("no"));
    response
}

/// All answers' pieces in the order in which they come.
fn merge(answers: Vec<Answer>) -> BoxStream<'static, Indexed> {
    let indexed = |(index, answer): (u32, Answer)| answer.into_pieces().map(move |piece| (index, piece)).boxed();
    let mut streams: Vec<BoxStream<'static, Indexed>> = (0..).zip(answers).map(indexed).collect();
    match streams.len() {
        1 => streams.remove(0),
        _ => futures::stream::select_all(streams).boxed(),
    }
}

struct EventStream<E> {
    pieces: ReadyChunks<BoxStream<'static, Indexed>>,
    keep_alive: Interval,
    events: E,
    options: StreamOptions,
    /// Of the choices that have ended.
    usage: Usage,
    done: bool,
}

impl<E: Events> EventStream<E> {
    fn into_bytes(self) -> impl Stream<Item = Bytes> {
        futures::stream::unfold(self, |mut stream| async move {
            let bytes = stream.next_write().await?;
            Some((bytes, stream))
        })
    }

    async fn next_write(&mut self) -> Option<Bytes> {
        if self.done {
            return None;
        }
        tokio::select! {
            biased;
            pieces = self.pieces.next() => {
                let bytes = self.write(pieces);
                if !bytes.is_empty() {
                    self.keep_alive.reset();
                }
                Some(bytes)
            }
            _ = self.keep_alive.tick() => Some(Bytes::from_static(b": keep-alive\n\n")),
        }
    }

    /// Events for some pieces, or for the end.
    fn write(&mut self, pieces: Option<Vec<Indexed>>) -> Bytes {
        let mut out = EventBuffer::default();
        match pieces {
            Some(pieces) => pieces.into_iter().for_each(|piece| self.write_piece(piece, &mut out)),
            None => self.write_end(&mut out),
        }
        Bytes::from(out.0)
    }

    fn write_piece(&mut self, (index, piece): Indexed, out: &mut EventBuffer) {
        match piece {
            // An error has ended the stream; what came with it is not shown.
            _ if self.done => (),
            Ok(piece) => {
                let usage = self.options.continuous_usage_stats.then_some(piece.usage);
                self.events.piece(index, &piece, usage, out);
                if piece.end.is_some() {
                    self.usage = self.usage + piece.usage;
                }
            }
            Err(interrupted) => {
                self.events.error(interrupted.into(), out);
                self.done = true;
            }
        }
    }

    fn write_end(&mut self, out: &mut EventBuffer) {
        if self.options.include_usage {
            self.events.usage(self.usage, out);
        }
        self.events.done(out);
        self.done = true;
    }
}
