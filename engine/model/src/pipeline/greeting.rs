//! The JSON messages of stages before the first step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use windlass_engine_contract::shape::ModelShape;
use windlass_engine_core::executor::{Geometry, KvGroups};

use super::wire;

/// A process that joins, and the model that it has.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Join {
    pub version: u32,
    /// 1 for the stage with the first layers; 0 is the leader, which has the last ones.
    pub node_rank: u32,
    /// Number of stages that it was started with.
    pub stages: u32,
    /// The kind of device: stages on others would round differently.
    pub device: String,
    /// Other options that decide how it rounds, by flag; empty from versions that did not send them.
    #[serde(default)]
    pub choices: BTreeMap<String, String>,
    pub shape: ModelShape,
    pub weight_type: String,
}

/// The sizes with which a stage is built.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(crate) struct Assign {
    version: u32,
    pub stage: u32,
    pub stages: u32,
    block_tokens: u32,
    blocks: u32,
    max_sequence_tokens: u32,
    max_step_rows: u32,
    max_step_tokens: u32,
    max_step_logits: u32,
    vocabulary: u32,
}

impl Join {
    /// The payload of a frame.
    pub fn to_payload(&self) -> Vec<u8> {
        let json = serde_json::to_vec(self).unwrap_or_default();
        [&wire::MAGIC[..], &json].concat()
    }

    /// Reads a frame's payload.
    pub fn parse(payload: &[u8]) -> Result<Join, String> {
        let json = payload.strip_prefix(&wire::MAGIC).unwrap_or_default();
        serde_json::from_slice(json).map_err(|error| format!("its greeting cannot be read: {error}"))
    }

    /// Why `other` cannot be a stage of this pipeline; `None` if it can.
    pub fn difference(&self, other: &Join) -> Option<String> {
        let Join { version, node_rank, stages, device, choices, shape, weight_type } = other;
        if *version != self.version {
            return Some(format!("it speaks version {version} of the protocol, not {}", self.version));
        }
        if *stages != self.stages || *node_rank == 0 || node_rank >= stages {
            return Some(format!("it is node {node_rank} of {stages}; there are {}", self.stages));
        }
        if *device != self.device {
            return Some(format!("it computes on {device}, not {}: give all nodes the same --device", self.device));
        }
        let other_choice = |(flag, _): &(&String, &String)| choices.get(*flag) != self.choices.get(*flag);
        if let Some((flag, own)) = self.choices.iter().find(other_choice) {
            let found = choices.get(flag).map_or("none", String::as_str);
            return Some(format!("it was started with {flag} {found}, not {own}: give all nodes the same"));
        }
        if *shape != self.shape || *weight_type != self.weight_type {
            return Some(format!(
                "it has another model: {weight_type} {shape:?}, not {} {:?}",
                self.weight_type, self.shape
            ));
        }
        None
    }
}

impl Assign {
    pub fn new(stage: u32, stages: u32, geometry: &Geometry) -> Assign {
        let Geometry {
            block_tokens,
            blocks,
            max_sequence_tokens,
            max_step_rows,
            max_step_tokens,
            max_step_logits,
            vocabulary,
            swap_slots: _,
            groups: _,
        } = *geometry;
        Assign {
            version: wire::VERSION,
            stage,
            stages,
            block_tokens,
            blocks,
            max_sequence_tokens,
            max_step_rows,
            max_step_tokens,
            max_step_logits,
            vocabulary,
        }
    }

    /// The sizes as a geometry.
    pub fn geometry(&self) -> Geometry {
        Geometry {
            block_tokens: self.block_tokens,
            blocks: self.blocks,
            swap_slots: 0,
            max_sequence_tokens: self.max_sequence_tokens,
            max_step_rows: self.max_step_rows,
            max_step_tokens: self.max_step_tokens,
            max_step_logits: self.max_step_logits,
            vocabulary: self.vocabulary,
            groups: KvGroups::ONE,
        }
    }

    /// The payload of a frame.
    pub fn to_json(&self) -> String {
        serde_json::to_string(self).unwrap_or_default()
    }

    /// Reads a frame's payload.
    pub fn parse(payload: &[u8]) -> Result<Assign, String> {
        let assign: Assign =
            serde_json::from_slice(payload).map_err(|error| format!("its assignment cannot be read: {error}"))?;
        match assign.version {
            wire::VERSION => Ok(assign),
            other => Err(format!("it speaks version {other} of the protocol, not {}", wire::VERSION)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn choices(activations: &str, keys: &str) -> BTreeMap<String, String> {
        let flags = [("--activation-dtype", activations), ("--kv-cache-dtype", keys)];
        flags.map(|(flag, value)| (flag.to_owned(), value.to_owned())).into()
    }

    fn join() -> Join {
        let shape = ModelShape {
            architecture: "llama".into(),
            layers: 2,
            hidden: 64,
            feed_forward: 128,
            heads: 2,
            kv_heads: 1,
            head_dim: 32,
            vocabulary: 100,
            context_tokens: 64,
            weight_bytes: 1000,
            windowed: None,
        };
        Join {
            version: wire::VERSION,
            node_rank: 1,
            stages: 2,
            device: "cpu".into(),
            choices: choices("int8", "bf16"),
            shape,
            weight_type: "f32".into(),
        }
    }

    #[test]
    fn only_a_stage_of_the_same_pipeline_and_model_may_join() {
        let own = Join { node_rank: 0, ..join() };
        assert_eq!(Join::parse(&join().to_payload()), Ok(join()));
        assert_eq!(own.difference(&join()), None);
        let other_shape = ModelShape { weight_bytes: 1, ..join().shape };
        for (other, why) in [
            (Join { version: 7, ..join() }, "version 7"),
            (Join { node_rank: 0, ..join() }, "node 0 of 2"),
            (Join { node_rank: 2, ..join() }, "node 2 of 2"),
            (Join { stages: 3, ..join() }, "of 3; there are 2"),
            (Join { device: "cuda".into(), ..join() }, "it computes on cuda, not cpu"),
            (Join { choices: choices("int16", "bf16"), ..join() }, "with --activation-dtype int16, not int8: give all"),
            (Join { choices: choices("int8", "fp8"), ..join() }, "with --kv-cache-dtype fp8, not bf16"),
            (Join { choices: BTreeMap::new(), ..join() }, "with --activation-dtype none, not int8"),
            (Join { shape: other_shape, ..join() }, "another model"),
            (Join { weight_type: "q4_1".into(), ..join() }, "another model"),
        ] {
            let refusal = own.difference(&other).unwrap_or_default();
            assert!(refusal.contains(why), "{refusal:?} should contain {why:?}");
        }
    }

    /// A version that did not send its options is refused as another version.
    #[test]
    fn greetings_of_the_version_before_are_understood() {
        let own = serde_json::to_value(join()).unwrap();
        let mut older = own.as_object().unwrap().clone();
        older.remove("choices");
        older.insert("version".into(), 2.into());
        let older = [&wire::MAGIC[..], &serde_json::to_vec(&older).unwrap()].concat();
        let refusal = join().difference(&Join::parse(&older).unwrap()).unwrap_or_default();
        let expected = format!("it speaks version 2 of the protocol, not {}", wire::VERSION);
        assert!(refusal.contains(&expected), "{refusal}");
    }
}
