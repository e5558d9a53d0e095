//! Reads overrides for single matrices: GPTQModel's `dynamic` and auto-round's `extra_config`.

use serde_json::Value;

use super::{Config, Modules, Pattern, Rule, Scheme, Schemes, rule_of_pattern};
use crate::config::{ConfigError, Unsupported};

/// Keys that overrides must not change: they select another tool or layout, which is only read for all matrices
/// together.
const COMMON: [&str; 5] = ["quant_method", "method", "format", "checkpoint_format", "pack_dtype"];

/// Characters of patterns: auto-round writes no pattern without one of them.
const PATTERN_SIGNS: [char; 13] = ['*', '^', '$', '|', '(', ')', '[', ']', '{', '}', '?', '+', '\\'];

/// Reads a scheme from an object of values.
pub(super) type ReadScheme = fn(&Config<'_>) -> Result<Scheme, ConfigError>;

impl Config<'_> {
    /// Overrides of GPTQModel: the first pattern that matches a module decides. Patterns after `-:` are of modules that
    /// are not quantized; others, with `+:` or without, have values that replace the common ones.
    pub(super) fn gptq_by_pattern(&self) -> Result<Schemes, ConfigError> {
        let others = Some(self.gptq()?);
        self.check_rules("dynamic", self.overrides("dynamic")?.count())?;
        let rules = self.overrides("dynamic")?.map(|(pattern, own)| self.gptq_rule(pattern, own));
        Ok(Schemes { rules: rules.collect::<Result<_, _>>()?, others })
    }

    fn gptq_rule(&self, pattern: &str, own: &Value) -> Result<Rule, ConfigError> {
        let key = format!("{}.dynamic[{pattern}]", self.path);
        if let Some(names) = pattern.strip_prefix("-:") {
            return rule_of_pattern(&key, names, Pattern::at_start, None);
        }
        self.refuse_override("dynamic", pattern, own, &COMMON)?;
        let values = self.overridden(own).ok_or_else(|| no_object(&key, own))?;
        let scheme = Config { values: &values, path: key.clone() }.gptq()?;
        rule_of_pattern(&key, pattern.strip_prefix("+:").unwrap_or(pattern), Pattern::at_start, Some(scheme))
    }

    /// The values of a scheme: the override's own, else the common ones.
    fn overridden(&self, own: &Value) -> Option<Value> {
        let own = own.as_object()?;
        let value = |key: &str| own.get(key).filter(|value| !value.is_null()).unwrap_or(&self.values[key]).clone();
        let keys = ["bits", "group_size", "sym", "checkpoint_format"];
        Some(keys.map(|key| (key.to_owned(), value(key))).into_iter().collect())
    }

    /// Overrides of auto-round: names decide before patterns, which may match anywhere in a name. Modules of 16 bits
    /// are not quantized; `scheme` reads the others.
    pub(super) fn auto_round_by_layer(&self, scheme: ReadScheme) -> Result<Vec<Rule>, ConfigError> {
        let overrides = self.overrides("extra_config")?;
        let (patterns, names): (Vec<_>, Vec<_>) = overrides.partition(|(layer, _)| layer.contains(PATTERN_SIGNS));
        self.check_rules("extra_config", patterns.len())?;
        let mut rules: Vec<Rule> = Vec::new();
        for (name, own) in names {
            let scheme = self.auto_round_scheme(name, own, scheme)?;
            match rules.iter_mut().find(|rule| rule.scheme == scheme) {
                Some(Rule { modules: Modules::Named(names), .. }) => _ = names.insert(name.clone()),
                _ => rules.push(Rule { modules: Modules::Named([name.clone()].into()), scheme }),
            }
        }
        for (pattern, own) in patterns {
            let scheme = self.auto_round_scheme(pattern, own, scheme)?;
            let key = format!("{}.extra_config[{pattern}]", self.path);
            rules.push(rule_of_pattern(&key, pattern, Pattern::anywhere, scheme)?);
        }
        Ok(rules)
    }

    fn auto_round_scheme(&self, layer: &str, own: &Value, scheme: ReadScheme) -> Result<Option<Scheme>, ConfigError> {
        let path = format!("{}.extra_config[{layer}]", self.path);
        if own["bits"] == 16 || own["bits"] == 32 {
            return Ok(None);
        }
        self.refuse_override("extra_config", layer, own, &["data_type"])?;
        let values = self.overridden(own).ok_or_else(|| no_object(&path, own))?;
        scheme(&Config { values: &values, path }).map(Some)
    }

    /// The entries of an object for single matrices, by name or pattern, in order.
    fn overrides(&self, key: &str) -> Result<impl Iterator<Item = (&String, &Value)>, ConfigError> {
        match &self.values[key] {
            Value::Null => Ok(None.into_iter().flatten()),
            Value::Object(overrides) => Ok(Some(overrides).into_iter().flatten()),
            _ => Err(self.unsupported(key, "what is no object of patterns")),
        }
    }

    /// Fails if an override changes one of the values that must be common.
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

fn no_object(key: &str, own: &Value) -> ConfigError {
    let (key, found, expected) = (key.to_owned(), own.to_string(), "an object of values".to_owned());
    ConfigError::Invalid { key, found, expected }
}
