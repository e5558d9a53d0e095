//! What kernels use of a chip that others lack, and how a person leaves a part of it out to find what a fault hangs on.

use super::error::DriverError;
use super::table::HOPPER;

/// The environment variable that names what is left out, such as `warpgroups,overlap`.
pub const WITHOUT: &str = "WINDLASS_CUDA_WITHOUT";

/// What is used of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Features {
    /// Products of four warps together (`wgmma`), and the bulk copies of tiles that feed them: Hopper's alone.
    pub warpgroups: bool,
    /// Blocks that begin together and reach each other's shared memory: from Hopper on.
    pub clusters: bool,
    /// A kernel starts before the one ahead of it ends (programmatic dependent launch): from Hopper on.
    pub overlap: bool,
}

impl Features {
    /// All that a device of `capability` has.
    pub fn of(capability: (u32, u32)) -> Features {
        let from_hopper_on = capability >= HOPPER;
        Features { warpgroups: capability == HOPPER, clusters: from_hopper_on, overlap: from_hopper_on }
    }

    /// These without those that `names` lists, with commas between them.
    ///
    /// # Errors
    /// A name that is none of a feature.
    pub fn without(self, names: &str) -> Result<Features, DriverError> {
        let mut names = names.split(',').map(str::trim).filter(|name| !name.is_empty());
        names.try_fold(self, |features, name| match name {
            "warpgroups" => Ok(Features { warpgroups: false, ..features }),
            "clusters" => Ok(Features { clusters: false, ..features }),
            "overlap" => Ok(Features { overlap: false, ..features }),
            _ => Err(DriverError::refused(WITHOUT, format!("{name:?} is none of warpgroups, clusters, overlap"))),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_named_is_left_out() {
        let all = Features::of(HOPPER);
        assert_eq!(all, Features { warpgroups: true, clusters: true, overlap: true });
        assert_eq!(all.without("").unwrap(), all);
        assert_eq!(all.without("warpgroups, overlap").unwrap(), Features { clusters: true, ..Features::of((8, 0)) });
        let refusal = all.without("clusters,wgmma").unwrap_err().to_string();
        assert!(refusal.contains("wgmma") && refusal.contains("warpgroups, clusters, overlap"), "{refusal}");
    }

    #[test]
    fn only_hopper_has_warpgroups() {
        assert_eq!(Features::of((8, 9)), Features { warpgroups: false, clusters: false, overlap: false });
        assert_eq!(Features::of((10, 0)), Features { warpgroups: false, clusters: true, overlap: true });
    }
}
