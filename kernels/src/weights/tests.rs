use crate::testing::{file_bytes, file_values};
use crate::{PackedMatrix, Pool, ShapeError, WeightType};

#[test]
fn rows_come_back_as_the_file_has_them() {
    let pool = Pool::new(2).unwrap();
    for weight_type in WeightType::ALL {
        let cols = 2 * weight_type.block_elements().max(5);
        for rows in [1, 16, 37] {
            let bytes = file_bytes(weight_type, rows, cols, 42);
            let matrix = PackedMatrix::pack(&pool, weight_type, rows, cols, &bytes).unwrap();
            let expected = file_values(weight_type, &bytes);
            let mut row_values = vec![0.0; cols];
            for (row, expected) in expected.chunks(cols).enumerate() {
                matrix.dequantize_row(row, &mut row_values);
                for (value, expected) in row_values.iter().zip(expected) {
                    let error = (f64::from(*value) - expected).abs();
                    assert!(error <= 1e-6 * expected.abs().max(1.0), "{weight_type:?} row {row}: {value} {expected}");
                }
            }
        }
    }
}

#[test]
fn packing_costs_at_most_five_percent() {
    let pool = Pool::new(1).unwrap();
    for weight_type in WeightType::ALL {
        let bytes = file_bytes(weight_type, 32, 512, 1);
        let matrix = PackedMatrix::pack(&pool, weight_type, 32, 512, &bytes).unwrap();
        assert!(matrix.bytes() * 100 <= bytes.len() * 105, "{weight_type:?}: {} of {}", matrix.bytes(), bytes.len());
    }
}

#[test]
fn wrong_shapes_are_refused_with_their_numbers() {
    let pool = Pool::new(1).unwrap();
    let pack =
        |weight_type, rows, cols, len| PackedMatrix::pack(&pool, weight_type, rows, cols, &vec![0; len]).unwrap_err();
    let message = |error: ShapeError| error.to_string();
    assert_eq!(
        message(pack(WeightType::Q4K, 2, 96, 288)),
        "a row of 96 values is no whole number of q4_k blocks of 256"
    );
    assert_eq!(message(pack(WeightType::Q8_0, 2, 64, 135)), "2 rows of 64 q8_0 values take 136 bytes, not 135");
    assert_eq!(message(pack(WeightType::F16, 0, 64, 0)), "0 rows of 64 values are no matrix");
    assert!(matches!(pack(WeightType::F32, usize::MAX, usize::MAX, 4), ShapeError::Degenerate { .. }));
}

/// What llama.cpp's own package reads of each type's blocks: `tests/api/blocks.py` records it.
#[test]
fn blocks_stand_for_what_llama_cpp_reads_in_them() {
    const NAMES: &str = "Q4_0 Q4_1 Q5_0 Q5_1 Q8_0 Q2_K Q3_K Q4_K Q5_K Q6_K IQ4_NL IQ4_XS MXFP4";
    let (pool, blocks) = (Pool::new(1).unwrap(), include_str!("tests/blocks.txt"));
    let names = blocks.lines().map(|line| line.split(' ').next().unwrap());
    assert_eq!(names.collect::<Vec<_>>(), NAMES.split(' ').collect::<Vec<_>>());
    for line in blocks.lines() {
        let (name, line) = line.split_once(' ').unwrap();
        let (hex, values) = line.split_once(' ').unwrap();
        let bytes: Vec<u8> =
            (0..hex.len() / 2).map(|at| u8::from_str_radix(&hex[2 * at..][..2], 16).unwrap()).collect();
        let expected: Vec<f32> = values.split(' ').map(|value| value.parse().unwrap()).collect();
        let is_named = |weight_type: &&WeightType| weight_type.name().eq_ignore_ascii_case(name);
        let weight_type = *WeightType::ALL.iter().find(is_named).unwrap();
        let matrix = PackedMatrix::pack(&pool, weight_type, 1, expected.len(), &bytes).unwrap();
        let mut values = vec![0.0; expected.len()];
        matrix.dequantize_row(0, &mut values);
        for (col, (value, expected)) in values.iter().zip(&expected).enumerate() {
            // What a power below the smallest normal number scales may be 0.
            let error = (value - expected).abs();
            assert!(error <= 1e-6 * expected.abs() || error < 1e-37, "{name} {col}: {value}, not {expected}");
        }
    }
}
