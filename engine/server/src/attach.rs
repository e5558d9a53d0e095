//! What the commands that ask have in common: a server that runs already, or one started for them.

use crate::cli::{Cli, Command, ServerArgs};
use crate::client::Client;
use crate::config::Config;
use crate::failure::Failure;
use crate::lifecycle::{Lifecycle, Stage};
use crate::serve::Server;
use clap::Parser;
use tokio::task::JoinHandle;

/// A server to ask.
pub struct Attached {
    /// How to ask it.
    pub client: Client,
    /// The model to name.
    pub model: String,
    own: Option<OwnServer>,
}

/// A server that lives in this process and for this command.
struct OwnServer {
    lifecycle: Lifecycle,
    end: JoinHandle<Result<(), Failure>>,
}

impl Attached {
    /// The server at the address that `target` is, or one that serves the model file that it is, with `flags`.
    pub async fn to(target: &str, args: &ServerArgs, flags: &[String]) -> Result<Attached, Failure> {
        let (url, own) = match target.contains("://") {
            true => (target.to_owned(), None),
            false => OwnServer::start(target, flags).await?,
        };
        let client = Client::new(&url, args.key_file.as_deref(), args.ca_file.as_deref())?;
        let model = match &args.model_name {
            Some(model) => model.clone(),
            None => client.first_model().await?,
        };
        Ok(Attached { client, model, own })
    }

    /// Ends what was started.
    pub async fn detach(self) -> Result<(), Failure> {
        let Some(OwnServer { lifecycle, end }) = self.own else { return Ok(()) };
        lifecycle.advance(Stage::Closing);
        end.await.map_err(|error| Failure::internal(format!("stopping the server: {error}")))?
    }
}

impl OwnServer {
    /// On ports of its own that only this machine reaches.
    async fn start(model: &str, flags: &[String]) -> Result<(String, Option<OwnServer>), Failure> {
        let fixed = "--host 127.0.0.1 --port 0 --admin-port 0 --drain-accept-seconds 0".split(' ').map(str::to_owned);
        let start = ["windlass-engine", "serve", model].map(str::to_owned);
        let line = start.into_iter().chain(fixed).chain(flags.iter().cloned());
        let parsed = Cli::try_parse_from(line).map_err(Failure::configuration)?;
        let Command::Serve(args) = parsed.command else { return Err(Failure::internal("serve is another command")) };
        let lifecycle = Lifecycle::default();
        let server = Server::start(Config::from_args(&args)?, lifecycle.clone()).await?;
        let url = format!("http://{}", server.api_address());
        Ok((url, Some(OwnServer { lifecycle, end: tokio::spawn(server.run()) })))
    }
}
