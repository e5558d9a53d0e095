//! The program windlass-operator: watches, observes, applies, scrapes. It decides nothing.

fn main() {}
