//! What a launch asks of the driver beside its blocks and arguments.

use cudarc::driver::sys::{self, CUlaunchAttributeID as Id, CUlaunchAttributeValue as Value};

use crate::cuda::DeviceFacts;
use crate::cuda::launch::Launch;

/// A launch's attributes; what it does not ask for is an entry that the driver ignores.
pub(super) fn of(launch: &Launch, facts: &DeviceFacts) -> [sys::CUlaunchAttribute; 2] {
    let (nothing, [x, y, z]) = (Value { pad: [0; 64] }, launch.cluster());
    // Every kernel waits for the one ahead before it touches what that one touches.
    let overlap = match facts.overlaps_launches() {
        true => attribute(
            Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            Value { programmaticStreamSerializationAllowed: 1 },
        ),
        false => attribute(Id::CU_LAUNCH_ATTRIBUTE_IGNORE, nothing),
    };
    let cluster = match [x, y, z] {
        [1, 1, 1] => attribute(Id::CU_LAUNCH_ATTRIBUTE_IGNORE, nothing),
        _ => attribute(
            Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            Value { clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z } },
        ),
    };
    [overlap, cluster]
}

fn attribute(id: Id, value: Value) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute { id, pad: Default::default(), value }
}
