//! Both ports: routes, connections, and what stands between them.

pub mod admin;
pub mod api;
pub mod auth;
mod body;
mod chat;
mod completions;
pub mod connection;
mod error;
mod models;
mod respond;
mod stall;
mod stream;
mod unread;

pub use respond::unix_seconds;
