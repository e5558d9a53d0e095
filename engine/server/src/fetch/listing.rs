//! Which of a repository's files make a model, and by what each is known.

use super::checksum::Checksum;
use super::objects::Store;
use crate::failure::Failure;
use object_store::path::Path as ObjectPath;
use std::sync::Arc;
use windlass_engine_contract::termination::Reason;

/// A revision of a repository.
#[derive(Debug)]
pub struct Listing {
    /// What names exactly these files: a commit, a digest.
    pub revision: String,
    /// The files of the folder that was asked for, or the one file.
    pub files: Vec<RemoteFile>,
}

/// A file that can be fetched.
#[derive(Clone, Debug)]
pub struct RemoteFile {
    /// Its name in the folder.
    pub name: String,
    /// Its length.
    pub bytes: u64,
    /// What its content is known by.
    pub identity: Identity,
    /// Where it is.
    pub place: Place,
}

/// What tells a file's content from any other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Its checksum, which is verified.
    Sha256(Checksum),
    /// What the server calls this version of it. Only the length can be verified.
    Version(String),
}

/// Where a file is.
#[derive(Clone, Debug)]
pub enum Place {
    /// At a URL.
    Web {
        /// The URL.
        url: String,
        /// Sent to its server, and to no other that it leads to.
        authorization: Option<String>,
    },
    /// In an object store.
    Object {
        /// The store.
        store: Arc<Store>,
        /// The object.
        path: ObjectPath,
    },
}

/// What the source's path names in a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Wanted {
    /// One file, by its path.
    File(String),
    /// What makes a model of the files directly in this folder; empty for the root.
    Folder(String),
}

impl Wanted {
    /// A path that ends in a GGUF file's name is a file.
    pub fn of(path: &str) -> Wanted {
        let path = path.trim_matches('/');
        match path.ends_with(".gguf") {
            true => Wanted::File(path.to_owned()),
            false => Wanted::Folder(path.to_owned()),
        }
    }

    /// The file's name in the model's folder, where the model may need the file at this path.
    pub fn name_of(&self, path: &str) -> Option<String> {
        let name = match self {
            Wanted::File(wanted) => (path == wanted).then(|| path.rsplit('/').next().unwrap_or(path))?,
            Wanted::Folder(folder) if folder.is_empty() => path,
            Wanted::Folder(folder) => path.strip_prefix(folder)?.strip_prefix('/')?,
        };
        is_plain(name).then(|| name.to_owned())
    }

    /// The files that make the model.
    pub fn select(&self, files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>, Failure> {
        let chosen = match self {
            Wanted::File(_) => files,
            Wanted::Folder(_) if files.iter().any(|file| file.name == "config.json") => select_folder(files),
            Wanted::Folder(_) => select_gguf(files)?,
        };
        match chosen.iter().any(|file| is_weights(&file.name)) {
            true => Ok(chosen),
            false => Err(invalid("it has neither a GGUF file nor config.json with safetensors".to_owned())),
        }
    }
}

/// Names that lead nowhere else.
fn is_plain(name: &str) -> bool {
    let odd = |character: char| character == '/' || character == '\\' || character.is_control();
    !name.is_empty() && !name.starts_with('.') && !name.contains(odd)
}

fn is_weights(name: &str) -> bool {
    name.ends_with(".gguf") || name.ends_with(".safetensors")
}

/// A folder of the hub's kind: descriptions, tokenizer and safetensors, and nothing that might be a pickle. Some
/// repositories have the weights a second time as their authors' own programs read them.
fn select_folder(files: Vec<RemoteFile>) -> Vec<RemoteFile> {
    let belongs = |name: &str| match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("safetensors") => !name.starts_with("consolidated") && !name.starts_with("adapter"),
        Some("json" | "jinja" | "txt") => true,
        _ => name == "tokenizer.model",
    };
    files.into_iter().filter(|file| belongs(&file.name)).collect()
}

/// The one GGUF file, or all parts of one.
fn select_gguf(files: Vec<RemoteFile>) -> Result<Vec<RemoteFile>, Failure> {
    let files: Vec<RemoteFile> = files.into_iter().filter(|file| file.name.ends_with(".gguf")).collect();
    let mut models: Vec<String> = files.iter().map(|file| model_of(&file.name)).collect();
    models.sort();
    models.dedup();
    match models.len() > 1 {
        true => Err(invalid(format!(
            "it has several GGUF files: name one at the end of the source, of {}",
            models.join(", ")
        ))),
        false => Ok(files),
    }
}

/// The name that all parts of a split file share: `name-00002-of-00005.gguf`.
fn model_of(name: &str) -> String {
    let stem = name.strip_suffix(".gguf").unwrap_or(name);
    let is_number = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    let split = stem.rsplit_once("-of-").filter(|(_, count)| is_number(count));
    let split = split.and_then(|(rest, _)| rest.rsplit_once('-')).filter(|(_, number)| is_number(number));
    split.map_or(name.to_owned(), |(model, _)| format!("{model}.gguf"))
}

fn invalid(message: String) -> Failure {
    Failure::new(Reason::ModelInvalid, format!("the source is no model: {message}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files(names: &[&str], wanted: &Wanted) -> Vec<RemoteFile> {
        let place = Place::Web { url: String::new(), authorization: None };
        let names = names.iter().filter_map(|name| wanted.name_of(name));
        let identity = Identity::Version(String::new());
        names.map(|name| RemoteFile { name, bytes: 1, identity: identity.clone(), place: place.clone() }).collect()
    }

    fn chosen(path: &str, names: &[&str]) -> Result<Vec<String>, String> {
        let wanted = Wanted::of(path);
        let chosen = wanted.select(files(names, &wanted)).map_err(|failure| failure.message)?;
        Ok(chosen.into_iter().map(|file| file.name).collect())
    }

    #[test]
    fn a_model_is_its_own_files_and_no_others() {
        let hub = [
            "README.md",
            "config.json",
            "model.safetensors",
            "pytorch_model.bin",
            "consolidated.safetensors",
            "onnx/model.onnx",
            "original/model.safetensors",
            "tokenizer.json",
            "tokenizer.model",
            ".gitattributes",
            "chat_template.jinja",
            "../../etc/passwd.json",
        ];
        let expected = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "chat_template.jinja"];
        assert_eq!(chosen("", &hub).unwrap(), expected);
        assert_eq!(chosen("sub/", &["sub/m.gguf", "other/n.gguf", "o.gguf"]).unwrap(), ["m.gguf"]);
        assert_eq!(chosen("sub/m.gguf", &["sub/m.gguf", "sub/n.gguf"]).unwrap(), ["m.gguf"]);
        let parts = ["m-00001-of-00002.gguf", "m-00002-of-00002.gguf"];
        assert_eq!(chosen("", &parts).unwrap(), parts);
    }

    #[test]
    fn what_is_no_one_model_is_refused_by_name() {
        let several = chosen("", &["m.Q4_0.gguf", "m.Q8_0.gguf", "README.md"]).unwrap_err();
        assert!(several.contains("name one at the end of the source, of m.Q4_0.gguf, m.Q8_0.gguf"), "{several}");
        for names in [&["config.json", "pytorch_model.bin"][..], &["README.md"], &[]] {
            assert!(chosen("", names).unwrap_err().contains("neither a GGUF file nor"), "{names:?}");
        }
    }
}
