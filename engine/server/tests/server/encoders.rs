//! Embeddings, scores and rankings over HTTP, by all-MiniLM-L6-v2 where it is there. The vectors themselves are held
//! against transformers' in the encoder's own tests; here it is what the API makes of them. How texts are put together and
//! admitted is tried on the simulated encoder.

use crate::common::{Answer, Client, MODEL, TestServer, eventually, get, serve, serve_at};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use futures::FutureExt;
use serde_json::{Value, json};
use tokio::task::JoinHandle;
use windlass_checkpoint::testing::sentence_encoder;

pub async fn encoder(flags: &str) -> Option<TestServer> {
    Some(serve_at(&sentence_encoder()?, &format!("--served-model-name minilm {flags}")).await)
}

pub async fn embed(server: &TestServer, extra: Value) -> Answer {
    let mut body = json!({"model": "minilm"});
    body.as_object_mut().unwrap().extend(extra.as_object().unwrap().clone());
    server.post("/v1/embeddings", &body).await
}

pub fn vectors(answer: &Answer) -> Vec<Vec<f32>> {
    assert!(answer.status.is_success(), "{}", answer.text());
    let data = answer.json()["data"].as_array().unwrap().clone();
    data.iter().map(|one| serde_json::from_value(one["embedding"].clone()).unwrap()).collect()
}

