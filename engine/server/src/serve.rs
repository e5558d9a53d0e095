//! The server from start to exit: bind, start the engine, serve, drain.

use crate::cache_scopes::CacheScopes;
use crate::clock::Clock;
use crate::config::{Config, LifeTimes};
use crate::dialogue::Dialogue;
use crate::driver::EngineHandle;
use crate::failure::Failure;
use crate::http::admin::{self, Admin};
use crate::http::api::{self, Api};
use crate::http::bodies::{self, Bodies};
use crate::http::connection::{MAX_ADMIN_CONNECTIONS, Server as Connections, most_connections};
use crate::http::door::{Door, Rules};
use crate::http::encoder::{self, EncoderApi};
use crate::http::tls::Tls;
use crate::http::unix_seconds;
use crate::lifecycle::{Lifecycle, Stage};
use crate::listen::bind;
use crate::machine;
use crate::monitor::{Monitor, SAMPLE_EVERY};
use crate::start::{self, EngineEnd, EngineThread, Started, StartedEncoder, StartedModel};
use crate::structure::Structures;
use crate::tenants::Tenants;
use crate::traces::Traces;
use std::net::SocketAddr;
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tokio::sync::Mutex;
use tokio::time::{Instant, sleep, timeout};
use tracing::{error, info, warn};
use windlass_engine_api::body::Limits;
use windlass_engine_contract::memory::process_bytes_with;
use windlass_engine_contract::termination::Reason;

/// Time for the last bytes to leave after streams were ended.
const FLUSH: Duration = Duration::from_secs(2);

/// A server that is ready.
pub struct Server {
    api_address: SocketAddr,
    admin_address: SocketAddr,
    lifecycle: Lifecycle,
    connections: Arc<Connections>,
    /// Absent where nothing streams.
    engine: Option<EngineHandle>,
    engine_end: EngineEnd,
    monitor: Arc<Monitor>,
    traces: Option<Arc<Traces>>,
    times: LifeTimes,
}

impl Server {
    /// Binds both ports, loads, generates the first token, and serves. The admin port answers from the beginning;
    /// clients that connect to the API port early wait in its queue.
    pub async fn start(config: Config, lifecycle: Lifecycle) -> Result<Server, Failure> {
        let clock = Clock::start();
        let files = machine::raise_open_files();
        let refresh = config.refresh_every;
        let tenants = config.tenants.clone().map(|source| Tenants::read(source, refresh, clock)).transpose()?;
        let tenants = tenants.map(Arc::new);
        let tokens = config.admin_tokens.clone().map(|source| Tenants::read(source, refresh, clock)).transpose()?;
        let tls = config.tls.clone().map(|source| Tls::read(source, refresh)).transpose()?;
        let (api_listener, api_address) = bind(config.api_address, "the API")?;
        let (admin_listener, admin_address) = bind(config.admin_address, "probes and metrics")?;
        let monitor = Arc::new(Monitor::new(clock, &config.served_names[0]).map_err(Failure::internal)?);
        let admin = Arc::new(Admin {
            monitor: monitor.clone(),
            lifecycle: lifecycle.clone(),
            engine: OnceLock::new(),
            tenants: tenants.clone(),
            tokens,
            turn: Mutex::new(()),
            drain_timeout: config.times.drain_timeout,
            stall_timeout_seconds: config.times.stall_timeout_seconds,
        });
        let admin_server = Connections::new(
            admin::router(admin.clone()),
            lifecycle.clone(),
            MAX_ADMIN_CONNECTIONS,
            None,
            config.patience,
        );
        tokio::spawn(Arc::new(admin_server.staying_open()).run(admin_listener));

        let (times, patience, asked_connections) = (config.times, config.patience, config.max_connections);
        let (config, started) = start_engine(config, monitor.clone(), clock).await?;
        let built = started.built().clone();
        let traces = config.traces_endpoint.as_deref().map(Traces::start).transpose()?.map(Arc::new);
        let door = Door::from(Rules {
            served_names: config.served_names,
            max_model_tokens: built.effective.max_model_tokens,
            created: unix_seconds(),
            fingerprint: built.fingerprint.as_str().into(),
            tenants,
            monitor: monitor.clone(),
            lifecycle: lifecycle.clone(),
            allowed_origins: config.allowed_origins,
            bodies: Bodies::new(config.body_memory_bytes.map_or_else(
                || bodies::share_of(machine::free_memory_bytes()),
                |bytes| usize::try_from(bytes).unwrap_or(usize::MAX),
            )),
            limits: limits(&started, built.effective.max_model_tokens, config.ignore_unknown_fields),
            text_log: config.text_log,
            traces: traces.clone(),
            patience,
        });
        let (routes, engine, engine_end, forms) = match started {
            Started::Model(model) => {
                let StartedModel { engine: EngineThread { handle, end }, tokenizer, template, .. } = *model;
                let tokenizer = Arc::new(tokenizer);
                let structures = Arc::new(Structures::new(tokenizer.clone(), &config.program));
                let forms = structures.clone();
                let api = Api {
                    structures,
                    engine: handle.clone(),
                    dialogue: Dialogue::new(&config.dialogue, template, &tokenizer, &config.program),
                    tokenizer,
                    cache_scopes: CacheScopes::new(config.batching.share_prefix_cache),
                    queue: config.batching.queue,
                    places: built.effective.max_sequences,
                    door,
                };
                // The engine is set once, here.
                let _ = admin.engine.set(handle.clone());
                (api::router(Arc::new(api)), Some(handle), end, Some(forms))
            }
            Started::Encoder(started) => {
                let StartedEncoder { handle, end, text, cuttable, .. } = *started;
                let api = EncoderApi { door, encoder: handle, text, cuttable };
                (encoder::router(Arc::new(api)), None, end, None)
            }
        };
        monitor.built(built);
        forms.into_iter().for_each(|forms| prepare_beside(forms, monitor.clone()));
        tokio::spawn(watch(Arc::downgrade(&monitor), times.stall_timeout_seconds));
        let max_age = times.max_connection_age;
        let most_connections =
            asked_connections.unwrap_or_else(|| most_connections(files, machine::free_memory_bytes()));
        let connections = Connections::new(routes, lifecycle.clone(), most_connections, max_age, patience);
        let connections = Arc::new(connections.over(tls));
        tokio::spawn(connections.clone().run(api_listener));
        lifecycle.advance(Stage::Serving);
        info!(api = %api_address, admin = %admin_address, seconds = clock.seconds(), "serving");
        Ok(Server { api_address, admin_address, lifecycle, connections, engine, engine_end, monitor, traces, times })
    }

