//! Keys, tenants, TLS and origins on real connections.

use crate::common::{Answer, Client, FAST, MODEL, SLOW, TestServer, chat, get, post, serve, within};
use crate::encoders::encoder;
use axum::body::Body;
use hyper::{Method, Request, StatusCode};
use rcgen::{BasicConstraints, CertificateParams, CertifiedIssuer, IsCa, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer, ServerName};
use serde_json::{Value, json};
use std::fs;
use std::path::Path;
use std::sync::Arc;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

const CHAT: &str = "/v1/chat/completions";

fn with_key(mut request: Request<Body>, key: &str) -> Request<Body> {
    request.headers_mut().insert("authorization", format!("Bearer {key}").parse().unwrap());
    request
}

async fn ask(server: &TestServer, key: &str, body: Value) -> Answer {
    let request = with_key(post(CHAT, &chat(body)), key);
    Answer::read(Client::connect(server.api).await.send(request).await.unwrap()).await
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenant_at_its_limit_waits_and_others_do_not() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("alice"), "key-a").unwrap();
    fs::write(folder.path().join("bob"), "key-b").unwrap();
    let keys = folder.path().display();
    let server = serve(&format!("{SLOW} --api-key-dir {keys} --tenant-max-concurrent-requests 1")).await;
    let endless = chat(json!({"max_tokens": 5000, "stream": true}));
    let mut client = Client::connect(server.api).await;
    let running = client.send(with_key(post(CHAT, &endless), "key-a")).await.unwrap();
    assert_eq!(running.status(), StatusCode::OK);

    let refused = ask(&server, "key-a", json!({"max_tokens": 1})).await;
    assert_eq!((refused.status.as_u16(), refused.header("retry-after")), (429, Some("1")));
    assert_eq!(refused.json()["error"]["code"], "tenant_concurrency");
    assert_eq!(ask(&server, "key-b", json!({"max_tokens": 1})).await.status, StatusCode::OK);
    drop((running, client));
    crate::common::eventually("the place is free again", async || {
        ask(&server, "key-a", json!({"max_tokens": 1})).await.status == StatusCode::OK
    })
    .await;
    let counted = server
        .metric("windlass:admission_rejections_total{engine=\"0\",model_name=\"sim-model\",reason=\"tenant_c")
        .await;
    assert!(counted >= 1.0, "{counted}");
}

