//! The schemes of a checkpoint, which tools assign to matrices by names of modules.

use std::collections::BTreeSet;

use regex::bytes::{Regex, RegexBuilder};

use super::scheme::Scheme;

/// Most rules of a configuration. Published ones have up to some dozens; plain names do not count.
pub(super) const MAX_RULES: usize = 1024;
/// Most bytes of a compiled pattern. Usual ones take some hundreds, since names are bytes here, not Unicode.
const MAX_PROGRAM_BYTES: usize = 1 << 16;

/// The schemes of a checkpoint.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Schemes {
    /// Rules; the first one that matches a module decides.
    pub(super) rules: Vec<Rule>,
    /// The scheme of modules that no rule matches.
    pub(super) others: Option<Scheme>,
}

/// A rule: the scheme of some modules.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Rule {
    pub modules: Modules,
    /// The scheme; `None` if the modules are not quantized.
    pub scheme: Option<Scheme>,
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Modules {
    Named(BTreeSet<String>),
    Like(Pattern),
    /// Modules of these classes of PyTorch.
    OfClass(BTreeSet<String>),
}

impl Schemes {
    /// One scheme for all matrices that are stored as codes.
    pub fn of_all(scheme: Scheme) -> Schemes {
        Schemes { rules: Vec::new(), others: Some(scheme) }
    }

    /// The scheme of the matrix that is called `name` in checkpoints that are not quantized.
    pub fn of(&self, name: &str) -> Option<Scheme> {
        let module = name.strip_suffix(".weight").unwrap_or(name);
        let rule = self.rules.iter().find(|rule| rule.modules.contains(module));
        rule.map_or(self.others, |rule| rule.scheme)
    }

    /// Whether inputs of matrices of eight bits are meant to be rounded to 8 bits. If only some are, none is rounded.
    pub fn rounds_inputs(&self) -> bool {
        let all = self.rules.iter().filter_map(|rule| rule.scheme).chain(self.others);
        let of_bytes: Vec<Scheme> = all.filter(|scheme| scheme.layout.is_of_bytes()).collect();
        !of_bytes.is_empty() && of_bytes.iter().all(|scheme| scheme.rounds_inputs)
    }
}

impl Modules {
    fn contains(&self, module: &str) -> bool {
        match self {
            Modules::Named(names) => names.contains(module),
            Modules::Like(pattern) => pattern.holds(module),
            Modules::OfClass(classes) => classes.contains(class(module)),
        }
    }
}

/// The PyTorch class of a matrix.
fn class(module: &str) -> &'static str {
    if module.ends_with("embed_tokens") { "Embedding" } else { "Linear" }
}

/// A regular expression. Matching takes time linear in the length of the name.
#[derive(Clone, Debug)]
pub(super) struct Pattern(Regex);

impl Pattern {
    /// Compiles a pattern that matches at the start of a name, as Python's `re.match`. `None` if the text is invalid,
    /// too large, or has look-around, which takes more than linear time.
    pub fn at_start(text: &str) -> Option<Pattern> {
        // The pattern is compiled alone too: otherwise its brackets could close those of the anchor.
        Pattern::anywhere(text)?;
        Pattern::anywhere(&format!("^(?:{text})"))
    }

    /// Compiles a pattern that matches anywhere in a name, as `re.search`; `None` as above.
    pub fn anywhere(text: &str) -> Option<Pattern> {
        let mut builder = RegexBuilder::new(text);
        builder.unicode(false).size_limit(MAX_PROGRAM_BYTES).dfa_size_limit(MAX_PROGRAM_BYTES).build().ok().map(Pattern)
    }

    fn holds(&self, name: &str) -> bool {
        self.0.is_match(name.as_bytes())
    }
}

impl PartialEq for Pattern {
    fn eq(&self, other: &Pattern) -> bool {
        self.0.as_str() == other.0.as_str()
    }
}

#[cfg(test)]
mod tests {
    use super::super::scheme::Layout;
    use super::*;

    /// Patterns match as Python's `re.match` does, from the start but not to the end; or as its `re.search`.
    #[test]
    fn patterns_hold_from_the_beginning_or_anywhere() {
        let name = "model.layers.10.mlp.down_proj";
        for (pattern, holds) in [
            (r".*\.mlp\..*", true),
            (r"model\.layers\.1", true),
            (r"layers", false),
            (r"model\.layers\.\d\.", false),
            (r".*down_proj$|lm_head", true),
            (r"(?i)MODEL", true),
            (r"lm_head|.*up_proj", false),
        ] {
            assert_eq!(Pattern::at_start(pattern).unwrap().holds(name), holds, "{pattern}");
        }
        let anywhere = |pattern: &str| Pattern::anywhere(pattern).unwrap().holds(name);
        assert!(anywhere("layers") && anywhere(r"down_proj$") && !anywhere(r"^layers"));
    }

    /// Weights of 4 bits, whose inputs are never rounded, do not count.
    #[test]
    fn inputs_are_rounded_where_all_matrices_of_eight_bits_multiply_rounded_ones() {
        let bytes = Scheme::of_weights(Layout::Bytes { symmetric: true }, None);
        let rounded = Scheme { rounds_inputs: true, ..bytes };
        let packed = Scheme::of_weights(Layout::Packed { bits: 4, symmetric: true }, None);
        let rounds = |schemes: &[Scheme]| {
            let rule = |scheme: &Scheme| Rule { modules: Modules::Named(BTreeSet::new()), scheme: Some(*scheme) };
            Schemes { rules: schemes.iter().map(rule).collect(), others: None }.rounds_inputs()
        };
        assert!(rounds(&[rounded, packed, rounded]) && Schemes::of_all(rounded).rounds_inputs());
        let packed_bytes = Scheme::of_weights(Layout::Packed { bits: 8, symmetric: true }, None);
        assert!(!rounds(&[rounded, packed_bytes]), "devices hold both alike");
        assert!(!rounds(&[rounded, bytes]) && !rounds(&[packed]) && !rounds(&[]));
    }

    #[test]
    fn patterns_that_are_none_or_too_large_or_look_around_are_none() {
        for pattern in ["(", "*", "a)(b", r"(?!lm_head)", r"(a)\1", r"(\d{1000}){1000}", "(?x) # the end"] {
            assert!(Pattern::at_start(pattern).is_none(), "{pattern}");
        }
        assert!(Pattern::at_start(&"a".repeat(MAX_PROGRAM_BYTES)).is_none());
        assert!(Pattern::at_start(&"(".repeat(1000)).is_none());
    }
}
