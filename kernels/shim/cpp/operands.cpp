// Operands of warpgroup products: where they are, what they stand for, and how they are added up.
#include "operands.h"

namespace shim {
namespace {

// The address of a byte of an operand whose rows are what is multiplied, and its columns what is summed over, as a descriptor
// says (PTX ISA, matrix descriptor, strides). Where it is transposed values have two bytes.
u32 address_in(u64 descriptor, bool transposed, u32 row, u32 byte) {
  const u32 start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4;
  const u32 stride = (descriptor >> 32 & 0x3fff) << 4, mode = descriptor >> 62;
  const u32 row_bytes = mode ? 256u >> mode : 16;  // without a swizzle, blocks of eight rows of 16 bytes each
  if (transposed) {
    if (!mode) fail("multiplies a transposed operand without a swizzle, which the shim does not know");
    const u32 across = row_bytes / 2, col = byte / 2;
    const u32 place = start + row / across * leading + 2 * (row % across) + byte % 2;
    return swizzled(place + col / 8 * stride + col % 8 * row_bytes, row_bytes);
  }
  const u32 eight_rows = start + row / 8 * stride + row % 8 * row_bytes;
  return mode ? swizzled(eight_rows + byte, row_bytes) : eight_rows + byte / 16 * leading + byte % 16;
}

// sum + a · b as Hopper adds up products of e4m3: of each addend 14 bits from the first one of the largest on (DeepSeek-V3's
// report, 3.5.2).
float added_shortly(float sum, const float* a, const float* b) {
  double addends[PRODUCT_BYTES + 1] = {sum}, largest = std::fabs(sum), exact = sum;
  for (u32 k = 0; k < PRODUCT_BYTES; ++k) {
    addends[k + 1] = double(a[k]) * b[k];
    largest = std::fmax(largest, std::fabs(addends[k + 1]));
    exact += addends[k + 1];
  }
  if (!std::isfinite(exact)) return exact;
  int exponent, total = 0;
  std::frexp(largest, &exponent);
  const double steps = std::ldexp(1.0, 14 - exponent);
  for (double addend : addends) total += static_cast<int>(addend * steps);
  return total / steps;
}

}  // namespace

u32 swizzled(u32 address, u32 row_bytes) { return address ^ (address >> 7 & (row_bytes / 16 - 1)) << 4; }

void read_operand(u64 descriptor, bool transposed, u32 rows, std::vector<u8>& bytes) {
  if (descriptor >> 49 & 7) fail("multiplies an operand with a base offset, which the shim does not know");
  const SharedWindow window = shared_window(now.rank);
  const u32 piece = transposed ? 2 : 16;  // bytes that are side by side
  for (u32 row = 0; row < rows; ++row) {
    for (u32 byte = 0; byte < PRODUCT_BYTES; byte += piece) {
      const u8* from = window.base + address_in(descriptor, transposed, row, byte);
      if (from < window.begin || from + piece > window.end) fail("multiplies what is outside of its shared memory");
      bytes.insert(bytes.end(), from, from + piece);
    }
  }
}

u32 depth_of(Values values) { return values == Values::BF16 ? PRODUCT_BYTES / 2 : PRODUCT_BYTES; }

std::vector<float> decoded(Values values, const std::vector<u8>& bytes) {
  std::vector<float> found;
  found.reserve(bytes.size());
  for (size_t at = 0; at < bytes.size(); at += values == Values::BF16 ? 2 : 1) {
    switch (values) {
      case Values::BF16: found.push_back(low_float(bytes[at] | bytes[at + 1] << 8)); break;
      case Values::SIGNED: found.push_back(byte_value(bytes[at], int{})); break;
      case Values::E4M3: found.push_back(byte_value(bytes[at], float{})); break;
    }
  }
  return found;
}

u32 added(Values values, u32 sum, const float* a, const float* b) {
  if (values == Values::E4M3) return bits_of(added_shortly(float_of(sum), a, b));
  double dot = 0;
  for (u32 k = 0; k < depth_of(values); ++k) dot += double(a[k]) * b[k];
  if (values == Values::SIGNED) return sum + static_cast<u32>(static_cast<int>(dot));
  return bits_of(static_cast<float>(float_of(sum) + dot));
}

}  // namespace shim
