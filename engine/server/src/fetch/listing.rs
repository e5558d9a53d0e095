//! Which of a repository's files make a model, and by what each is known.

use super::checksum::Checksum;
use super::objects::Store;
use super::proof::Proof;
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
    /// What they make.
    pub form: Form,
}

/// What the files of a listing make.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// The one file that was asked for.
    File,
    /// A model's folder.
    Folder,
    /// The layers of an image, in which the model's folder is.
    Layers,
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
    /// What the server says of its content, where that is not its identity.
    pub told: Option<Proof>,
}

impl RemoteFile {
    /// What its content is verified by; `None` where its length is all that is known.
    pub fn proof(&self) -> Option<Proof> {
        match self.identity {
            Identity::Sha256(checksum) => Some(checksum.into()),
            Identity::Version(_) => self.told.clone(),
        }
    }
}

/// What tells a file's content from any other.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Identity {
    /// Its checksum, which is verified.
    Sha256(Checksum),
    /// What the server calls this version of it.
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
        /// The server's name (ETag) of the version that all parts must be of, where they might not.
        tag: Option<String>,
    },
    /// In an object store.
    Object {
        /// The store.
        store: Arc<Store>,
        /// The object.
        path: ObjectPath,
        /// The store's name (ETag) of the version that all parts must be of, if it has one.
        tag: Option<String>,
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

    /// What a listing of these files at `revision` is.
    pub fn listing(&self, revision: String, files: Vec<RemoteFile>) -> Listing {
        let form = match self {
            Wanted::File(_) => Form::File,
            Wanted::Folder(_) => Form::Folder,
        };
        Listing { revision, files, form }
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
        match self {
            Wanted::File(_) => with_weights(files, |file| &file.name),
            Wanted::Folder(_) => choose(files, |file| &file.name),
        }
    }
}

/// The files of a folder that make the model, by their names.
pub fn choose<T>(files: Vec<T>, name: impl Fn(&T) -> &str + Copy) -> Result<Vec<T>, Failure> {
    let chosen = match files.iter().any(|file| name(file) == "config.json") {
        true => select_folder(files, name),
        false => select_gguf(files, name)?,
    };
    with_weights(chosen, name)
}

fn with_weights<T>(files: Vec<T>, name: impl Fn(&T) -> &str) -> Result<Vec<T>, Failure> {
    match files.iter().any(|file| is_weights(name(file))) {
        true => Ok(files),
        false => Err(invalid("it has neither a GGUF file nor config.json with safetensors".to_owned())),
    }
}

/// Whether a model of any kind may have a file of this name.
pub fn is_of_a_model(name: &str) -> bool {
    is_plain(name) && (name.ends_with(".gguf") || belongs(name))
}

/// Names that lead nowhere else.
fn is_plain(name: &str) -> bool {
    let odd = |character: char| character == '/' || character == '\\' || character.is_control();
    !name.is_empty() && !name.starts_with('.') && !name.contains(odd)
}

/// Whether a file holds tensors, and is not one that describes them.
pub fn is_weights(name: &str) -> bool {
    name.ends_with(".gguf") || name.ends_with(".safetensors")
}

/// A folder of the hub's kind: descriptions, tokenizer and safetensors, and nothing that might be a pickle. Some
/// repositories have the weights a second time as their authors' own programs read them.
fn select_folder<T>(files: Vec<T>, name: impl Fn(&T) -> &str) -> Vec<T> {
    files.into_iter().filter(|file| belongs(name(file))).collect()
}

fn belongs(name: &str) -> bool {
    match name.rsplit_once('.').map(|(_, ending)| ending) {
        Some("safetensors") => !name.starts_with("consolidated") && !name.starts_with("adapter"),
        Some("json" | "jinja" | "txt") => true,
        _ => name == "tokenizer.model",
    }
}

/// The one GGUF file, or all parts of one.
fn select_gguf<T>(files: Vec<T>, name: impl Fn(&T) -> &str) -> Result<Vec<T>, Failure> {
    let files: Vec<T> = files.into_iter().filter(|file| name(file).ends_with(".gguf")).collect();
    let mut models: Vec<String> = files.iter().map(|file| model_of(name(file))).collect();
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
        let place = Place::Web { url: String::new(), authorization: None, tag: None };
        let names = names.iter().filter_map(|name| wanted.name_of(name));
        let identity = Identity::Version(String::new());
        let file = |name| RemoteFile { name, bytes: 1, identity: identity.clone(), place: place.clone(), told: None };
        names.map(file).collect()
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
