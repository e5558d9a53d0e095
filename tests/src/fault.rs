//! A proxy between an operator and the API server that does to it what clusters do: loses the answer to a write, loses
//! a watch event, serves an older list, is away.
//!
//! It speaks plain HTTP/1 on both sides, one connection a request; upstream is `kubectl proxy`, asked in HTTP/1.0, so
//! that every answer, a watch too, is lines until the end of the connection.

use anyhow::{Context, Result, bail};
use std::collections::{HashMap, HashSet};
use std::io::{BufRead, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Largest body of a request, bytes.
const MAX_BODY_BYTES: usize = 4 << 20;
/// Longest that a watch is silent before its connection is looked after: Kubernetes ends watches within 10 minutes.
const SILENCE: Duration = Duration::from_secs(900);

/// How long a watch is deaf that has lost an event.
const UNSEEN: Duration = Duration::from_millis(700);
const EXPIRED: &[u8] = br#"{"type":"ERROR","object":{"kind":"Status","apiVersion":"v1","metadata":{},"status":"Failure","message":"too old resource version","reason":"Expired","code":410}}
"#;

/// What is done to the operator.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    #[default]
    None,
    /// The n-th write, from 1, is done and its answer lost; then nothing passes until the next fault is set.
    LoseAnswer(usize),
    /// The n-th event of all watches, from 1, does not come, nor does what follows on its watch for a while; then the
    /// watch has expired, as after a break that outlasted the API server's memory, and what happened meanwhile shows
    /// only in its result.
    LoseEvent(usize),
    /// Each collection is listed once as it was when it was first listed.
    StaleLists,
    /// Nothing passes.
    Away,
}

/// One request that changes something.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// `POST`, `PUT`, `PATCH` or `DELETE`.
    pub method: String,
    /// Path without query.
    pub path: String,
}

/// The proxy; it ends with its owner.
#[derive(Debug)]
pub struct Proxy {
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    upstream: SocketAddr,
    state: Mutex<State>,
    is_over: AtomicBool,
}

#[derive(Debug, Default)]
struct State {
    fault: Fault,
    /// The fault has happened.
    is_done: bool,
    /// Faults set so far.
    turn: usize,
    writes: Vec<Written>,
    events: usize,
    first_lists: HashMap<String, Vec<u8>>,
    served_stale: HashSet<String>,
    /// Paths whose watch has expired and that were not listed since.
    unlisted: HashSet<String>,
}

impl Proxy {
    /// Starts one before the API that answers plain HTTP at `upstream`.
    ///
    /// # Errors
    /// When the machine has no port left.
    pub fn start(upstream: SocketAddr) -> Result<Proxy> {
        let listener = TcpListener::bind("127.0.0.1:0").context("no port for the proxy")?;
        let address = listener.local_addr()?;
        let shared = Arc::new(Shared { upstream, state: Mutex::default(), is_over: AtomicBool::new(false) });
        let serving = shared.clone();
        std::thread::spawn(move || serving.serve(&listener));
        Ok(Proxy { address, shared })
    }

    /// Where it listens.
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on this fault; counts begin anew, and watches that are under way end with their next event: it would
    /// reach an operator that is gone, and count as one that the next has lost.
    pub fn set(&self, fault: Fault) {
        let mut state = self.shared.state();
        state.turn += 1;
        (state.fault, state.is_done, state.events) = (fault, false, 0);
        state.writes.clear();
        state.served_stale.clear();
        state.unlisted.clear();
    }

    /// Lets everything pass again after the fault has happened.
    pub fn resume(&self) {
        self.shared.state().fault = Fault::None;
    }

    /// Whether the fault has happened.
    pub fn is_done(&self) -> bool {
        self.shared.state().is_done
    }

    /// Whether every collection whose watch has expired was listed again: what was lost shows nowhere else.
    pub fn has_listed_again(&self) -> bool {
        self.shared.state().unlisted.is_empty()
    }

    /// Writes since the fault was set, those of Leases and events left out.
    pub fn writes(&self) -> Vec<Written> {
        self.shared.state().writes.clone()
    }

    /// Events since the fault was set.
    pub fn events(&self) -> usize {
        self.shared.state().events
    }

