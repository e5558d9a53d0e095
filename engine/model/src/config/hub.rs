//! Reads the configuration of a decoder from the `config.json` of a Hugging Face checkpoint.

mod rope;

use std::ops::RangeInclusive;

use serde_json::Value;
use windlass_checkpoint::HubFolder;

use super::{
    Activation, ConfigError, DecoderConfig, ExpertsConfig, LayerSet, LocalAttention, MAX_CONTEXT_TOKENS, MAX_HEAD_DIM,
    MAX_LAYERS, Unsupported,
};
use crate::config::family::{Family, LocalLayers, Wrapper};
use crate::config::names::{Naming, Nesting, OUTPUT};
use crate::config::quantization_config::Schemes;

/// Largest size of any kind; those of GGUF files are u32 too.
const MAX_SIZE: u64 = u32::MAX as u64;

/// Reads the configuration of a folder. For models of more than text it is that of the text model.
pub(super) fn read(folder: &HubFolder) -> Result<DecoderConfig, ConfigError> {
    match Wrapper::of(folder.config()) {
        None => read_decoder(folder, Keys::of(folder.config()), Naming::Hub(Nesting::Alone)),
        Some(wrapper) => {
            let text = wrapper.text_config(folder.config())?;
            let keys = Keys { values: &text, path: ["text_config", "", ""] };
            read_decoder(folder, keys, Naming::Hub(Nesting::of(folder)))
        }
    }
}

fn read_decoder(folder: &HubFolder, keys: Keys<'_>, naming: Naming) -> Result<DecoderConfig, ConfigError> {
    let model_type = keys.values["model_type"].as_str().ok_or_else(|| keys.invalid("model_type", "a name"))?;
    let family = Family::of_hub(model_type).ok_or_else(|| Unsupported::Architecture(model_type.to_owned()))?;
    keys.refuse_features(family)?;
    let (hidden, layers) = (keys.size("hidden_size")?, keys.layers()?);
    let heads = keys.size("num_attention_heads")?;
    let kv_heads = keys.size_or("num_key_value_heads", heads)?;
    if !heads.is_multiple_of(kv_heads) {
        return Err(keys.invalid("num_key_value_heads", format!("a divisor of the {heads} heads")));
    }
    let head_dim = keys.head_dim(hidden, heads)?;
    let experts = keys.experts(family)?;
    let feed_forward = match &experts {
        Some(experts) => experts.feed_forward.max(experts.shared_feed_forward.unwrap_or(0)),
        None => keys.size("intermediate_size")?,
    };
    let tied = keys.flag("tie_word_embeddings")? || folder.tensor(&naming.once(OUTPUT)).is_none();
    Ok(DecoderConfig {
        architecture: model_type.to_owned(),
        layers,
        hidden,
        feed_forward,
        heads,
        kv_heads,
        head_dim,
        vocabulary: keys.size("vocab_size")?,
        context_tokens: keys.context_tokens()?,
        norm_epsilon: keys.norm_epsilon()?,
        rope: keys.rope(head_dim, keys.rotary_layers(family)?)?,
        local: keys.local(family, layers, head_dim)?,
        attention_scale: keys.positive("query_pre_attn_scalar", Some(head_dim as f32))?.sqrt().recip(),
        attention_soft_cap: keys.optional("attn_logit_softcapping")?,
        logit_soft_cap: keys.optional("final_logit_softcapping")?,
        embedding_scale: if family.scaled_embedding { (hidden as f32).sqrt() } else { 1.0 },
        activation: family.activation,
        norm_offset: if family.norms_above_one { 1.0 } else { 0.0 },
        post_norms: family.post_norms,
        fused: family.fused,
        experts,
        biases: family.biases,
        head_norms: family.head_norms,
        schemes: Schemes::read(folder)?,
        naming,
        tied_output: tied,
    })
}

/// The keys of `config.json`, or of an object in it.
#[derive(Clone, Copy)]
struct Keys<'a> {
    values: &'a Value,
    /// The keys that lead to the object, then empty strings.
    path: [&'static str; 3],
}

