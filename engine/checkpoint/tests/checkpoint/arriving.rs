//! Files that are read while they come.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};

use windlass_checkpoint::testing::{GgufBuilder, SafetensorsBuilder};
use windlass_checkpoint::{Arrival, Checkpoint};

/// A file of zeros into which as much comes as somebody waits for.
#[derive(Debug)]
struct Slow {
    file: File,
    content: Vec<u8>,
    came: Mutex<usize>,
}

impl Slow {
    fn at(path: &Path, content: Vec<u8>) -> Arc<Slow> {
        let file = File::create(path).unwrap();
        file.set_len(content.len() as u64).unwrap();
        Arc::new(Slow { file, content, came: Mutex::new(0) })
    }

    fn came(&self) -> usize {
        *self.came.lock().unwrap()
    }
}

impl Arrival for Slow {
    fn wait(&self, end: u64) {
        let mut came = self.came.lock().unwrap();
        let end = (end as usize).max(*came);
        self.file.write_all_at(&self.content[*came..end], *came as u64).unwrap();
        *came = end;
    }
}

/// Megabytes, none of them zeros.
fn values(megabytes: usize, value: f32) -> Vec<f32> {
    vec![value; megabytes << 18]
}

fn open(path: &Path, slow: &Arc<Slow>) -> Checkpoint {
    Checkpoint::open_arriving(path, &|_: &Path| Some(slow.clone() as Arc<dyn Arrival>)).unwrap()
}

/// A folder, and in it a file of two tensors of 2 and 3 MB, described in some other way.
fn folder() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.gguf");
    (folder, path)
}

fn check(checkpoint: &Checkpoint, slow: &Slow, header_bytes: usize) {
    assert_eq!(checkpoint.tensors().map(|tensor| tensor.bytes.len()).sum::<usize>(), 5 << 20);
    assert!(slow.came() < header_bytes, "{} bytes came for the header", slow.came());
    let (a, b) = (checkpoint.tensor("a").unwrap(), checkpoint.tensor("b").unwrap());
    let half = b.bytes.slice(0..1 << 20);
    let before = slow.came();
    assert_eq!((half.len(), half.is_empty(), slow.came()), (1 << 20, false, before), "a length needs no data");
    assert!(a.bytes.chunks(4).all(|value| value == 1f32.to_le_bytes()));
    let after_a = slow.came();
    assert!(half.get().chunks(4).all(|value| value == 2f32.to_le_bytes()));
    assert!(slow.came() - after_a <= 2 << 20 && slow.came() < slow.content.len(), "half of b was enough");
    assert!(b.bytes.chunks(4).all(|value| value == 2f32.to_le_bytes()));
}

#[test]
fn a_gguf_file_is_known_by_its_header_and_each_tensor_waited_for() {
    let (_folder, path) = folder();
    let file = GgufBuilder::new().str("general.architecture", "x");
    let file = file.tensor_f32("a", &[2 << 18], &values(2, 1.0)).tensor_f32("b", &[3 << 18], &values(3, 2.0)).build();
    let slow = Slow::at(&path, file);
    check(&open(&path, &slow), &slow, (1 << 20) + 1);
}

#[test]
fn as_much_is_waited_for_as_a_long_header_takes() {
    let (_folder, path) = folder();
    let file = GgufBuilder::new().str("general.architecture", "x").str("long", &"v".repeat(2 << 20));
    let file = file.tensor_f32("a", &[2 << 18], &values(2, 1.0)).tensor_f32("b", &[3 << 18], &values(3, 2.0)).build();
    let slow = Slow::at(&path, file);
    check(&open(&path, &slow), &slow, (4 << 20) + 1);
}

#[test]
fn a_folder_is_known_by_its_headers() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("config.json"), "{}").unwrap();
    let file = SafetensorsBuilder::new().tensor_f32("a", &[2 << 18], &values(2, 1.0));
    let file = file.tensor_f32("b", &[3 << 18], &values(3, 2.0)).build();
    let slow = Slow::at(&folder.path().join("model.safetensors"), file);
    check(&open(folder.path(), &slow), &slow, (1 << 20) + 1);
}

#[test]
fn a_damaged_header_is_refused_when_all_of_it_is_there() {
    let (_folder, path) = folder();
    let mut file = GgufBuilder::new().tensor_f32("a", &[2 << 18], &values(2, 1.0)).build();
    file[0] = b'!';
    let slow = Slow::at(&path, file);
    let opened = Checkpoint::open_arriving(&path, &|_: &Path| Some(slow.clone() as Arc<dyn Arrival>));
    assert!(opened.unwrap_err().to_string().contains("GGUF"));
}
