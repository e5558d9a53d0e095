//! OpenAI wire types of the engine's API.
