//! The protocol over two streams: lines of JSON in, lines of JSON out, and nothing else on either.

use std::io::{BufRead, Read, Write};

use windlass_operator_core::validate::Refusal;

use crate::exposition;
use crate::policy::{Name, Policy};
use crate::protocol::{Edges, Hello, MAX_LINE_BYTES, Message, Tick, VERSION};

/// Why a conversation ended early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A stream broke.
    #[error("the stream to the judge broke")]
    Stream(#[from] std::io::Error),
    /// A line is longer than is read.
    #[error("line {line} is longer than {MAX_LINE_BYTES} bytes")]
    TooLong {
        /// Counted from 1.
        line: usize,
    },
    /// A line is no message.
    #[error("line {line} is no message of the replay protocol")]
    Message {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// Another version.
    #[error("the judge speaks version {0} of the replay protocol, this is version {VERSION}")]
    Version(u32),
    /// A tick before the hello.
    #[error("line {line} is a tick; the first line has to be a hello")]
    NoHello {
        /// Counted from 1.
        line: usize,
    },
    /// What a pod says as text is not understood.
    #[error("the pods of line {line} cannot be read")]
    Text {
        /// Counted from 1.
        line: usize,
        /// What is wrong with it.
        source: exposition::Error,
    },
    /// Bounds or targets that the resource does not take.
    #[error("the hello describes what no InferenceService could be")]
    Hello(#[from] Refusal),
}

/// Answers a judge with the policy `name` until it ends the conversation or closes its stream.
///
/// # Errors
/// See [`Error`].
pub fn serve(name: Name, mut judge: impl BufRead, mut answers: impl Write) -> Result<(), Error> {
    let mut greeted: Option<(Box<dyn Policy>, Edges)> = None;
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let read = judge.by_ref().take(MAX_LINE_BYTES + 1).read_until(b'\n', &mut text)?;
        if read == 0 {
            break;
        }
        if read as u64 > MAX_LINE_BYTES {
            return Err(Error::TooLong { line });
        }
        match serde_json::from_slice(&text).map_err(|source| Error::Message { line, source })? {
            Message::Hello(hello) => greeted = Some((greet(name, &hello)?, hello.histogram_edges)),
            Message::Tick(mut tick) => {
                let (policy, edges) = greeted.as_mut().ok_or(Error::NoHello { line })?;
                tick.read_texts(edges).map_err(|source| Error::Text { line, source })?;
                answer(policy.as_mut(), &tick, &mut answers)?;
            }
            Message::End => break,
        }
    }
    Ok(())
}

fn greet(name: Name, hello: &Hello) -> Result<Box<dyn Policy>, Error> {
    if hello.protocol != VERSION {
        return Err(Error::Version(hello.protocol));
    }
    Ok(name.policy(hello)?)
}

fn answer(policy: &mut dyn Policy, tick: &Tick, answers: &mut impl Write) -> Result<(), Error> {
    let mut line = serde_json::to_vec(&policy.decide(tick)).map_err(std::io::Error::from)?;
    line.push(b'\n');
    answers.write_all(&line)?;
    Ok(answers.flush()?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::protocol::Reply;

    const HELLO: &str = r#"{"type":"hello","protocol":1,"scenario":"s","scrapeIntervalSeconds":5,"spec":{"minReplicas":1,"maxReplicas":16,"initialReplicas":3,"targets":{"ttftSeconds":1.0,"interTokenSeconds":0.05,"share":0.99},"drainTimeoutSeconds":300.0,"spot":{"available":false,"interruptionHandler":"none"}},"engine":{"kvCacheTokens":400000,"maxNumSeqs":256,"maxNumBatchedTokens":8192},"histogramEdges":{"ttft":[0.5],"interToken":[0.05],"e2e":[1.0]}}"#;
    const TICK: &str = r#"{"type":"tick","t":0.0,"gateway":{"queued":0,"oldestAgeSeconds":0.0},"pods":[{"name":"pod-1","phase":"Ready","capacityType":"spot","ageSeconds":1.0,"readySeconds":0.5,"reclaimInSeconds":20.0,"metrics":null,"new":1},{"name":"pod-2","phase":"Ready","capacityType":"on-demand","ageSeconds":1.0,"readySeconds":0.5,"reclaimInSeconds":null,"metrics":{"running":0,"waiting":0,"oldestQueueAgeSeconds":0.0,"kvUsage":0.0,"gpuUtilization":0.0,"promptTokensTotal":0,"generationTokensTotal":0,"requestsFinishedTotal":0,"ttft":{"cumulative":[0,0],"sum":0.0},"interToken":{"cumulative":[0,0],"sum":0.0},"e2e":{"cumulative":[0,0],"sum":0.0}}}]}"#;

    fn converse(lines: &[&str]) -> Result<String, Error> {
        let mut answers = Vec::new();
        serve(Name::Builtin, lines.join("\n").as_bytes(), &mut answers)?;
        Ok(String::from_utf8(answers).expect("text"))
    }

    #[test]
    fn each_tick_gets_one_line_and_nothing_else_is_said() {
        let answers = converse(&[HELLO, TICK, TICK, r#"{"type":"end"}"#, "never read"]).expect("a conversation");
        assert_eq!(answers.lines().count(), 2);
        let first: Reply = serde_json::from_str(answers.lines().next().expect("a line")).expect("a reply");
        assert_eq!((first.desired_replicas, first.victims), (2, vec!["pod-1".to_owned()]), "a spot node is taken");
    }

    #[test]
    fn what_cannot_be_answered_ends_the_conversation_with_its_line() {
        let fails = |lines: &[&str], words: &str| {
            let error = converse(lines).expect_err("refused").to_string();
            assert!(error.contains(words), "{error}");
        };
        fails(&[TICK], "line 1 is a tick");
        fails(&[HELLO, "{}"], "line 2 is no message");
        fails(&[&HELLO.replace("\"protocol\":1", "\"protocol\":2")], "version 2");
        fails(&[&HELLO.replace("\"minReplicas\":1", "\"minReplicas\":99")], "InferenceService");
        let lacking = TICK.replace("\"metrics\":null", "\"prometheus\":\"vllm:num_requests_running 1\"");
        fails(&[HELLO, &lacking], "the pods of line 2 cannot be read");
        converse(&[HELLO]).expect("a stream that is closed ends it");
    }

    /// Two pods, one of which was not read, the other late at `t` as `said` tells.
    fn late(t: f64, said: &str) -> String {
        let pod = |name: &str, said: &str| {
            format!(r#"{{"name":"{name}","phase":"Ready","ageSeconds":900.0,"readySeconds":800.0,{said}}}"#)
        };
        let silent = pod("pod-1", &format!("{}:null", said.split(':').next().expect("a field")));
        format!(r#"{{"type":"tick","t":{t},"pods":[{silent},{}]}}"#, pod("pod-2", said))
    }

    #[test]
    fn text_is_answered_as_numbers_are() {
        let numbers = |count: u32| {
            late(
                f64::from(count) * 5.0,
                &format!(
                    r#""metrics":{{"running":4,"waiting":30,"oldestQueueAgeSeconds":9.5,"kvUsage":0.25,"gpuUtilization":1.0,"promptTokensTotal":{count}000,"generationTokensTotal":{count}00,"requestsFinishedTotal":{count}0,"ttft":{{"cumulative":[{count},{count}0],"sum":{count}2.5}},"interToken":{{"cumulative":[{count}0,{count}00],"sum":{count}.5}},"e2e":{{"cumulative":[0,{count}0],"sum":{count}90.0}}}}"#
                ),
            )
        };
        let text = |count: u32| {
            late(
                f64::from(count) * 5.0,
                &format!(
                    r#""prometheus":"vllm:num_requests_running 4\nvllm:num_requests_waiting 30\nwindlass:oldest_queued_request_age_seconds 9.5\nvllm:kv_cache_usage_perc 0.25\nwindlass:gpu_utilization_ratio 1.0\nvllm:prompt_tokens_total {count}000\nvllm:generation_tokens_total {count}00\nvllm:request_success_total {count}0\nvllm:time_to_first_token_seconds_bucket{{le=\"0.5\"}} {count}\nvllm:time_to_first_token_seconds_bucket{{le=\"+Inf\"}} {count}0\nvllm:time_to_first_token_seconds_sum {count}2.5\nvllm:inter_token_latency_seconds_bucket{{le=\"0.05\"}} {count}0\nvllm:inter_token_latency_seconds_bucket{{le=\"+Inf\"}} {count}00\nvllm:inter_token_latency_seconds_sum {count}.5\nvllm:e2e_request_latency_seconds_bucket{{le=\"1.0\"}} 0\nvllm:e2e_request_latency_seconds_bucket{{le=\"+Inf\"}} {count}0\nvllm:e2e_request_latency_seconds_sum {count}90.0\n""#
                ),
            )
        };
        let answers = |tick: &dyn Fn(u32) -> String| {
            let ticks: Vec<String> = (1..9).map(tick).collect();
            let lines: Vec<&str> = std::iter::once(HELLO).chain(ticks.iter().map(String::as_str)).collect();
            converse(&lines).expect("answers")
        };
        let (from_text, from_numbers) = (answers(&text), answers(&numbers));
        assert_eq!(from_text, from_numbers);
        assert!(from_text.contains("TargetBreached"), "{from_text}");
    }
}
