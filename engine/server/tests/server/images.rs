//! Models in the layers of container images, sound and hostile.

use crate::mirror::{Mirror, bytes};
use crate::sources::{fetch, inspected, names};
use flate2::Compression;
use flate2::write::GzEncoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use std::io::Write;
use std::path::PathBuf;
use std::sync::Arc;
use tar::{Builder, EntryType, Header};
use windlass_engine::failure::Failure;
use windlass_engine_contract::termination::Reason;

/// An entry of a layer.
enum Entry<'a> {
    File(&'a str, Vec<u8>),
    Folder(&'a str),
    Link(EntryType, &'a str, &'a str),
}
use Entry::{File, Folder, Link};

fn layer(entries: Vec<Entry<'_>>) -> Vec<u8> {
    let mut archive = Builder::new(Vec::new());
    for entry in entries {
        let mut header = Header::new_gnu();
        header.set_mode(0o644);
        let (kind, path, target, data) = match entry {
            File(path, data) => (EntryType::Regular, path, None, data),
            Folder(path) => (EntryType::Directory, path, None, Vec::new()),
            Link(kind, path, target) => (kind, path, Some(target), Vec::new()),
        };
        header.set_entry_type(kind);
        header.set_size(data.len() as u64);
        // As it is, also where the crate would refuse it.
        header.as_old_mut().name[..path.len()].copy_from_slice(path.as_bytes());
        target.into_iter().filter(|target| !target.is_empty()).for_each(|target| header.set_link_name(target).unwrap());
        header.set_cksum();
        archive.append(&header, &data[..]).unwrap();
    }
    archive.into_inner().unwrap()
}

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(bytes).unwrap();
    encoder.finish().unwrap()
}

fn zstd(bytes: &[u8]) -> Vec<u8> {
    compress_to_vec(bytes, CompressionLevel::Fastest)
}

/// A registry with an image of these layers, and where its model goes.
struct Image {
    mirror: Arc<Mirror>,
    address: String,
    folder: tempfile::TempDir,
}

impl Image {
    async fn of(layers: &[(&str, Vec<u8>)]) -> Image {
        let mirror = Arc::new(Mirror::new(layers));
        let address = format!("{}/org/name:v1", mirror.serve().await.replace("http://", "oci://"));
        Image { mirror, address, folder: tempfile::tempdir().unwrap() }
    }

    fn to(&self) -> PathBuf {
        self.folder.path().join("models/it")
    }

    async fn fetch(&self, flags: &[&str]) -> Result<(), Failure> {
        fetch(&self.address, &self.to(), flags).await
    }

