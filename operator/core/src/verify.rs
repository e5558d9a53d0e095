//! Whether what an engine built is what the spec asks for. An engine reads this back from itself, never from its flags:
//! a flag that was lost on the way, or quietly replaced, shows here.

use windlass_engine_contract::stats::EffectiveConfig;

use crate::validate::{Device, ValidatedService};

/// What the simulator reports as its device. It takes the place of any.
const SIMULATED: &str = "sim";

/// Differences in words, `field is built, wanted is asked`; empty where everything is as asked.
pub fn differences(service: &ValidatedService, effective: &EffectiveConfig) -> Vec<String> {
    let engine = &service.engine;
    let number = |value: Option<u32>| value.map(|value| value.to_string());
    let text = |value: Option<&'static str>| value.map(str::to_owned);
    let simulated = effective.device == SIMULATED;
    let formats = |value: Option<&'static str>| text(value).filter(|_| !simulated);
    [
        ("accelerator", Some(device(&service.device).to_owned()).filter(|_| !simulated), effective.device.clone()),
        ("parallelism.tensor", Some(service.device.tensor().to_string()), effective.tensor_parallel.to_string()),
        ("parallelism.pipeline", Some(service.nodes.to_string()), effective.pipeline_parallel.to_string()),
        ("engine.quantization", formats(engine.quantization.built()), effective.quantization.clone()),
        ("engine.kvCacheDataType", formats(engine.kv_cache_data_type.flag()), effective.kv_cache_data_type.clone()),
        ("engine.maxModelTokens", number(engine.max_model_tokens), effective.max_model_tokens.to_string()),
        ("engine.maxSequences", number(engine.max_sequences), effective.max_sequences.to_string()),
        ("model.servedNames", Some(service.served_names.join(", ")), effective.served_names.join(", ")),
    ]
    .into_iter()
    .filter_map(|(field, asked, built)| {
        let asked = asked.filter(|asked| *asked != built)?;
        Some(format!("{field} is {built}, the spec asks for {asked}"))
    })
    .collect()
}

fn device(device: &Device) -> &'static str {
    match device {
        Device::Cpu => "cpu",
        Device::NvidiaGpu { .. } => "cuda",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{effective, service};
    use serde_json::json;

    #[test]
    fn what_was_built_as_asked_has_no_differences() {
        let service = service().valid();
        assert_eq!(differences(&service, &effective()), Vec::<String>::new());
    }

    #[test]
    fn every_field_that_is_not_as_asked_is_named() {
        let spec = service().with("engine", json!({"quantization": "Q8_0", "maxModelTokens": 2048, "maxSequences": 7}));
        let service = spec.valid();
        let mut built = effective();
        built.tensor_parallel = 2;
        built.pipeline_parallel = 3;
        built.served_names = vec!["other".into()];
        let fields = [
            "parallelism.tensor",
            "parallelism.pipeline",
            "quantization",
            "maxModelTokens",
            "maxSequences",
            "servedNames",
        ];
        let found = differences(&service, &built);
        assert_eq!(found.len(), fields.len(), "{found:?}");
        for (difference, field) in found.iter().zip(fields) {
            assert!(difference.contains(field), "{difference} {field}");
        }
    }

    #[test]
    fn the_simulator_stands_for_any_device_and_format() {
        let service =
            service().with("accelerator", json!({"type": "NvidiaGPU"})).with("parallelism", json!({"tensor": 2}));
        let service = service.with("engine", json!({"quantization": "BF16"})).valid();
        let mut built = effective();
        built.device = "sim".into();
        assert_eq!(differences(&service, &built), ["parallelism.tensor is 1, the spec asks for 2"]);
    }
}
