//! How far a download is: a bar on a terminal, a line every few seconds elsewhere.

use indicatif::{HumanBytes, ProgressBar, ProgressStyle};
use std::io::IsTerminal;
use std::time::{Duration, Instant};
use tracing::info;

/// Time between lines.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// Tells about one download.
pub enum Progress {
    /// For people.
    Bar(ProgressBar),
    /// For logs.
    Lines {
        /// Bytes expected, if known.
        total: Option<u64>,
        /// When to write the next line.
        next: Instant,
    },
}

impl Progress {
    /// Starts at `done` of `total` bytes.
    pub fn start(done: u64, total: Option<u64>) -> Progress {
        if !std::io::stderr().is_terminal() {
            return Progress::Lines { total, next: Instant::now() + LINE_EVERY };
        }
        let bar = total.map_or_else(ProgressBar::no_length, ProgressBar::new);
        let template = "{bar:40} {bytes} of {total_bytes}, {bytes_per_sec}, {eta} left";
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_position(done);
        Progress::Bar(bar)
    }

    /// `done` bytes are there.
    pub fn at(&mut self, done: u64) {
        match self {
            Progress::Bar(bar) => bar.set_position(done),
            Progress::Lines { total, next } if Instant::now() >= *next => {
                *next = Instant::now() + LINE_EVERY;
                let total = total.map_or("an unknown size".to_owned(), |total| HumanBytes(total).to_string());
                info!("fetched {} of {total}", HumanBytes(done));
            }
            Progress::Lines { .. } => (),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Progress::Bar(bar) = self {
            bar.finish_and_clear();
        }
    }
}