    async fn refusal(entries: Vec<Entry<'_>>, flags: &[&str]) -> Failure {
        let image = Image::of(&[("layer1.tar", layer(entries))]).await;
        let failure = image.fetch(flags).await.unwrap_err();
        assert!(!image.to().exists(), "{failure}");
        failure
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn layers_make_a_model_together_and_hide_what_is_below() {
    let base = layer(vec![
        Folder("bin/"),
        Link(EntryType::Symlink, "bin/sh", "busybox"),
        File("config.json", b"of the image".to_vec()),
        File("models/config.json", b"old".to_vec()),
        File("models/model.safetensors", bytes(1, 30_000)),
        File("models/tokenizer.txt", b"hidden".to_vec()),
        File("models/sub/added.json", b"hidden with its folder".to_vec()),
        File("models/pytorch_model.bin", b"a pickle".to_vec()),
    ]);
    let above = layer(vec![
        File("./models/config.json", b"{}".to_vec()),
        File("models/.wh.tokenizer.txt", Vec::new()),
        File("models/sub/.wh..wh..opq", Vec::new()),
        File("models/tokenizer.json", b"old".to_vec()),
    ]);
    let top = layer(vec![File("models/tokenizer.json", b"new".to_vec())]);
    let layers = [("layer1.tar", base), ("layer2.tar.gz", gzip(&above)), ("layer3.tar.zst", zstd(&top))];
    let image = Image::of(&layers).await;
    image.fetch(&[]).await.unwrap();
    assert_eq!(names(&image.to()), ["config.json", "model.safetensors", "tokenizer.json"]);
    let read = |name: &str| std::fs::read(image.to().join(name)).unwrap();
    assert!(read("config.json") == b"{}" && read("model.safetensors") == bytes(1, 30_000));
    assert_eq!(read("tokenizer.json"), b"new");
    assert_eq!(names(&image.to().with_file_name("blobs")), Vec::<String>::new(), "layers are not kept");
    let requests = image.mirror.requests();
    image.fetch(&[]).await.unwrap();
    assert_eq!(image.mirror.requests(), requests + 1, "only the manifest is asked for again");
    let refused = inspected(&image.address, &[]).await.unwrap_err();
    assert_eq!(refused.reason, Reason::Unsupported, "{refused}");
    assert!(refused.message.contains("is an image"), "{refused}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_may_be_in_the_one_folder_below_and_all_of_a_lower_layer_be_hidden() {
    // The last is a file in the folder's place.
    let hiding = [
        ".wh.models",
        ".wh..wh..opq",
        "models/.wh..wh..opq",
        "models/.wh.old",
        "models/old/.wh..wh..opq",
        "models/old/.wh.m.gguf",
        "models/old",
    ];
    for hiding in hiding {
        let base = layer(vec![File("models/old/m.gguf", bytes(2, 100))]);
        let above = layer(vec![File(hiding, Vec::new()), File("models/llama/m.gguf", bytes(3, 5000))]);
        let image = Image::of(&[("layer1.tar", base), ("layer2.tar", above)]).await;
        image.fetch(&[]).await.unwrap_or_else(|failure| panic!("{hiding}: {failure}"));
        assert_eq!(names(&image.to()), ["m.gguf"], "{hiding}");
        assert!(std::fs::read(image.to().join("m.gguf")).unwrap() == bytes(3, 5000), "{hiding}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_layer_may_not_have_is_refused_by_name() {
    let model = || File("models/m.gguf", bytes(1, 5000));
    for (entries, reason, words) in [
        (vec![model(), File("models/../../../m.gguf", vec![1])], Reason::ModelInvalid, "leads out of its folder"),
        (
            vec![model(), Link(EntryType::Symlink, "models/n.gguf", "/etc/passwd")],
            Reason::Unsupported,
            "is no plain file",
        ),
        (vec![model(), Link(EntryType::Link, "models/n.gguf", "etc/passwd")], Reason::Unsupported, "is no plain file"),
        (vec![Link(EntryType::Symlink, "models", "opt/models"), model()], Reason::Unsupported, "is no plain file"),
        (vec![model(), Link(EntryType::Char, "models/zero", "")], Reason::Unsupported, "is no plain file"),
        (vec![File("opt/m.gguf", bytes(1, 10))], Reason::ModelInvalid, "no one model in /models"),
        (
            vec![File("models/a/m.gguf", vec![1]), File("models/b/m.gguf", vec![1])],
            Reason::ModelInvalid,
            "several models: in models/a, models/b",
        ),
    ] {
        let failure = Image::refusal(entries, &[]).await;
        assert_eq!(failure.reason, reason, "{failure}");
        assert!(failure.message.contains(words), "{failure}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_layer_unpacks_to_is_bounded() {
    let bomb = layer(vec![File("models/m.gguf", vec![0; 8 << 20])]);
    for compressed in [("layer1.tar.gz", gzip(&bomb)), ("layer1.tar.zst", zstd(&bomb))] {
        let image = Image::of(&[compressed]).await;
        let failure = image.fetch(&["--max-bytes", "1000000"]).await.unwrap_err();
        assert!(failure.message.contains("more than --max-bytes"), "{failure}");
    }
    // A name of megabytes, as GNU's tar writes long ones.
    let name = Entry::Link(EntryType::GNULongName, "././@LongLink", "");
    let mut archive = layer(vec![name, File("models/m.gguf", vec![1])]);
    let mut header = Header::from_byte_slice(&archive[..512]).clone();
    header.set_size(2 << 20);
    header.set_cksum();
    let long = header.as_bytes().iter().copied().chain(vec![b'n'; 2 << 20]);
    drop(archive.splice(..512, long));
    let image = Image::of(&[("layer1.tar", archive)]).await;
    let failure = image.fetch(&[]).await.unwrap_err();
    assert!(failure.message.contains("description is longer"), "{failure}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_damaged_layer_is_refused() {
    let whole = layer(vec![File("models/m.gguf", bytes(1, 50_000))]);
    for (name, whole) in [("layer1.tar.gz", gzip(&whole)), ("layer1.tar.zst", zstd(&whole))] {
        let image = Image::of(&[(name, whole[..whole.len() / 2].to_vec())]).await;
        let failure = image.fetch(&[]).await.unwrap_err();
        assert!(failure.message.contains("cannot be unpacked"), "{failure}");
        assert!(!image.to().exists());
    }
}
