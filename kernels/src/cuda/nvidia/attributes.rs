//! What a launch asks of the driver beside its blocks and arguments.

use cudarc::driver::sys::{self, CUlaunchAttributeID as Id, CUlaunchAttributeValue as Value};

use crate::cuda::DeviceFacts;
use crate::cuda::launch::Launch;

/// Most attributes of a launch.
const MOST: usize = 2;

/// A launch's attributes, and how many of them it has.
pub(super) fn of(launch: &Launch, facts: &DeviceFacts) -> ([sys::CUlaunchAttribute; MOST], u32) {
    // Every kernel waits for the one ahead before it touches what that one touches.
    let overlap = facts.overlaps_launches().then(|| {
        let value = Value { programmaticStreamSerializationAllowed: 1 };
        attribute(Id::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, value)
    });
    let cluster = (launch.cluster() != [1; 3]).then(|| {
        let [x, y, z] = launch.cluster();
        let value = Value { clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x, y, z } };
        attribute(Id::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, value)
    });
    let mut attributes = [attribute(Id::CU_LAUNCH_ATTRIBUTE_IGNORE, Value { pad: [0; 64] }); MOST];
    let own = [overlap, cluster].into_iter().flatten();
    let count = attributes.iter_mut().zip(own).map(|(place, own)| *place = own).count();
    (attributes, count as u32)
}

fn attribute(id: Id, value: Value) -> sys::CUlaunchAttribute {
    sys::CUlaunchAttribute { id, pad: Default::default(), value }
}
