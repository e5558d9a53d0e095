//! Whether a replica fits into the memory of the nodes it may run on, and what is chosen where the spec leaves a choice.
//!
//! The arithmetic is the engine's own (`windlass_engine_contract::memory`): weights in the format they are loaded in, KV
//! cache of one sequence at its longest, workspace of the largest step, and what the process itself has. Weights and KV
//! cache are split over the ranks of a replica; the rest is not.

use std::fmt;

use windlass_engine_contract::inspection::Inspection;
use windlass_engine_contract::memory::{
    KvDataType, StepDefaults, cpu_free_bytes, kv_sequence_bytes, process_bytes, rotary_bytes, workspace_bytes,
};
use windlass_operator_api::engine::Quantization;

use crate::choice::Picked;
use crate::inventory::{GpuKind, Inventory};
use crate::quantity;
use crate::validate::{Device, ValidatedService};

/// Share of a GPU that is reckoned with: what the driver and other processes take is not known beforehand.
const GPU_SHARE: f64 = 0.9;
/// What a process has of a GPU: code and queues. The rest of it is in the node's memory.
const GPU_PROCESS_BYTES: u64 = 64 << 20;
/// Where the spec names no longest sequence the engine takes what fits; less than this is of no use.
const LEAST_TOKENS: u32 = 2048;
/// Splits that engines know.
const TENSORS: [u32; 5] = [1, 2, 4, 8, 16];
/// Alternatives that are told.
const ALTERNATIVES: usize = 3;

/// Whether it fits.
#[derive(Clone, Debug, PartialEq)]
pub enum Fit {
    /// It does, so and there.
    Fits {
        /// What was chosen where the spec leaves a choice.
        picked: Picked,
        /// Numbers.
        message: String,
    },
    /// It does not.
    TooLarge {
        /// Numbers and alternatives.
        message: String,
    },
    /// Nobody knows what nodes there are, or will be.
    NoInventory {
        /// What it takes.
        message: String,
    },
}

/// Formats that weights can have in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    AsStored,
    Int8,
    Fp8,
    Int4,
}

/// One way to run a replica.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Way {
    format: Format,
    tensor: u32,
    need: Need,
}

/// What a rank takes, bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Need {
    weights: u64,
    kv: u64,
    tokens: u32,
    workspace: u64,
    process: u64,
    /// Everything together, and what has to be free for the engine to take as much KV cache.
    total: u64,
}

/// Where a rank can be.
#[derive(Clone, Debug, PartialEq)]
struct Place {
    name: String,
    usable: u64,
    ranks: u32,
}

/// Judges the model of `inspection` on `inventory`; `held` is an earlier choice, kept as long as it fits.
pub fn judge(service: &ValidatedService, inspection: &Inspection, inventory: Option<&Inventory>, held: &Picked) -> Fit {
    let asker = Asker { service, inspection };
    let ways = asker.ways();
    let places = asker.places(inventory);
    let (Some(first), false) = (ways.first(), places.is_empty()) else {
        let need = ways.first().map(ToString::to_string).unwrap_or_default();
        return Fit::NoInventory { message: format!("{need}; no node that it may run on is known") };
    };
    let holds = |way: &Way| places.iter().find(|place| place.holds(way)).map(|place| (*way, place));
    let kept = ways.iter().filter(|way| asker.picked(way, None) == held.without_reason()).find_map(holds);
    match kept.or_else(|| ways.iter().find_map(holds)) {
        Some((way, place)) => {
            let reason = (way != *first).then(|| format!("{first}, which is more than there is"));
            Fit::Fits { message: format!("{way} of {place}"), picked: asker.picked(&way, Some((place, reason))) }
        }
        None => Fit::TooLarge { message: asker.too_large(first, &places) },
    }
}

struct Asker<'a> {
    service: &'a ValidatedService,
    inspection: &'a Inspection,
}

