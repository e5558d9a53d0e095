// Products of 8-bit activations with 8-bit weights: both signed integers (sm_80 on), or both e4m3 (sm_89 on). Activations have
// a scale for each token, found here; weights one for every `group` columns of a row.
//
// After every 128 columns what was added up (integers: exactly) is scaled and added in f32.
#include "codes.cuh"
#include "output.cuh"
#include "tile.cuh"

typedef Tiles<u8, 32> Many;
// Of few tokens the weights are what is waited for: small blocks, so that there is one for every multiprocessor, each with as
// many stages on their way as shared memory of 48 KiB holds.
typedef Tiles<u8, 16, 1, 16, 2, 12> Few;
constexpr int THREADS = 256;  // of a token's rounding
constexpr u32 RUN = 128;  // columns that are added up before they are scaled; a group has a multiple, or all

// The codes and the scale of each of `count` tokens, or of those that `order` names; where it names none of them, the row stays as it
// is. Grid: rows.
template <typename Code>
DEVICE void quantize(const bf16* input, const u32* order, u8* codes, float* scales, u32 count, u32 cols) {
  wait_for_previous();
  let_next_start();
  const u32 token = order ? order[block_x()] : block_x();
  if (token >= count) return;
  const bf16* own = input + static_cast<u64>(token) * cols;
  round_token<Code, THREADS>(codes + static_cast<u64>(block_x()) * cols, scales + block_x(), cols,
                             [&](float (&to)[RUN_VALUES], u32 col) { unpack(to, load_quad(own + col)); });
}

KERNEL(quantize_int8, THREADS)(const bf16* input, const u32* order, u8* codes, float* scales, u32 count, u32 cols) {
  quantize<Int8>(input, order, codes, scales, count, cols);
}

KERNEL(quantize_fp8, THREADS)(const bf16* input, const u32* order, u8* codes, float* scales, u32 count, u32 cols) {
  quantize<E4m3>(input, order, codes, scales, count, cols);
}

// total += sum · scale of each row's group, and the sum begins again.
template <typename Product, typename Totals, typename Sums>
DEVICE void scale_up(Totals& total, Sums& sum, const float* scales, u32 first_row, u32 rows, u32 groups, u32 group) {
#pragma unroll
  for (int n = 0; n < Product::ROW_PARTS; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 row = first_row + 8 * n + i;
      const float scale = row < rows ? scales[static_cast<u64>(row) * groups + group] : 0;
#pragma unroll
      for (int m = 0; m < Product::TOKEN_PARTS; ++m) {
        for (int half = 0; half < 2; ++half) {
          float& value = total.of[m][n][2 * half + i];
          value = fused(static_cast<float>(sum.of[m][n][2 * half + i]), scale, value);
          sum.of[m][n][2 * half + i] = 0;
        }
      }
    }
  }
}

// Grid: (parts of the rows, parts of the tokens).
template <typename Product, typename Code>
DEVICE void product(const u8* weights, const float* scales, const u8* input, const float* input_scales, const Output& out,
                    u32 tokens, u32 rows, u32 cols, u32 group) {
  DYNAMIC_SHARED(typename Product::Stage, stages);
  const Product product{input, weights, tokens, rows, cols};
  const u32 groups = ceil_divide(cols, group);
  typename Product::template Sums<typename Code::Sum> sum;
  typename Product::template Sums<float> total;
  product.multiply(stages, sum, [&](u32 step) {
    const u32 begin = step * Product::DEPTH, end = begin + Product::DEPTH;
    if (end % RUN && end < cols) return;
    scale_up<Product>(total, sum, scales, product.first_row(), rows, groups, begin / group);
  });
  product.each(total, [&](u32 token, u32 row, float sum) {
    out.write(token, row, rounded_product(sum, input_scales[token]));
  });
}

#define PARAMETERS                                                                                                   \
  (const u8* weights, const float* scales, const u8* input, const float* input_scales, bf16* halves, float* floats, \
   u32 action, u32 tokens, u32 rows, u32 cols, u32 group) {                                                            \
    product
#define ARGUMENTS (weights, scales, input, input_scales, {halves, floats, action, rows}, tokens, rows, cols, group); }

KERNEL(w8a8_int8_few, Few::THREADS) PARAMETERS<Few, Int8> ARGUMENTS
KERNEL(w8a8_int8_many, Many::THREADS) PARAMETERS<Many, Int8> ARGUMENTS
KERNEL(w8a8_fp8_few, Few::THREADS) PARAMETERS<Few, E4m3> ARGUMENTS
KERNEL(w8a8_fp8_many, Many::THREADS) PARAMETERS<Many, E4m3> ARGUMENTS