    /// Forgets which lists came first.
    pub fn forget_lists(&self) {
        self.shared.state().first_lists.clear();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        self.shared.is_over.store(true, Ordering::Relaxed);
        // Wakes the listener; that it fails means that it is gone already.
        let _ = TcpStream::connect(self.address);
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn serve(self: Arc<Self>, listener: &TcpListener) {
        for client in listener.incoming() {
            if self.is_over.load(Ordering::Relaxed) {
                return;
            }
            let (Ok(client), shared) = (client, self.clone()) else { continue };
            // A connection that breaks is what this is about: the operator has to cope.
            std::thread::spawn(move || drop(shared.exchange(client)));
        }
    }

    fn exchange(&self, client: TcpStream) -> Result<()> {
        client.set_read_timeout(Some(SILENCE))?;
        let request = Request::read(&mut BufReader::new(client.try_clone()?))?;
        let verdict = self.state().judge(&request);
        match verdict {
            Verdict::Refuse => Ok(()),
            Verdict::Answer(stale) => Ok((&client).write_all(&stale)?),
            Verdict::Pass => self.pass(&request, &client),
            Verdict::PassSilently => {
                // The whole answer has come: what was asked for is done.
                Upstream::ask(self.upstream, &request)?.rest()?;
                self.state().is_done = true;
                Ok(())
            }
        }
    }

    fn pass(&self, request: &Request, mut client: &TcpStream) -> Result<()> {
        let mut upstream = Upstream::ask(self.upstream, request)?;
        client.write_all(&upstream.head)?;
        if !request.is_watch() {
            let body = upstream.rest()?;
            self.state().keep_first(request, &upstream.head, &body);
            return Ok(client.write_all(&body)?);
        }
        let turn = self.state().turn;
        while let Some(line) = upstream.line()? {
            let mut state = self.state();
            if state.turn != turn {
                return Ok(());
            }
            let passes = state.lets_through(request.path(), &line);
            drop(state);
            if !passes {
                std::thread::sleep(UNSEEN);
                return Ok(client.write_all(EXPIRED)?);
            }
            client.write_all(&line)?;
        }
        Ok(())
    }
}

/// How the operator asks for the list that a watch begins with; other lists are shorter.
const FIRST_PAGE: &str = "limit=500";

/// What becomes of a request.
enum Verdict {
    Pass,
    PassSilently,
    Answer(Vec<u8>),
    Refuse,
}

impl State {
    fn judge(&mut self, request: &Request) -> Verdict {
        if self.fault == Fault::Away || (matches!(self.fault, Fault::LoseAnswer(_)) && self.is_done) {
            return Verdict::Refuse;
        }
        if let (Fault::StaleLists, Some(key)) = (self.fault, request.collection())
            && let Some(list) = self.first_lists.get(&key)
            && self.served_stale.insert(key)
        {
            self.is_done = true;
            return Verdict::Answer(list.clone());
        }
        if request.collection().is_some() {
            self.unlisted.remove(request.path());
        }
        let Some(write) = request.write() else { return Verdict::Pass };
        self.writes.push(write);
        if self.fault == Fault::LoseAnswer(self.writes.len()) { Verdict::PassSilently } else { Verdict::Pass }
    }

    fn keep_first(&mut self, request: &Request, head: &[u8], body: &[u8]) {
        if let Some(key) = request.collection() {
            self.first_lists.entry(key).or_insert_with(|| [head, body].concat());
        }
    }

    /// Whether an event of the watch of `path` may pass.
    fn lets_through(&mut self, path: &str, line: &[u8]) -> bool {
        if line.starts_with(br#"{"type":"BOOKMARK""#) {
            return true;
        }
        self.events += 1;
        let is_lost = self.fault == Fault::LoseEvent(self.events);
        self.is_done |= is_lost;
        self.unlisted.extend(is_lost.then(|| path.to_owned()));
        !is_lost
    }
}

struct Request {
    method: String,
    target: String,
    headers: Vec<String>,
    body: Vec<u8>,
}

impl Request {
    fn read(from: &mut impl BufRead) -> Result<Request> {
        let mut lines = Vec::new();
        loop {
            let mut line = String::new();
            if from.read_line(&mut line)? == 0 {
                bail!("the client has gone");
            }
            match line.trim_end() {
                "" => break,
                line => lines.push(line.to_owned()),
            }
        }
        let first = lines.first().context("a request without a line")?;
        let mut words = first.split(' ');
        let (method, target) = (words.next().unwrap_or_default().to_owned(), words.next().unwrap_or("/").to_owned());
        let length = lines.iter().find_map(|line| header(line, "content-length")?.parse().ok()).unwrap_or(0);
        anyhow::ensure!(length <= MAX_BODY_BYTES, "a body of {length} bytes");
        let mut body = vec![0; length];
        from.read_exact(&mut body)?;
        // Answers are to be lines that can be read here, and connections are not to be kept.
        let unwanted = ["connection", "accept-encoding", "host", "content-length"];
        let headers = lines.split_off(1);
        let headers = headers.into_iter().filter(|line| unwanted.iter().all(|name| header(line, name).is_none()));
        Ok(Request { method, target, headers: headers.collect(), body })
    }