impl Asker<'_> {
    /// What the spec permits, the best first: the weights as they are on as few GPUs as possible, then smaller ones.
    fn ways(&self) -> Vec<Way> {
        let formats = match self.service.engine.quantization {
            Quantization::Auto => vec![Format::AsStored, Format::Int8, Format::Int4],
            Quantization::Int8 => vec![Format::Int8],
            Quantization::FP8 => vec![Format::Fp8],
            Quantization::Int4 => vec![Format::Int4],
            _ => vec![Format::AsStored],
        };
        let tensors = if self.service.is_tensor_open { self.tensors() } else { vec![self.service.device.tensor()] };
        self.product(&formats, &tensors)
    }

    /// Splits by which heads can be divided.
    fn tensors(&self) -> Vec<u32> {
        let shape = &self.inspection.shape;
        let divides = |tensor: &u32| shape.heads.is_multiple_of(*tensor) && shape.kv_heads.is_multiple_of(*tensor);
        TENSORS.into_iter().filter(divides).collect()
    }

    fn product(&self, formats: &[Format], tensors: &[u32]) -> Vec<Way> {
        let way = |format: Format, tensor: u32| {
            self.weights(format).map(|weights| Way { format, tensor, need: self.need(weights, tensor) })
        };
        formats.iter().flat_map(|format| tensors.iter().filter_map(move |tensor| way(*format, *tensor))).collect()
    }

    fn weights(&self, format: Format) -> Option<u64> {
        match format {
            Format::AsStored => Some(self.stored_bytes()),
            Format::Int8 => self.inspection.int8_bytes,
            Format::Fp8 => self.inspection.fp8_bytes,
            Format::Int4 => self.inspection.int4_bytes,
        }
    }

    fn stored_bytes(&self) -> u64 {
        let Inspection { gpu_bytes, shape, .. } = self.inspection;
        match self.service.device {
            Device::Cpu => shape.weight_bytes,
            Device::NvidiaGpu { .. } => gpu_bytes.unwrap_or(shape.weight_bytes),
        }
    }

    fn need(&self, weights: u64, tensor: u32) -> Need {
        let (engine, shape) = (&self.service.engine, &self.inspection.shape);
        let tokens = engine.max_model_tokens.unwrap_or(LEAST_TOKENS).min(shape.context_tokens);
        let ranks = u64::from(tensor.max(1));
        let weights = weights.div_ceil(ranks);
        let kv = kv_sequence_bytes(shape, self.kv_data_type(), tokens).div_ceil(ranks);
        let (workspace, process) = (self.workspace_bytes(tokens), self.process_bytes());
        let total = (weights + kv + workspace).max(self.free_for_pool(kv)) + process;
        Need { weights, kv, tokens, workspace, process, total }
    }

    /// What the process has where the model is.
    fn process_bytes(&self) -> u64 {
        match self.service.device {
            Device::Cpu => process_bytes(self.inspection.shape.vocabulary),
            Device::NvidiaGpu { .. } => GPU_PROCESS_BYTES,
        }
    }

    /// Of the largest step, as the engine has it where it is told nothing of its tokens, and of positions up to `longest`.
    fn workspace_bytes(&self, longest: u32) -> u64 {
        let defaults = match self.service.device {
            Device::Cpu => StepDefaults::CPU,
            Device::NvidiaGpu { .. } => StepDefaults::CUDA,
        };
        let (steps, shape) = (defaults.with(self.service.engine.max_sequences, None), &self.inspection.shape);
        workspace_bytes(shape, steps.tokens, steps.logit_rows()) + rotary_bytes(shape.head_dim, longest)
    }

    /// On a CPU the engine's pool is a share of what is free, reckoned by the weights as they are stored: one that cannot
    /// hold a longest sequence that was asked for ends the engine.
    fn free_for_pool(&self, kv: u64) -> u64 {
        let is_bound = matches!(self.service.device, Device::Cpu) && self.service.engine.max_model_tokens.is_some();
        if is_bound { cpu_free_bytes(kv, self.inspection.shape.weight_bytes) } else { 0 }
    }

    /// As the engine takes it: its own choice is the type by default, on every device.
    fn kv_data_type(&self) -> KvDataType {
        self.service.engine.kv_cache_data_type.flag().and_then(KvDataType::named).unwrap_or_default()
    }

    fn places(&self, inventory: Option<&Inventory>) -> Vec<Place> {
        match self.service.device {
            Device::Cpu => self.processor(inventory).into_iter().collect(),
            Device::NvidiaGpu { .. } => inventory.map(|found| found.gpus.iter().map(gpu).collect()).unwrap_or_default(),
        }
    }

    /// The memory that the container may use, or that of the largest node.
    fn processor(&self, inventory: Option<&Inventory>) -> Option<Place> {
        let limit = self.service.resources.limits.get("memory").and_then(|limit| quantity::milli(&limit.0));
        let limit = limit.map(|thousandths| (thousandths / 1000.0) as u64);
        let place = |name: &str, usable| Place { name: name.to_owned(), usable, ranks: 1 };
        let node = || inventory?.memory.map(|memory| place("the largest node", memory));
        limit.map(|limit| place("resources.limits.memory", limit)).or_else(node)
    }

    /// The choice that a way means, where the spec leaves one.
    fn picked(&self, way: &Way, why: Option<(&Place, Option<String>)>) -> Picked {
        let is_gpu = matches!(self.service.device, Device::NvidiaGpu { .. });
        let tensor = (self.service.is_tensor_open && is_gpu).then_some(way.tensor);
        let quantization = match (self.service.engine.quantization, way.format) {
            (Quantization::Auto, Format::Int8) => Some(Quantization::Int8),
            (Quantization::Auto, Format::Int4) => Some(Quantization::Int4),
            _ => None,
        };
        let is_choice = tensor.is_some() || quantization.is_some();
        let reason = why.filter(|_| is_choice).map(|(place, because)| {
            let because = because.map(|because| format!("; {because}")).unwrap_or_default();
            format!("{way} of {place}{because}")
        });
        Picked { tensor, quantization, commit: None, reason }
    }

    fn too_large(&self, asked: &Way, places: &[Place]) -> String {
        let largest = places.iter().max_by_key(|place| place.usable).map(ToString::to_string).unwrap_or_default();
        let alternatives = self.alternatives(places);
        let told =
            if alternatives.is_empty() { "nothing there would do".to_owned() } else { alternatives.join("; or ") };
        format!("{asked}, more than {largest}: {told}")
    }

    /// What would fit, whatever the spec fixes.
    fn alternatives(&self, places: &[Place]) -> Vec<String> {
        let every = self.product(&[Format::AsStored, Format::Int8, Format::Int4], &self.splits());
        let here = every.iter().filter_map(|way| {
            let place = places.iter().find(|place| place.holds(way))?;
            Some(format!("{} fits {}", way.change(), place.times(way.tensor)))
        });
        here.take(ALTERNATIVES).chain(self.elsewhere()).collect()
    }

    fn splits(&self) -> Vec<u32> {
        if matches!(self.service.device, Device::Cpu) { vec![1] } else { self.tensors() }
    }

    /// More memory than there is: the smallest amount, or device, that would do.
    fn elsewhere(&self) -> Option<String> {
        let asked = self.ways().into_iter().next()?;
        match self.service.device {
            Device::Cpu => Some(format!("resources.limits.memory of {}", gibibytes(asked.need.total))),
            Device::NvidiaGpu { .. } => {
                let kind = GpuKind::known().map(|kind| gpu(&kind)).find(|place| place.holds(&asked))?;
                Some(format!("{} would do", kind.times(asked.tensor)))
            }
        }
    }
}

