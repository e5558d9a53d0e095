// What hopper.cpp asks of operands.cpp.
#pragma once

#include "runtime.h"
#include "hopper.cuh"

#include <vector>

namespace shim {

// The place of an address whose 16-byte parts are swizzled over rows of so many bytes: address bits 4.. XOR bits 7...
u32 swizzled(u32 address, u32 row_bytes);
// Appends an operand, `rows` of PRODUCT_BYTES, as its descriptor says where they are.
void read_operand(u64 descriptor, bool transposed, u32 rows, std::vector<u8>& bytes);
// Values of a row of an operand.
u32 depth_of(Values values);
// What bytes stand for, value after value.
std::vector<float> decoded(Values values, const std::vector<u8>& bytes);
// The bits of sum + a · b, of floats or, where values are signed, of integers.
u32 added(Values values, u32 sum, const float* a, const float* b);

}  // namespace shim
