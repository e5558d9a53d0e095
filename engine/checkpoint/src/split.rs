//! A checkpoint in several files, as `llama-gguf-split` writes it: what each part says of itself, and how parts are named.

use std::path::{Path, PathBuf};

use crate::error::GgufError;
use crate::metadata::Metadata;

/// Which part of how many a file says it is. A file that was never split is part 0 of 1.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Part {
    /// From 0.
    pub number: u64,
    pub count: u64,
    /// Tensors of all parts together, where the file says.
    pub tensors: Option<u64>,
}

impl Part {
    /// Reads a part's place; metadata other than this is in part 0 alone.
    pub fn read(metadata: Metadata<'_>) -> Result<Part, GgufError> {
        let count = metadata.u64("split.count")?.unwrap_or(1).max(1);
        let (number, tensors) = (metadata.u64("split.no")?.unwrap_or(0), metadata.u64("split.tensors.count")?);
        Ok(Part { number, count, tensors })
    }
}

/// Splits `name-00002-of-00003.gguf` into `name`, 1 and 3; `None` for any other name.
pub(crate) fn parse(path: &Path) -> Option<(PathBuf, u64, u64)> {
    let stem = path.file_name()?.to_str()?.strip_suffix(".gguf")?;
    let (rest, count) = stem.rsplit_once("-of-")?;
    let (name, number) = rest.rsplit_once('-')?;
    let (number, count) = (digits(number)?, digits(count)?);
    (1..=count).contains(&number).then(|| (path.with_file_name(name), number - 1, count))
}

/// Where part `number`, from 0, of the checkpoint `name` lies.
pub(crate) fn part_path(name: &Path, number: u64, count: u64) -> PathBuf {
    let mut file = name.file_name().unwrap_or_default().to_owned();
    file.push(format!("-{:05}-of-{count:05}.gguf", number + 1));
    name.with_file_name(file)
}

fn digits(text: &str) -> Option<u64> {
    (text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit())).then(|| text.parse().ok()).flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_parts_are_parsed_and_made() {
        let path = Path::new("/m/a-of-b-00002-of-00013.gguf");
        assert_eq!(parse(path), Some((PathBuf::from("/m/a-of-b"), 1, 13)));
        assert_eq!(part_path(Path::new("/m/a-of-b"), 1, 13), path);
        for other in
            ["a.gguf", "a-00000-of-00002.gguf", "a-00003-of-00002.gguf", "a-2-of-3.gguf", "a-00001-of-00002.bin"]
        {
            assert_eq!(parse(Path::new(other)), None, "{other}");
        }
    }
}
