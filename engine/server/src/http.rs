//! Both ports: routes, connections, and what stands between them.

pub mod admin;
mod admin_guard;
mod admin_sleep;
mod ambiguous;
pub mod api;
pub mod auth;
pub mod bodies;
mod body;
mod body_bytes;
pub mod connection;
mod cors;
pub mod door;
pub mod encoder;
mod error;
mod native;
mod openai;
mod openapi;
mod page;
mod request_name;
mod respond;
mod stall;
mod stream;
mod strict_lines;
mod tgi;
pub mod tls;
mod unread;

pub use error::SHOULD_RETRY;
pub use respond::unix_seconds;
