//! Requests over time: read from a trace, and varied.

use std::io::BufRead;

/// A request of a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Request {
    /// Seconds since the start.
    pub at: f64,
    /// Tokens of the prompt, at least 1.
    pub prompt: u32,
    /// Tokens to generate, at least 1.
    pub output: u32,
}

/// Why a trace was not read.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file ended or broke.
    #[error("the trace cannot be read")]
    Read(#[from] std::io::Error),
    /// A line is not `milliseconds,prompt,output`.
    #[error(
        "line {line} of the trace: {problem}; each line after the first is milliseconds,prompt tokens,output tokens"
    )]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        problem: String,
    },
    /// More than [`MAX_REQUESTS`] lines.
    #[error("the trace has more than {MAX_REQUESTS} requests")]
    TooLong,
}

/// Most requests of a trace that are read.
pub const MAX_REQUESTS: usize = 2_000_000;
/// Longest prompt and answer that are read: what exceeds it is no sequence of any engine.
const MAX_TOKENS: u32 = 1 << 22;

/// Reads lines of `milliseconds,prompt,output` below a heading, and sorts them by time.
///
/// # Errors
/// A line has another form, or there are too many.
pub fn read(source: impl BufRead) -> Result<Vec<Request>, Error> {
    let mut requests = Vec::new();
    for (index, line) in source.lines().enumerate().skip(1) {
        let line = line?;
        if line.trim().is_empty() {
            continue;
        }
        if requests.len() == MAX_REQUESTS {
            return Err(Error::TooLong);
        }
        requests.push(parse(&line).map_err(|problem| Error::Line { line: index + 1, problem })?);
    }
    requests.sort_by(|left, right| left.at.total_cmp(&right.at));
    Ok(requests)
}

fn parse(line: &str) -> Result<Request, String> {
    let mut numbers = line.split(',').map(|field| field.trim().parse::<f64>());
    let mut number = |name: &str, most: f64| match numbers.next() {
        Some(Ok(value)) if (0.0..=most).contains(&value) => Ok(value),
        Some(Ok(value)) => Err(format!("{name} {value} is not within 0 and {most}")),
        Some(Err(_)) => Err(format!("{name} is not a number")),
        None => Err(format!("{name} is missing")),
    };
    let at = number("milliseconds", 1e12)? / 1000.0;
    let prompt = number("prompt", MAX_TOKENS.into())?.max(1.0) as u32;
    let output = number("output", MAX_TOKENS.into())?.max(1.0) as u32;
    Ok(Request { at, prompt, output })
}

/// Chats that begin `per_second` on average for so many seconds: prompts of 150 to 1,850 tokens, answers of 40 to 360.
pub fn chats(seconds: f64, per_second: f64) -> Vec<Request> {
    let mut requests = Vec::new();
    let (mut at, mut seed) = (0.0, 0);
    loop {
        let mut even = || {
            seed += 1;
            fraction(seed)
        };
        at -= (1.0 - even()).ln() / per_second;
        if at >= seconds || requests.len() == MAX_REQUESTS {
            return requests;
        }
        let (prompt, output) = (150.0 + 1700.0 * even(), 40.0 + 320.0 * even());
        requests.push(Request { at, prompt: prompt as u32, output: output as u32 });
    }
}

/// Ways to vary a trace.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Variant {
    /// So many times the requests.
    Scaled(f64),
    /// So many times the requests, and three times that in the first minute of every ten.
    Bursty(f64),
    /// The trace four times over, from a fifth of the requests at night to all of them, so many times, at noon.
    Diurnal(f64),
}

/// Each copy of a request comes within this time of the original, seconds.
const SPREAD: f64 = 10.0;

impl Variant {
    /// The trace varied, in order of time. Equal input gives equal output.
    pub fn of(self, trace: &[Request]) -> Vec<Request> {
        let length = trace.last().map_or(0.0, |last| last.at) + 1.0;
        let rounds = if matches!(self, Variant::Diurnal(_)) { 4 } else { 1 };
        let mut requests = Vec::new();
        for round in 0..rounds {
            for (index, request) in trace.iter().enumerate() {
                let at = request.at + f64::from(round) * length;
                let copies = self.copies(at, length * f64::from(rounds));
                let seed = (round as u64) << 40 | (index as u64) << 8;
                let whole = (copies + fraction(seed)) as u64;
                let copy = |number: u64| Request { at: at + SPREAD * shift(seed, number), ..*request };
                requests.extend((0..whole.min(255)).map(copy));
            }
        }
        requests.sort_by(|left, right| left.at.total_cmp(&right.at));
        requests
    }

    /// Expected copies of a request at `at` of `length` seconds.
    fn copies(self, at: f64, length: f64) -> f64 {
        match self {
            Variant::Scaled(times) => times,
            Variant::Bursty(times) => times * if at % 600.0 < 60.0 { 3.0 } else { 1.0 },
            Variant::Diurnal(times) => times * (0.6 - 0.4 * (at / length * std::f64::consts::TAU).cos()),
        }
    }
}

/// The original stays where it is.
fn shift(seed: u64, number: u64) -> f64 {
    if number == 0 { 0.0 } else { fraction(seed + number) }
}

/// An even number in 0 to 1 that depends on nothing but `seed` (SplitMix64).
fn fraction(seed: u64) -> f64 {
    let mut z = seed.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    ((z ^ (z >> 31)) >> 11) as f64 / (1_u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steady(count: u32) -> Vec<Request> {
        (0..count).map(|second| Request { at: f64::from(second), prompt: 100, output: 10 }).collect()
    }

    #[test]
    fn lines_are_read_and_sorted() {
        let read = read("ms,prompt,output\n2000,10,3\n\n500.5,7,0\n".as_bytes()).expect("a trace");
        let expected = [Request { at: 0.5005, prompt: 7, output: 1 }, Request { at: 2.0, prompt: 10, output: 3 }];
        assert_eq!(read, expected);
    }

    #[test]
    fn a_line_of_another_form_is_named() {
        for (text, word) in
            [("h\n1,2", "output is missing"), ("h\n1,x,2", "prompt is not a number"), ("h\n-1,1,1", "within")]
        {
            let error = read(text.as_bytes()).expect_err("refused").to_string();
            assert!(error.contains(word) && error.contains("line 2"), "{error}");
        }
    }

    #[test]
    fn a_scaled_trace_has_so_many_times_the_requests_and_is_the_same_each_time() {
        let trace = steady(4000);
        let scaled = Variant::Scaled(2.5).of(&trace);
        assert!((9800..10_200).contains(&scaled.len()), "{}", scaled.len());
        assert_eq!(scaled, Variant::Scaled(2.5).of(&trace));
        assert_eq!(Variant::Scaled(1.0).of(&trace), trace);
    }

    #[test]
    fn chats_come_at_their_rate() {
        let chats = chats(1000.0, 3.0);
        assert!((2800..3200).contains(&chats.len()), "{}", chats.len());
        assert!(chats.is_sorted_by(|left, right| left.at <= right.at));
    }

    #[test]
    fn bursts_and_days_have_their_shape() {
        let within = |requests: &[Request], from: f64, to: f64| {
            requests.iter().filter(|request| (from..to).contains(&request.at)).count() as f64
        };
        let bursty = Variant::Bursty(2.0).of(&steady(3600));
        assert!(within(&bursty, 600.0, 660.0) > 2.5 * within(&bursty, 700.0, 760.0));
        let day = Variant::Diurnal(2.0).of(&steady(1000));
        assert!(within(&day, 1900.0, 2100.0) > 4.0 * within(&day, 0.0, 200.0));
    }
}
