// Products of many tokens with a bf16 matrix: out[t][r] = sum over k of weights[r][k] · input[t][k].
#include "output.cuh"
#include "tile.cuh"

typedef Tiles<bf16, 64> Product;
constexpr int THREADS = Product::THREADS;

// Grid: (parts of the rows, parts of the tokens).
KERNEL(gemm_bf16, THREADS)(const bf16* weights, const bf16* input, bf16* halves, float* floats, u32 action, u32 tokens,
                           u32 rows, u32 cols) {
  DYNAMIC_SHARED(Product::Stage, stages);
  const Product product{input, weights, tokens, rows, cols};
  Product::Sums<float> sum;
  product.multiply(stages, sum, [](u32) {});
  const Output out{halves, floats, action, rows};
  product.each(sum, [&](u32 token, u32 row, float value) { out.write(token, row, value); });
}
