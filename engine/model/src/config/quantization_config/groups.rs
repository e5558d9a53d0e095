//! Reads `config_groups` of compressed-tensors: schemes, and the modules of each.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Config, Float8Scales, Layout, Modules, Pattern, Rule, Scheme, Schemes, rule_of_pattern};
use crate::config::ConfigError;

/// Prefix of patterns among names.
const PATTERN: &str = "re:";

/// A scheme with the names, patterns and classes of its modules.
struct Group {
    /// Names and classes of modules, which are written alike.
    words: BTreeSet<String>,
    patterns: Vec<String>,
    scheme: Option<Scheme>,
    /// The key of the group, for messages.
    key: String,
}

impl Config<'_> {
    /// Reads the schemes. If there is one group, it covers all matrices that are stored as codes: names in old
    /// checkpoints are not those of their tensors.
    pub(super) fn groups(&self) -> Result<Schemes, ConfigError> {
        let groups = self.values["config_groups"].as_object().filter(|groups| !groups.is_empty());
        let groups = groups.ok_or_else(|| self.unsupported("config_groups", "what is no object of groups"))?;
        let all = self.inside("config_groups");
        match groups.keys().collect::<Vec<_>>()[..] {
            [only] => self.group_scheme(&all.inside(only)).map(Schemes::of_all),
            _ => {
                let named = groups.keys().map(|name| self.named_group(&all.inside(name)));
                self.by_target(named.collect::<Result<_, _>>()?)
            }
        }
    }

    fn named_group(&self, group: &Config<'_>) -> Result<Group, ConfigError> {
        let scheme = self.group_scheme(group)?;
        group.targets("targets", Some(scheme))
    }

    /// The modules of a list.
    fn targets(&self, key: &str, scheme: Option<Scheme>) -> Result<Group, ConfigError> {
        let list = match &self.values[key] {
            Value::Null => Some(Vec::new()),
            Value::Array(list) => list.iter().map(Value::as_str).collect(),
            _ => None,
        };
        let list = list.ok_or_else(|| self.unsupported(key, "what is no list of names"))?;
        let (patterns, words): (Vec<_>, Vec<_>) = list.into_iter().partition(|target| target.starts_with(PATTERN));
        let [patterns, words] = [patterns, words].map(|list| list.into_iter().map(str::to_owned));
        let key = format!("{}.{key}", self.path);
        Ok(Group { words: words.collect(), patterns: patterns.collect(), scheme, key })
    }

    /// Rules in the order of compressed-tensors: ignored modules are not quantized; then names come before patterns, in
    /// alphabetic order, and patterns before classes; of equal ones that of the last group counts.
    fn by_target(&self, mut groups: Vec<Group>) -> Result<Schemes, ConfigError> {
        groups.reverse();
        let ignored = [self.targets("ignore", None)?];
        let patterns = |groups: &[Group]| groups.iter().map(|group| group.patterns.len()).sum::<usize>();
        self.check_rules("config_groups", 2 * groups.len() + patterns(&groups) + patterns(&ignored))?;
        let mut rules = Vec::new();
        for groups in [&ignored[..], &groups[..]] {
            rules.extend(groups.iter().map(Group::names));
            rules.extend(pattern_rules(groups)?);
            rules.extend(groups.iter().map(Group::classes));
        }
        Ok(Schemes { rules, others: None })
    }

    /// The scheme of a group, which has its own format in mixed checkpoints.
    fn group_scheme(&self, group: &Config<'_>) -> Result<Scheme, ConfigError> {
        let weights = group.inside("weights");
        let rounds_inputs = group.values["input_activations"]["num_bits"] == 8;
        let symmetric = weights.values["symmetric"] != false;
        let place = if group.values["format"].is_null() { self } else { group };
        match place.values["format"].as_str() {
            Some("pack-quantized") => {
                weights.expect("type", &["int".into()])?;
                let layout = Layout::Packed { bits: weights.bits("num_bits", &[4, 8])?, symmetric };
                Ok(Scheme::of_weights(layout, weights.group("group_size")?))
            }
            Some("int-quantized") => {
                weights.expect("type", &["int".into()])?;
                weights.bits("num_bits", &[8])?;
                weights.expect("strategy", &["channel".into(), "group".into()])?;
                let scheme = Scheme::of_weights(Layout::Bytes { symmetric }, weights.group("group_size")?);
                Ok(Scheme { rounds_inputs, ..scheme })
            }
            Some("float-quantized" | "naive-quantized") => {
                weights.expect("type", &["float".into()])?;
                weights.bits("num_bits", &[8])?;
                let scales = weights.float8_scales()?;
                let scheme = Scheme::of_weights(Layout::Float8 { scales, inverse: false }, None);
                Ok(Scheme { rounds_inputs, ..scheme })
            }
            _ => Err(place.unsupported("format", "this layout")),
        }
    }

    fn float8_scales(&self) -> Result<Float8Scales, ConfigError> {
        match self.values["strategy"].as_str() {
            Some("tensor") => Ok(Float8Scales::Matrix),
            Some("channel") => Ok(Float8Scales::Outputs),
            Some("block") => self.blocks("block_structure"),
            _ => Err(self.unsupported("strategy", "a checkpoint quantized this way")),
        }
    }
}

impl Group {
    fn names(&self) -> Rule {
        Rule { modules: Modules::Named(self.words.clone()), scheme: self.scheme }
    }

    fn classes(&self) -> Rule {
        Rule { modules: Modules::OfClass(self.words.clone()), scheme: self.scheme }
    }
}

/// Patterns in alphabetic order.
fn pattern_rules(groups: &[Group]) -> Result<Vec<Rule>, ConfigError> {
    let mut all: Vec<(&str, &Group)> =
        groups.iter().flat_map(|group| group.patterns.iter().map(move |pattern| (&pattern[..], group))).collect();
    all.sort_by_key(|(pattern, _)| *pattern);
    let rule = |(pattern, group): (&str, &Group)| {
        rule_of_pattern(&group.key, pattern.strip_prefix(PATTERN).unwrap_or(pattern), Pattern::at_start, group.scheme)
    };
    all.into_iter().map(rule).collect()
}