impl<'a> Keys<'a> {
    fn of(config: &'a Value) -> Keys<'a> {
        Keys { values: config, path: [""; 3] }
    }

    /// The keys of the object at `key`, which may be missing.
    fn inside(self, key: &'static str) -> Keys<'a> {
        let Keys { values, mut path } = self;
        path.iter_mut().find(|place| place.is_empty()).into_iter().for_each(|place| *place = key);
        Keys { values: &values[key], path }
    }

    /// The name of a key in messages.
    fn name(self, key: &str) -> String {
        let objects = self.path.into_iter().filter(|object| !object.is_empty()).map(|object| format!("{object}."));
        format!("config.json: {}{key}", objects.collect::<String>())
    }

    fn absent(self, key: &str) -> bool {
        self.values[key].is_null()
    }

    fn invalid(self, key: &str, expected: impl Into<String>) -> ConfigError {
        let found = if self.absent(key) { "missing".to_owned() } else { self.values[key].to_string() };
        ConfigError::Invalid { key: self.name(key), found, expected: expected.into() }
    }

    fn size(self, key: &str) -> Result<usize, ConfigError> {
        match self.values[key].as_u64() {
            Some(size @ 1..=MAX_SIZE) => Ok(size as usize),
            _ => Err(self.invalid(key, "a positive integer below 2^32")),
        }
    }

    fn size_or(self, key: &str, default: usize) -> Result<usize, ConfigError> {
        if self.absent(key) { Ok(default) } else { self.size(key) }
    }

    fn layers(self) -> Result<usize, ConfigError> {
        match self.size("num_hidden_layers")? {
            layers @ 1..=MAX_LAYERS => Ok(layers),
            _ => Err(self.invalid("num_hidden_layers", format!("at most {MAX_LAYERS}"))),
        }
    }

    fn head_dim(self, hidden: usize, heads: usize) -> Result<usize, ConfigError> {
        if self.absent("head_dim") && !hidden.is_multiple_of(heads) {
            return Err(self.invalid("num_attention_heads", format!("a divisor of the width {hidden}")));
        }
        match self.size_or("head_dim", hidden / heads)? {
            head_dim @ 1..=MAX_HEAD_DIM => Ok(head_dim),
            _ => Err(self.invalid("head_dim", format!("at most {MAX_HEAD_DIM}"))),
        }
    }

    /// A Boolean; false if it is missing.
    fn flag(self, key: &str) -> Result<bool, ConfigError> {
        match &self.values[key] {
            Value::Null => Ok(false),
            Value::Bool(flag) => Ok(*flag),
            _ => Err(self.invalid(key, "true or false")),
        }
    }

    /// A finite number above zero, or the default if it is missing.
    fn positive(self, key: &str, default: Option<f32>) -> Result<f32, ConfigError> {
        match (self.values[key].as_f64().map(|number| number as f32), default) {
            (Some(number), _) if number.is_finite() && number > 0.0 => Ok(number),
            (None, Some(default)) if self.absent(key) => Ok(default),
            _ => Err(self.invalid(key, "a positive number")),
        }
    }

    /// A number in a range, or the default if it is missing.
    fn within(self, key: &str, range: RangeInclusive<f32>, default: Option<f32>) -> Result<f32, ConfigError> {
        match (self.values[key].as_f64().map(|number| number as f32), default) {
            (Some(number), _) if range.contains(&number) => Ok(number),
            (None, Some(default)) if self.absent(key) => Ok(default),
            _ => Err(self.invalid(key, format!("a number from {} to {}", range.start(), range.end()))),
        }
    }

    /// A finite number above zero; `None` if it is missing.
    fn optional(self, key: &str) -> Result<Option<f32>, ConfigError> {
        if self.absent(key) { Ok(None) } else { self.positive(key, None).map(Some) }
    }

    /// The context length: the tokens that the model was trained for, or to which YaRN extends them, which not all
    /// files count.
    fn context_tokens(self) -> Result<u32, ConfigError> {
        let extended = self.yarn()?.map_or(0, |yarn| yarn.tokens());
        Ok(self.position_embeddings()?.max(extended))
    }

    fn position_embeddings(self) -> Result<u32, ConfigError> {
        match self.size("max_position_embeddings")? as u32 {
            tokens @ 1..=MAX_CONTEXT_TOKENS => Ok(tokens),
            _ => Err(self.invalid("max_position_embeddings", format!("at most {MAX_CONTEXT_TOKENS}"))),
        }
    }

    fn norm_epsilon(self) -> Result<f32, ConfigError> {
        match self.positive("rms_norm_eps", None)? {
            epsilon if epsilon < 1.0 => Ok(epsilon),
            _ => Err(self.invalid("rms_norm_eps", "below 1")),
        }
    }

    /// The layers with a window; `None` if the context fits in the window.
    fn local(self, family: &Family, layers: usize, head_dim: usize) -> Result<Option<LocalAttention>, ConfigError> {
        let off = family.local == LocalLayers::Upper && !self.flag("use_sliding_window")?;
        if off || self.absent("sliding_window") {
            return Ok(None);
        }
        let window = self.size("sliding_window")?;
        let set = self.local_layers(family, layers)?;
        let rope = match family.local {
            LocalLayers::AllButEvery { rope_theta: Some(theta), .. } => Some(self.local_rope(head_dim, theta)?),
            _ => None,
        };
        let needless = window >= self.context_tokens()? as usize && rope.is_none();
        Ok((!needless).then_some(LocalAttention { window, layers: set, rope }))
    }

    /// The layers with a window; newer files list the kind of every layer.
    fn local_layers(self, family: &Family, layers: usize) -> Result<LayerSet, ConfigError> {
        if !self.absent("layer_types") {
            return self.listed_layers(layers);
        }
        match family.local {
            LocalLayers::All => Ok(LayerSet::All),
            LocalLayers::AllButEvery { interval, .. } => {
                Ok(LayerSet::AllButEvery(self.size_or("sliding_window_pattern", interval)?))
            }
            LocalLayers::Upper => {
                let first = self.values["max_window_layers"].as_u64().unwrap_or(0);
                Ok(LayerSet::Listed((0..layers as u64).map(|layer| layer >= first).collect()))
            }
        }
    }

    fn listed_layers(self, layers: usize) -> Result<LayerSet, ConfigError> {
        let local = |kind: &Value| match kind.as_str() {
            Some("sliding_attention") => Some(true),
            Some("full_attention") => Some(false),
            _ => None,
        };
        let list =
            self.values["layer_types"].as_array().and_then(|kinds| kinds.iter().map(local).collect::<Option<Vec<_>>>());
        let list = list.filter(|list| list.len() == layers);
        let expected = "\"sliding_attention\" or \"full_attention\" for each layer";
        list.map(LayerSet::Listed).ok_or_else(|| self.invalid("layer_types", expected))
    }

    fn experts(self, family: &Family) -> Result<Option<ExpertsConfig>, ConfigError> {
        let key = if self.absent("num_experts") { "num_local_experts" } else { "num_experts" };
        let Some(names) = family.experts.filter(|_| !self.absent(key)) else { return Ok(None) };
        let (count, used) = (self.size(key)?, self.size("num_experts_per_tok")?);
        if used > count {
            return Err(self.invalid("num_experts_per_tok", format!("at most the {count} experts")));
        }
        if self.size_or("decoder_sparse_step", 1)? != 1 {
            return Err(self.unsupported("decoder_sparse_step", "a layer without experts among those that have them"));
        }
        if self.values["mlp_only_layers"].as_array().is_some_and(|layers| !layers.is_empty()) {
            return Err(self.unsupported("mlp_only_layers", "a layer without experts among those that have them"));
        }
        let width = if self.absent("moe_intermediate_size") { "intermediate_size" } else { "moe_intermediate_size" };
        let shared = "shared_expert_intermediate_size";
        let shared_feed_forward = if self.absent(shared) { None } else { Some(self.size(shared)?) };
        let sum_to_one =
            if self.absent("norm_topk_prob") { family.experts_sum_to_one } else { self.flag("norm_topk_prob")? };
        let feed_forward = self.size(width)?;
        let held = 0..count;
        Ok(Some(ExpertsConfig { count, held, used, feed_forward, shared_feed_forward, sum_to_one, names }))
    }

    /// Refuses features of a supported family that are not implemented and would change the output.
    fn refuse_features(self, family: &Family) -> Result<(), ConfigError> {
        for (key, feature) in
            [("attention_bias", "a bias of the attention's output"), ("mlp_bias", "a bias of the feed-forward block")]
        {
            if self.flag(key)? {
                return Err(self.unsupported(key, feature));
            }
        }
        let key = if self.absent("hidden_activation") { "hidden_act" } else { "hidden_activation" };
        let names: &[&str] = match family.activation {
            Activation::Silu => &["silu"],
            // Files of the first Gemma say gelu but mean this one.
            Activation::GeluTanh => &["gelu_pytorch_tanh", "gelu"],
        };
        match self.absent(key) || self.values[key].as_str().is_some_and(|name| names.contains(&name)) {
            true => Ok(()),
            false => Err(self.unsupported(key, "this activation")),
        }
    }

    fn unsupported(self, key: &str, feature: &'static str) -> ConfigError {
        let value = self.values[key].to_string();
        Unsupported::Feature { key: self.name(key), value, feature }.into()
    }
}
