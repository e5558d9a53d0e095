use windlass_kernels::cuda::ops::{self, NextStep};

use crate::common::device;

#[test]
fn drawn_tokens_become_the_next_step() {
    let (device, stream) = device(1);
    let upload = |values: &[u32]| device.upload(values).unwrap();
    // Within a page, into a new page, a failed row, and a padded row at its table's end.
    let (drawn, tables) = (upload(&[7, 8, u32::MAX, 3]), upload(&[5, 6, 9, 4, 2, 3, 0, 0]));
    let (mut tokens, mut positions) = (upload(&[1, 1, 1, 1]), upload(&[10, 63, 64, 200]));
    let (mut lengths, mut slots) = (upload(&[11, 64, 65, 201]), upload(&[0; 4]));
    let next = NextStep {
        tokens: tokens.view_mut(),
        positions: positions.view_mut(),
        lengths: lengths.view_mut(),
        slots: slots.view_mut(),
    };
    ops::advance(&stream, drawn.view(), tables.view(), 1000, next).unwrap();
    assert_eq!(tokens.read(&stream).unwrap(), [7, 8, 0, 3]);
    assert_eq!(positions.read(&stream).unwrap(), [11, 64, 65, 201]);
    assert_eq!(lengths.read(&stream).unwrap(), [12, 65, 66, 202]);
    assert_eq!(slots.read(&stream).unwrap(), [5 * 64 + 11, 4 * 64, 3 * 64 + 1, 9]);
}
