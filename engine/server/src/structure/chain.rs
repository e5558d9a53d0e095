//! How far the rules or references of a form lead from one to the next. `llguidance` follows them by recursion, so a
//! long way is refused before it costs a process that tries it (see [`super::trial`]).

use super::form::Source;
use serde_json::Value;
use std::collections::{HashMap, HashSet};

/// Longest way: several times what the largest schemas and grammars in use have.
const MAX_STEPS: usize = 1000;

/// Refuses a form whose rules or references lead further.
pub(super) fn check(source: &Source) -> Result<(), String> {
    match source {
        Source::Schema(text) => {
            let schema: Value = serde_json::from_str(text).map_err(|error| error.to_string())?;
            within(&schema, "references", |place| steps_of_schema(&schema, place))
        }
        Source::Lark(text) => {
            let rules = rules(text);
            within("start", "rules", |name| steps_of_rule(&rules, name))
        }
    }
}

/// Follows `steps` from `start`, each once and the way down first, as the compiler does.
fn within<P: Copy>(start: P, called: &str, steps: impl Fn(P) -> Vec<(String, P)>) -> Result<(), String> {
    let (mut seen, mut ahead) = (HashSet::new(), vec![(String::new(), start, 0)]);
    while let Some((name, place, depth)) = ahead.pop() {
        if depth > MAX_STEPS {
            return Err(format!("more than {MAX_STEPS} of its {called} lead from one to the next; make it flatter"));
        }
        if seen.insert(name) {
            ahead.extend(steps(place).into_iter().rev().map(|(name, place)| (name, place, depth + 1)));
        }
    }
    Ok(())
}

/// The references inside a part of a schema, and what they lead to.
fn steps_of_schema<'a>(schema: &'a Value, part: &'a Value) -> Vec<(String, &'a Value)> {
    let (mut found, mut ahead) = (Vec::new(), vec![part]);
    while let Some(value) = ahead.pop() {
        match value {
            Value::Array(items) => ahead.extend(items),
            Value::Object(fields) => {
                // What lies in definitions is reached by references alone.
                ahead.extend(fields.iter().filter(|(name, _)| !is_definitions(name)).map(|(_, value)| value));
                let reference = fields.get("$ref").and_then(Value::as_str);
                found.extend(reference.and_then(|name| Some((name.to_owned(), target(schema, name)?))));
            }
            _ => (),
        }
    }
    found
}

fn is_definitions(field: &str) -> bool {
    ["$defs", "definitions"].contains(&field)
}

/// What a reference within the schema leads to.
fn target<'a>(schema: &'a Value, reference: &str) -> Option<&'a Value> {
    schema.pointer(reference.strip_prefix('#')?)
}

/// The rules and terminals of a grammar: what is between the beginning of one and that of the next.
fn rules(grammar: &str) -> HashMap<&str, Vec<&str>> {
    let mut rules: HashMap<&str, Vec<&str>> = HashMap::new();
    let mut rule = "";
    for line in grammar.lines() {
        let body = match beginning(line) {
            Some((name, body)) => {
                rule = name;
                body
            }
            None => line,
        };
        rules.entry(rule).or_default().extend(names(body));
    }
    rules
}

/// The name at the beginning of a line that begins a rule, and the rest.
fn beginning(line: &str) -> Option<(&str, &str)> {
    let (head, body) = line.split_once(':')?;
    let name = names(head).next()?;
    let plain = head.trim_start_matches([' ', '\t', '?', '!']).starts_with(name);
    plain.then_some((name, body))
}

fn names(text: &str) -> impl Iterator<Item = &str> {
    text.split(|letter: char| !letter.is_alphanumeric() && letter != '_').filter(|name| !name.is_empty())
}

fn steps_of_rule<'a>(rules: &HashMap<&'a str, Vec<&'a str>>, name: &str) -> Vec<(String, &'a str)> {
    let known = rules.get(name).into_iter().flatten().filter(|name| rules.contains_key(**name));
    known.map(|name| ((*name).to_owned(), *name)).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn refused(source: &Source) -> bool {
        let refusal = check(source).err().unwrap_or_default();
        assert!(refusal.is_empty() || refusal.contains("lead from one to the next"), "{refusal}");
        !refusal.is_empty()
    }

    #[test]
    fn long_ways_are_refused_however_they_are_written() {
        let schema = |count: usize, target: fn(usize) -> Value| {
            let definitions: serde_json::Map<String, Value> =
                (0..count).map(|number| (format!("d{number}"), target(number + 1))).collect();
            let mut schema = json!({"$ref": "#/$defs/d0", "$defs": definitions});
            schema["$defs"][format!("d{count}")] = json!({"type": "null"});
            Source::Schema(schema.to_string())
        };
        let nested = |number| json!({"type": "object", "properties": {"a": {"$ref": format!("#/$defs/d{number}")}}});
        let bare = |number| json!({"$ref": format!("#/$defs/d{number}")});
        let rules = |count: usize, name: &str| {
            let rule = |number: usize| format!("{name}{number}: {name}{}\n", number + 1);
            let chain: String = (0..count).map(rule).collect();
            Source::Lark(format!("start: {name}0\n{chain}{name}{count}: \"x\"\n"))
        };
        for count in [10, 900, 1100, 5000] {
            let long = count > MAX_STEPS;
            let all = [schema(count, nested), schema(count, bare), rules(count, "r"), rules(count, "T")];
            assert_eq!(all.each_ref().map(refused), [long; 4], "{count}");
        }
    }

    #[test]
    fn many_rules_that_come_back_are_no_long_way() {
        let many: String = (0..3000).map(|number| format!("r{number}: start | \"r{number}\"\n")).collect();
        let all: Vec<String> = (0..3000).map(|number| format!("r{number}")).collect();
        assert!(!refused(&Source::Lark(format!("start: {}\n{many}", all.join("\n  | ")))));
        assert!(!refused(&Source::Schema(json!({"$ref": "#"}).to_string())));
    }
}
