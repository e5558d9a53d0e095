//! Flags of `windlass-engine serve` that the operator sets from the resource.
//!
//! `engine.extraArgs` may carry any other flag; these are refused there by name, with the field that owns them.

#![allow(missing_docs)] // a flag constant is its own description

/// A flag that belongs to a field of the resource.
pub struct ManagedFlag {
    /// The flag as typed, with its dashes.
    pub flag: &'static str,
    /// The field of the InferenceService that sets it; `None`: nothing changes it.
    pub field: Option<&'static str>,
}

impl ManagedFlag {
    /// Why `engine.extraArgs` may not carry it, and what would be right.
    pub fn refusal(&self) -> String {
        let ManagedFlag { flag, field } = self;
        match field {
            Some(field) => format!("{flag} is set by the operator; use {field}"),
            None => format!("{flag} is left to the operator and stays as it is"),
        }
    }
}

pub const SERVED_MODEL_NAME: &str = "--served-model-name";
pub const MAX_MODEL_LEN: &str = "--max-model-len";
pub const MAX_NUM_SEQS: &str = "--max-num-seqs";
pub const TENSOR_PARALLEL_SIZE: &str = "--tensor-parallel-size";
pub const PIPELINE_PARALLEL_SIZE: &str = "--pipeline-parallel-size";
pub const NODE_RANK: &str = "--node-rank";
pub const NNODES: &str = "--nnodes";
pub const MASTER_ADDR: &str = "--master-addr";
pub const MASTER_PORT: &str = "--master-port";
pub const HEADLESS: &str = "--headless";
pub const QUANTIZATION: &str = "--quantization";
pub const KV_CACHE_DTYPE: &str = "--kv-cache-dtype";
pub const DEVICE: &str = "--device";
pub const API_KEY_DIR: &str = "--api-key-dir";
pub const DRAIN_TIMEOUT_SECONDS: &str = "--drain-timeout-seconds";
pub const PORT: &str = "--port";
pub const ADMIN_PORT: &str = "--admin-port";
pub const HOST: &str = "--host";
pub const ADMIN_HOST: &str = "--admin-host";
pub const ADMIN_TOKEN_FILE: &str = "--admin-token-file";

/// `windlass-engine fetch SOURCE …`: what the init container of a source that is no volume runs. It ends with 0 once the
/// file or folder at [`TO`](fetch::TO) is what was asked for, at once where it already is; it resumes what an earlier run
/// began.
pub mod fetch {
    /// The subcommand; its argument is the source.
    pub const SUBCOMMAND: &str = "fetch";
    /// Path of the file to write, or of the folder for a model of several files; its folder is made.
    pub const TO: &str = "--to";
    /// Most bytes that the models in the folder of [`TO`] may take together.
    pub const CACHE_MAX_BYTES: &str = "--cache-max-bytes";
    /// Seconds that a model in the folder of [`TO`] is kept unused.
    pub const CACHE_KEEP_SECONDS: &str = "--cache-keep-seconds";
    /// The fewest of [`CACHE_KEEP_SECONDS`]: for so long a fetched model may wait for its engine.
    pub const MIN_CACHE_KEEP_SECONDS: u32 = 3600;
    /// Hexadecimal SHA-256 of the file of an https source.
    pub const SHA256: &str = "--sha256";
    /// Branch, tag or commit of an `hf://` source.
    pub const REVISION: &str = "--revision";
    /// Folder with a file for each setting of an object store, named like it (`AWS_ACCESS_KEY_ID`): a mounted Secret.
    pub const CREDENTIALS_DIR: &str = "--credentials-dir";
    /// File with a token to send as `Authorization: Bearer`.
    pub const TOKEN_FILE: &str = "--token-file";
    /// File with PEM certificates to trust instead of the public ones.
    pub const CA_FILE: &str = "--ca-file";
}

/// `windlass-engine inspect MODEL …`: reads headers alone, of a file, a folder or a URL, and leaves
/// [`Inspection`](crate::inspection::Inspection) as JSON on standard output and in the termination message.
pub mod inspect {
    /// The subcommand; its argument is the path or URL. A URL takes [`TOKEN_FILE`](super::fetch::TOKEN_FILE) and
    /// [`CA_FILE`](super::fetch::CA_FILE) as `fetch` does.
    pub const SUBCOMMAND: &str = "inspect";
    /// Without the list of tensor types.
    pub const SUMMARY: &str = "--summary";
}

/// Every managed flag with its field.
pub const MANAGED: &[ManagedFlag] = &[
    ManagedFlag { flag: SERVED_MODEL_NAME, field: Some("spec.model.servedNames") },
    ManagedFlag { flag: MAX_MODEL_LEN, field: Some("spec.engine.maxModelTokens") },
    ManagedFlag { flag: MAX_NUM_SEQS, field: Some("spec.engine.maxSequences") },
    ManagedFlag { flag: TENSOR_PARALLEL_SIZE, field: Some("spec.parallelism.tensor") },
    ManagedFlag { flag: PIPELINE_PARALLEL_SIZE, field: Some("spec.parallelism.pipeline") },
    ManagedFlag { flag: QUANTIZATION, field: Some("spec.engine.quantization") },
    ManagedFlag { flag: KV_CACHE_DTYPE, field: Some("spec.engine.kvCacheDataType") },
    ManagedFlag { flag: DEVICE, field: Some("spec.accelerator.type") },
    ManagedFlag { flag: API_KEY_DIR, field: Some("spec.auth.apiKeysSecretRef") },
    ManagedFlag { flag: DRAIN_TIMEOUT_SECONDS, field: Some("spec.drainTimeoutSeconds") },
    ManagedFlag { flag: PORT, field: None },
    ManagedFlag { flag: ADMIN_PORT, field: None },
    ManagedFlag { flag: HOST, field: None },
    ManagedFlag { flag: ADMIN_HOST, field: None },
    // The operator reads no Secret, so it could not ask a server that wants one.
    ManagedFlag { flag: ADMIN_TOKEN_FILE, field: None },
    ManagedFlag { flag: NODE_RANK, field: None },
    ManagedFlag { flag: NNODES, field: None },
    ManagedFlag { flag: MASTER_ADDR, field: None },
    ManagedFlag { flag: MASTER_PORT, field: None },
    ManagedFlag { flag: HEADLESS, field: None },
];

/// The managed flag that `argument` sets, in any of the forms `--flag`, `--flag=value`.
pub fn managed(argument: &str) -> Option<&'static ManagedFlag> {
    let name = argument.split('=').next().unwrap_or(argument);
    MANAGED.iter().find(|managed| managed.flag == name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_managed_flag_is_found_in_both_spellings_and_no_prefix_matches() {
        assert!(managed("--port").is_some());
        assert!(managed("--port=9").is_some());
        assert!(managed("--portable").is_none());
        assert!(managed("9").is_none());
    }
}
