//! NVIDIA's numbers of critical errors (XIDs), and which of them end an engine.

/// Errors after which a GPU computes nothing more, or nothing that can be relied on: those for which NVIDIA's catalogue
/// (docs.nvidia.com/deploy/xid-errors, of Ampere and later) has the GPU reset, the machine restarted, NVLink examined, or, of memory
/// errors, the program. Others are a program's own (13, 31, 43), perhaps another one's on the same GPU: where they are this engine's,
/// its next call of the driver says so. A row of memory that was replaced (63) is so from the next reset on.
const FATAL: [(u64, &str); 11] = [
    (46, "it stopped processing"),
    (48, "an uncorrectable error of its memory (ECC)"),
    (62, "its controller halted"),
    (64, "a failing row of its memory could not be replaced"),
    (74, "an error of NVLink"),
    (79, "it has fallen off the bus"),
    (94, "an uncorrectable error of its memory (ECC), contained"),
    (95, "an uncorrectable error of its memory (ECC), not contained"),
    (119, "its system processor (GSP) does not answer"),
    (120, "its system processor (GSP) failed"),
    (140, "an error of its memory (ECC) from which it did not recover"),
];

/// What an error means that ends an engine; none for one that does not.
pub fn fatal(xid: u64) -> Option<&'static str> {
    FATAL.iter().find(|(number, _)| *number == xid).map(|(_, meaning)| *meaning)
}