#[tokio::test(flavor = "multi_thread")]
async fn tokens_of_prompts_and_answers_count_against_the_rate() {
    let folder = tempfile::tempdir().unwrap();
    let (keys, limits) = (folder.path().join("keys"), folder.path().join("limits.json"));
    fs::write(&keys, "alice key-a\nbob key-b\n").unwrap();
    fs::write(&limits, r#"{"alice": {"tokens_per_minute": 20}}"#).unwrap();
    let flags = format!("{FAST} --api-key-file {} --tenant-limits-file {}", keys.display(), limits.display());
    let server = serve(&flags).await;
    // 6 tokens of prompt and 24 of answer: more than a minute's, known only afterwards.
    assert_eq!(ask(&server, "key-a", json!({"max_tokens": 24})).await.status, StatusCode::OK);
    let refused = ask(&server, "key-a", json!({"max_tokens": 1})).await;
    assert_eq!(refused.json()["error"]["code"], "tenant_token_rate");
    let seconds: u32 = refused.header("retry-after").unwrap().parse().unwrap();
    assert!((20..=33).contains(&seconds), "{seconds}: 11 tokens at 20 a minute");
    assert_eq!(ask(&server, "key-b", json!({"max_tokens": 24})).await.status, StatusCode::OK);
}

/// Every operation of a server's document asks for a key unless the document says that it needs none.
async fn asks_for_a_key_everywhere(server: &TestServer, operations: usize) {
    let document = get(server.api, "/openapi.json").await.json();
    let mut asked = 0;
    for (path, methods) in document["paths"].as_object().unwrap() {
        for (method, operation) in methods.as_object().unwrap().iter().filter(|(name, _)| *name != "parameters") {
            let request = Request::builder().method(method.to_uppercase().as_str()).uri(path.replace("{name}", MODEL));
            let request = request.header("content-type", "application/json").body(Body::from("{}")).unwrap();
            let answer = Answer::read(Client::connect(server.api).await.send(request).await.unwrap()).await;
            let open = operation["security"] == json!([{}]);
            assert_eq!(answer.status == StatusCode::UNAUTHORIZED, !open, "{method} {path}: {}", answer.status);
            asked += usize::from(!open);
        }
    }
    assert!(asked >= operations, "{asked} operations ask for a key: {document}");
    assert_eq!(get(server.api, "/nothing").await.status, StatusCode::UNAUTHORIZED);
}

#[tokio::test(flavor = "multi_thread")]
async fn every_route_of_every_dialect_asks_for_a_key() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "secret").unwrap();
    let flags = format!("--api-key-file {}", file.path().display());
    asks_for_a_key_everywhere(&serve(&format!("{FAST} {flags}")).await, 12).await;
    if let Some(encoder) = encoder(&flags).await {
        asks_for_a_key_everywhere(&encoder, 9).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn browsers_are_let_in_from_the_origins_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "secret").unwrap();
    let keys = file.path().display();
    let server = serve(&format!("{FAST} --api-key-file {keys} --allowed-origins https://chat.example")).await;
    let preflight = async |origin: &str| {
        let request = Request::builder().method(Method::OPTIONS).uri(CHAT).header("origin", origin);
        let request = request.header("access-control-request-method", "POST");
        let request = request.header("access-control-request-headers", "authorization").body(Body::empty()).unwrap();
        Answer::read(Client::connect(server.api).await.send(request).await.unwrap()).await
    };
    let allowed = preflight("https://chat.example").await;
    assert_eq!(allowed.header("access-control-allow-origin"), Some("https://chat.example"));
    assert_eq!(allowed.header("access-control-allow-headers"), Some("authorization"));
    assert_eq!(preflight("https://evil.example").await.header("access-control-allow-origin"), None);
    let silent = serve(FAST).await;
    assert_eq!(get(silent.api, "/v1/models").await.header("access-control-allow-origin"), None);
}

/// An authority and a certificate that it signed, as PEM.
struct Issued {
    authority: String,
    certificate: String,
    key: String,
}

fn issue() -> Issued {
    let mut params = CertificateParams::new(Vec::new()).unwrap();
    params.is_ca = IsCa::Ca(BasicConstraints::Unconstrained);
    let authority = CertifiedIssuer::self_signed(params, KeyPair::generate().unwrap()).unwrap();
    let key = KeyPair::generate().unwrap();
    let leaf = CertificateParams::new(vec!["localhost".to_owned()]).unwrap().signed_by(&key, &authority).unwrap();
    Issued { authority: authority.pem(), certificate: leaf.pem(), key: key.serialize_pem() }
}

fn write(folder: &Path, issued: &Issued) {
    fs::write(folder.join("tls.crt"), &issued.certificate).unwrap();
    fs::write(folder.join("tls.key"), &issued.key).unwrap();
}

/// A folder with what a server needs that checks its clients' certificates, by the authority that issued its own, and
/// the flags that say so.
fn mutual(own: &Issued) -> (tempfile::TempDir, String) {
    let folder = tempfile::tempdir().unwrap();
    write(folder.path(), own);
    fs::write(folder.path().join("ca.crt"), &own.authority).unwrap();
    let path = folder.path().display();
    let flags = format!("--ssl-certfile {path}/tls.crt --ssl-keyfile {path}/tls.key --ssl-ca-certs {path}/ca.crt");
    (folder, flags)
}

