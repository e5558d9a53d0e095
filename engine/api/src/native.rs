//! The plain dialect: one prompt in, one text out; tokens in and out; the server in numbers.

mod generate;
mod metrics;
mod tokens;

pub use generate::{GenerateRequest, GenerateResponse, Timings, TokenCounts};
pub use metrics::{Latency, ServerMetrics};
pub use tokens::{DetokenizeRequest, DetokenizeResponse, TokenizeInput, TokenizeRequest, TokenizeResponse};
