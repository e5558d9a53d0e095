//! Folders whose matrices are codes, with one part tampered with: refused in a sentence that names the part, or survived; never a
//! panic and never much memory.

use std::collections::BTreeMap;
use std::fs;

use serde_json::{Value, json};
use windlass_checkpoint::Checkpoint;
use windlass_checkpoint::testing::SafetensorsBuilder;
use windlass_engine_model::build;

use crate::hostile::options;
use crate::{coded, packed};

/// The matrix that is tampered with.
const MATRIX: &str = "model.layers.0.self_attn.q_proj.";
/// Parts that tools write and nobody reads.
const NOT_READ: [&str; 4] = ["bias", "weight_shape", "input_scale", "weight_format"];
/// Types of as many bytes.
const SWAPS: [(&str, &str); 6] =
    [("I32", "U32"), ("F16", "I16"), ("F32", "I32"), ("I8", "U8"), ("U8", "I8"), ("F8_E4M3", "F8_E5M2")];

#[derive(Clone)]
struct Part {
    dtype: String,
    /// The slowest dimension first.
    shape: Vec<u64>,
    data: Vec<u8>,
}

impl Part {
    fn element_bytes(&self) -> usize {
        self.data.len() / self.shape.iter().product::<u64>() as usize
    }

    /// The same with other data, of a type with a byte for each element.
    fn of_bytes(&self, data: &[u8]) -> Part {
        Part { shape: vec![data.len() as u64], data: data.to_vec(), ..self.clone() }
    }

    /// The same with one element replaced.
    fn with(&self, index: usize, element: &[u8]) -> Part {
        let mut part = self.clone();
        part.data[index * element.len()..][..element.len()].copy_from_slice(element);
        part
    }

    /// The same with these floats, as its type has them, in place of one after the other.
    fn with_float(&self, index: usize, value: f32) -> Part {
        match &self.dtype[..] {
            "F16" => self.with(index, &half::f16::from_f32(value).to_le_bytes()),
            _ => self.with(index, &value.to_le_bytes()),
        }
    }
}

/// A folder of a quantized checkpoint.
struct Folder {
    kind: &'static str,
    config: Value,
    parts: BTreeMap<String, Part>,
}

impl Folder {
    fn of((kind, checkpoint): (&'static str, Checkpoint)) -> Folder {
        let Checkpoint::Hub(hub) = &checkpoint else { panic!("{kind} is no folder") };
        let parts = checkpoint.tensors().map(|tensor| {
            let shape = tensor.dims.iter().rev().copied().collect();
            let dtype = tensor.kind.name().to_uppercase();
            (tensor.name.to_owned(), Part { dtype, shape, data: tensor.bytes.to_vec() })
        });
        Folder { kind, config: hub.config().clone(), parts: parts.collect() }
    }

    fn every() -> impl Iterator<Item = Folder> {
        let coded = coded::checkpoints().map(|(kind, _, checkpoint, _)| (kind, checkpoint));
        packed::checkpoints().chain(coded).map(Folder::of)
    }

    /// The names of the matrix's parts that are read.
    fn read_parts(&self) -> Vec<String> {
        let read = |name: &&String| name.strip_prefix(MATRIX).is_some_and(|part| !NOT_READ.contains(&part));
        self.parts.keys().filter(read).cloned().collect()
    }

    /// What becomes of the folder with a part that is another, or none.
    fn load_with(&self, name: &str, part: Option<&Part>) -> Result<(), String> {
        let others = self.parts.iter().filter(|(other, _)| *other != name);
        let file = others.fold(SafetensorsBuilder::new(), |file, (name, part)| add(file, name, part));
        self.load(&part.into_iter().fold(file, |file, part| add(file, name, part)).build())
    }

    fn load(&self, weights: &[u8]) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("config.json"), self.config.to_string()).unwrap();
        fs::write(folder.path().join("model.safetensors"), weights).unwrap();
        let checkpoint = Checkpoint::open(folder.path()).map_err(|error| error.to_string())?;
        build(&checkpoint, &options()).map(drop).map_err(|error| error.to_string())
    }

    /// That the folder with this part is refused, in a sentence with these words.
    fn refuses(&self, name: &str, part: Option<&Part>, what: &str, words: &[&str]) {
        let refusal = self.load_with(name, part);
        let refusal = refusal.expect_err(&format!("{}: {name} {what}", self.kind));
        let has_all = words.iter().all(|word| refusal.contains(word)) && !refusal.contains('\n');
        assert!(has_all, "{}: {name} {what}: {refusal:?} should contain {words:?}", self.kind);
    }
}

