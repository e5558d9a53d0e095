// Products of many tokens in 8 bits with weights in 8 bits on Hopper. What codes and scales are says codes.cuh.
//
// A block computes 128 tokens x 128 rows, and a warpgroup 64 of those rows: the weights are the left operand, so that a thread has
// two rows, and no more scales than that. A stage holds 128 columns. What they gave is scaled and added in f32 before the next
// one's products begin; the other warpgroup multiplies meanwhile. It needs so many registers that a block has its multiprocessor to
// itself, and as many stages as shared memory holds.
//
// Signed integers are added up exactly: the results are those of w8a8.cu, bit for bit. Those of e4m3 are not: a warpgroup's product
// keeps few bits of a sum, which is why 128 columns are the most that are left to it, and mma.sync, which w8a8.cu uses, multiplies
// e4m3 as f16 on Hopper (CUTLASS, issue 1986).
#include "gemm_hopper.cuh"

#ifdef HOPPER

typedef TilePair<u8> Stage;
constexpr u32 DEPTH = Stage::DEPTH;
constexpr u32 STAGES = 6;

// The scales of a thread's two rows.
struct RowScales {
  const float* scales;
  u32 first[2];
  u32 group;  // columns of a scale: whole stages, or all

  DEVICE RowScales(const float* scales, u32 rows_before, u32 rows, u32 cols, u32 group) : scales(scales), group(group) {
    for (u32 half = 0; half < 2; ++half) {
      first[half] = (rows_before + smaller(row_of(2 * half), rows - 1)) * ceil_divide(cols, group);
    }
  }
  DEVICE float at(u32 half, u32 step) const { return scales[first[half] + step * DEPTH / group]; }
};

// What a warpgroup does.
template <typename Sum>
DEVICE void multiply_all(const Pipeline<Stage, STAGES>& pipeline, const RowScales& scales, float (&total)[64], u32 steps) {
  const u32 first_row = warp_index() / 4 * PRODUCT_ROWS;
  Sum sum[64];
  for (u32 step = 0; step < steps; ++step) {
    const float scale[2] = {scales.at(0, step), scales.at(1, step)};
    const Stage& stage = pipeline.wait_tiles(step);
    u64 weights = operand_at(stage.weights + first_row * DEPTH), input = operand_at(stage.input);
    fence_products();
#pragma unroll
    for (u32 col = 0; col < DEPTH; col += PRODUCT_BYTES) {
      multiply_byte_tiles(sum, weights, input, col > 0);
      weights = operand_after(weights);
      input = operand_after(input);
    }
    commit_products();
    settle_products(sum);
    pipeline.release(step);
#pragma unroll
    for (u32 i = 0; i < 64; ++i) total[i] = fused(static_cast<float>(sum[i]), scale[i / 2 % 2], total[i]);
  }
}

// Writes a thread's sums, each times its token's own scale.
DEVICE void write_scaled(const Results& out, const float (&total)[64], const float* scales) {
#pragma unroll
  for (u32 i = 0; i < 64; ++i) {
    const u32 token = token_of(out.part, i);
    const float scale = token < out.part.end ? scales[token] : 0;
    out.write(token, row_of(i), rounded_product(total[i], scale));
  }
}

template <typename Sum>
DEVICE void product(const TensorMap& weights, const float* scales, const TensorMap& input, const float* input_scales,
                    const Results& out, u32 cols, u32 group) {
  const u32 steps = ceil_divide(cols, DEPTH);
  multiply_matrices<u8, STAGES>(steps, out.part, weights, input, [&](const Pipeline<Stage, STAGES>& pipeline) {
    float total[64] = {};
    multiply_all<Sum>(pipeline, RowScales(scales, out.part.rows_before, out.rows, cols, group), total, steps);
    write_scaled(out, total, input_scales);
  });
}

#endif  // HOPPER

#ifdef HOPPER
#define PRODUCT(SUM, STRIDE, PART) product<SUM>(weights, scales, input, input_scales, {{halves, floats, action, STRIDE}, PART, rows}, cols, group)
#define PRODUCT_OF_ALL(SUM) PRODUCT(SUM, rows, part_of_all(tokens))
#define PRODUCT_OF_EXPERTS(SUM)                \
  const Part part = part_of_experts(tiles, rows); \
  if (part.end > 0) PRODUCT(SUM, stride, part)
#else
#define PRODUCT_OF_ALL(SUM)
#define PRODUCT_OF_EXPERTS(SUM)
#endif
#define PARAMETERS                                                                                                   \
  (TENSOR_MAP weights, const float* scales, TENSOR_MAP input, const float* input_scales, bf16* halves, float* floats, \
   u32 action, u32 tokens, u32 rows, u32 cols, u32 group)
#define PARAMETERS_OF_EXPERTS                                                                                           \
  (TENSOR_MAP weights, const float* scales, TENSOR_MAP input, const float* input_scales, const u32* tiles, bf16* halves, \
   float* floats, u32 action, u32 stride, u32 rows, u32 cols, u32 group)

KERNEL(w8a8_hopper_int8, THREADS) PARAMETERS { PRODUCT_OF_ALL(int); }
KERNEL(w8a8_hopper_fp8, THREADS) PARAMETERS { PRODUCT_OF_ALL(float); }
// The same for the tiles of a mixture of experts, whose matrices' rows follow each other.
KERNEL(w8a8_hopper_int8_experts, THREADS) PARAMETERS_OF_EXPERTS { PRODUCT_OF_EXPERTS(int); }
KERNEL(w8a8_hopper_fp8_experts, THREADS) PARAMETERS_OF_EXPERTS { PRODUCT_OF_EXPERTS(float); }
