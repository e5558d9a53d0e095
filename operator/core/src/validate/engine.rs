//! What the engine is told.

use windlass_engine_contract::flags;
use windlass_operator_api::engine::{Engine, KvCacheDataType, Quantization};

use super::{Refusal, bounded};

/// The flag that chooses the executor, and its value for the simulator.
const EXECUTOR: &str = "--executor";
const SIMULATOR: &str = "sim";

/// `spec.engine`, validated.
#[derive(Clone, Debug, PartialEq)]
pub struct EngineSettings {
    /// Image; `None`: the operator's default.
    pub image: Option<String>,
    /// Format of the weights.
    pub quantization: Quantization,
    /// Format of the KV cache.
    pub kv_cache_data_type: KvCacheDataType,
    /// Longest sequence.
    pub max_model_tokens: Option<u32>,
    /// Most sequences at once.
    pub max_sequences: Option<u32>,
    /// Further flags, none of them managed.
    pub extra_args: Vec<String>,
    /// These ask for the simulator, which loads no weights.
    pub is_simulated: bool,
}

impl EngineSettings {
    pub(crate) fn validate(engine: Option<&Engine>) -> Result<Self, Refusal> {
        let engine = engine.cloned().unwrap_or_default();
        if let Some(managed) = engine.extra_args.iter().find_map(|argument| flags::managed(argument)) {
            return Err(Refusal::ManagedFlag { problem: managed.refusal() });
        }
        let limit = |field, value: Option<i32>, max| value.map(|value| bounded(field, value, 1, max)).transpose();
        Ok(EngineSettings {
            image: engine.image,
            quantization: engine.quantization.unwrap_or_default(),
            kv_cache_data_type: engine.kv_cache_data_type.unwrap_or_default(),
            max_model_tokens: limit("spec.engine.maxModelTokens", engine.max_model_tokens, 16_777_216)?,
            max_sequences: limit("spec.engine.maxSequences", engine.max_sequences, 65_536)?,
            is_simulated: is_simulated(&engine.extra_args),
            extra_args: engine.extra_args,
        })
    }
}

fn is_simulated(arguments: &[String]) -> bool {
    let follows = arguments.windows(2).any(|pair| pair[0] == EXECUTOR && pair[1] == SIMULATOR);
    follows || arguments.iter().any(|one| one.strip_prefix(EXECUTOR) == Some("=sim"))
}

#[cfg(test)]
mod tests {
    use crate::testing::service;
    use serde_json::json;

    #[test]
    fn the_simulator_is_asked_for_by_a_flag_and_its_value() {
        for (arguments, is_simulated) in [
            (json!(["--executor", "sim"]), true),
            (json!(["--executor=sim"]), true),
            (json!(["--verbose", "--executor=sim"]), true),
            (json!([]), false),
            (json!(["--executor", "real"]), false),
            (json!(["--executor=real"]), false),
            (json!(["--name", "sim"]), false),
            (json!(["--name=sim"]), false),
            (json!(["sim", "--executor"]), false),
            (json!(["--executor"]), false),
        ] {
            let engine = service().with("engine", json!({"extraArgs": arguments})).valid().engine;
            assert_eq!(engine.is_simulated, is_simulated, "{arguments}");
        }
    }
}
