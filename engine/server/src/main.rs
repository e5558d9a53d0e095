//! The program windlass-engine: HTTP, tokenizer, chat template, streaming, the loop thread.

fn main() {}
