//! What a configuration has of single matrices: GPTQModel's `dynamic` and auto-round's `extra_config`.

use serde_json::Value;

use super::{Config, Rule, Schemes, rule_of_pattern};
use crate::config::{ConfigError, Unsupported};

/// What makes an override's matrices another tool's, or others in ways that are not read of some matrices alone.
const COMMON: [&str; 5] = ["quant_method", "method", "format", "checkpoint_format", "pack_dtype"];

impl Config<'_> {
    /// GPTQModel's: the first pattern that knows a module decides. Behind `-:` are those that were left as they were; the
    /// others, with `+:` or without, are quantized by what the pattern has and by the common values.
    pub(super) fn gptq_by_pattern(&self) -> Result<Schemes, ConfigError> {
        let others = Some(self.gptq()?);
        self.check_rules("dynamic", self.overrides("dynamic")?.count())?;
        let rules = self.overrides("dynamic")?.map(|(pattern, own)| self.gptq_rule(pattern, own));
        Ok(Schemes { rules: rules.collect::<Result<_, _>>()?, others })
    }

    fn gptq_rule(&self, pattern: &str, own: &Value) -> Result<Rule, ConfigError> {
        let key = format!("{}.dynamic[{pattern}]", self.path);
        if let Some(names) = pattern.strip_prefix("-:") {
            return rule_of_pattern(&key, names, None);
        }
        self.refuse_override("dynamic", pattern, own, &COMMON)?;
        let Some(values) = self.overridden(own) else {
            let (found, expected) = (own.to_string(), "an object of values".to_owned());
            return Err(ConfigError::Invalid { key, found, expected });
        };
        let scheme = Config { values: &values, path: key.clone() }.gptq()?;
        rule_of_pattern(&key, pattern.strip_prefix("+:").unwrap_or(pattern), Some(scheme))
    }

    /// What a scheme is made of, an override's value where it has one.
    fn overridden(&self, own: &Value) -> Option<Value> {
        let own = own.as_object()?;
        let value = |key: &str| own.get(key).filter(|value| !value.is_null()).unwrap_or(&self.values[key]).clone();
        let keys = ["bits", "group_size", "sym", "checkpoint_format"];
        Some(keys.map(|key| (key.to_owned(), value(key))).into_iter().collect())
    }

    /// Of auto-round, refuses matrices that are laid out otherwise than the rest. Those that were left as they were, which have
    /// 16 bits, their tensors tell.
    pub(super) fn refuse_other_bits(&self) -> Result<(), ConfigError> {
        let is_left = |own: &Value| own["bits"] == 16 || own["bits"] == 32;
        for (pattern, own) in self.overrides("extra_config")?.filter(|(_, own)| !is_left(own)) {
            self.refuse_override("extra_config", pattern, own, &["bits", "group_size", "sym", "data_type"])?;
        }
        Ok(())
    }

    /// What an object has of single matrices, by their names or patterns of them, in its order.
    fn overrides(&self, key: &str) -> Result<impl Iterator<Item = (&String, &Value)>, ConfigError> {
        match &self.values[key] {
            Value::Null => Ok(None.into_iter().flatten()),
            Value::Object(overrides) => Ok(Some(overrides).into_iter().flatten()),
            _ => Err(self.unsupported(key, "what is no object of patterns")),
        }
    }

    /// Refuses an override of which one of these values is not the common one.
    fn refuse_override(&self, key: &str, pattern: &str, own: &Value, common: &[&str]) -> Result<(), ConfigError> {
        match common.iter().find(|of| !own[**of].is_null() && own[**of] != self.values[**of]) {
            None => Ok(()),
            Some(&of) => {
                let (value, key) = (own[of].to_string(), format!("{}.{key}[{pattern}].{of}", self.path));
                Err(Unsupported::Override { key, value, common: self.values[of].to_string() }.into())
            }
        }
    }
}
