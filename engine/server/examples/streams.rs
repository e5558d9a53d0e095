//! How many tokens a second a server streams: `cargo run --release --example streams -- ADDRESS MODEL STREAMS TOKENS`.
//!
//! Opens the streams at once, one connection each, reads all of them to the end and prints tokens per second, events
//! per second and the time to the first event. The client is as thin as it can be, since it takes its share of the CPU.

use std::net::SocketAddr;
use std::time::{Duration, Instant};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

/// What one stream saw.
struct Seen {
    events: usize,
    first: Duration,
    complete: bool,
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let arguments: Vec<String> = std::env::args().collect();
    let [_, address, model, streams, tokens] = arguments.as_slice() else {
        return eprintln!("usage: streams ADDRESS MODEL STREAMS TOKENS");
    };
    let (Ok(address), Ok(streams), Ok(tokens)) = (address.parse::<SocketAddr>(), streams.parse(), tokens.parse())
    else {
        return eprintln!("ADDRESS is HOST:PORT, STREAMS and TOKENS are numbers");
    };
    let began = Instant::now();
    let all: Vec<_> =
        (0..streams).map(|seed| tokio::spawn(stream(address, model.clone(), seed, tokens, began))).collect();
    let mut seen = Vec::new();
    for one in all {
        match one.await {
            Ok(Ok(one)) => seen.push(one),
            other => eprintln!("a stream failed: {:?}", other.map(|one| one.err())),
        }
    }
    report(&seen, tokens, began.elapsed());
}

fn report(seen: &[Seen], tokens: usize, elapsed: Duration) {
    let complete = seen.iter().filter(|one| one.complete).count();
    let events: usize = seen.iter().map(|one| one.events).sum();
    let mut firsts: Vec<Duration> = seen.iter().map(|one| one.first).collect();
    firsts.sort_unstable();
    let rate = |count: usize| count as f64 / elapsed.as_secs_f64();
    println!("{complete} of {} streams complete in {:.2} s", seen.len(), elapsed.as_secs_f64());
    println!("{:.0} tokens/s, {:.0} events/s", rate(complete * tokens), rate(events));
    if let (Some(median), Some(last)) = (firsts.get(firsts.len() / 2), firsts.last()) {
        println!("first event: median {median:.0?}, last {last:.0?}");
    }
}

async fn stream(address: SocketAddr, model: String, seed: u64, tokens: usize, began: Instant) -> std::io::Result<Seen> {
    let body = format!(
        r#"{{"model":"{model}","prompt":"the engine","max_tokens":{tokens},"ignore_eos":true,"seed":{seed},"stream":true}}"#
    );
    let request = format!(
        "POST /v1/completions HTTP/1.1\r\nHost: bench\r\nContent-Type: application/json\r\nConnection: close\r\n\
         Content-Length: {}\r\n\r\n{body}",
        body.len()
    );
    let mut connection = TcpStream::connect(address).await?;
    connection.write_all(request.as_bytes()).await?;
    let (mut seen, mut buffer) = (Seen { events: 0, first: Duration::ZERO, complete: false }, vec![0; 1 << 16]);
    loop {
        let read = connection.read(&mut buffer).await?;
        if read == 0 {
            return Ok(seen);
        }
        let text = &buffer[..read];
        let events = text.windows(6).filter(|window| window == b"data: ").count();
        if seen.events == 0 && events > 0 {
            seen.first = began.elapsed();
        }
        seen.events += events;
        seen.complete |= text.windows(6).any(|window| window == b"[DONE]");
    }
}