    /// Where the API is.
    pub fn api_address(&self) -> SocketAddr {
        self.api_address
    }

    /// Where probes and metrics are.
    pub fn admin_address(&self) -> SocketAddr {
        self.admin_address
    }

    /// Serves until the life cycle reaches [`Stage::Closing`], then drains. An error if the engine or a GPU fails meanwhile.
    pub async fn run(mut self) -> Result<(), Failure> {
        tokio::select! {
            failure = self.engine_end.failure() => return Err(self.fail(failure).await),
            why = self.monitor.gpu_is_lost() => {
                return Err(self.fail(Failure::new(Reason::DeviceFailed, why)).await);
            }
            () = self.lifecycle.reached(Stage::Closing) => (),
        }
        self.drain().await;
        if let Some(traces) = self.traces {
            // The last spans leave, or the collector does not answer in time.
            let _ = tokio::task::spawn_blocking(move || traces.finish()).await;
        }
        Ok(())
    }

    /// Streams get their error event before the process ends, unless the engine waits for a GPU that does not answer. What a lost GPU
    /// reported goes with what the engine failed of.
    async fn fail(&self, failure: Failure) -> Failure {
        let ended = async {
            if let Some(engine) = &self.engine {
                engine.end_all(&failure.message).await;
            }
            self.connections.no_connections().await;
        };
        let _ = timeout(FLUSH, ended).await;
        match self.monitor.lost_gpu().filter(|why| *why != failure.message) {
            Some(why) => Failure { message: format!("{}; {why}", failure.message), ..failure },
            None => failure,
        }
    }

