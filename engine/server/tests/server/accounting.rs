//! What clients are told of tokens is what the metrics count, to the token.

use crate::common::{Client, FAST, MODEL, TestServer, eventually, serve};
use futures::StreamExt;
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// A request of a mixed load: answers that stop at strings, tokens and limits, several to a prompt, whole and streamed.
fn asked(index: u64) -> (&'static str, Value) {
    let text = format!("tell me of the engine and of block {index}");
    let messages = json!([{"role": "user", "content": text}]);
    let (path, mut body) = match index % 8 {
        0 => (CHAT, json!({"messages": messages, "stop": ["the", "of"]})),
        1 => (CHAT, json!({"messages": messages, "stop": ["a"], "stream": true})),
        2 => (CHAT, json!({"messages": messages, "n": 3, "stop": ["the"], "stream": true})),
        3 => (CHAT, json!({"messages": messages, "stop_token_ids": (1..40).collect::<Vec<u32>>()})),
        4 => (COMPLETIONS, json!({"prompt": [text, "of the block"], "n": 2, "stop": ["e"]})),
        5 => (COMPLETIONS, json!({"prompt": text, "best_of": 3, "stop": ["block"]})),
        6 => (COMPLETIONS, json!({"prompt": text, "n": 2, "use_beam_search": true})),
        _ => (COMPLETIONS, json!({"prompt": text, "echo": true, "logprobs": 1})),
    };
    let most = if body["echo"] == true { 0 } else { 8 + index % 40 };
    let common = json!({"model": MODEL, "max_tokens": most, "temperature": 1.0, "seed": index});
    body.as_object_mut().unwrap().extend(common.as_object().unwrap().clone());
    if body["stream"] == true {
        body["stream_options"] = json!({"include_usage": true});
    }
    (path, body)
}

/// Tokens of prompts, of those found in the cache, and of answers, as the client is told.
async fn told(server: &TestServer, index: u64) -> [u64; 3] {
    let (path, body) = asked(index);
    let answer = Client::connect(server.api).await.post(path, &body).await;
    assert!(answer.status.is_success(), "{}", answer.text());
    let last = if body["stream"] == true { answer.events().pop().unwrap() } else { answer.json() };
    let usage = &last["usage"];
    let cached = &usage["prompt_tokens_details"]["cached_tokens"];
    [&usage["prompt_tokens"], cached, &usage["completion_tokens"]].map(|tokens| tokens.as_u64().unwrap())
}

#[tokio::test(flavor = "multi_thread")]
async fn usage_and_counters_agree_to_the_token() {
    let server = serve(&format!("{FAST} --max-num-seqs 8")).await;
    let all = futures::stream::iter(0..160).map(|index| told(&server, index)).buffer_unordered(12);
    let told = all.fold([0; 3], async |sum: [u64; 3], one| std::array::from_fn(|of| sum[of] + one[of])).await;
    let names = ["vllm:prompt_tokens_total", "vllm:prompt_tokens_cached_total", "vllm:generation_tokens_total"];
    for (name, told) in names.into_iter().zip(told) {
        let counted = server.metric(name).await;
        assert!((counted - told as f64).abs() < 0.5, "{name}: {counted}, and clients were told of {told}");
    }
    eventually("the sums over requests are the same", async || {
        let prompts = server.metric("vllm:request_prompt_tokens_sum").await;
        let answers = server.metric("vllm:request_generation_tokens_sum").await;
        (prompts - told[0] as f64).abs() < 0.5 && (answers - told[2] as f64).abs() < 0.5
    })
    .await;
}
