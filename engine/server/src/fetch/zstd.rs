//! What zstd has compressed, read as it comes. Tools write layers as several frames, so that each can be read by itself, and
//! between them frames of their own (skippable ones), which are passed over (RFC 8878).

use ruzstd::decoding::errors::{FrameDecoderError, ReadFrameHeaderError};
use ruzstd::decoding::{BlockDecodingStrategy, FrameDecoder};
use std::io::{self, BufRead, Read, copy, sink};

/// Most bytes of what came before that a frame may refer to, all of which are kept: what zstd itself takes without being asked.
const MAX_WINDOW_BYTES: u64 = 128 << 20;
/// First bytes of a frame.
const FRAME: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];
/// Those of one to pass over, behind the first, whose lower half may be anything.
const PASSED_OVER: [u8; 3] = [0x2a, 0x4d, 0x18];

/// Whether what begins so is zstd's.
pub fn is_zstd(start: &[u8]) -> bool {
    start.starts_with(&FRAME)
        || start.first().is_some_and(|first| first >> 4 == 5) && start[1..].starts_with(&PASSED_OVER)
}

/// The content of all frames of a source.
pub struct Frames<R> {
    source: R,
    /// The one that is being read.
    frame: FrameDecoder,
}

impl<R: BufRead> Frames<R> {
    /// Those of `source`.
    pub fn new(source: R) -> Frames<R> {
        let mut frame = FrameDecoder::new();
        frame.set_max_window_size(MAX_WINDOW_BYTES);
        Frames { source, frame }
    }

    /// Begins the next frame that has content; false where there is none.
    fn next(&mut self) -> io::Result<bool> {
        while !self.source.fill_buf()?.is_empty() {
            match self.frame.reset(&mut self.source) {
                Ok(()) => return Ok(true),
                Err(FrameDecoderError::ReadFrameHeaderError(ReadFrameHeaderError::SkipFrame { length, .. })) => {
                    copy(&mut self.source.by_ref().take(length.into()), &mut sink())?;
                }
                Err(error) => return Err(damaged(&error)),
            }
        }
        Ok(false)
    }
}

impl<R: BufRead> Read for Frames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        while self.frame.can_collect() == 0 {
            if !self.frame.is_finished() {
                let a_block = BlockDecodingStrategy::UptoBlocks(1);
                self.frame.decode_blocks(&mut self.source, a_block).map_err(|error| damaged(&error))?;
            } else if !self.next()? {
                return Ok(0);
            }
        }
        self.frame.read(buffer)
    }
}

fn damaged(error: &FrameDecoderError) -> io::Error {
    io::Error::other(format!("a frame of zstd cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// "weights ", 40 times, as `zstd -19 --check` writes it.
    const WEIGHTS: [u8; 28] = [
        0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x68, 0x7d, 0x00, 0x00, 0x40, 0x77, 0x65, 0x69, 0x67, 0x68, 0x74, 0x73, 0x20,
        0x01, 0x00, 0x35, 0xd5, 0xcb, 0x05, 0xf8, 0x27, 0x8d, 0x86,
    ];
    /// "and more", as `zstd` does.
    const MORE: [u8; 21] = [
        0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x58, 0x41, 0x00, 0x00, 0x61, 0x6e, 0x64, 0x20, 0x6d, 0x6f, 0x72, 0x65, 0x07,
        0xb3, 0x26, 0xef,
    ];
    /// A letter, as `zstd --ultra --long=28` does: with a window of 256 MiB.
    const WIDE: [u8; 14] = [0x28, 0xb5, 0x2f, 0xfd, 0x04, 0x90, 0x09, 0x00, 0x00, 0x78, 0x23, 0x11, 0x04, 0x83];

    fn read(bytes: &[u8]) -> io::Result<Vec<u8>> {
        let mut content = Vec::new();
        Frames::new(bytes).read_to_end(&mut content).map(|_| content)
    }

    #[test]
    fn frames_are_read_one_after_the_other_and_those_of_tools_are_passed_over() {
        let passed_over = [&[0x5e, 0x2a, 0x4d, 0x18, 3, 0, 0, 0][..], b"tar"].concat();
        let all = [&passed_over, &WEIGHTS[..], &passed_over, &MORE, &passed_over].concat();
        assert!(is_zstd(&all) && is_zstd(&WEIGHTS) && !is_zstd(b"models/") && !is_zstd(b""));
        assert_eq!(String::from_utf8(read(&all).unwrap()).unwrap(), "weights ".repeat(40) + "and more");
        assert!(read(&[]).unwrap().is_empty());
    }

    #[test]
    fn frames_that_are_cut_damaged_or_look_back_too_far_are_refused() {
        let refusal = |bytes: &[u8]| read(bytes).unwrap_err().to_string();
        (1..WEIGHTS.len()).for_each(|length| drop(refusal(&WEIGHTS[..length])));
        assert!(refusal(&[&MORE[..], b"tar!"].concat()).contains("MagicNumber"), "{}", refusal(b"tar!"));
        assert!(refusal(&WIDE).contains("window_size"), "{}", refusal(&WIDE));
    }
}
