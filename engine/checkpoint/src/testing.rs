//! For tests of every crate: writes small GGUF files, and finds models and suites where they were fetched.
//!
//! The writer checks nothing: a test may ask for a file that no reader should accept.

mod fetched;

pub use fetched::{fetched, real_model, schema_suite, sentence_encoder};

/// Value types' numbers in a file.
const U32: u32 = 4;
const I32: u32 = 5;
const F32: u32 = 6;
const BOOL: u32 = 7;
const STRING: u32 = 8;
const ARRAY: u32 = 9;

/// A GGUF file to be. Methods chain; [`GgufBuilder::build`] gives its bytes.
#[derive(Clone, Debug)]
pub struct GgufBuilder {
    version: u32,
    alignment: usize,
    metadata: Vec<(String, Vec<u8>)>,
    tensors: Vec<TensorToWrite>,
}

#[derive(Clone, Debug)]
struct TensorToWrite {
    name: String,
    dims: Vec<u64>,
    type_id: u32,
    data: Vec<u8>,
    offset: Option<u64>,
}

impl Default for GgufBuilder {
    fn default() -> GgufBuilder {
        GgufBuilder { version: 3, alignment: 32, metadata: Vec::new(), tensors: Vec::new() }
    }
}

impl GgufBuilder {
    /// An empty file of version 3.
    pub fn new() -> GgufBuilder {
        GgufBuilder::default()
    }

    /// Another version.
    pub fn version(mut self, version: u32) -> GgufBuilder {
        self.version = version;
        self
    }

    /// Where tensors start. Does not write `general.alignment`.
    pub fn alignment(mut self, alignment: usize) -> GgufBuilder {
        self.alignment = alignment;
        self
    }

    /// Metadata of any type: the type's number and the value's bytes.
    pub fn raw(mut self, key: &str, value_type: u32, value: &[u8]) -> GgufBuilder {
        let entry = [&string(key)[..], &value_type.to_le_bytes(), value].concat();
        self.metadata.push((key.to_owned(), entry));
        self
    }

    /// A u32.
    pub fn u32(self, key: &str, value: u32) -> GgufBuilder {
        self.raw(key, U32, &value.to_le_bytes())
    }

    /// An f32.
    pub fn f32(self, key: &str, value: f32) -> GgufBuilder {
        self.raw(key, F32, &value.to_le_bytes())
    }

    /// A Boolean.
    pub fn bool(self, key: &str, value: bool) -> GgufBuilder {
        self.raw(key, BOOL, &[value.into()])
    }

    /// A string.
    pub fn str(self, key: &str, value: &str) -> GgufBuilder {
        self.raw(key, STRING, &string(value))
    }

    /// An array of strings.
    pub fn str_array<S: AsRef<str>>(self, key: &str, values: &[S]) -> GgufBuilder {
        let elements: Vec<u8> = values.iter().flat_map(|value| string(value.as_ref())).collect();
        self.raw(key, ARRAY, &array(STRING, values.len(), &elements))
    }