    fn path(&self) -> &str {
        self.target.split('?').next().unwrap_or_default()
    }

    fn is_watch(&self) -> bool {
        self.method == "GET" && self.target.contains("watch=")
    }

    /// The key of a list that a watch begins with, that of its path and selector; `None` for anything else.
    fn collection(&self) -> Option<String> {
        let is_list = self.method == "GET" && !self.is_watch() && self.target.contains(FIRST_PAGE);
        is_list.then(|| self.target.clone())
    }

    fn write(&self) -> Option<Written> {
        let changes = self.method != "GET" && !["/leases", "/events"].iter().any(|kind| self.path().contains(kind));
        changes.then(|| Written { method: self.method.clone(), path: self.path().to_owned() })
    }
}

/// The value of a header line of that name.
fn header<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (found, value) = line.split_once(':')?;
    found.eq_ignore_ascii_case(name).then(|| value.trim())
}

struct Upstream {
    connection: BufReader<TcpStream>,
    /// Of the answer, for the client.
    head: Vec<u8>,
}

impl Upstream {
    fn ask(address: SocketAddr, request: &Request) -> Result<Upstream> {
        let mut connection = TcpStream::connect(address)?;
        connection.set_read_timeout(Some(SILENCE))?;
        let headers = request.headers.iter().map(|line| format!("{line}\r\n")).collect::<String>();
        let head = format!(
            "{} {} HTTP/1.0\r\nHost: localhost\r\nContent-Length: {}\r\n{headers}\r\n",
            request.method,
            request.target,
            request.body.len()
        );
        connection.write_all(head.as_bytes())?;
        connection.write_all(&request.body)?;
        let mut connection = BufReader::new(connection);
        let mut head = String::new();
        while !head.ends_with("\r\n\r\n") {
            anyhow::ensure!(connection.read_line(&mut head)? > 0, "the API server has gone");
        }
        let head = head.replacen("HTTP/1.0", "HTTP/1.1", 1).replacen("\r\n", "\r\nConnection: close\r\n", 1);
        Ok(Upstream { connection, head: head.into_bytes() })
    }

    fn rest(&mut self) -> Result<Vec<u8>> {
        let mut body = Vec::new();
        self.connection.read_to_end(&mut body)?;
        Ok(body)
    }

    fn line(&mut self) -> Result<Option<Vec<u8>>> {
        let mut line = Vec::new();
        let read = self.connection.read_until(b'\n', &mut line)?;
        Ok((read > 0).then_some(line))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn get(target: &str) -> Request {
        Request { method: "GET".into(), target: target.into(), headers: Vec::new(), body: Vec::new() }
    }

    #[test]
    fn what_a_lost_event_told_is_owed_until_the_whole_is_listed() {
        let mut state = State { fault: Fault::LoseEvent(2), ..State::default() };
        assert!(state.lets_through("/pods", b"{\"type\":\"ADDED\"}"));
        assert!(!state.lets_through("/pods", b"{\"type\":\"DELETED\"}"));
        assert!(state.is_done && state.unlisted.contains("/pods"));
        // Neither a watch from where it broke off nor the list of another kind tells what was lost.
        for other in ["/pods?watch=true&resourceVersion=7", "/nodes?limit=500", "/pods/one"] {
            state.judge(&get(other));
            assert!(state.unlisted.contains("/pods"), "{other}");
        }
        state.judge(&get("/pods?limit=500&resourceVersion=0"));
        assert!(state.unlisted.is_empty());
    }
}
