//! Text in and out: prompts to tokens, tokens to text.
//!
//! Nothing here knows requests, HTTP or the engine; every type is a value that one request or the whole process owns.

mod bpe;
mod byte_level;
mod charsmap;
pub mod chat_template;
pub mod detokenize;
pub mod encoder_text;
mod guarded;
pub mod hub;
pub mod python_json;
pub mod renderer_process;
pub mod renderers;
mod spm;
pub mod stop_strings;
mod template_program;
pub mod tokenizer;
mod tokenizer_file;
mod ugm;
pub mod vocabulary;
pub mod words;
mod wpm;
