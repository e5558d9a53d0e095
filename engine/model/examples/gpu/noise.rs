//! Numbers without order: on zeros a GPU is faster, and a mistake goes unseen.

use std::iter;

use half::bf16;
use windlass_kernels::cuda::weights::EightBits;
use windlass_kernels::cuda::{Device, Element, Memory, Stream};

use crate::Outcome;
use crate::tiny::Random;

/// So many numbers are made; longer runs repeat them.
const PERIOD: usize = 1 << 20;

/// Random bytes.
pub fn bytes(count: usize) -> Vec<u8> {
    let mut random = Random(0x4b4e4f42);
    repeated(count, || random.bits() as u8)
}

/// Codes of 8 bits; of floats only those below 2, which are all numbers.
pub fn codes(code: EightBits, count: usize) -> Vec<u8> {
    const HIGHEST_EXPONENT_BIT: u8 = 1 << 6;
    let mask = if code == EightBits::E4m3 { !HIGHEST_EXPONENT_BIT } else { !0 };
    bytes(count).into_iter().map(|byte| byte & mask).collect()
}

/// Evenly between -1 and 1.
pub fn floats(count: usize) -> Vec<f32> {
    let mut random = Random(0x464c4f54);
    repeated(count, || 2.0 * random.uniform() - 1.0)
}

/// The same in bf16.
pub fn halves(count: usize) -> Vec<bf16> {
    repeated_from(count, &floats(count.min(PERIOD)).into_iter().map(bf16::from_f32).collect::<Vec<_>>())
}

fn repeated<T: Copy>(count: usize, value: impl FnMut() -> T) -> Vec<T> {
    let period: Vec<T> = iter::repeat_with(value).take(count.min(PERIOD)).collect();
    repeated_from(count, &period)
}

/// `period` over and over, to the last of `count` values.
pub fn repeated_from<T: Copy>(count: usize, period: &[T]) -> Vec<T> {
    let mut values = Vec::with_capacity(count);
    while values.len() < count {
        values.extend_from_slice(&period[..period.len().min(count - values.len())]);
    }
    values
}

/// Memory of a device with `period` over and over, copied there by the device itself.
pub fn memory<T: Element>(device: &Device, stream: &Stream, count: usize, period: &[T]) -> Outcome<Memory<T>> {
    let (mut memory, source) = (device.allocate::<T>(count)?, device.upload(&period[..period.len().min(count)])?);
    for first in (0..count).step_by(source.len().max(1)) {
        let place = first..(first + source.len()).min(count);
        let length = place.len();
        stream.copy(memory.slice_mut(place), source.slice(0..length))?;
    }
    stream.synchronize()?;
    Ok(memory)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_repeated_ends_where_it_is_to() {
        for (count, expected) in [(0, vec![]), (2, vec![1, 2]), (7, vec![1, 2, 3, 1, 2, 3, 1])] {
            assert_eq!(repeated_from(count, &[1, 2, 3]), expected);
        }
        assert_eq!(bytes(PERIOD + 2)[PERIOD..], bytes(2));
        assert!(halves(100).iter().any(|value| value.to_f32() < 0.0) && halves(100).iter().any(|v| v.to_f32() > 0.0));
    }
}
