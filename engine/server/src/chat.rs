//! `windlass-engine chat`: a conversation in the terminal.

use crate::attach::Attached;
use crate::cli::ChatArgs;
use crate::client::{Client, ClientError};
use crate::failure::Failure;
use serde_json::{Value, json};
use std::io::{self, BufRead, IsTerminal, Write};

/// Talks until the input ends.
pub async fn run(args: &ChatArgs) -> Result<(), Failure> {
    let attached = Attached::to(&args.model, &args.server, &[]).await?;
    let mut conversation = Conversation::new(args, attached.model.clone());
    let interactive = io::stdin().is_terminal();
    if interactive {
        eprintln!("Talking to {}. /reset forgets, /quit ends.", conversation.model);
    }
    while let Some(line) = next_line(interactive).map_err(Failure::internal)? {
        match line.trim() {
            "" => (),
            "/quit" => break,
            "/reset" => conversation.reset(),
            text => conversation.turn(&attached.client, text).await?,
        }
    }
    attached.detach().await
}

/// What was said, and how to go on.
struct Conversation {
    model: String,
    instructions: Vec<Value>,
    messages: Vec<Value>,
    temperature: f64,
    max_tokens: u32,
}

impl Conversation {
    fn new(args: &ChatArgs, model: String) -> Conversation {
        let instructions: Vec<Value> =
            args.system.iter().map(|text| json!({"role": "system", "content": text})).collect();
        let messages = instructions.clone();
        Conversation { model, instructions, messages, temperature: args.temperature, max_tokens: args.max_tokens }
    }

    fn reset(&mut self) {
        self.messages = self.instructions.clone();
    }

    /// Says `text` and prints the answer as it comes. What the server refuses is told and forgotten.
    async fn turn(&mut self, client: &Client, text: &str) -> Result<(), Failure> {
        self.messages.push(json!({"role": "user", "content": text}));
        match self.answer(client).await {
            Ok(answer) => self.messages.push(json!({"role": "assistant", "content": answer})),
            Err(error @ ClientError::Connection(_)) => return Err(error.into()),
            Err(error) => {
                self.messages.pop();
                eprintln!("{error}");
            }
        }
        Ok(())
    }

    async fn answer(&self, client: &Client) -> Result<String, ClientError> {
        let body = json!({"model": self.model, "messages": self.messages, "temperature": self.temperature,
            "max_tokens": self.max_tokens, "stream": true});
        let reply = client.post("/v1/chat/completions", body.to_string().into()).await?;
        let (mut reply, mut answer, mut out) = (reply.succeeded().await?, String::new(), io::stdout());
        while let Some(event) = reply.next_event().await? {
            if event == b"[DONE]" {
                continue;
            }
            let event: Value = serde_json::from_slice(event).map_err(|error| ClientError::Answer(error.to_string()))?;
            if let Some(error) = event["error"]["message"].as_str() {
                return Err(ClientError::Answer(error.to_owned()));
            }
            let text = event["choices"][0]["delta"]["content"].as_str().unwrap_or_default();
            answer.push_str(text);
            // A closed output ends the command with the next line.
            let _ = write!(out, "{text}").and_then(|()| out.flush());
        }
        println!();
        Ok(answer)
    }
}

fn next_line(interactive: bool) -> io::Result<Option<String>> {
    if interactive {
        eprint!("> ");
    }
    let mut line = String::new();
    Ok((io::stdin().lock().read_line(&mut line)? > 0).then_some(line))
}
