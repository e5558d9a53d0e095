//! The structured last word of an engine: written to the termination message file, quoted by conditions.

use serde::{Deserialize, Serialize};

/// Kubernetes keeps at most this much of a container's termination message.
pub const MAX_TERMINATION_BYTES: usize = 4096;

/// Why the process ended.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Termination {
    /// A stable CamelCase word that a condition can take as its reason.
    pub reason: Reason,
    /// One or two sentences with the numbers and the next step.
    pub message: String,
}

/// Stable reasons; each has an exit code of its own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Reason {
    /// A flag is unknown, contradictory or out of range.
    InvalidConfiguration,
    /// The source does not answer, or there is no such file.
    ModelUnavailable,
    /// Bytes arrived but are not what the checksum says.
    ChecksumMismatch,
    /// The file is damaged, or of a kind this engine does not read.
    ModelInvalid,
    /// The architecture, tensor type or parallel size is not supported.
    Unsupported,
    /// Weights, KV and workspace need more memory than there is.
    OutOfMemory,
    /// The device or its driver failed.
    DeviceFailed,
    /// A defect of ours.
    Internal,
}

impl Reason {
    /// Every reason, in order of exit code.
    pub const ALL: [Reason; 8] = [
        Reason::InvalidConfiguration,
        Reason::ModelUnavailable,
        Reason::ChecksumMismatch,
        Reason::ModelInvalid,
        Reason::Unsupported,
        Reason::OutOfMemory,
        Reason::DeviceFailed,
        Reason::Internal,
    ];

    /// Whether trying again cannot help: somebody has to change something.
    pub fn is_final(self) -> bool {
        match self {
            Reason::InvalidConfiguration
            | Reason::ChecksumMismatch
            | Reason::ModelInvalid
            | Reason::Unsupported
            | Reason::OutOfMemory => true,
            Reason::ModelUnavailable | Reason::DeviceFailed | Reason::Internal => false,
        }
    }

    /// The process's exit code for this reason (2 is also what clap exits with).
    pub fn exit_code(self) -> u8 {
        match self {
            Reason::InvalidConfiguration => 2,
            Reason::ModelUnavailable => 10,
            Reason::ChecksumMismatch => 11,
            Reason::ModelInvalid => 12,
            Reason::Unsupported => 13,
            Reason::OutOfMemory => 14,
            Reason::DeviceFailed => 15,
            Reason::Internal => 70,
        }
    }
}

impl Termination {
    /// Serialized within [`MAX_TERMINATION_BYTES`]; an overlong message loses its tail.
    pub fn to_json(&self) -> String {
        let mut kept = self.clone();
        loop {
            let json = serde_json::to_string(&kept).unwrap_or_default();
            if json.len() <= MAX_TERMINATION_BYTES {
                return json;
            }
            let half = kept.message.chars().count() / 2;
            kept.message = kept.message.chars().take(half).collect::<String>() + "…";
        }
    }

    /// Reads what an engine wrote; `None` for a container that ended without a last word.
    pub fn parse(text: &str) -> Option<Termination> {
        serde_json::from_str(text).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_overlong_message_is_cut_and_still_parses() {
        let long = Termination { reason: Reason::OutOfMemory, message: "é\"".repeat(5000) };
        let json = long.to_json();
        assert!(json.len() <= MAX_TERMINATION_BYTES);
        assert_eq!(Termination::parse(&json).map(|read| read.reason), Some(Reason::OutOfMemory));
    }

    #[test]
    fn exit_codes_are_distinct() {
        let mut codes: Vec<u8> = Reason::ALL.iter().map(|reason| reason.exit_code()).collect();
        codes.dedup();
        assert_eq!(codes.len(), Reason::ALL.len());
    }
}
