//! What a configuration has of single matrices: GPTQModel's `dynamic` and auto-round's `extra_config`.

use serde_json::Value;

use super::{Config, Modules, Pattern, Rule, Scheme, Schemes, rule_of_pattern};
use crate::config::{ConfigError, Unsupported};

/// What makes an override's matrices another tool's, or others in ways that are not read of some matrices alone.
const COMMON: [&str; 5] = ["quant_method", "method", "format", "checkpoint_format", "pack_dtype"];

/// What tells a pattern from a name: auto-round writes none without one of these.
const PATTERN_SIGNS: [char; 13] = ['*', '^', '$', '|', '(', ')', '[', ']', '{', '}', '?', '+', '\\'];

/// Reads how a matrix was quantized from an object of values.
pub(super) type ReadScheme = fn(&Config<'_>) -> Result<Scheme, ConfigError>;

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
            return rule_of_pattern(&key, names, Pattern::at_start, None);
        }
        self.refuse_override("dynamic", pattern, own, &COMMON)?;
        let values = self.overridden(own).ok_or_else(|| no_object(&key, own))?;
        let scheme = Config { values: &values, path: key.clone() }.gptq()?;
        rule_of_pattern(&key, pattern.strip_prefix("+:").unwrap_or(pattern), Pattern::at_start, Some(scheme))
    }

    /// What a scheme is made of, an override's value where it has one.
    fn overridden(&self, own: &Value) -> Option<Value> {
        let own = own.as_object()?;
        let value = |key: &str| own.get(key).filter(|value| !value.is_null()).unwrap_or(&self.values[key]).clone();
        let keys = ["bits", "group_size", "sym", "checkpoint_format"];
        Some(keys.map(|key| (key.to_owned(), value(key))).into_iter().collect())
    }

    /// auto-round's: names of modules decide before patterns, which may hold anywhere in a name. What has 16 bits was left as
    /// it was; `scheme` reads the rest.
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

fn no_object(key: &str, own: &Value) -> ConfigError {
    let (key, found, expected) = (key.to_owned(), own.to_string(), "an object of values".to_owned());
    ConfigError::Invalid { key, found, expected }
}
