//! GGUF files: header, metadata and tensor data, validated before anything is allocated.