fn gpu(kind: &GpuKind) -> Place {
    Place {
        name: kind.product.clone(),
        usable: (kind.memory as f64 * GPU_SHARE) as u64,
        ranks: if kind.is_slice() { 1 } else { kind.in_a_node },
    }
}

impl Need {
    /// Whether it takes more free memory than its parts.
    fn is_share(&self) -> bool {
        self.total > self.weights + self.kv + self.workspace + self.process
    }
}

impl Place {
    fn holds(&self, way: &Way) -> bool {
        way.tensor <= self.ranks && way.need.total <= self.usable
    }

    fn times(&self, count: u32) -> String {
        format!("{count} × {} ({})", self.name, gibibytes(self.usable))
    }
}

impl Way {
    /// The fields that bring it about.
    fn change(&self) -> String {
        let format = match self.format {
            Format::AsStored => return format!("parallelism.tensor: {}", self.tensor),
            Format::Int8 => "INT8",
            Format::Fp8 => "FP8",
            Format::Int4 => "INT4",
        };
        let split = if self.tensor > 1 { format!(" with parallelism.tensor: {}", self.tensor) } else { String::new() };
        format!("engine.quantization: {format}{split}")
    }
}

impl fmt::Display for Way {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let format = match self.format {
            Format::AsStored => "as stored",
            Format::Int8 => "as INT8",
            Format::Fp8 => "as FP8",
            Format::Int4 => "as INT4",
        };
        let each = if self.tensor > 1 { format!(" on each of {} GPUs", self.tensor) } else { String::new() };
        let Need { weights, kv, workspace, process, total, .. } = self.need;
        let [total, weights, kv, workspace, process] = [total, weights, kv, workspace, process].map(gibibytes);
        let tokens = self.need.tokens;
        let share = if self.need.is_share() { ", at most a quarter of what the weights leave" } else { "" };
        write!(
            formatter,
            "{format} it needs {total}{each} (weights {weights}, KV cache of {tokens} tokens {kv}{share}, workspace {workspace}, \
             process {process})"
        )
    }
}

impl fmt::Display for Place {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "the {} that {} leaves", gibibytes(self.usable), self.name)
    }
}

/// Two digits after the point: a small model's parts are told too.
fn gibibytes(bytes: u64) -> String {
    format!("{:.2} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests;
