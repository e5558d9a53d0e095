//! Matrices that others quantized: the layouts of GPTQ, AWQ and compressed-tensors, turned into the kernels' groups.
//!
//! All of them are integers with a scale, and mostly a zero point, for each group of inputs:
//! `weight = scale · (code - zero point)`. What differs is how the integers lie in their words. A value's code is kept as
//! it is; scales and `-scale · zero point` are rounded to f16, which moves a weight by less than a hundredth of a step.

use std::ops::Range;

use half::f16;
use serde_json::Value;
use windlass_checkpoint::{HubFolder, Tensor};
use windlass_kernels::{WeightType, floats};

use crate::config::{ConfigError, Unsupported};

/// Which nibble of a word holds which of eight outputs in AWQ: output `n` is nibble `AWQ_NIBBLE[n]`.
const AWQ_NIBBLE: [usize; 8] = [0, 4, 1, 5, 2, 6, 3, 7];

/// How a checkpoint's matrices were quantized.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Scheme {
    layout: Layout,
    /// Inputs that share a scale; absent for all of them.
    group: Option<usize>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Layout {
    /// Words of eight inputs, `[inputs / 8, outputs]`. The first version stored zero points less one.
    Gptq { zero_offset: u32 },
    /// Words of eight outputs, `[inputs, outputs / 8]`.
    Awq,
    /// Words of eight inputs, `[outputs, inputs / 8]`, without zero points.
    Packed,
    /// Bytes, `[outputs, inputs]`, with one scale for each output.
    Bytes,
}

impl Scheme {
    /// Reads `quantization_config`; `None` where the checkpoint has none.
    pub fn read(folder: &HubFolder) -> Result<Option<Scheme>, ConfigError> {
        let config = Config(&folder.config()["quantization_config"]);
        match &config.0["quant_method"] {
            Value::Null if config.0.is_null() => Ok(None),
            Value::String(method) => match method.as_str() {
                "gptq" => config.gptq().map(Some),
                "awq" => config.awq().map(Some),
                "compressed-tensors" => config.compressed_tensors().map(Some),
                _ => Err(config.unsupported("quant_method", "a checkpoint quantized this way")),
            },
            _ => Err(config.unsupported("quant_method", "a checkpoint quantized this way")),
        }
    }

    /// What the checkpoint calls the codes of the matrix `name`.
    pub fn codes_name(self, name: &str) -> String {
        match self.layout {
            Layout::Gptq { .. } | Layout::Awq => replace(name, "qweight"),
            Layout::Packed => replace(name, "weight_packed"),
            Layout::Bytes => name.to_owned(),
        }
    }

    /// Names of the other tensors of the matrix `name`, which may be there.
    pub fn other_names(self, name: &str) -> Vec<String> {
        let parts: &[&str] = match self.layout {
            Layout::Gptq { .. } => &["qzeros", "scales", "g_idx"],
            Layout::Awq => &["qzeros", "scales"],
            Layout::Packed => &["weight_scale", "weight_shape"],
            Layout::Bytes => &["weight_scale"],
        };
        parts.iter().map(|part| replace(name, part)).collect()
    }
}

/// `…q_proj.weight` to `…q_proj.PART`.
fn replace(name: &str, part: &str) -> String {
    format!("{}{part}", name.strip_suffix("weight").unwrap_or(name))
}

/// A matrix `[rows = outputs, cols = inputs]`, its tensors found and their sizes checked.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PackedTensor<'a> {
    pub name: &'a str,
    pub rows: usize,
    pub cols: usize,
    /// What it is packed as.
    pub kind: WeightType,
    layout: Layout,
    /// Inputs that share a scale.
    group: usize,
    codes: &'a [u8],
    zeros: &'a [u8],
    scales: Tensor<'a>,
    scale_kind: WeightType,
}