    /// An array of i32.
    pub fn i32_array(self, key: &str, values: &[i32]) -> GgufBuilder {
        let elements: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key, ARRAY, &array(I32, values.len(), &elements))
    }

    /// An array of f32.
    pub fn f32_array(self, key: &str, values: &[f32]) -> GgufBuilder {
        let elements: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.raw(key, ARRAY, &array(F32, values.len(), &elements))
    }

    /// A tensor, placed after the last one.
    pub fn tensor(mut self, name: &str, dims: &[u64], type_id: u32, data: &[u8]) -> GgufBuilder {
        let (name, dims, data) = (name.to_owned(), dims.to_vec(), data.to_vec());
        self.tensors.push(TensorToWrite { name, dims, type_id, data, offset: None });
        self
    }

    /// A tensor whose header names this offset, wherever its data is.
    pub fn tensor_at(mut self, name: &str, dims: &[u64], type_id: u32, data: &[u8], offset: u64) -> GgufBuilder {
        self = self.tensor(name, dims, type_id, data);
        if let Some(last) = self.tensors.last_mut() {
            last.offset = Some(offset);
        }
        self
    }

    /// An f32 tensor.
    pub fn tensor_f32(self, name: &str, dims: &[u64], values: &[f32]) -> GgufBuilder {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, dims, 0, &data)
    }

    /// Without the metadata of this key.
    pub fn without(mut self, key: &str) -> GgufBuilder {
        self.metadata.retain(|(found, _)| found != key);
        self
    }

    /// Without the tensor of this name.
    pub fn without_tensor(mut self, name: &str) -> GgufBuilder {
        self.tensors.retain(|tensor| tensor.name != name);
        self
    }

    /// The file's bytes.
    pub fn build(&self) -> Vec<u8> {
        let mut file = b"GGUF".to_vec();
        file.extend(self.version.to_le_bytes());
        file.extend((self.tensors.len() as u64).to_le_bytes());
        file.extend((self.metadata.len() as u64).to_le_bytes());
        self.metadata.iter().for_each(|(_, entry)| file.extend(entry));
        self.write_tensor_headers(&mut file);
        for tensor in &self.tensors {
            file.resize(file.len().next_multiple_of(self.alignment), 0);
            file.extend(&tensor.data);
        }
        file
    }

    fn write_tensor_headers(&self, file: &mut Vec<u8>) {
        let mut next = 0u64;
        for tensor in &self.tensors {
            file.extend(string(&tensor.name));
            file.extend((tensor.dims.len() as u32).to_le_bytes());
            tensor.dims.iter().for_each(|dim| file.extend(dim.to_le_bytes()));
            file.extend(tensor.type_id.to_le_bytes());
            file.extend(tensor.offset.unwrap_or(next).to_le_bytes());
            next = (next + tensor.data.len() as u64).next_multiple_of(self.alignment as u64);
        }
    }
}

/// An array value's bytes.
pub fn array(element_type: u32, count: usize, elements: &[u8]) -> Vec<u8> {
    [&element_type.to_le_bytes()[..], &(count as u64).to_le_bytes(), elements].concat()
}

/// A string's bytes.
pub fn string(text: &str) -> Vec<u8> {
    [&(text.len() as u64).to_le_bytes()[..], text.as_bytes()].concat()
}

/// A safetensors file to be. The writer checks nothing.
#[derive(Clone, Debug, Default)]
pub struct SafetensorsBuilder {
    entries: Vec<(String, Described)>,
}

/// What a file says of a tensor.
#[derive(Clone, Debug)]
enum Described {
    /// Type and shape, with its data behind that of the last one.
    Data(String, Vec<u8>),
    /// Any JSON.
    Raw(String),
}

impl SafetensorsBuilder {
    /// An empty file.
    pub fn new() -> SafetensorsBuilder {
        SafetensorsBuilder::default()
    }

    /// A tensor after the last one; its shape has the slowest dimension first.
    pub fn tensor(mut self, name: &str, dtype: &str, shape: &[u64], data: &[u8]) -> SafetensorsBuilder {
        let kind = format!("\"dtype\":{dtype:?},\"shape\":{shape:?}");
        self.entries.push((name.to_owned(), Described::Data(kind, data.to_vec())));
        self
    }

    /// An f32 tensor.
    pub fn tensor_f32(self, name: &str, shape: &[u64], values: &[f32]) -> SafetensorsBuilder {
        let data: Vec<u8> = values.iter().flat_map(|value| value.to_le_bytes()).collect();
        self.tensor(name, "F32", shape, &data)
    }

    /// Without the tensor of this name.
    pub fn without(mut self, name: &str) -> SafetensorsBuilder {
        self.entries.retain(|(found, _)| found != name);
        self
    }

    /// An entry with any JSON as its description.
    pub fn entry(mut self, name: &str, json: &str) -> SafetensorsBuilder {
        self.entries.push((name.to_owned(), Described::Raw(json.to_owned())));
        self
    }

    /// The file's bytes.
    pub fn build(&self) -> Vec<u8> {
        let (mut entries, mut data) = (Vec::new(), Vec::new());
        for (name, described) in &self.entries {
            entries.push(match described {
                Described::Data(kind, bytes) => {
                    let start = data.len();
                    data.extend(bytes);
                    format!("{name:?}:{{{kind},\"data_offsets\":[{start},{}]}}", data.len())
                }
                Described::Raw(json) => format!("{name:?}:{json}"),
            });
        }
        let header = format!("{{{}}}", entries.join(","));
        [&(header.len() as u64).to_le_bytes()[..], header.as_bytes(), &data].concat()
    }
}
