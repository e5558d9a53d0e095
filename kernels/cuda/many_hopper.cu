// Products of many tokens with a bf16 matrix on Hopper, in the bits of those of a few (linear.cu): out[t][r] = sum over k of
// weights[r][k] · input[t][k].
//
// wgmma gives the bits of mma: both add up the same sixteen products at once, and go on from the same sum (tests/gpu/probes/bits.cu
// shows it on a card). So a token has the same result here as there where the sixteens and their order are the same: linear.cu's
// warps take turns along the columns, a span each, and their sums are added in the warps' order. Here a warpgroup goes through the
// spans of the first warp's turns, then of the second's, and adds up what each of them gave.
//
// A block computes 128 or 64 tokens x 128 rows, a warpgroup 64 of those rows. With 128 tokens it has its multiprocessor to itself, as a
// thread's sums are twice 64, of the turn and of all; of those with 64, for which the weights' bytes count, there are two.
#include "gemm_hopper.cuh"

#ifdef HOPPER

constexpr u32 DEPTH = TILE_ROW_BYTES / sizeof(bf16);  // columns of a stage
// linear.cuh's: warps that take turns, and columns of a turn.
constexpr u32 WARPS = 8;
constexpr u32 SPAN = 128;
constexpr u32 SPAN_STEPS = SPAN / DEPTH;

// A stage's tiles, of so many tokens.
template <u32 COUNT>
struct Stage {
  bf16 input[COUNT * DEPTH];
  bf16 weights[ROWS * DEPTH];
};

// Where the columns of a step are. Of the warps some have a turn more than the others.
DEVICE u32 column_of(u32 step, u32 spans) {
  const u32 turns = spans / WARPS, longer = spans % WARPS * (turns + 1), span = step / SPAN_STEPS;
  const bool is_longer = span < longer;
  const u32 count = is_longer ? turns + 1 : turns, at = is_longer ? span : span - longer;
  const u32 warp = at / count + (is_longer ? 0 : spans % WARPS);
  return SPAN * (warp + WARPS * (at % count)) + DEPTH * (step % SPAN_STEPS);
}

// What a warpgroup does. A step's products run while the next step's tiles are waited for.
template <u32 SUMS, typename Pipeline>
DEVICE void multiply_all(const Pipeline& pipeline, float (&total)[SUMS], u32 spans) {
  const u32 first_row = warp_index() / 4 * PRODUCT_ROWS;
  u32 step = 0;
  for (u32 warp = 0; warp < smaller(spans, WARPS); ++warp) {
    float sum[SUMS];  // not zeros: registers that others write too would make every product wait for the one before
    const u32 end = step + SPAN_STEPS * ceil_divide(spans - warp, WARPS);
    for (bool adds = false; step < end; ++step) {
      const auto& stage = pipeline.wait_tiles(step);
      u64 weights = operand_at(stage.weights + first_row * DEPTH), input = operand_at(stage.input);
      fence_products();
#pragma unroll
      for (u32 col = 0; col < DEPTH; col += 16) {
        multiply_tiles(sum, weights, input, adds || col > 0);
        weights = operand_after(weights);
        input = operand_after(input);
      }
      adds = true;
      commit_products();
      wait_products<1>();
      if (step > 0) pipeline.release(step - 1);
    }
    settle_products(sum);
#pragma unroll
    for (u32 i = 0; i < SUMS; ++i) total[i] = warp == 0 ? sum[i] : total[i] + sum[i];
  }
}

// A block's product, `copy` of whose tokens starts a step's.
template <u32 COUNT, u32 STAGES, typename Copy>
DEVICE void product(const TensorMap& weights, const Results& out, u32 cols, Copy copy) {
  const u32 spans = ceil_divide(cols, SPAN);
  multiply_tiles_of<Stage<COUNT>, STAGES>(
      SPAN_STEPS * spans,
      [&](u32 step, Stage<COUNT>& to, Barrier* came) {
        copy_tile(to.weights, weights, column_of(step, spans), block_y() * ROWS, came);
      },
      [&](u32 step, Stage<COUNT>& to, Barrier* came) { copy(to.input, column_of(step, spans), came); },
      [&](const Pipeline<Stage<COUNT>, STAGES>& pipeline) {
        float total[COUNT / 2];
        multiply_all(pipeline, total, spans);
        write_sums(out, total);
      });
}

#endif  // HOPPER

#define PARAMETERS                                                                                                    \
  (TENSOR_MAP weights, TENSOR_MAP input, bf16* halves, float* floats, u32 action, u32 stride, u32 tokens, u32 rows, u32 cols)

KERNEL(many_hopper_bf16, THREADS) PARAMETERS {
#ifdef HOPPER
  const Results out{{halves, floats, action, stride}, part_of_all(tokens), rows};
  product<TOKENS, 6>(weights, out, cols,
                     [&](bf16* to, u32 col, Barrier* came) { copy_tokens(to, input, col, out.part, came); });
#endif
}

// The same for 64 tokens, whose blocks are by themselves.
RESIDENT_KERNEL(many_hopper_bf16_64, THREADS, 2) PARAMETERS {
#ifdef HOPPER
  const Results out{{halves, floats, action, stride}, {block_x() * SHARE_TOKENS, tokens, 0}, rows};
  product<SHARE_TOKENS, 4>(weights, out, cols,
                           [&](bf16* to, u32 col, Barrier* came) { copy_tile(to, input, col, out.part.first, came); });
#endif
}
