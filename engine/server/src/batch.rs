//! `windlass-engine batch`: a file of requests becomes a file of answers, however often it is interrupted.
//!
//! Requests of similar length are asked together, the longest first, so that a batch is full until its end.

mod input;
mod output;

use crate::attach::Attached;
use crate::cli::BatchArgs;
use crate::client::{Client, ClientError};
use crate::failure::Failure;
use crate::http::SHOULD_RETRY;
use axum::http::StatusCode;
use futures::StreamExt;
use indicatif::{ProgressBar, ProgressStyle};
use input::{Input, Item, Line};
use output::{Answer, Output};
use std::time::Duration;

/// Attempts at one request where the server asks to come back.
const ATTEMPTS: u32 = 20;
/// Longest pause before another attempt.
const LONGEST_PAUSE: Duration = Duration::from_secs(30);

/// Answers what is not answered yet.
pub async fn run(args: &BatchArgs) -> Result<(), Failure> {
    if args.concurrency == 0 {
        return Err(Failure::configuration("--concurrency must be at least 1"));
    }
    let input = Input::read(&args.input)?;
    let mut output = Output::open(&args.output)?;
    let mut left: Vec<&Item> = input.items().iter().filter(|item| !output.has(&item.custom_id)).collect();
    left.sort_by_key(|item| std::cmp::Reverse(item.length));
    let (total, done) = (input.items().len(), input.items().len() - left.len());
    if left.is_empty() {
        println!("all {total} requests were answered already");
        return Ok(());
    }
    let attached = Attached::to(&args.model, &args.server, &serve_flags(args)).await?;
    let progress = progress(total, done);
    let asked = left.into_iter().map(|item| ask(&attached, &input, item));
    let mut answers = futures::stream::iter(asked).buffer_unordered(args.concurrency);
    let mut put_off = 0;
    while let Some(answer) = answers.next().await {
        match answer? {
            Some(answer) => output.write(&answer)?,
            None => put_off += 1,
        }
        progress.inc(1);
    }
    drop(answers);
    progress.finish_and_clear();
    println!("{total} requests, {done} of them answered before, {} of them refused", output.refused());
    attached.detach().await?;
    match put_off {
        0 => Ok(()),
        _ => Err(ClientError::Answer(format!(
            "for {put_off} requests the server asked to come back {ATTEMPTS} times; run the command again later"
        ))
        .into()),
    }
}

/// What a server of this command's own needs to take so many requests.
fn serve_flags(args: &BatchArgs) -> Vec<String> {
    ["--max-num-seqs".to_owned(), args.concurrency.min(512).to_string()].into()
}

fn progress(total: usize, done: usize) -> ProgressBar {
    let bar = ProgressBar::new(total as u64).with_position(done as u64);
    if let Ok(style) = ProgressStyle::with_template("{bar:40} {pos}/{len} requests, {per_sec}, {eta} left") {
        bar.set_style(style);
    }
    bar
}

/// The answer to one request; what is wrong with a line is an answer, too. `None` where the server puts it off again and
/// again: others may have more luck, and the next run asks once more. A lost server ends everything.
async fn ask(attached: &Attached, input: &Input, item: &Item) -> Result<Option<Answer>, Failure> {
    let Line { url, body } = match input.line(item, &attached.model)? {
        Ok(line) => line,
        Err(wrong) => return Ok(Some(Answer::invalid(&item.custom_id, &wrong))),
    };
    for _ in 0..ATTEMPTS {
        match answer(&attached.client, &url, &body).await? {
            Asked::Later(pause) => tokio::time::sleep(pause.min(LONGEST_PAUSE)).await,
            Asked::Answered(status, body) => return Ok(Some(Answer::new(&item.custom_id, status, body))),
        }
    }
    Ok(None)
}

enum Asked {
    Answered(StatusCode, Vec<u8>),
    /// It is overloaded or stopping, or gave this one up and may not the next time.
    Later(Duration),
}

async fn answer(client: &Client, url: &str, body: &axum::body::Bytes) -> Result<Asked, ClientError> {
    let reply = client.post(url, body.clone()).await?;
    let status = reply.status;
    let given_up = reply.headers.get(SHOULD_RETRY).is_some_and(|value| value == "true");
    if given_up || matches!(status, StatusCode::TOO_MANY_REQUESTS | StatusCode::SERVICE_UNAVAILABLE) {
        let after = reply.headers.get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok());
        reply.whole().await?;
        return Ok(Asked::Later(Duration::from_secs(after.unwrap_or(1))));
    }
    Ok(Asked::Answered(status, reply.whole().await?))
}
