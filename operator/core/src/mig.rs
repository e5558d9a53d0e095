//! Slices of a GPU that is split by MIG with strategy `mixed`: each profile is a resource of its own.

/// What NVIDIA's device plugin names them.
const RESOURCE_PREFIX: &str = "nvidia.com/mig-";
/// A slice has a little less than the gigabytes of its name: 1g.5gb 4,864 MiB of an A100, 1g.18gb 16 GiB of an H200.
const BYTES_OF_A_GIGABYTE: u64 = 950_000_000;

/// A profile of slices, as `1g.10gb`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MigProfile {
    name: String,
    compute_slices: u32,
    gigabytes: u64,
}

impl MigProfile {
    /// By its name: sevenths of a GPU's processors, and gigabytes of its memory.
    pub fn parse(name: &str) -> Option<MigProfile> {
        let (compute_slices, rest) = name.split_once("g.")?;
        let (gigabytes, extension) = rest.split_once("gb")?;
        let compute_slices = compute_slices.parse().ok().filter(|slices| (1..=7).contains(slices))?;
        let gigabytes = gigabytes.parse().ok().filter(|gigabytes| (1..1000).contains(gigabytes))?;
        let is_known = extension.is_empty() || extension == ".me";
        is_known.then(|| MigProfile { name: name.to_owned(), compute_slices, gigabytes })
    }

    /// The resource that a pod asks for.
    pub fn resource(&self) -> String {
        format!("{RESOURCE_PREFIX}{}", self.name)
    }

    /// What a slice of `product` is called where nodes have no other slices, with strategy `single`.
    pub fn of(&self, product: &str) -> String {
        format!("{product}-MIG-{}", self.name)
    }

    /// Memory of a slice, bytes: not more than any GPU gives it.
    pub fn memory(&self) -> u64 {
        self.gigabytes * BYTES_OF_A_GIGABYTE
    }

    /// Most slices of one GPU.
    pub fn most_of_a_gpu(&self) -> u32 {
        7 / self.compute_slices
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn profiles_tell_their_memory_and_resource() {
        let profile = MigProfile::parse("3g.40gb").expect("a profile");
        assert_eq!((profile.resource().as_str(), profile.memory() >> 30), ("nvidia.com/mig-3g.40gb", 35));
        assert_eq!(profile.of("NVIDIA-H100-80GB-HBM3"), "NVIDIA-H100-80GB-HBM3-MIG-3g.40gb");
        assert_eq!(MigProfile::parse("1g.10gb.me").map(|profile| profile.most_of_a_gpu()), Some(7));
        // What NVIDIA's table gives them, MiB: none has less than is counted on.
        for (name, mebibytes) in [("1g.5gb", 4864), ("1g.10gb", 9728), ("7g.80gb", 80_896), ("1g.18gb", 16_384)] {
            assert!(MigProfile::parse(name).expect("a profile").memory() <= mebibytes << 20, "{name}");
        }
        for name in ["", "g.gb", "8g.10gb", "0g.10gb", "1g.0gb", "1g.10gb.max", "1g.10", "1g.99999999999gb"] {
            assert_eq!(MigProfile::parse(name), None, "{name}");
        }
    }
}
