//! Weight matrices in the layout that the kernels read, one format per file.

pub(crate) mod bnb4;
pub(crate) mod cell;
pub(crate) mod float;
pub(crate) mod float8;
mod grouped;
pub(crate) mod int2;
pub(crate) mod int4;
pub(crate) mod iq4_nl;
mod iq4_xs;
mod matrix;
pub(crate) mod mxfp4;
mod q2_k;
mod q3_k;
mod q4_1;
mod q4_k;
mod q5_0;
mod q5_1;
mod q5_k;
mod q6_k;
mod q8_0;
mod quantize;
pub(crate) mod uint8;
mod weight_type;
mod zero_points;

pub use matrix::{NO_INPUT, PackedMatrix, ShapeError};
pub(crate) use matrix::{Tiles, check_order, validated_row_bytes};
pub(crate) use q3_k::q3_k_scale;
pub(crate) use q4_k::scale_and_minimum;
pub use quantize::{Group, Integer, floats};
pub use weight_type::WeightType;

#[cfg(test)]
mod tests;
