//! HTTP/2 frames on a connection to a server as it listens: it may refuse what it likes, and ends the connection when its
//! client has said everything.
#![no_main]

use std::net::SocketAddr;
use std::sync::LazyLock;
use std::time::Duration;

use clap::Parser;
use libfuzzer_sys::fuzz_target;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::runtime::{Builder, Runtime};
use tokio::time::timeout;
use windlass_engine::cli::{Cli, Command};
use windlass_engine::config::Config;
use windlass_engine::lifecycle::Lifecycle;
use windlass_engine::serve::Server;

/// An encoder of the simulator, which starts no processes and answers at once.
const LINE: &str = "windlass-engine serve m --executor sim --task embed --host 127.0.0.1 --port 0 --admin-port 0 \
                    --max-batch-wait-ms 0 --sim-step-us 1 --sim-prefill-token-us 1 --log-format text";
/// What a client begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0";
/// No connection is answered for longer.
const MOST_TIME: Duration = Duration::from_secs(10);
/// Before a frame: its type, its flags, its stream and the bytes that it has, of which this many are told by the number.
const HEAD_BYTES: usize = 4;
/// Types from here on are no frames: what follows is sent as it is.
const RAW: u8 = 0xf0;

struct Listening {
    runtime: Runtime,
    address: SocketAddr,
}

static SERVER: LazyLock<Listening> = LazyLock::new(|| {
    let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build().expect("a runtime");
    let Ok(Cli { command: Command::Serve(args), .. }) = Cli::try_parse_from(LINE.split_whitespace()) else {
        panic!("{LINE}")
    };
    let config = Config::from_args(&args).expect("the flags are sound");
    let server = runtime.block_on(Server::start(config, Lifecycle::default())).expect("it starts");
    let address = server.api_address();
    runtime.spawn(async { server.run().await.expect("it serves until the end") });
    Listening { runtime, address }
});

fuzz_target!(|input: &[u8]| {
    let Listening { runtime, address } = &*SERVER;
    let ended = runtime.block_on(async { timeout(MOST_TIME, say(*address, &sent(input))).await });
    assert!(ended.is_ok(), "the connection is open after {MOST_TIME:?}");
});

/// The bytes on the connection.
fn sent(mut input: &[u8]) -> Vec<u8> {
    let mut sent = PREFACE.to_vec();
    while let Some((head, rest)) = input.split_first_chunk::<HEAD_BYTES>() {
        let [kind, flags, stream, length] = *head;
        let (payload, rest) = rest.split_at(rest.len().min(length.into()));
        if kind < RAW {
            sent.extend([0, 0, payload.len() as u8, kind, flags, 0, 0, 0, stream]);
        }
        sent.extend(payload);
        input = rest;
    }
    sent
}

/// Says it all, and listens to the end. Whether the server hears it all is for the server to say.
async fn say(address: SocketAddr, sent: &[u8]) {
    let stream = TcpStream::connect(address).await.expect("it listens");
    // Ports of connections that were ended by a reset can be used again at once.
    let _ = stream.set_zero_linger();
    let (mut reader, mut writer) = stream.into_split();
    let write = async {
        let _ = writer.write_all(sent).await;
        let _ = writer.shutdown().await;
    };
    let read = async {
        let mut heard = [0; 4096];
        while reader.read(&mut heard).await.is_ok_and(|bytes| bytes > 0) {}
    };
    tokio::join!(write, read);
}
