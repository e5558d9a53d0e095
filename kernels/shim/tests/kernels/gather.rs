use windlass_kernels::cuda::ops;

use crate::common::{Random, device, poisoned};

#[test]
fn rows_are_picked_and_an_index_outside_gives_zeros() {
    let mut random = Random::new(2);
    for cols in [8, 576, 2056] {
        let (device, stream) = device(1);
        let rows = 7;
        let table = random.halves(rows * cols, 3.0);
        let values = random.values(rows * cols, 3.0);
        let indices = [6u32, 0, 7, 3, u32::MAX, 3];
        let row = |index: u32, of: &dyn Fn(usize) -> f32| -> Vec<f32> {
            (0..cols).map(|col| if (index as usize) < rows { of(index as usize * cols + col) } else { 0.0 }).collect()
        };
        let places = device.upload(&indices).unwrap();
        let mut out = poisoned::<f32>(&device, indices.len() * cols);
        ops::embed(&stream, places.view(), device.upload(&table).unwrap().view(), cols, out.view_mut()).unwrap();
        let exact: Vec<f32> = indices.iter().flat_map(|&index| row(index, &|i| table[i].to_f32())).collect();
        assert_eq!(out.read(&stream).unwrap(), exact);
        let mut out = poisoned::<f32>(&device, indices.len() * cols);
        ops::gather_rows(&stream, places.view(), device.upload(&values).unwrap().view(), cols, out.view_mut()).unwrap();
        let exact: Vec<f32> = indices.iter().flat_map(|&index| row(index, &|i| values[i])).collect();
        assert_eq!(out.read(&stream).unwrap(), exact);
    }
}