fn add(file: SafetensorsBuilder, name: &str, Part { dtype, shape, data }: &Part) -> SafetensorsBuilder {
    file.tensor(name, dtype, shape, data)
}

/// That this process never held much.
fn check_memory() {
    let Ok(status) = fs::read_to_string("/proc/self/status") else { return };
    let peak = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).unwrap();
    let peak = peak.trim().trim_end_matches(" kB").parse::<u64>().unwrap() >> 10;
    assert!(peak < 256, "{peak} MiB at most");
}

#[test]
fn parts_of_other_shapes_and_types_are_refused_by_name() {
    for folder in Folder::every() {
        for name in folder.read_parts() {
            let part = &folder.parts[&name];
            if !name.ends_with("g_idx") {
                folder.refuses(&name, None, "that is missing", &[MATRIX]);
            }
            if name.contains("quant_state") {
                continue;
            }
            let other = SWAPS.iter().find(|(dtype, _)| *dtype == part.dtype).unwrap().1;
            folder.refuses(&name, Some(&Part { dtype: other.to_owned(), ..part.clone() }), other, &[&name]);
            let longer = Part { data: [&part.data[..], &part.data].concat(), ..part.clone() };
            let [mut twice, mut deep] = [part.shape.clone(), part.shape.clone()];
            match twice.last_mut() {
                Some(last) => *last *= 2,
                None => twice.push(2),
            }
            deep.push(2);
            for shape in [twice, deep] {
                folder.refuses(&name, Some(&Part { shape, ..longer.clone() }), "twice as long", &[&name]);
            }
            let element = part.data[..part.element_bytes()].to_vec();
            if part.data.len() > element.len() {
                folder.refuses(&name, Some(&Part { shape: vec![], data: element, ..part.clone() }), "of one", &[&name]);
            }
            folder.refuses(&name, Some(&Part { shape: vec![0], data: Vec::new(), ..part.clone() }), "empty", &[&name]);
            if let [high, wide] = part.shape[..]
                && high != wide
                && high.min(wide) > 1
            {
                folder.refuses(&name, Some(&Part { shape: vec![wide, high], ..part.clone() }), "turned", &[&name]);
            }
        }
    }
    check_memory();
}

#[test]
fn parts_whose_headers_lie_are_refused_by_name() {
    for folder in Folder::every() {
        for name in folder.read_parts() {
            let part = &folder.parts[&name];
            let header =
                |shape: Value, end: u64| json!({"dtype": part.dtype, "shape": shape, "data_offsets": [0, end]});
            let length = part.data.len() as u64;
            for entry in [
                header(json!(part.shape), length - 1),
                header(json!(part.shape), length + 1),
                header(json!(part.shape), u64::MAX),
                header(json!([u64::MAX, 2]), length),
                header(json!([1_u64 << 62, 4]), length),
                header(json!([1_u64 << 40]), 1 << 40),
            ] {
                let others = folder.parts.iter().filter(|(other, _)| **other != name);
                let file = others.fold(SafetensorsBuilder::new(), |file, (name, part)| add(file, name, part));
                let refusal = folder.load(&file.entry(&name, &entry.to_string()).build()).unwrap_err();
                assert!(refusal.contains(&name), "{}: {entry}: {refusal:?} should name {name}", folder.kind);
            }
        }
    }
    check_memory();
}

