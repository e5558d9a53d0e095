//! `windlass-engine fetch` of whole models: a mirror of the hub, a registry and a real S3 server.

use crate::mirror::{COMMIT, Mirror, bytes, hex};
use base64::Engine;
use clap::Parser;
use serde_json::json;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command as Process, Stdio};
use std::sync::atomic::Ordering;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::net::TcpListener;
use windlass_checkpoint::testing::{SafetensorsBuilder, fetched};
use windlass_engine::cli::{Cli, Command};
use windlass_engine::failure::Failure;
use windlass_engine::{fetch, inspect};
use windlass_engine_contract::inspection::Inspection;
use windlass_engine_contract::termination::Reason;

pub async fn fetch(source: &str, to: &Path, flags: &[&str]) -> Result<(), Failure> {
    let line = ["windlass-engine", "fetch", source, "--to", to.to_str().unwrap()];
    let Command::Fetch(args) = Cli::try_parse_from(line.iter().chain(flags)).unwrap().command else { panic!() };
    tokio::task::spawn_blocking(move || fetch::run(&args, Duration::from_millis(1))).await.unwrap()
}

/// What `inspect` says of a source, and what it would say of the same files here.
pub async fn inspected(source: &str, flags: &[&str]) -> Result<Inspection, Failure> {
    let log = tempfile::NamedTempFile::new().unwrap();
    let line = ["windlass-engine", "inspect", source, "--summary", "--termination-log", log.path().to_str().unwrap()];
    let Command::Inspect(args) = Cli::try_parse_from(line.iter().chain(flags)).unwrap().command else { panic!() };
    tokio::task::spawn_blocking(move || inspect::run(&args, Duration::from_millis(1))).await.unwrap()?;
    Ok(Inspection::parse(&std::fs::read_to_string(log.path()).unwrap()).unwrap())
}