    /// Serves what still arrives for a while, then lets streams finish, then ends them.
    async fn drain(&self) {
        let LifeTimes { drain_accept, drain_timeout, .. } = self.times;
        let (began, own) = (Instant::now(), Instant::now() + drain_timeout);
        let left = self.lifecycle.deadline(own) - began;
        info!(accept_seconds = drain_accept.as_secs(), timeout_seconds = left.as_secs(), "draining");
        // Of a short notice most is for the streams.
        sleep(drain_accept.min(left / 3)).await;
        self.lifecycle.advance(Stage::Refusing);
        let is_late = tokio::select! {
            () = self.connections.no_connections() => false,
            () = self.lifecycle.passed(own) => true,
        };
        if is_late {
            warn!("streams are left after {} s; ending them", began.elapsed().as_secs());
            if let Some(engine) = &self.engine {
                engine.end_all("the server shut down before this answer was complete").await;
            }
            let _ = timeout(FLUSH, self.connections.no_connections()).await;
        }
        info!("drained");
    }
}

/// What requests may hold: no text is longer than as many of the vocabulary's longest tokens as the context has. An
/// encoder reads beginnings of texts of any length.
fn limits(started: &Started, max_model_tokens: u32, ignore_unknown_fields: bool) -> Limits {
    let prompt_tokens = max_model_tokens as usize;
    let prompt_bytes = match started {
        Started::Model(model) => prompt_tokens.saturating_mul(model.tokenizer.vocabulary().longest_piece()),
        Started::Encoder(_) => usize::MAX,
    };
    Limits { prompt_tokens, prompt_bytes, ignore_unknown_fields }
}

/// Keeps readings for the view of the last minute, and says what is stuck, as long as there is a monitor.
async fn watch(monitor: Weak<Monitor>, stall_timeout_seconds: f64) {
    while let Some(monitor) = monitor.upgrade() {
        monitor.sample();
        if let Some(stuck) = monitor.stuck(stall_timeout_seconds) {
            error!("{stuck}");
        }
        drop(monitor);
        sleep(SAMPLE_EVERY).await;
    }
}

/// Makes the tables for forms of answers, which the first requests do not wait for.
fn prepare_beside(structures: Arc<Structures>, monitor: Arc<Monitor>) {
    tokio::spawn(async move {
        structures.prepare().await;
        if let Some(bytes) = structures.table_bytes() {
            info!(bytes, "tables for structured answers were made");
            monitor.process_bytes(process_bytes_with(structures.vocabulary(), bytes));
        }
    });
}

/// Starts the engine on a thread that may block.
async fn start_engine(config: Config, monitor: Arc<Monitor>, clock: Clock) -> Result<(Config, Started), Failure> {
    let start = move || start::start(&config, &monitor, clock).map(|started| (config, started));
    let joined = tokio::task::spawn_blocking(start).await;
    joined.map_err(|error| Failure::internal(format!("starting the engine: {error}")))?
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::{Cli, Command};
    use clap::Parser;
    use windlass_engine_contract::termination::Termination;

    /// One that starts no process of its own, as those that render conversations are.
    async fn server() -> Server {
        const LINE: &str =
            "windlass-engine serve m --executor sim --task embed --host 127.0.0.1 --port 0 --admin-port 0";
        let Command::Serve(args) = Cli::try_parse_from(LINE.split(' ')).unwrap().command else { panic!("{LINE}") };
        Server::start(Config::from_args(&args).unwrap(), Lifecycle::default()).await.unwrap()
    }

    #[tokio::test]
    async fn a_gpu_that_reports_a_fatal_error_ends_the_server_with_its_words() {
        let server = server().await;
        server.monitor.gpu_lost("GPU 0 (0000:0A:00.0) reports a critical error: XID 79".into());
        server.monitor.gpu_lost("GPU 1 is lost by then, too".into());
        let failure = server.run().await.unwrap_err();
        assert_eq!(failure.reason.exit_code(), 15);
        let log = tempfile::NamedTempFile::new().unwrap();
        failure.report(Some(log.path()));
        let told = Termination::parse(&std::fs::read_to_string(log.path()).unwrap()).unwrap();
        assert_eq!(
            (told.reason, told.message.as_str()),
            (Reason::DeviceFailed, "GPU 0 (0000:0A:00.0) reports a critical error: XID 79")
        );
    }

    #[tokio::test]
    async fn what_a_lost_gpu_reported_goes_with_what_the_engine_failed_of() {
        let server = server().await;
        server.monitor.gpu_lost("GPU 0 reports XID 48".into());
        let failure = server.fail(Failure::new(Reason::DeviceFailed, "the executor failed: CUDA_ERROR_ECC")).await;
        assert_eq!(failure.message, "the executor failed: CUDA_ERROR_ECC; GPU 0 reports XID 48");
    }
}