#[test]
fn scales_and_tables_that_are_no_use_are_refused_by_their_place() {
    for folder in Folder::every() {
        for name in folder.read_parts() {
            let part = &folder.parts[&name];
            if !["F16", "F32"].contains(&&part.dtype[..]) {
                continue;
            }
            let last = part.data.len() / part.element_bytes() - 1;
            let large = if part.dtype == "F16" { 65_504.0 } else { 1e30 };
            for (index, value) in [(0, f32::NAN), (last, f32::INFINITY), (0, f32::NEG_INFINITY), (last, large)] {
                let place = format!("value {index} of {name:?}, at offset ");
                folder.refuses(&name, Some(&part.with_float(index, value)), &format!("{value}"), &[&place]);
            }
        }
    }
    check_memory();
}

#[test]
fn groups_that_are_none_are_refused_by_their_place() {
    let mut found = 0;
    for folder in Folder::every() {
        for name in folder.read_parts().into_iter().filter(|name| name.ends_with("g_idx")) {
            let part = &folder.parts[&name];
            let last = part.data.len() / 4 - 1;
            for (index, group) in [(0, -1), (last, i32::MAX), (last, i32::MIN), (0, 1 << 20)] {
                let words = format!("{name:?} has group {group} of ");
                folder.refuses(
                    &name,
                    Some(&part.with(index, &group.to_le_bytes())),
                    "beyond",
                    &[&words, " at offset "],
                );
            }
            let groups = part.data.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes)).max().unwrap();
            if groups > 0 {
                let uneven = Part { data: vec![0; part.data.len()], ..part.clone() };
                folder.refuses(&name, Some(&uneven), "of one group", &[&format!("{name:?} at offset "), "every group"]);
            }
            found += 1;
        }
    }
    assert!(found > 5, "{found} have groups by input");
}

#[test]
fn any_quant_state_is_survived() {
    let texts = ["", "not JSON", "{}", "[]", "null", "{\"blocksize\": 64", "\u{0}\u{0}"].map(str::to_owned);
    let numbers = ["0", "-1", "1.5", "1e300", "18446744073709551615", "null", "\"64\"", "{}"];
    let of = |key: &str, number: &str| {
        let mut state = json!({"blocksize": 64, "nested_blocksize": 256, "nested_offset": 0.1});
        state[key] = serde_json::from_str(number).unwrap();
        state.to_string()
    };
    let blocks = numbers.iter().flat_map(|number| ["blocksize", "nested_blocksize"].map(|key| of(key, number)));
    let offsets = ["1e300", "-1e300", "null", "\"0\"", "{}"].map(|number| of("nested_offset", number));
    let states: Vec<String> = texts.into_iter().chain(["[".repeat(100_000)]).chain(blocks).chain(offsets).collect();
    for folder in Folder::every() {
        for name in folder.read_parts().into_iter().filter(|name| name.contains("quant_state")) {
            let (part, mut refused) = (&folder.parts[&name], 0);
            for state in &states {
                let loaded = folder.load_with(&name, Some(&part.of_bytes(state.as_bytes())));
                let Err(refusal) = loaded else { continue };
                assert!(refusal.contains(MATRIX) && refusal.len() < 1000, "{}: {state:.80}: {refusal}", folder.kind);
                refused += 1;
            }
            assert!(refused >= 14, "{}: {refused} of {} are refused", folder.kind, states.len());
        }
    }
    check_memory();
}

#[test]
fn any_codes_and_zero_points_are_survived() {
    for folder in Folder::every() {
        for name in folder.read_parts() {
            let part = &folder.parts[&name];
            if ["F16", "F32"].contains(&&part.dtype[..]) || name.ends_with("g_idx") || name.contains("quant_state") {
                continue;
            }
            for byte in [0, 0x7f, 0x80, 0xff] {
                let same = Part { data: vec![byte; part.data.len()], ..part.clone() };
                if let Err(refusal) = folder.load_with(&name, Some(&same)) {
                    assert!(refusal.contains(MATRIX), "{}: {name} of {byte}: {refusal}", folder.kind);
                }
            }
        }
    }
    check_memory();
}
