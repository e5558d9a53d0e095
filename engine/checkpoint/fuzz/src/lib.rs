//! The folder in which a target puts what it was given.

use std::cell::OnceCell;
use std::path::Path;
use std::{fs, io};

use tempfile::TempDir;
use windlass_checkpoint::testing::SafetensorsBuilder;

thread_local! {
    static FOLDER: OnceCell<TempDir> = const { OnceCell::new() };
}

/// Lets `read` see a folder of `config.json` and one tensor in `model.safetensors`, in which the file `name` holds `content`.
///
/// One folder serves all inputs of a target. A folder that cannot be written ends the target: nothing would be tried.
pub fn in_folder(name: &str, content: &[u8], read: impl FnOnce(&Path)) {
    FOLDER.with(|folder| {
        let folder = folder.get_or_init(|| begin().expect("a temporary folder can be written"));
        fs::write(folder.path().join(name), content).expect("a file in it can be written");
        read(folder.path());
    });
}

fn begin() -> io::Result<TempDir> {
    let folder = tempfile::tempdir()?;
    let file = SafetensorsBuilder::new().tensor_f32("model.norm.weight", &[8], &[1.0; 8]).build();
    fs::write(folder.path().join("model.safetensors"), file)?;
    fs::write(folder.path().join("config.json"), "{}")?;
    Ok(folder)
}
