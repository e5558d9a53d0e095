// Products of many tokens with a bf16 matrix on Hopper: out[t][r] = sum over k of weights[r][k] · input[t][k].
//
// A block computes 128 tokens x 128 rows. One thread has tiles of 64 columns of both copied through stages of shared memory, and
// two warpgroups multiply them there, 64 tokens each. Three stages, and no more registers than nine warps may have: so two blocks
// share a multiprocessor, and one multiplies while the other begins or writes.
//
// Of experts' products gates and ups, whose rows lie by eights, are what a thread has beside each other: it gates them.
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
  const u32 token = out.part.first + 16 * warp_index() + lane_index() / 4;
  const u32 row = block_y() * ROWS + 2 * (lane_index() % 4);
#pragma unroll
  for (u32 i = 0; i < 64; i += 2) out.write_pair(token + 8 * (i / 2 % 2), row + 8 * (i / 4), sum[i], sum[i + 1]);
}

// The same where every eight rows of gates are followed by those of their ups: half as many results.
DEVICE void write_gated(const Results& both, const float (&sum)[64]) {
  const Results out{both.out, both.part, both.rows / 2};
  const u32 token = out.part.first + 16 * warp_index() + lane_index() / 4;
  const u32 row = block_y() * ROWS / 2 + 2 * (lane_index() % 4);
#pragma unroll
  for (u32 i = 0; i < 64; i += 8) {
#pragma unroll
    for (u32 k = i; k < i + 4; k += 2) {
      const float first = out.out.gated(sum[k], sum[k + 4]), second = out.out.gated(sum[k + 1], sum[k + 5]);
      out.write_pair(token + 8 * (k / 2 % 2), row + i, first, second);
    }
  }
}

DEVICE void product(const TensorMap& weights, const TensorMap& input, const Results& out, u32 cols) {
  const u32 steps = ceil_divide(cols, DEPTH);
  multiply_matrices<bf16, STAGES>(steps, out.part, weights, input, [&](const Pipeline<Stage, STAGES>& pipeline) {
    float sum[64];  // not zeros: registers that others write too would make every product wait for the one before
    multiply_all(pipeline, sum, steps);
    if (out.out.gates()) write_gated(out, sum);
    else write_all(out, sum);
  });
}

#endif  // HOPPER

KERNEL(gemm_hopper_bf16, THREADS)(TENSOR_MAP weights, TENSOR_MAP input, bf16* halves, float* floats, u32 action,
                                  u32 tokens, u32 rows, u32 cols) {
#ifdef HOPPER
  product(weights, input, {{halves, floats, action, rows}, part_of_all(tokens), rows}, cols);
#endif
}

// The same for the tiles of a mixture of experts, whose matrices' rows follow each other: of `rows` rows each, of which a token's
// results lie `stride` behind those of the one before.
KERNEL(gemm_hopper_experts, THREADS)(TENSOR_MAP weights, TENSOR_MAP input, const u32* tiles, bf16* halves, float* floats,
                                     u32 action, u32 stride, u32 rows, u32 cols) {
#ifdef HOPPER
  const Part part = part_of_experts(tiles, rows);
  if (part.end > 0) product(weights, input, {{halves, floats, action, stride}, part, rows}, cols);
#endif
}
