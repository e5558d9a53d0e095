//! NVIDIA's numbers of critical errors (XIDs), and which of them end an engine.

/// Errors after which a GPU computes nothing more, or nothing that can be relied on: those for which NVIDIA's catalogue
/// (docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html, of Ampere and later) has the GPU reset (46, 62, 64, 95, 109, 110,
/// 119, 120, 136, 140, 143, 155, 156, 158), the machine restarted (79, 151) or, of memory errors, the program (94); and two that it has
/// examined, and says a reset is needed to clear: 48, and 74, which a GPU may report for a failed one at the other end of the link.
/// The node monitoring agent of EKS (github.com/aws/eks-node-monitoring-agent) takes the same for fatal but 94, and some besides of
/// which the catalogue has none reset: 54, 63, 142. NVIDIA's device plugin (github.com/NVIDIA/k8s-device-plugin) takes every error
/// for one but those of programs: 13, 31, 43, 45, 68, and 109, whose reset the catalogue asks for by now.
///
/// Others are a program's own, perhaps another one's on the same GPU: where they are this engine's, its next call of the driver says
/// so. So it does after errors of NVLink's fifth generation (144 to 150), most of whose kinds the catalogue has ignored. A row of memory
/// that was replaced (63) is so from the next reset on.
const FATAL: [(u64, &str); 19] = [
    (46, "it stopped processing"),
    (48, "an uncorrectable error of its memory (ECC)"),
    (62, "its controller halted"),
    (64, "a failing row of its memory could not be replaced"),
    (74, "an error of NVLink"),
    (79, "it has fallen off the bus"),
    (94, "an uncorrectable error of its memory (ECC), contained"),
    (95, "an uncorrectable error of its memory (ECC), not contained"),
    (109, "it did not switch between programs in time"),
    (110, "a security fault"),
    (119, "its system processor (GSP) does not answer"),
    (120, "its system processor (GSP) failed"),
    (136, "a link was not trained"),
    (140, "an error of its memory (ECC) from which it did not recover"),
    (143, "it was not initialized"),
    (151, "its keys were not exchanged"),
    (155, "a link of NVLink was taken down"),
    (156, "a part of it was retired"),
    (158, "it did not answer in time"),
];

/// What an error means that ends an engine; none for one that does not.
pub fn fatal(xid: u64) -> Option<&'static str> {
    FATAL.iter().find(|(number, _)| *number == xid).map(|(_, meaning)| *meaning)
}