impl<'a> PackedTensor<'a> {
    /// Finds the matrix that plain checkpoints call `name`; `find` gives tensors by name.
    pub fn find(
        scheme: Scheme,
        name: &str,
        [cols, rows]: [usize; 2],
        find: impl Fn(&str) -> Option<Tensor<'a>>,
    ) -> Result<PackedTensor<'a>, String> {
        let part = |part: &str| {
            let name = replace(name, part);
            find(&name).ok_or_else(|| format!("{name:?} is missing"))
        };
        let Scheme { layout, group } = scheme;
        let group = group.unwrap_or(cols);
        let kind = kind(layout, group, cols)
            .ok_or_else(|| format!("groups of {group} do not divide its {cols} inputs, or are no multiple of 32"))?;
        let codes =
            find(&scheme.codes_name(name)).ok_or_else(|| format!("{:?} is missing", scheme.codes_name(name)))?;
        let (words, outputs, groups) = (cols / 8, rows / 8, cols / group);
        let zeros = || part("qzeros");
        // Dimensions have the fastest first.
        let (codes_dims, scales, scales_dims, zeros) = match layout {
            Layout::Gptq { .. } => {
                ([rows, words], part("scales")?, [rows, groups], Some((zeros()?, [outputs, groups])))
            }
            Layout::Awq => ([outputs, cols], part("scales")?, [rows, groups], Some((zeros()?, [outputs, groups]))),
            Layout::Packed => ([words, rows], part("weight_scale")?, [groups, rows], None),
            Layout::Bytes => ([cols, rows], part("weight_scale")?, [1, rows], None),
        };
        if zeros.is_some() && !rows.is_multiple_of(8) {
            return Err(format!("its {rows} outputs are no multiple of 8"));
        }
        check(&codes, codes_dims, if layout == Layout::Bytes { "i8" } else { "i32" })?;
        if let Some((zeros, dims)) = &zeros {
            check(zeros, *dims, "i32")?;
        }
        let scale_kind = float_kind(&scales)?;
        check(&scales, scales_dims, scales.kind.name())?;
        if let Some(order) = matches!(layout, Layout::Gptq { .. }).then(|| part("g_idx").ok()).flatten() {
            check_order(&order, cols, group)?;
        }
        let zeros = zeros.map_or(&[][..], |(zeros, _)| zeros.bytes);
        Ok(PackedTensor {
            name: codes.name,
            rows,
            cols,
            kind,
            layout,
            group,
            codes: codes.bytes,
            zeros,
            scales,
            scale_kind,
        })
    }

    /// These rows and columns, which are whole blocks, as the kernels' file rows of its [`kind`](Self::kind).
    pub fn file_rows(&self, rows: Range<usize>, cols: Range<usize>) -> Vec<u8> {
        let row_bytes = self.kind.row_bytes(cols.len()).unwrap_or(0);
        let scales = floats(self.scale_kind, self.scales.bytes);
        let mut out = Vec::with_capacity(row_bytes * rows.len());
        for row in rows {
            for first in cols.clone().step_by(self.kind.block_elements()) {
                self.append_block(row, first, &scales, &mut out);
            }
        }
        out
    }

    /// Appends the block of a row from column `first` on.
    fn append_block(&self, row: usize, first: usize, scales: &[f32], out: &mut Vec<u8>) {
        let group = first / self.group;
        let scale = scales[self.scale_index(row, group)];
        let columns = first..first + self.kind.block_elements();
        out.extend(f16::from_f32(scale).to_le_bytes());
        if self.layout == Layout::Bytes {
            return out.extend(columns.map(|col| self.codes[row * self.cols + col]));
        }
        out.extend(f16::from_f32(-scale * self.zero(row, group) as f32).to_le_bytes());
        for block in columns.step_by(32) {
            out.extend((block..block + 16).map(|col| self.code(row, col) | self.code(row, col + 16) << 4));
        }
    }

    fn scale_index(&self, row: usize, group: usize) -> usize {
        match self.layout {
            Layout::Gptq { .. } | Layout::Awq => group * self.rows + row,
            Layout::Packed => row * (self.cols / self.group) + group,
            Layout::Bytes => row,
        }
    }

    fn code(&self, row: usize, col: usize) -> u8 {
        match self.layout {
            Layout::Gptq { .. } => nibble(self.codes, col / 8 * self.rows + row, col % 8),
            Layout::Awq => nibble(self.codes, (col * self.rows + row) / 8, AWQ_NIBBLE[row % 8]),
            Layout::Packed | Layout::Bytes => nibble(self.codes, (row * self.cols + col) / 8, col % 8),
        }
    }

    fn zero(&self, row: usize, group: usize) -> u32 {
        let word = (group * self.rows + row) / 8;
        match self.layout {
            Layout::Gptq { zero_offset } => u32::from(nibble(self.zeros, word, row % 8)) + zero_offset,
            Layout::Awq => u32::from(nibble(self.zeros, word, AWQ_NIBBLE[row % 8])),
            // Signed codes are stored plus 8.
            Layout::Packed | Layout::Bytes => 8,
        }
    }
}

/// Nibble `index` of little-endian word `word`.
fn nibble(words: &[u8], word: usize, index: usize) -> u8 {
    words[4 * word + index / 2] >> (index % 2 * 4) & 15
}