pub fn cosine(a: &[f32], b: &[f32]) -> f32 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_tokens_floats_and_bytes_say_the_same() {
    let Some(server) = encoder("").await else { return };
    let text = vectors(&embed(&server, json!({"input": "A man is eating food."})).await).remove(0);
    assert!((cosine(&text, &text) - 1.0).abs() < 1e-5 && text.len() == 384);
    // The tokens of that text, as its tokenizer has them.
    let tokens = json!({"input": [101, 1037, 2158, 2003, 5983, 2833, 1012, 102]});
    let answer = embed(&server, tokens.clone()).await;
    assert_eq!(answer.json()["usage"]["prompt_tokens"], 8);
    assert!(cosine(&vectors(&answer)[0], &text) > 0.99999);
    let encoded = embed(&server, json!({"input": tokens["input"], "encoding_format": "base64"})).await.json();
    let bytes = STANDARD.decode(encoded["data"][0]["embedding"].as_str().unwrap()).unwrap();
    let floats: Vec<f32> = bytes.chunks(4).map(|four| f32::from_le_bytes(four.try_into().unwrap())).collect();
    assert!(cosine(&floats, &text) > 0.99999);
    let many = embed(&server, json!({"input": ["A man is eating food.", "é", "The stock market fell."]})).await;
    assert!(cosine(&vectors(&many)[0], &text) > 0.99999, "its neighbours change nothing");
    let cut = embed(&server, json!({"input": "word ".repeat(500), "truncate_prompt_tokens": 16})).await;
    assert_eq!(cut.json()["usage"]["prompt_tokens"], 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_best_answer_comes_first() {
    let Some(server) = encoder("").await else { return };
    let documents = ["The stock market fell.", "Someone eats a piece of bread.", "Rain is expected."];
    let body = json!({"model": "minilm", "query": "A man is eating food.", "documents": documents, "top_n": 2});
    let ranking = server.post("/v1/rerank", &body).await.json();
    let results = ranking["results"].as_array().unwrap();
    assert_eq!((results.len(), &results[0]["index"]), (2, &json!(1)), "{ranking}");
    assert_eq!(results[0]["document"]["text"], documents[1]);
    let pair = json!({"model": "minilm", "text_1": "A man is eating food.", "text_2": documents});
    let scores = server.post("/v1/score", &pair).await.json();
    let scores: Vec<f64> =
        scores["data"].as_array().unwrap().iter().map(|one| one["score"].as_f64().unwrap()).collect();
    assert_eq!(scores.len(), 3);
    assert!((scores[1] - results[0]["relevance_score"].as_f64().unwrap()).abs() < 1e-5);
    assert!((scores[1] - 0.57).abs() < 0.1, "{scores:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_that_come_together_are_computed_together() {
    // None goes before all have come, but all go then.
    let Some(server) = encoder("--max-batch-wait-ms 60000 --max-batch-size 8").await else { return };
    let asked = (0..8).map(|index| embed(&server, json!({"input": format!("text number {index}")})).boxed_local());
    let answers = futures::future::join_all(asked).await;
    assert!(answers.iter().all(|answer| answer.status.is_success()));
    assert_eq!(batch(&server, 8.0).await, 8.0);
    eventually("they are counted", async || server.stats().await["finished"] == 8).await;
    assert_eq!(server.stats().await["running"], 0);
    assert!(server.metric("vllm:prompt_tokens_total").await > 8.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_an_encoder_cannot_do_is_refused_by_name() {
    let Some(server) = encoder("--max-queue-tokens 64").await else { return };
    for (extra, param) in [
        (json!({"input": []}), "input"),
        (json!({"input": ""}), ""),
        (json!({"input": "word ".repeat(500)}), "input"),
        (json!({"input": [4_000_000]}), "input"),
        (json!({"input": [[]]}), "input"),
        (json!({"input": "a", "dimensions": 100}), "dimensions"),
        (json!({"input": "a", "dimensions": 0}), "dimensions"),
        (json!({"input": "a", "truncate_prompt_tokens": 0}), "truncate_prompt_tokens"),
        (json!({"input": "a", "encoding_format": "hex"}), "encoding_format"),
    ] {
        let answer = embed(&server, extra.clone()).await;
        if param.is_empty() {
            assert!(answer.status.is_success(), "the empty text has its special tokens: {}", answer.text());
            continue;
        }
        assert_eq!(answer.status.as_u16(), 400, "{extra}: {}", answer.text());
        assert_eq!(answer.json()["error"]["param"], param, "{}", answer.text());
    }
    assert_eq!(vectors(&embed(&server, json!({"input": "a", "dimensions": 384})).await)[0].len(), 384);
    let chat = json!({"model": "minilm", "messages": [{"role": "user", "content": "hi"}]});
    let chat = server.post("/v1/chat/completions", &chat).await;
    assert_eq!((chat.status.as_u16(), &chat.json()["error"]["code"]), (400, &json!("model_does_not_generate")));
    assert_eq!(get(server.admin, "/readyz").await.status.as_u16(), 200);
    assert_eq!(server.stats().await["effective"]["maxModelTokens"], 256);
    // All of these wait for the first of them, whose batch waits for nothing.
    let text = "word ".repeat(200);
    let asked = (0..8).map(|_| embed(&server, json!({"input": [text, text, text, text]})).boxed_local());
    let statuses: Vec<u16> =
        futures::future::join_all(asked).await.iter().map(|answer| answer.status.as_u16()).collect();
    assert!(statuses.contains(&200) && statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn vectors_that_may_be_cut_are_cut() {
    let Some(model) = sentence_encoder() else { return };
    let copy = tempfile::tempdir().unwrap();
    for name in ["model.safetensors", "tokenizer.json", "modules.json", "sentence_bert_config.json", "1_Pooling"] {
        std::os::unix::fs::symlink(model.join(name), copy.path().join(name)).unwrap();
    }
    let mut config: Value = serde_json::from_slice(&std::fs::read(model.join("config.json")).unwrap()).unwrap();
    config["is_matryoshka"] = json!(true);
    std::fs::write(copy.path().join("config.json"), config.to_string()).unwrap();
    let server = serve_at(copy.path(), "--served-model-name minilm").await;
    let whole = vectors(&embed(&server, json!({"input": "a text"})).await).remove(0);
    let short = vectors(&embed(&server, json!({"input": "a text", "dimensions": 64})).await).remove(0);
    assert!(short.len() == 64 && (cosine(&short, &short) - 1.0).abs() < 1e-5);
    let scale = short[0] / whole[0];
    assert!(short.iter().zip(&whole).all(|(a, b)| (a - b * scale).abs() < 1e-5));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_alone_is_taken_whatever_its_size() {
    let Some(server) = encoder("--max-queue-tokens 16").await else { return };
    let texts: Vec<String> = (0..200).map(|index| format!("text {index}")).collect();
    assert_eq!(vectors(&embed(&server, json!({"input": texts})).await).len(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_batch_holds_so_many_tokens() {
    for (flags, texts) in [("", 4.0), ("--max-batch-tokens 16", 2.0)] {
        let Some(server) = encoder(&format!("--max-batch-wait-ms 100 {flags}")).await else { return };
        // Eight tokens each.
        let input = ["A man is eating food."; 4];
        assert_eq!(vectors(&embed(&server, json!({"input": input})).await).len(), 4);
        let fill = server.metric("windlass:batch_fill_ratio").await;
        assert!((fill * 32.0 - texts).abs() < 0.01, "{flags}: {fill}");
    }
}

/// A simulated encoder that takes so many milliseconds for a batch.
async fn simulated(step_ms: u32, flags: &str) -> TestServer {
    let time = format!("--sim-step-us {step_ms}000 --sim-prefill-token-us 0");
    serve(&format!("--runner pooling {time} {flags}")).await
}

/// What the vectors of these texts are asked with, of so many words each.
fn texts(count: usize, words: usize) -> Value {
    json!({"model": MODEL, "input": vec!["word ".repeat(words); count]})
}

/// The same, on its way.
fn asking(server: &TestServer, count: usize, words: usize) -> JoinHandle<Answer> {
    let (api, body) = (server.api, texts(count, words));
    tokio::spawn(async move { Client::connect(api).await.post("/v1/embeddings", &body).await })
}

/// The texts of the last batch.
async fn batch(server: &TestServer, max_texts: f64) -> f64 {
    (server.metric("windlass:batch_fill_ratio").await * max_texts).round()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_simulated_encoder_serves_what_an_encoder_does() {
    let server = simulated(1, "--max-model-len 32").await;
    let documents = ["the stock market", "a man eats bread", "it will rain"];
    let ranking = json!({"model": MODEL, "query": "a man eats", "documents": documents});
    let ranking = server.post("/v1/rerank", &ranking).await.json();
    assert_eq!(ranking["results"][0]["index"], 1, "{ranking}");
    let answer = server.post("/v1/embeddings", &json!({"model": MODEL, "input": ["a man", "a man eats"]})).await;
    let found = vectors(&answer);
    assert_eq!(answer.json()["usage"]["prompt_tokens"], 5);
    assert!((cosine(&found[0], &found[0]) - 1.0).abs() < 1e-5 && cosine(&found[0], &found[1]) > 0.5);
    let long = server.post("/v1/embeddings", &texts(1, 33)).await;
    assert_eq!((long.status.as_u16(), &long.json()["error"]["code"]), (400, &json!("context_length_exceeded")));
    let stats = server.stats().await;
    assert_eq!((&stats["simulated"], &stats["effective"]["device"]), (&json!(true), &json!("sim")), "{stats}");
    assert_eq!(server.chat(json!({})).await.status.as_u16(), 400);

    let scores = simulated(1, "--task score").await;
    let pairs = json!({"model": MODEL, "text_1": "a man eats", "text_2": documents});
    let pairs = scores.post("/v1/score", &pairs).await.json();
    let score = |index: usize| pairs["data"][index]["score"].as_f64().unwrap();
    assert!(score(1) > score(0) && score(1) > score(2) && score(1) <= 1.0 && score(0) >= 0.0, "{pairs}");
}

/// Each bound ends a batch. The wait is long where it is not to be the one, and nothing is waited for in vain.
#[tokio::test(flavor = "multi_thread")]
async fn a_batch_goes_when_it_has_texts_or_tokens_or_waited() {
    for (flags, asked, last) in [
        // Two full batches of four.
        ("--max-batch-wait-ms 60000 --max-batch-size 4", texts(8, 3), 4.0),
        // Three texts of four tokens fill twelve, so the fourth begins a batch, which waits for its time.
        ("--max-batch-wait-ms 200 --max-batch-size 4 --max-batch-tokens 14", texts(4, 4), 1.0),
        // A text alone is computed however long it is.
        ("--max-batch-wait-ms 200 --max-batch-size 4 --max-batch-tokens 2", texts(1, 9), 1.0),
        // Two are not enough for anything but the time.
        ("--max-batch-wait-ms 200 --max-batch-size 4", texts(2, 3), 2.0),
    ] {
        let server = simulated(1, flags).await;
        let answer = server.post("/v1/embeddings", &asked).await;
        assert_eq!(vectors(&answer).len(), asked["input"].as_array().unwrap().len(), "{flags}");
        assert_eq!(batch(&server, 4.0).await, last, "{flags}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn texts_that_come_while_a_batch_is_computed_are_the_next_one() {
    let server = simulated(1000, "--max-batch-wait-ms 0 --max-batch-size 8").await;
    let first = asking(&server, 1, 3);
    server.until("the first is computed", |stats| stats["running"] == 1).await;
    let others = asking(&server, 5, 3);
    server.until("the others wait", |stats| (&stats["running"], &stats["waiting"]) == (&json!(1), &json!(5))).await;
    assert!(first.await.unwrap().status.is_success() && others.await.unwrap().status.is_success());
    assert_eq!(batch(&server, 8.0).await, 5.0);
}

/// However many come at once, no more tokens wait than may.
#[tokio::test(flavor = "multi_thread")]
async fn requests_that_come_together_are_admitted_up_to_the_limit_and_no_further() {
    let server = simulated(3000, "--max-batch-wait-ms 0 --max-queue-tokens 100").await;
    let first = asking(&server, 1, 10);
    server.until("the first is computed", |stats| stats["running"] == 1).await;
    let others: Vec<_> = (0..40).map(|_| asking(&server, 2, 15)).collect();
    assert!(first.await.unwrap().status.is_success());
    let mut statuses = Vec::new();
    for answer in others {
        let answer = answer.await.unwrap();
        assert_eq!(answer.header("retry-after").is_some(), answer.status.as_u16() == 429, "{answer:?}");
        statuses.push(answer.status.as_u16());
    }
    // Ten tokens are being computed, and thirty of each request may wait three times.
    let taken = statuses.iter().filter(|status| **status == 200).count();
    assert!(taken == 3 && statuses.iter().all(|status| [200, 429].contains(status)), "{statuses:?}");
    server.until("nothing waits", |stats| stats["waiting"] == 0 && stats["queuedTokens"] == 0).await;
}
