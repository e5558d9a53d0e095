// Products of many tokens with a bf16 matrix on Hopper: out[t][r] = sum over k of weights[r][k] · input[t][k].
//
// A block computes 128 tokens x 128 rows. One thread has tiles of 64 columns of both copied through stages of shared memory, and
// two warpgroups multiply them there, 64 tokens each. Three stages, and no more registers than nine warps may have: so two blocks
// share a multiprocessor, and one multiplies while the other begins or writes.
//
// Sums run over the columns from first to last: a token's result is the same whatever tokens come with it.
#include "gemm_hopper.cuh"

#ifdef HOPPER

typedef TilePair<bf16> Stage;
constexpr u32 DEPTH = Stage::DEPTH;
constexpr u32 STAGES = 3;

// What a warpgroup does. A step's products run while the next step's tiles are waited for.
DEVICE void multiply_all(const Pipeline<Stage, STAGES>& pipeline, float (&sum)[64], u32 steps) {
  const u32 first_token = warp_index() / 4 * PRODUCT_ROWS;
  for (u32 step = 0; step < steps; ++step) {
    const Stage& stage = pipeline.wait_tiles(step);
    u64 input = operand_at(stage.input + first_token * DEPTH), weights = operand_at(stage.weights);
    fence_products();
#pragma unroll
    for (u32 col = 0; col < DEPTH; col += 16) {
      multiply_tiles(sum, input, weights, col > 0 || step > 0);
      input = operand_after(input);
      weights = operand_after(weights);
    }
    commit_products();
    wait_products<1>();
    if (step > 0) pipeline.release(step - 1);
  }
  settle_products(sum);
}

// Writes a thread's sums: tokens g and g + 8 of its warp's sixteen, and rows 2t and 2t + 1 of every eight.
DEVICE void write_all(const Results& out, const float (&sum)[64]) {
  const u32 token = block_x() * TOKENS + 16 * warp_index() + lane_index() / 4;
  const u32 row = block_y() * ROWS + 2 * (lane_index() % 4);
#pragma unroll
  for (u32 i = 0; i < 64; i += 2) out.write_pair(token + 8 * (i / 2 % 2), row + 8 * (i / 4), sum[i], sum[i + 1]);
}

#endif  // HOPPER

KERNEL(gemm_hopper_bf16, THREADS)(TENSOR_MAP weights, TENSOR_MAP input, bf16* halves, float* floats, u32 action,
                                  u32 tokens, u32 rows, u32 cols) {
#ifdef HOPPER
  const u32 steps = ceil_divide(cols, DEPTH);
  multiply_matrices<bf16, STAGES>(steps, weights, input, [&](const Pipeline<Stage, STAGES>& pipeline) {
    float sum[64];  // not zeros: registers that others write too would make every product wait for the one before
    multiply_all(pipeline, sum, steps);
    write_all({{halves, floats, action, rows}, tokens, rows}, sum);
  });
#endif
}