/// The status line that a client gets which trusts `authority`, or why it gets none.
async fn ask_over_tls(server: &TestServer, authority: &str, client: Option<&Issued>) -> std::io::Result<String> {
    let mut roots = rustls::RootCertStore::empty();
    roots.add(CertificateDer::from_pem_slice(authority.as_bytes()).unwrap()).unwrap();
    let provider = Arc::new(rustls::crypto::ring::default_provider());
    let builder = rustls::ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().unwrap();
    let builder = builder.with_root_certificates(roots);
    let config = match client {
        None => builder.with_no_client_auth(),
        Some(issued) => {
            let chain = vec![CertificateDer::from_pem_slice(issued.certificate.as_bytes()).unwrap()];
            builder.with_client_auth_cert(chain, PrivateKeyDer::from_pem_slice(issued.key.as_bytes()).unwrap()).unwrap()
        }
    };
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let name = ServerName::try_from("localhost").unwrap();
    let exchange = async {
        let mut stream = connector.connect(name, TcpStream::connect(server.api).await?).await?;
        stream.write_all(b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await?;
        let mut answer = Vec::new();
        stream.read_to_end(&mut answer).await?;
        Ok(String::from_utf8_lossy(&answer).lines().next().unwrap_or_default().to_owned())
    };
    within("an answer over TLS", exchange).await
}

#[tokio::test(flavor = "multi_thread")]
async fn the_commands_client_speaks_tls_with_those_it_trusts() {
    let (folder, issued, other) = (tempfile::tempdir().unwrap(), issue(), issue());
    write(folder.path(), &issued);
    let path = folder.path().display();
    let server = serve(&format!("{FAST} --ssl-certfile {path}/tls.crt --ssl-keyfile {path}/tls.key")).await;
    let ask = async |host: &str, authority: Option<&str>| {
        let file = folder.path().join("ca.crt");
        fs::write(&file, authority.unwrap_or_default()).unwrap();
        let url = format!("https://{host}:{}", server.api.port());
        let client = windlass_engine::client::Client::new(&url, None, authority.map(|_| file.as_path())).unwrap();
        client.first_model().await
    };
    assert_eq!(ask("localhost", Some(&issued.authority)).await.unwrap(), MODEL);
    assert!(ask("localhost", Some(&other.authority)).await.is_err(), "another authority's word was taken");
    assert!(ask("localhost", None).await.is_err(), "a certificate that nobody vouches for was taken");
    assert!(ask("127.0.0.1", Some(&issued.authority)).await.is_err(), "another name's certificate was taken");
}

#[tokio::test(flavor = "multi_thread")]
async fn tls_is_spoken_and_a_renewed_certificate_counts_without_a_restart() {
    let (folder, first, second) = (tempfile::tempdir().unwrap(), issue(), issue());
    write(folder.path(), &first);
    let path = folder.path().display();
    let mut config =
        crate::common::config(&format!("{FAST} --ssl-certfile {path}/tls.crt --ssl-keyfile {path}/tls.key"));
    config.refresh_every = std::time::Duration::ZERO;
    let server = crate::common::start(config).await;
    assert_eq!(ask_over_tls(&server, &first.authority, None).await.unwrap(), "HTTP/1.1 200 OK");
    assert!(ask_over_tls(&server, &second.authority, None).await.is_err());
    fs::write(folder.path().join("tls.crt"), "damaged").unwrap();
    assert_eq!(ask_over_tls(&server, &first.authority, None).await.unwrap(), "HTTP/1.1 200 OK");
    write(folder.path(), &second);
    assert_eq!(ask_over_tls(&server, &second.authority, None).await.unwrap(), "HTTP/1.1 200 OK");
    // Plain HTTP, or nothing, is cut and hurts nobody.
    let mut plain = TcpStream::connect(server.api).await.unwrap();
    plain.write_all(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n").await.unwrap();
    let mut answer = Vec::new();
    let _ = within("it is closed", plain.read_to_end(&mut answer)).await;
    assert!(!answer.starts_with(b"HTTP"));
    assert_eq!(ask_over_tls(&server, &second.authority, None).await.unwrap(), "HTTP/1.1 200 OK");
}

#[tokio::test(flavor = "multi_thread")]
async fn clients_show_a_certificate_where_one_is_required() {
    let (own, stranger) = (issue(), issue());
    let (_folder, flags) = mutual(&own);
    let server = serve(&format!("{FAST} {flags} --ssl-cert-reqs 2")).await;
    assert!(ask_over_tls(&server, &own.authority, None).await.is_err());
    assert!(ask_over_tls(&server, &own.authority, Some(&stranger)).await.is_err());
    assert_eq!(ask_over_tls(&server, &own.authority, Some(&own)).await.unwrap(), "HTTP/1.1 200 OK");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_certificate_may_be_left_out_where_it_is_only_checked() {
    let (own, stranger) = (issue(), issue());
    let (_folder, flags) = mutual(&own);
    let server = serve(&format!("{FAST} {flags} --ssl-cert-reqs 1")).await;
    assert_eq!(ask_over_tls(&server, &own.authority, None).await.unwrap(), "HTTP/1.1 200 OK");
    assert_eq!(ask_over_tls(&server, &own.authority, Some(&own)).await.unwrap(), "HTTP/1.1 200 OK");
    assert!(ask_over_tls(&server, &own.authority, Some(&stranger)).await.is_err(), "one that is shown is checked");
}

#[tokio::test(flavor = "multi_thread")]
async fn other_authorities_count_without_a_restart() {
    let (own, other) = (issue(), issue());
    let (folder, flags) = mutual(&own);
    let mut config = crate::common::config(&format!("{FAST} {flags} --ssl-cert-reqs 2"));
    config.refresh_every = std::time::Duration::ZERO;
    let server = crate::common::start(config).await;
    assert!(ask_over_tls(&server, &own.authority, Some(&other)).await.is_err());
    fs::write(folder.path().join("ca.crt"), &other.authority).unwrap();
    assert_eq!(ask_over_tls(&server, &own.authority, Some(&other)).await.unwrap(), "HTTP/1.1 200 OK");
    assert!(ask_over_tls(&server, &own.authority, Some(&own)).await.is_err(), "the old authority counts no more");
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_find_each_others_prompts_only_where_they_share() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "alice key-a\nalice key-a2\nbob key-b\n").unwrap();
    for (flag, shared) in [("", 0), ("--share-prefix-cache", 96)] {
        let server = serve(&format!("{FAST} --api-key-file {} {flag}", file.path().display())).await;
        let cached = async |key: &str| {
            let prompt: Vec<u32> = (1..100).collect();
            let body = json!({"model": MODEL, "prompt": prompt, "max_tokens": 1});
            let request = with_key(post("/v1/completions", &body), key);
            let answer = Answer::read(Client::connect(server.api).await.send(request).await.unwrap()).await;
            answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
        };
        assert_eq!((cached("key-a").await, cached("key-a2").await), (0, 96), "keys of one tenant");
        assert_eq!((cached("key-b").await, cached("key-b").await), (shared, 96), "{flag:?}");
    }
}

/// The status of a request to the admin port with these headers.
async fn admin(server: &TestServer, method: Method, path: &str, headers: &[(&str, &str)]) -> u16 {
    let head: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let mut stream = TcpStream::connect(server.admin).await.unwrap();
    stream.write_all(format!("{method} {path} HTTP/1.1\r\n{head}Connection: close\r\n\r\n").as_bytes()).await.unwrap();
    let mut answer = Vec::new();
    within("an answer", stream.read_to_end(&mut answer)).await.unwrap();
    let line = String::from_utf8_lossy(&answer);
    line.split(' ').nth(1).unwrap().parse().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_page_in_a_browser_acts_on_the_admin_port() {
    let server = serve(FAST).await;
    let own = server.admin.to_string();
    for headers in [
        &[("Host", "evil.example")][..],
        &[("Host", own.as_str()), ("Origin", "http://evil.example")],
        &[("Host", own.as_str()), ("Origin", "null")],
        &[("Host", "evil.example"), ("Origin", "http://evil.example")],
    ] {
        for (method, path) in [(Method::POST, "/drain"), (Method::POST, "/sleep"), (Method::GET, "/metrics")] {
            assert_eq!(admin(&server, method, path, headers).await, 403, "{path} {headers:?}");
        }
    }
    assert_eq!(admin(&server, Method::GET, "/readyz", &[("Host", "10.0.0.7:8001")]).await, 200, "nothing was done");
    assert_eq!(admin(&server, Method::POST, "/drain", &[("Host", own.as_str())]).await, 202);
}

#[tokio::test(flavor = "multi_thread")]
async fn the_admin_port_asks_for_a_token_where_there_is_one() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "secret").unwrap();
    let server = serve(&format!("{FAST} --admin-token-file {}", file.path().display())).await;
    let host = ("Host", "localhost");
    let (right, wrong) = (("Authorization", "Bearer secret"), ("Authorization", "Bearer other"));
    for path in ["/livez", "/readyz"] {
        assert_eq!(admin(&server, Method::GET, path, &[host]).await, 200, "{path}: kubelets have no token");
    }
    for path in ["/metrics", "/stats"] {
        assert_eq!(admin(&server, Method::GET, path, &[host]).await, 401, "{path}");
        assert_eq!(admin(&server, Method::GET, path, &[host, wrong]).await, 401, "{path}");
        assert_eq!(admin(&server, Method::GET, path, &[host, right]).await, 200, "{path}");
    }
    assert_eq!(admin(&server, Method::POST, "/drain", &[host]).await, 401);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_file_that_is_wrong_is_told_wherever_one_looks() {
    let file = tempfile::NamedTempFile::new().unwrap();
    fs::write(file.path(), "alice key-a\nbob key-b\n").unwrap();
    let mut config = crate::common::config(&format!("{FAST} --api-key-file {}", file.path().display()));
    config.refresh_every = std::time::Duration::ZERO;
    let server = crate::common::start(config).await;
    let status = async |key: &str| ask(&server, key, json!({"max_tokens": 1})).await.status.as_u16();
    assert_eq!((status("key-a").await, status("key-b").await), (200, 200));
    assert_eq!(get(server.admin, "/readyz").await.text(), "ok\n");
    assert_eq!(server.metric("windlass:api_keys_unreadable").await, 0.0);
    fs::write(file.path(), "alice key-a\nbob has gone\n").unwrap();
    assert_eq!((status("key-a").await, status("key-b").await), (200, 401));
    let ready = get(server.admin, "/readyz").await;
    assert!(ready.status == StatusCode::OK && ready.text().contains("line 2"), "{}", ready.text());
    assert_eq!(server.metric("windlass:api_keys_unreadable").await, 1.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_tenants_limit_counts_answers() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("alice"), "key-a").unwrap();
    let keys = folder.path().display();
    let server = serve(&format!("{SLOW} --api-key-dir {keys} --tenant-max-concurrent-requests 4")).await;
    let body = chat(json!({"max_tokens": 5000, "stream": true, "n": 3}));
    let mut client = Client::connect(server.api).await;
    let running = client.send(with_key(post(CHAT, &body), "key-a")).await.unwrap();
    assert_eq!(running.status(), StatusCode::OK);
    let refused = ask(&server, "key-a", json!({"max_tokens": 1, "n": 2})).await;
    assert_eq!((refused.status.as_u16(), refused.json()["error"]["code"].clone()), (429, json!("tenant_concurrency")));
    assert_eq!(ask(&server, "key-a", json!({"max_tokens": 1})).await.status, StatusCode::OK);
    let never = ask(&server, "key-a", json!({"max_tokens": 1, "n": 5})).await;
    assert_eq!((never.status.as_u16(), never.json()["error"]["param"].clone()), (400, json!("n")));
    drop((running, client));
}

#[tokio::test(flavor = "multi_thread")]
async fn connections_that_ask_for_nothing_make_room_for_those_that_do() {
    let mut config = crate::common::config(FAST);
    config.max_connections = Some(32);
    let server = crate::common::start(config).await;
    let mut asked = Client::connect(server.api).await;
    assert_eq!(asked.get("/health").await.unwrap().status, StatusCode::OK);
    let mut silent = Vec::new();
    for _ in 0..100 {
        silent.push(TcpStream::connect(server.api).await.unwrap());
    }
    assert_eq!(within("an answer beside them", get(server.api, "/health")).await.status, StatusCode::OK);
    assert_eq!(asked.get("/health").await.unwrap().status, StatusCode::OK, "who asked stays");
    assert_eq!(get(server.admin, "/readyz").await.status, StatusCode::OK);
    // The first to come was the first to go.
    let mut byte = [0];
    assert_eq!(within("its end", silent[0].read(&mut byte)).await.unwrap_or(0), 0);
}