/// The kernels' widest groups that these are made of.
fn kind(layout: Layout, group: usize, cols: usize) -> Option<WeightType> {
    if group == 0 || !cols.is_multiple_of(group) {
        return None;
    }
    let kinds: &[WeightType] = match layout {
        Layout::Bytes => &[WeightType::I8G128, WeightType::Q8_0],
        _ => &[WeightType::I4G128, WeightType::I4G64, WeightType::Q4_1],
    };
    kinds.iter().copied().find(|kind| group.is_multiple_of(kind.block_elements()))
}

fn check(tensor: &Tensor<'_>, dims: [usize; 2], kind: &str) -> Result<(), String> {
    let expected = dims.map(|dim| dim as u64);
    let flat = [expected[0] * expected[1]];
    match tensor.kind.name() == kind && (tensor.dims == expected || tensor.dims == flat) {
        true => Ok(()),
        false => {
            Err(format!("{:?} is {} {:?}; it should be {kind} {expected:?}", tensor.name, tensor.kind, tensor.dims))
        }
    }
}

fn float_kind(tensor: &Tensor<'_>) -> Result<WeightType, String> {
    match tensor.kind.name() {
        "f16" => Ok(WeightType::F16),
        "bf16" => Ok(WeightType::BF16),
        "f32" => Ok(WeightType::F32),
        other => Err(format!("{:?} is {other}; scales are floats", tensor.name)),
    }
}

/// Inputs must be in the order of their groups: reordered ones would need the activations reordered too.
fn check_order(order: &Tensor<'_>, cols: usize, group: usize) -> Result<(), String> {
    if order.kind.name() != "i32" || order.dims != [cols as u64] {
        return Err(format!("{:?} is {} {:?}; it should be i32 [{cols}]", order.name, order.kind, order.dims));
    }
    let groups = order.bytes.as_chunks().0.iter().map(|bytes| i32::from_le_bytes(*bytes));
    match groups.enumerate().all(|(col, found)| found == (col / group) as i32) {
        true => Ok(()),
        false => Err(format!("{:?} reorders the inputs (desc_act), which is not supported", order.name)),
    }
}

/// `quantization_config`.
struct Config<'a>(&'a Value);

impl Config<'_> {
    fn gptq(&self) -> Result<Scheme, ConfigError> {
        self.expect("bits", &[4.into()])?;
        let second = self.0["checkpoint_format"] == "gptq_v2";
        let layout = Layout::Gptq { zero_offset: if second { 0 } else { 1 } };
        Ok(Scheme { layout, group: self.group("group_size", &self.0["group_size"])? })
    }

    fn awq(&self) -> Result<Scheme, ConfigError> {
        self.expect("bits", &[4.into()])?;
        self.expect("version", &["gemm".into(), "GEMM".into(), Value::Null])?;
        Ok(Scheme { layout: Layout::Awq, group: self.group("group_size", &self.0["group_size"])? })
    }

    fn compressed_tensors(&self) -> Result<Scheme, ConfigError> {
        let groups = self.0["config_groups"].as_object();
        let Some(groups) = groups.filter(|groups| groups.len() == 1) else {
            return Err(self.unsupported("config_groups", "more than one way to quantize"));
        };
        let weights = Config(groups.values().next().map_or(&Value::Null, |group| &group["weights"]));
        weights.expect("type", &["int".into()])?;
        weights.expect("symmetric", &[true.into()])?;
        match self.0["format"].as_str() {
            Some("pack-quantized") => {
                weights.expect("num_bits", &[4.into()])?;
                Ok(Scheme { layout: Layout::Packed, group: weights.group("group_size", &weights.0["group_size"])? })
            }
            Some("int-quantized") => {
                weights.expect("num_bits", &[8.into()])?;
                weights.expect("strategy", &["channel".into()])?;
                Ok(Scheme { layout: Layout::Bytes, group: None })
            }
            _ => Err(self.unsupported("format", "this layout")),
        }
    }

    fn expect(&self, key: &str, wanted: &[Value]) -> Result<(), ConfigError> {
        match wanted.contains(&self.0[key]) {
            true => Ok(()),
            false => Err(self.unsupported(key, "a checkpoint quantized this way")),
        }
    }

    /// -1 and nothing stand for all inputs.
    fn group(&self, key: &str, value: &Value) -> Result<Option<usize>, ConfigError> {
        match value.as_i64() {
            None if value.is_null() => Ok(None),
            Some(-1) => Ok(None),
            Some(group @ 32..=0x10000) if group % 32 == 0 => Ok(Some(group as usize)),
            _ => Err(self.unsupported(key, "a group that is no multiple of 32")),
        }
    }

    fn unsupported(&self, key: &str, feature: &'static str) -> ConfigError {
        let (key, value) = (format!("config.json: quantization_config.{key}"), self.0[key].to_string());
        Unsupported::Feature { key, value, feature }.into()
    }
}
