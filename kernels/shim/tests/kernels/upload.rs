//! Values that are copied to a device while the next ones are made.

use windlass_cuda_shim::{HostMachine, Kernels};
use windlass_kernels::cuda::{Upload, Uploader};

/// Words that fill a buffer.
const WORDS: usize = 16;
/// Two copies of which neither has run, each with the mark of its end.
const TWO_COPIES: usize = 4;

/// In any order of copying and making: buffers are written again only once their copies have ended.
#[test]
fn a_second_copy_is_issued_before_the_first_has_ended_and_all_values_arrive() {
    let mut overlapped = 0;
    for seed in 0..16 {
        let driver = HostMachine::new(Kernels::Record, seed).driver(0, 1 << 20);
        let (device, stream) = (driver.device(), driver.device().stream().unwrap());
        let uploader = Uploader::new(&device, 4 * WORDS).unwrap();
        let words = |first: u32, count: usize| (first..first + count as u32).collect::<Vec<u32>>();
        let sent = [words(1, WORDS), words(100, WORDS), words(1000, 5 * WORDS + 3), words(5000, 1), vec![]];
        let first = [&sent[0], &sent[1]].map(|values| uploader.upload(values).unwrap());
        overlapped += usize::from(driver.pending() == TWO_COPIES);
        let others = [&sent[2], &sent[3], &sent[4]].map(|values| uploader.upload(values).unwrap());
        let bytes = uploader.upload(&[7u8; 3 * WORDS]).unwrap();
        uploader.finish().unwrap();
        assert_eq!(driver.pending(), 0, "all has come");
        let found: Vec<_> = first.iter().chain(&others).map(|memory| memory.read(&stream).unwrap()).collect();
        assert_eq!(found, sent, "seed {seed}");
        assert_eq!(bytes.read(&stream).unwrap(), [7; 3 * WORDS]);
    }
    assert!(overlapped > 0, "every copy was waited for");
}

#[test]
fn a_copy_that_fails_is_told_at_last() {
    let driver = HostMachine::new(Kernels::Record, 7).driver(0, 1 << 20);
    let uploader = Uploader::new(&driver.device(), 4 * WORDS).unwrap();
    driver.lose_after(0, "CUDA_ERROR_ECC_UNCORRECTABLE: it has broken down");
    let sent = uploader.upload(&[1u32]).map(drop).and(uploader.finish());
    assert!(sent.unwrap_err().device_lost());
}