/// A Llama of 8 MB whose embedding and layer are in a shard each.
fn llama() -> Mirror {
    let matrix = |file: SafetensorsBuilder, name: &str, [rows, cols]: [usize; 2]| {
        file.tensor(&format!("model.{name}.weight"), "BF16", &[rows as u64, cols as u64], &vec![0; 2 * rows * cols])
    };
    let norm =
        |file: SafetensorsBuilder, name: &str| file.tensor_f32(&format!("model.{name}.weight"), &[64], &[1.0; 64]);
    let layer = [("q", [64, 64]), ("k", [32, 64]), ("v", [32, 64]), ("o", [64, 64])];
    let mut second = norm(SafetensorsBuilder::new(), "norm");
    for (part, shape) in layer {
        second = matrix(second, &format!("layers.0.self_attn.{part}_proj"), shape);
    }
    for (part, shape) in [("gate", [128, 64]), ("up", [128, 64]), ("down", [64, 128])] {
        second = matrix(second, &format!("layers.0.mlp.{part}_proj"), shape);
    }
    let second = norm(norm(second, "layers.0.input_layernorm"), "layers.0.post_attention_layernorm").build();
    let first = matrix(SafetensorsBuilder::new(), "embed_tokens", [1 << 16, 64]).build();
    let config = json!({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
        "num_key_value_heads": 1, "intermediate_size": 128, "vocab_size": 1 << 16, "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5, "tie_word_embeddings": true});
    let map =
        json!({"weight_map": {"model.embed_tokens.weight": "a.safetensors", "model.norm.weight": "b.safetensors"}});
    Mirror::new(&[
        ("config.json", config.to_string().into_bytes()),
        ("model.safetensors.index.json", map.to_string().into_bytes()),
        ("tokenizer.json", vec![b' '; 1 << 20]),
        ("a.safetensors", first),
        ("b.safetensors", second),
    ])
}

pub fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn check_model(mirror: &Mirror, folder: &Path) {
    let expected =
        ["config.json", "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors", "tokenizer.json"];
    assert_eq!(names(folder), expected);
    for name in expected {
        assert!(std::fs::read(folder.join(name)).unwrap() == mirror.files[name], "{name}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_repository_of_the_hub_is_fetched_in_parts_once_and_shared() {
    let mirror = Arc::new(Mirror::model());
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--hf-endpoint", &endpoint];
    fetch("hf://org/name", &folder.path().join("one"), &flags).await.unwrap();
    check_model(&mirror, &folder.path().join("one"));
    // The list, three parts of 20 MB, and three small files.
    assert_eq!(mirror.requests(), 1 + 3 + 3);
    fetch("hf://org/name", &folder.path().join("two"), &flags).await.unwrap();
    assert_eq!(mirror.requests(), 8, "the second time only the list is asked for");
    let inode = |model: &str| folder.path().join(model).join("config.json").metadata().unwrap().ino();
    assert_eq!(inode("one"), inode("two"), "both are links to one content");
    let pinned = ["--hf-endpoint", &endpoint, "--revision", COMMIT];
    fetch("hf://org/name", &folder.path().join("two"), &pinned).await.unwrap();
    assert_eq!(mirror.requests(), 8, "a commit that is there needs no server");
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_that_broke_off_are_fetched_again_and_the_others_kept() {
    let mirror = Arc::new(Mirror { broken: Mutex::new(2), ..Mirror::model() });
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model");
    fetch("hf://org/name", &to, &["--hf-endpoint", &endpoint]).await.unwrap();
    check_model(&mirror, &to);
    // So many failures that the first attempt gives up: the next one goes on where it was.
    let mirror = Arc::new(Mirror { broken: Mutex::new(4), ..Mirror::model() });
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model");
    let flags = ["--hf-endpoint", &endpoint, "--connections", "1"];
    let failure = fetch("hf://org/name", &to, &flags).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelUnavailable, "{failure}");
    *mirror.broken.lock().unwrap() = 0;
    fetch("hf://org/name", &to, &flags).await.unwrap();
    check_model(&mirror, &to);
}

/// Leaves in `folder` what a fetch of the large file leaves that ended when the parts at `offsets` were there: of its
/// content, what `written` makes of it.
fn begun(folder: &Path, mirror: &Mirror, written: fn(&[u8]) -> Vec<u8>, offsets: &str) {
    let large = &mirror.files["model-00001-of-00002.safetensors"];
    let blobs = folder.join("blobs");
    std::fs::create_dir(&blobs).unwrap();
    std::fs::write(blobs.join(format!("sha256-{}.part", hex(large))), written(large)).unwrap();
    std::fs::write(blobs.join(format!("sha256-{}.parts", hex(large))), offsets).unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_interrupted_fetch_asks_only_for_what_is_missing() {
    let mirror = Arc::new(Mirror::model());
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    begun(folder.path(), &mirror, <[u8]>::to_vec, "0\n16777216\n");
    fetch("hf://org/name", &folder.path().join("model"), &["--hf-endpoint", &endpoint]).await.unwrap();
    check_model(&mirror, &folder.path().join("model"));
    assert_eq!(mirror.requests(), 1 + 1 + 3, "two of three parts were there");
}

#[tokio::test(flavor = "multi_thread")]
async fn parts_of_a_file_that_was_cut_short_are_not_believed_to_be_there() {
    let mirror = Arc::new(Mirror::model());
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    begun(folder.path(), &mirror, |large| large[..1000].to_vec(), "0\n16777216\n");
    fetch("hf://org/name", &folder.path().join("model"), &["--hf-endpoint", &endpoint]).await.unwrap();
    check_model(&mirror, &folder.path().join("model"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_part_that_is_shorter_than_asked_for_is_asked_for_again() {
    let mirror = Arc::new(Mirror { short: Mutex::new(2), ..Mirror::model() });
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    fetch("hf://org/name", &folder.path().join("model"), &["--hf-endpoint", &endpoint]).await.unwrap();
    check_model(&mirror, &folder.path().join("model"));
    let endpoint = Arc::new(Mirror { short: Mutex::new(2), ..llama() }).serve().await;
    inspected("hf://org/name", &["--hf-endpoint", &endpoint]).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn descriptions_come_first_then_headers_then_the_rest() {
    let mirror = Arc::new(Mirror::model());
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--hf-endpoint", &endpoint, "--connections", "1"];
    fetch("hf://org/name", &folder.path().join("model"), &flags).await.unwrap();
    let asked = mirror.asked.lock().unwrap();
    let names: Vec<&str> = asked[1..].iter().map(|path| path.rsplit('/').next().unwrap()).collect();
    let [first, second] = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"];
    assert_eq!(names, ["config.json", "tokenizer.json", first, second, first, first]);
}

#[tokio::test(flavor = "multi_thread")]
async fn files_of_the_same_content_come_once() {
    let mut mirror = Mirror::model();
    mirror.files.insert("generation_config.json".to_owned(), mirror.files["config.json"].clone());
    let mirror = Arc::new(mirror);
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model");
    fetch("hf://org/name", &to, &["--hf-endpoint", &endpoint]).await.unwrap();
    assert_eq!(std::fs::read(to.join("generation_config.json")).unwrap(), b"{}");
    assert_eq!(mirror.requests(), 1 + 3 + 3);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_larger_than_allowed_is_refused_before_any_of_it_comes() {
    let mirror = Arc::new(Mirror::model());
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--hf-endpoint", &endpoint, "--max-bytes", "20000000"];
    let failure = fetch("hf://org/name", &folder.path().join("model"), &flags).await.unwrap_err();
    assert!(failure.message.contains("--max-bytes is 20000000"), "{failure}");
    assert_eq!(mirror.requests(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_description_without_an_end_is_not_read_to_it() {
    let endless = Box::leak("0".repeat(33 << 20).into_boxed_str());
    let mirror = Arc::new(Mirror { lies: Some(endless), ..Mirror::new(&[("m.gguf", bytes(1, 100))]) });
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let failure =
        fetch("hf://org/name", &folder.path().join("model"), &["--hf-endpoint", &endpoint]).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ModelUnavailable, "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_content_that_is_another_one_is_refused_and_forgotten() {
    let mirror = Arc::new(Mirror::model());
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    begun(folder.path(), &mirror, |large| vec![7; large.len()], "0\n");
    let to = folder.path().join("model");
    let failure = fetch("hf://org/name", &to, &["--hf-endpoint", &endpoint]).await.unwrap_err();
    assert_eq!(failure.reason, Reason::ChecksumMismatch, "{failure}");
    assert!(!to.exists());
    fetch("hf://org/name", &to, &["--hf-endpoint", &endpoint]).await.unwrap();
    check_model(&mirror, &to);
}

#[tokio::test(flavor = "multi_thread")]
async fn pods_that_share_a_cache_fetch_each_content_once() {
    let mirror = Arc::new(Mirror::model());
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let flags = ["--hf-endpoint", &endpoint];
    let (one, two) = (folder.path().join("one"), folder.path().join("two"));
    let (first, second) = tokio::join!(fetch("hf://org/name", &one, &flags), fetch("hf://org/name", &two, &flags));
    first.unwrap();
    second.unwrap();
    check_model(&mirror, &one);
    check_model(&mirror, &two);
    assert_eq!(mirror.requests(), 2 + 6);
}

#[tokio::test(flavor = "multi_thread")]
async fn one_gguf_file_of_several_is_named_and_a_token_is_sent() {
    let files = [("m.Q4_0.gguf", bytes(3, 5000)), ("m.Q8_0.gguf", bytes(4, 9000))];
    let mirror = Arc::new(Mirror { token: Some("secret"), ..Mirror::new(&files) });
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model.gguf");
    let token = folder.path().join("token");
    std::fs::write(&token, "secret\n").unwrap();
    let flags = ["--hf-endpoint", &endpoint, "--token-file", token.to_str().unwrap()];
    let several = fetch("hf://org/name", &to, &flags).await.unwrap_err();
    assert!(several.message.contains("of m.Q4_0.gguf, m.Q8_0.gguf"), "{several}");
    fetch("hf://org/name/m.Q8_0.gguf", &to, &flags).await.unwrap();
    assert_eq!(std::fs::read(&to).unwrap(), files[1].1);
    std::fs::write(&token, "wrong").unwrap();
    let refused = fetch("hf://org/name/m.Q4_0.gguf", &to, &flags).await.unwrap_err();
    assert!(refused.message.contains("401") && refused.message.contains("token"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_token_follows_a_redirect_to_its_own_server_and_to_no_other() {
    let storage = Arc::new(Mirror::model());
    let address = Some(storage.serve().await);
    let mirror = Arc::new(Mirror { token: Some("secret"), storage: address, ..Mirror::model() });
    let endpoint = mirror.serve().await;
    let folder = tempfile::tempdir().unwrap();
    let (to, token) = (folder.path().join("model"), folder.path().join("token"));
    std::fs::write(&token, "secret").unwrap();
    let flags = ["--hf-endpoint", &endpoint, "--token-file", token.to_str().unwrap()];
    fetch("hf://org/name", &to, &flags).await.unwrap();
    check_model(&mirror, &to);
    // The list, two small files with a redirect each, and four parts that are elsewhere.
    assert_eq!((mirror.requests(), mirror.credentials.load(Ordering::SeqCst)), (9, 9));
    assert_eq!((storage.requests(), storage.credentials.load(Ordering::SeqCst)), (4, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_artifact_of_a_registry_is_fetched_with_the_token_it_asks_for() {
    let mirror = Mirror::model();
    let files: Vec<_> = mirror.files.iter().filter(|(name, _)| !name.contains("onnx")).collect();
    let files: Vec<(&str, Vec<u8>)> = files.into_iter().map(|(name, bytes)| (name.as_str(), bytes.clone())).collect();
    let mirror = Arc::new(Mirror { token: Some("granted"), ..Mirror::new(&files) });
    let registry = mirror.serve().await.replace("http://", "oci://");
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model");
    fetch(&format!("{registry}/org/name:v1"), &to, &[]).await.unwrap();
    check_model(&mirror, &to);
    let image = Arc::new(Mirror::new(&[("folder.tar", vec![0; 100])]));
    let registry = image.serve().await.replace("http://", "oci://");
    let refused = fetch(&format!("{registry}/org/name"), &to, &[]).await.unwrap_err();
    assert_eq!(refused.reason, Reason::Unsupported);
    assert!(refused.message.contains("is no file"), "{refused}");
}

/// As images of several platforms are pushed by OCI's tools and by Docker's. Such a registry answers only who accepts one.
#[tokio::test(flavor = "multi_thread")]
async fn the_first_manifest_of_a_list_is_fetched() {
    for kind in ["application/vnd.oci.image.index.v1+json", "application/vnd.docker.distribution.manifest.list.v2+json"]
    {
        let model = [("m.gguf", bytes(1, 5000))];
        let mirror = Arc::new(Mirror { list_type: Some(kind), ..Mirror::new(&model) });
        let registry = mirror.serve().await.replace("http://", "oci://");
        let folder = tempfile::tempdir().unwrap();
        let to = folder.path().join("model");
        fetch(&format!("{registry}/org/name:v1"), &to, &[]).await.unwrap_or_else(|failure| panic!("{kind}: {failure}"));
        assert!(std::fs::read(to.join("m.gguf")).unwrap() == model[0].1, "{kind}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_of_the_hub_or_of_a_registry_is_inspected_by_its_headers() {
    let (mirror, folder) = (Arc::new(llama()), tempfile::tempdir().unwrap());
    for (name, bytes) in &mirror.files {
        std::fs::write(folder.path().join(name), bytes).unwrap();
    }
    let here = inspected(folder.path().to_str().unwrap(), &[]).await.unwrap();
    assert_eq!((here.shape.layers, here.shape.vocabulary, here.weight_type.as_str()), (1, 1 << 16, "bf16"));
    let endpoint = mirror.serve().await;
    let of_hub = inspected("hf://org/name", &["--hf-endpoint", &endpoint]).await.unwrap();
    assert_eq!(of_hub.revision.as_deref(), Some(COMMIT));
    let of_registry = inspected(&format!("{}/org/name:v1", endpoint.replace("http://", "oci://")), &[]).await.unwrap();
    assert!(of_registry.revision.is_some());
    for there in [of_hub, of_registry] {
        assert_eq!(Inspection { revision: None, ..there }, here);
    }
    let (sent, whole) = (mirror.sent.load(Ordering::SeqCst), mirror.files["a.safetensors"].len());
    assert!(sent < whole / 10, "{sent} bytes were sent");
    let asked = mirror.asked.lock().unwrap();
    assert!(!asked.iter().any(|path| path.ends_with("tokenizer.json")), "{asked:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_header_of_a_model_elsewhere_is_refused_and_a_broken_line_tried_again() {
    let mirror = Arc::new(Mirror { broken: Mutex::new(2), ..llama() });
    let endpoint = mirror.serve().await;
    inspected("hf://org/name", &["--hf-endpoint", &endpoint]).await.unwrap();
    let mut damaged = llama();
    damaged.files.get_mut("b.safetensors").unwrap()[8] = b'!';
    let endpoint = Arc::new(damaged).serve().await;
    let refused = inspected("hf://org/name", &["--hf-endpoint", &endpoint]).await.unwrap_err();
    assert_eq!(refused.reason, Reason::ModelInvalid, "{refused}");
    assert!(refused.message.contains("b.safetensors"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn sources_that_name_nothing_are_refused_with_what_would_be_right() {
    let folder = tempfile::tempdir().unwrap();
    let to = folder.path().join("model");
    for (source, flags, expected) in [
        ("hf://org", &[][..], "is not hf://organization/name"),
        ("hf://org/../name", &[], "is not hf://organization/name"),
        ("hf://org/name", &["--revision", "a b"], "is no branch, tag or commit"),
        ("hf://org/name", &["--sha256", "00"], "--sha256 is for one file"),
        ("https://host/file.gguf", &[], "this source needs --sha256"),
        ("https://host/file.gguf", &["--revision", "main"], "--revision is for hf:// alone"),
        ("s3://", &[], "names no bucket"),
        ("oci://registry", &[], "is not oci://registry/repository:tag"),
        ("ftp://host/file", &[], "the source must begin with hf://"),
    ] {
        let failure = fetch(source, &to, flags).await.unwrap_err();
        assert_eq!(failure.reason, Reason::InvalidConfiguration, "{failure}");
        assert!(failure.message.contains(expected), "{failure}");
    }
}

/// moto's S3 server, which speaks the protocol and checks requests' form.
struct Moto {
    process: Child,
    endpoint: String,
}

impl Drop for Moto {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

impl Moto {
    async fn start() -> Option<Moto> {
        let python = fetched("WINDLASS_MOTO_PYTHON", "python/moto-5.2.5/bin/python", "the S3 server moto")?;
        let port = TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap().port();
        let mut command = Process::new(python);
        command.args(["-m", "moto.server", "-H", "127.0.0.1", "-p", &port.to_string()]);
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        let moto = Moto { process, endpoint: format!("http://127.0.0.1:{port}") };
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Some(moto)
    }

    async fn put(&self, path: &str, body: Vec<u8>) {
        self.put_with(path, body, &[("x-amz-acl", "public-read")]).await;
    }

    async fn put_with(&self, path: &str, body: Vec<u8>, headers: &[(&str, &str)]) {
        let request = ureq::put(format!("{}/{path}", self.endpoint));
        let request = headers.iter().fold(request, |request, (name, value)| request.header(*name, *value));
        let put = move || request.send(&body[..]).map(drop);
        tokio::task::spawn_blocking(put).await.unwrap().unwrap();
    }

    /// A folder with settings, in `folder`.
    fn settings(&self, folder: &Path) -> PathBuf {
        let settings = folder.join("credentials");
        std::fs::create_dir(&settings).unwrap();
        for (name, value) in [
            ("AWS_ENDPOINT", self.endpoint.as_str()),
            ("AWS_ACCESS_KEY_ID", "key\n"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_REGION", "us-east-1"),
        ] {
            std::fs::write(settings.join(name), value).unwrap();
        }
        settings
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_in_a_bucket_is_fetched_with_credentials_from_files() {
    let Some(moto) = Moto::start().await else { return };
    let mirror = Mirror::model();
    moto.put("models", Vec::new()).await;
    for (name, bytes) in &mirror.files {
        moto.put(&format!("models/team/llama/{name}"), bytes.clone()).await;
    }
    let folder = tempfile::tempdir().unwrap();
    let credentials = moto.settings(folder.path());
    let flags = ["--credentials-dir", credentials.to_str().unwrap()];
    let to = folder.path().join("model");
    fetch("s3://models/team/llama", &to, &flags).await.unwrap();
    check_model(&mirror, &to);
    for (name, bytes) in &llama().files {
        moto.put(&format!("models/small/{name}"), bytes.clone()).await;
    }
    let found = inspected("s3://models/small", &flags).await.unwrap();
    assert!(found.shape.layers == 1 && found.revision.is_some(), "{found:?}");
    moto.put("models/one/m.gguf", bytes(5, 9_000_000)).await;
    let file = folder.path().join("m.gguf");
    fetch("s3://models/one/m.gguf", &file, &flags).await.unwrap();
    assert!(std::fs::read(&file).unwrap() == bytes(5, 9_000_000));
    let nothing = fetch("s3://models/one/n.gguf", &file, &flags).await.unwrap_err();
    assert_eq!(nothing.reason, Reason::ModelUnavailable, "{nothing}");
    let empty = fetch("s3://models/nowhere", &to, &flags).await.unwrap_err();
    assert!(empty.message.contains("neither a GGUF file nor"), "{empty}");
}

/// Leaves in `folder` an object's content as an earlier fetch would have that was all there, but for one byte.
fn corrupt(folder: &Path, file: &str) {
    let blobs = folder.join("blobs");
    let content = std::fs::read_dir(&blobs).unwrap().next().unwrap().unwrap().path();
    let mut bytes = std::fs::read(&content).unwrap();
    bytes[1000] ^= 1;
    std::fs::remove_file(folder.join(file)).unwrap();
    std::fs::remove_file(&content).unwrap();
    std::fs::write(content.with_extension("part"), bytes).unwrap();
    std::fs::write(content.with_extension("parts"), "0\n").unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn an_object_is_held_to_what_its_store_says_of_it() {
    let Some(moto) = Moto::start().await else { return };
    moto.put("models", Vec::new()).await;
    let object = bytes(6, 100_000);
    let sha256: Vec<u8> = hex(&object)
        .as_bytes()
        .chunks(2)
        .map(|pair| u8::from_str_radix(str::from_utf8(pair).unwrap(), 16).unwrap())
        .collect();
    let sha256 = base64::engine::general_purpose::STANDARD.encode(sha256);
    moto.put("models/etag/m.gguf", object.clone()).await;
    moto.put_with(
        "models/checksum/m.gguf",
        object.clone(),
        &[("x-amz-checksum-sha256", &sha256), ("x-amz-sdk-checksum-algorithm", "SHA256")],
    )
    .await;
    moto.put_with("models/secret/m.gguf", object, &[("x-amz-server-side-encryption", "aws:kms")]).await;
    for (name, kind) in [("etag", Some("MD5")), ("checksum", Some("SHA-256")), ("secret", None)] {
        let folder = tempfile::tempdir().unwrap();
        let (settings, to) = (moto.settings(folder.path()), folder.path().join("m.gguf"));
        let flags = ["--credentials-dir", settings.to_str().unwrap()];
        let source = format!("s3://models/{name}/m.gguf");
        fetch(&source, &to, &flags).await.unwrap();
        corrupt(folder.path(), "m.gguf");
        match (fetch(&source, &to, &flags).await, kind) {
            (Err(failure), Some(kind)) => {
                assert_eq!(failure.reason, Reason::ChecksumMismatch, "{failure}");
                assert!(failure.message.contains(kind), "{failure}");
                fetch(&source, &to, &flags).await.unwrap();
            }
            // Of an object that the store encrypts with a key of its own it tells nothing.
            (Ok(()), None) => (),
            (other, kind) => panic!("{name}: {other:?} where {kind:?} is checked"),
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_bucket_that_anybody_may_read_needs_no_credentials() {
    let Some(moto) = Moto::start().await else { return };
    moto.put("models", Vec::new()).await;
    moto.put("models/m.gguf", bytes(7, 50_000)).await;
    let folder = tempfile::tempdir().unwrap();
    let settings = moto.settings(folder.path());
    for name in ["AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"] {
        std::fs::remove_file(settings.join(name)).unwrap();
    }
    std::fs::write(settings.join("AWS_SKIP_SIGNATURE"), "true").unwrap();
    let to = folder.path().join("m.gguf");
    fetch("s3://models/m.gguf", &to, &["--credentials-dir", settings.to_str().unwrap()]).await.unwrap();
    assert!(std::fs::read(&to).unwrap() == bytes(7, 50_000));
}
