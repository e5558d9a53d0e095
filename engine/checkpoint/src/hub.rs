//! A folder as the Hugging Face hub has them: `config.json`, safetensors in one file or in shards under an index, and
//! the tokenizer's files. Pickles are never opened.

use std::collections::BTreeMap;
use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde_json::Value;

use crate::data::Arrivals;
use crate::error::HubError;
use crate::map::Bytes;
use crate::safetensors::SafetensorsFile;
use crate::tensor::Tensor;

/// Largest text file that is read: a tokenizer of a million tokens takes some 30 MB.
const MAX_TEXT_BYTES: u64 = 64 << 20;
/// Most values in a JSON file that is read whole: the largest indices of tensors name some 140,000. A value takes about a
/// hundred bytes of memory, and two in the file.
const MAX_JSON_VALUES: usize = 1 << 19;
/// The index of a sharded checkpoint.
const INDEX: &str = "model.safetensors.index.json";
/// The weights of one that is not.
const SINGLE: &str = "model.safetensors";

/// A model's folder, its tensors mapped and validated. Dropping it releases the mapping.
#[derive(Debug)]
pub struct HubFolder {
    /// Absent where it is in memory.
    path: Option<PathBuf>,
    config: Value,
    shards: Vec<SafetensorsFile>,
    /// The shard of every tensor.
    tensors: BTreeMap<String, usize>,
}

impl HubFolder {
    /// Whether `path` is a folder with a `config.json` in it.
    pub fn is_at(path: &Path) -> bool {
        path.join("config.json").is_file()
    }

    /// Opens the folder at `path`.
    pub fn open(path: &Path) -> Result<HubFolder, HubError> {
        HubFolder::open_arriving(path, &|_| None)
    }

    /// The same where safetensors may still be on their way.
    pub fn open_arriving(path: &Path, arrivals: Arrivals<'_>) -> Result<HubFolder, HubError> {
        let config = json(path, "config.json")?.ok_or_else(|| HubError::Missing { path: path.join("config.json") })?;
        let names = match json(path, INDEX)? {
            Some(index) => shard_names(&path.join(INDEX), &index)?,
            None => single_name(path)?,
        };
        let open = |name: &String| SafetensorsFile::open(&path.join(name), arrivals);
        let shards = names.iter().map(open).collect::<Result<Vec<_>, _>>()?;
        HubFolder::join(Some(path.to_owned()), config, &names, shards)
    }

    /// A folder of a `config.json` and a file of weights that are in memory already, and of no other files.
    pub fn from_bytes(config: &str, weights: Vec<u8>) -> Result<HubFolder, HubError> {
        let config = parse(Path::new("config.json"), config)?;
        let wrong = |source| HubError::Safetensors { path: SINGLE.into(), source };
        let shard = SafetensorsFile::validated(Bytes::from(weights)).map_err(wrong)?;
        HubFolder::join(None, config, &[SINGLE.to_owned()], vec![shard])
    }

    fn join(
        path: Option<PathBuf>,
        config: Value,
        names: &[String],
        shards: Vec<SafetensorsFile>,
    ) -> Result<HubFolder, HubError> {
        let mut tensors = BTreeMap::new();
        for (shard, file) in shards.iter().enumerate() {
            for name in file.names() {
                if let Some(other) = tensors.insert(name.to_owned(), shard) {
                    let (first, second) = (names[other].clone(), names[shard].clone());
                    return Err(HubError::Duplicate { name: name.to_owned(), first, second });
                }
            }
        }
        Ok(HubFolder { path, config, shards, tensors })
    }

    /// `config.json`.
    pub fn config(&self) -> &Value {
        &self.config
    }

    /// A JSON file of the folder, if it is there.
    pub fn json(&self, name: &str) -> Result<Option<Value>, HubError> {
        self.path.as_deref().map_or(Ok(None), |path| json(path, name))
    }

    /// A text file of the folder, if it is there.
    pub fn text(&self, name: &str) -> Result<Option<String>, HubError> {
        self.path.as_deref().map_or(Ok(None), |path| text(path, name))
    }

    /// All tensors, by name.
    pub fn tensors(&self) -> impl Iterator<Item = Tensor<'_>> {
        self.tensors.iter().filter_map(|(name, &shard)| self.shards[shard].tensor(name))
    }

    /// The tensor of this name.
    pub fn tensor(&self, name: &str) -> Option<Tensor<'_>> {
        self.shards[*self.tensors.get(name)?].tensor(name)
    }

    pub(crate) fn release(&self, part: &[u8]) {
        self.shards.iter().for_each(|shard| shard.release(part));
    }
}

/// The shards that an index names, each once.
fn shard_names(path: &Path, index: &Value) -> Result<Vec<String>, HubError> {
    let problem = |problem: String| HubError::Index { path: path.to_owned(), problem };
    let map = index["weight_map"].as_object().ok_or_else(|| problem("it has no weight_map".into()))?;
    let mut names: Vec<String> = Vec::new();
    for (tensor, file) in map {
        let file = file.as_str().ok_or_else(|| problem(format!("tensor {tensor:?} has no file name")))?;
        // A name that leads out of the folder is an attack; a file that is no safetensors may be a pickle.
        if file.contains(['/', '\\']) || !file.ends_with(".safetensors") {
            return Err(problem(format!("tensor {tensor:?} is in {file:?}, which is no safetensors file beside it")));
        }
        names.push(file.to_owned());
    }
    names.sort();
    names.dedup();
    match names.is_empty() {
        true => Err(problem("its weight_map is empty".into())),
        false => Ok(names),
    }
}

fn single_name(path: &Path) -> Result<Vec<String>, HubError> {
    match path.join(SINGLE).is_file() {
        true => Ok(vec![SINGLE.to_owned()]),
        false => Err(HubError::NoWeights { path: path.to_owned() }),
    }
}

fn json(folder: &Path, name: &str) -> Result<Option<Value>, HubError> {
    text(folder, name)?.map(|text| parse(&folder.join(name), &text)).transpose()
}

fn parse(path: &Path, text: &str) -> Result<Value, HubError> {
    let (path, values) = (path.to_owned(), most_values(text));
    if values > MAX_JSON_VALUES {
        return Err(HubError::ManyValues { path, values, limit: MAX_JSON_VALUES });
    }
    serde_json::from_str(text).map_err(|error| HubError::Json { path, problem: error.to_string() })
}

/// As many values as a JSON text can have: before each but the first is a comma, or a bracket that opens.
fn most_values(text: &str) -> usize {
    1 + text.bytes().filter(|byte| b",[{".contains(byte)).count()
}

fn text(folder: &Path, name: &str) -> Result<Option<String>, HubError> {
    let path = folder.join(name);
    if !path.is_file() {
        return Ok(None);
    }
    let io = |source| HubError::Io { path: path.clone(), source };
    let file = fs::File::open(&path).map_err(io)?;
    let bytes = file.metadata().map_err(io)?.len();
    if bytes > MAX_TEXT_BYTES {
        return Err(HubError::TooLarge { path, bytes, limit: MAX_TEXT_BYTES });
    }
    let mut text = String::new();
    file.take(MAX_TEXT_BYTES).read_to_string(&mut text).map_err(io)?;
    Ok(Some(text))
}
