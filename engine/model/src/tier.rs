//! Swap space for blocks that leave the KV pool: memory, or a file on a disk that is faster than recomputing.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Slots for blocks of one size, numbered from 0.
pub trait Tier: Send {
    /// Stores a block, given in parts, in a slot.
    fn store(&mut self, slot: usize, parts: &[&[u8]]) -> io::Result<()>;

    /// Loads a slot into the parts of a block. A slot that was never stored gives an error or zeros.
    fn load(&mut self, slot: usize, parts: &mut [&mut [u8]]) -> io::Result<()>;

    /// Forgets every block and frees the room.
    fn clear(&mut self) -> io::Result<()>;
}

/// A tier in memory. A slot takes memory when it is first used.
#[derive(Debug)]
pub struct MemoryTier {
    slots: Vec<Option<Box<[u8]>>>,
}

impl MemoryTier {
    /// Makes a tier of so many slots.
    pub fn new(slots: usize) -> MemoryTier {
        MemoryTier { slots: vec![None; slots] }
    }
}

impl Tier for MemoryTier {
    fn store(&mut self, slot: usize, parts: &[&[u8]]) -> io::Result<()> {
        let kept = self.slots[slot].get_or_insert_with(|| parts.concat().into());
        let mut rest = &mut kept[..];
        for part in parts {
            let (to, after) = rest.split_at_mut(part.len());
            to.copy_from_slice(part);
            rest = after;
        }
        Ok(())
    }

    fn load(&mut self, slot: usize, parts: &mut [&mut [u8]]) -> io::Result<()> {
        let kept = self.slots[slot].as_deref().ok_or(io::ErrorKind::NotFound)?;
        let mut rest = kept;
        for part in parts {
            let (from, after) = rest.split_at(part.len());
            part.copy_from_slice(from);
            rest = after;
        }
        Ok(())
    }

    fn clear(&mut self) -> io::Result<()> {
        self.slots.fill(None);
        Ok(())
    }
}

/// A tier in an unnamed file, which vanishes with the process, however that ends.
#[derive(Debug)]
pub struct FileTier {
    file: File,
    block_bytes: u64,
}

impl FileTier {
    /// Creates a file in `folder` with `slots` slots of `block_bytes` bytes. The disk must have room for all of them
    /// now, but the room is not reserved: if others fill the disk later, blocks that cannot be stored are recomputed.
    pub fn create(folder: &Path, slots: u64, block_bytes: u64) -> io::Result<FileTier> {
        let (wanted, disk) = (slots.saturating_mul(block_bytes), rustix::fs::statvfs(folder)?);
        let free = disk.f_bavail.saturating_mul(disk.f_frsize);
        if wanted > free {
            let said = format!("{} has {free} bytes free, and {wanted} are asked for", folder.display());
            return Err(io::Error::new(io::ErrorKind::StorageFull, said));
        }
        let path = folder.join(format!(".windlass-kv-{}", std::process::id()));
        let file = File::options().read(true).write(true).create_new(true).open(&path)?;
        std::fs::remove_file(&path)?;
        file.set_len(wanted)?;
        Ok(FileTier { file, block_bytes })
    }
}

impl Tier for FileTier {
    fn store(&mut self, slot: usize, parts: &[&[u8]]) -> io::Result<()> {
        let mut at = slot as u64 * self.block_bytes;
        for part in parts {
            self.file.write_all_at(part, at)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn load(&mut self, slot: usize, parts: &mut [&mut [u8]]) -> io::Result<()> {
        let mut at = slot as u64 * self.block_bytes;
        for part in parts {
            self.file.read_exact_at(part, at)?;
            at += part.len() as u64;
        }
        Ok(())
    }

    fn clear(&mut self) -> io::Result<()> {
        let bytes = self.file.metadata()?.len();
        self.file.set_len(0)?;
        self.file.set_len(bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_give_back_what_they_were_given() {
        let folder = tempfile::tempdir().unwrap();
        let tiers: [Box<dyn Tier>; 2] =
            [Box::new(MemoryTier::new(3)), Box::new(FileTier::create(folder.path(), 3, 6).unwrap())];
        for mut tier in tiers {
            tier.store(0, &[&[1, 2, 3, 4], &[5, 6]]).unwrap();
            tier.store(2, &[&[7; 4], &[8; 2]]).unwrap();
            tier.store(0, &[&[9, 2, 3, 4], &[5, 6]]).unwrap();
            for (slot, expected) in [(2, ([7; 4], [8; 2])), (0, ([9, 2, 3, 4], [5, 6]))] {
                let (mut first, mut second) = ([0; 4], [0; 2]);
                tier.load(slot, &mut [&mut first, &mut second]).unwrap();
                assert_eq!((first, second), expected);
            }
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "the file has no name");
    }

    #[test]
    fn a_file_larger_than_its_disk_is_refused_by_the_numbers() {
        let folder = tempfile::tempdir().unwrap();
        let refused = FileTier::create(folder.path(), 1 << 40, 1 << 16).unwrap_err();
        assert_eq!(refused.kind(), io::ErrorKind::StorageFull);
        let said = refused.to_string();
        assert!(said.contains("bytes free, and 72057594037927936 are asked for"), "{said}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }

    #[test]
    fn a_slot_that_holds_nothing_is_an_error_in_memory() {
        let mut tier = MemoryTier::new(1);
        assert!(tier.load(0, &mut [&mut [0; 4]]).is_err());
        tier.store(0, &[&[1; 4]]).unwrap();
        tier.clear().unwrap();
        assert!(tier.load(0, &mut [&mut [0; 4]]).is_err());
        tier.store(0, &[&[1; 4]]).unwrap();
        tier.load(0, &mut [&mut [0; 4]]).unwrap();
    }

    #[test]
    fn a_file_gives_its_disk_back_and_goes_on() {
        let folder = tempfile::tempdir().unwrap();
        let mut tier = FileTier::create(folder.path(), 2, 1 << 16).unwrap();
        tier.store(1, &[&[7; 1 << 16]]).unwrap();
        let held = |tier: &FileTier| std::os::unix::fs::MetadataExt::blocks(&tier.file.metadata().unwrap());
        assert!(held(&tier) > 0);
        tier.clear().unwrap();
        assert_eq!(held(&tier), 0);
        tier.store(1, &[&[8; 1 << 16]]).unwrap();
        let mut back = [0; 1 << 16];
        tier.load(1, &mut [&mut back]).unwrap();
        assert_eq!(back, [8; 1 << 16]);
    }
}
