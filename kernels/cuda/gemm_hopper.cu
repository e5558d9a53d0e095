// Products of many tokens with a bf16 matrix on Hopper: out[t][r] = sum over k of weights[r][k] · input[t][k].
//
// A block computes 128 tokens x 128 rows. One thread has tiles of 64 columns of both copied through stages of shared memory, and
// two warpgroups multiply them there, 64 tokens each. Of a stage's two barriers one says that its tiles came, the other that all
// eight warps have read them. Three stages, and no more registers than nine warps may have: so two blocks share a
// multiprocessor, and one multiplies while the other begins or writes.
//
// Sums run over the columns from first to last: a token's result is the same whatever tokens come with it.
#include "hopper.cuh"

constexpr u32 MULTIPLYING_WARPS = 8;
constexpr int THREADS = 32 * (MULTIPLYING_WARPS + 1);

#ifdef HOPPER

constexpr u32 TOKENS = 128;
constexpr u32 ROWS = 128;
constexpr u32 DEPTH = TILE_ROW_BYTES / sizeof(bf16);  // columns of a stage
constexpr u32 STAGES = 3;
constexpr u32 GROUP_TOKENS = 64;  // of a warpgroup

struct Stage {
  bf16 input[TOKENS * DEPTH];
  bf16 weights[ROWS * DEPTH];
};

// Stages that go round: step after step of the columns has the next one.
struct Pipeline {
  Stage* stages;
  Barrier* came;
  Barrier* read;

  DEVICE void init() const {
    for (u32 stage = 0; stage < STAGES; ++stage) {
      init_barrier(&came[stage], 1);
      init_barrier(&read[stage], MULTIPLYING_WARPS);
    }
    publish_barriers();
  }

  DEVICE void expect(u32 step) const { arrive_expecting(&came[step % STAGES], sizeof(Stage)); }
  DEVICE void copy_weights(const TensorMap& weights, u32 step) const {
    copy_tile(stages[step % STAGES].weights, weights, step * DEPTH, block_y() * ROWS, &came[step % STAGES]);
  }
  DEVICE void copy_input(const TensorMap& input, u32 step) const {
    copy_tile(stages[step % STAGES].input, input, step * DEPTH, block_x() * TOKENS, &came[step % STAGES]);
  }

  // Waits until all have read what the stage of this step, not one of the first, held before.
  DEVICE void wait_free(u32 step) const { wait_phase(&read[step % STAGES], (step / STAGES + 1) % 2); }
  // Waits until the tiles of a step came.
  DEVICE const Stage& wait_tiles(u32 step) const {
    wait_phase(&came[step % STAGES], step / STAGES % 2);
    return stages[step % STAGES];
  }
  // Says that this warp has read the tiles of a step.
  DEVICE void release(u32 step) const {
    if (lane_index() == 0) arrive(&read[step % STAGES]);
  }
};

// What the thread does that has tiles copied.
DEVICE void copy_all(const Pipeline& pipeline, const TensorMap& weights, const TensorMap& input, u32 steps) {
  const u32 ahead = smaller(steps, STAGES);
  for (u32 step = 0; step < ahead; ++step) {
    pipeline.expect(step);
    pipeline.copy_weights(weights, step);
  }
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  for (u32 step = 0; step < ahead; ++step) pipeline.copy_input(input, step);
  for (u32 step = ahead; step < steps; ++step) {
    pipeline.wait_free(step);
    pipeline.expect(step);
    pipeline.copy_weights(weights, step);
    pipeline.copy_input(input, step);
  }
}

// What a warpgroup does. A step's products run while the next step's tiles are waited for.
DEVICE void multiply_all(const Pipeline& pipeline, float (&sum)[64], u32 steps) {
  const u32 first_token = warp_index() / 4 * GROUP_TOKENS;
  for (u32 step = 0; step < steps; ++step) {
    const Stage& stage = pipeline.wait_tiles(step);
    u64 input = operand_at(stage.input + first_token * DEPTH), weights = operand_at(stage.weights);
    fence_products();
#pragma unroll
    for (u32 col = 0; col < DEPTH; col += 16) {
      multiply_tiles(sum, input, weights, col > 0 || step > 0);
      input = operand_after<16>(input);
      weights = operand_after<16>(weights);
    }
    commit_products();
    wait_products<1>();
    if (step > 0) pipeline.release(step - 1);
  }
  settle_products(sum);
}

// Where results go: to `halves`, or to `floats`, or are added to `floats`.
struct Output {
  bf16* halves;
  float* floats;
  u32 add, tokens, rows;

  DEVICE void write(u32 token, u32 row, float value) const {
    if (token >= tokens || row >= rows) return;
    const u64 place = static_cast<u64>(token) * rows + row;
    if (halves) halves[place] = to_bf16(value);
    else floats[place] = add ? floats[place] + value : value;
  }

  // Two neighbours, at once where they lie in one word.
  DEVICE void write_pair(u32 token, u32 row, float first, float second) const {
    if (halves && rows % 2 == 0 && token < tokens && row < rows) {
      *reinterpret_cast<u32*>(halves + static_cast<u64>(token) * rows + row) = pack_bf16(first, second);
      return;
    }
    write(token, row, first);
    write(token, row + 1, second);
  }
};

// Writes a thread's sums: tokens g and g + 8 of its warp's sixteen, and rows 2t and 2t + 1 of every eight.
DEVICE void write_all(const Output& out, const float (&sum)[64]) {
  const u32 token = block_x() * TOKENS + 16 * warp_index() + lane_index() / 4;
  const u32 row = block_y() * ROWS + 2 * (lane_index() % 4);
#pragma unroll
  for (u32 i = 0; i < 64; i += 2) out.write_pair(token + 8 * (i / 2 % 2), row + 8 * (i / 4), sum[i], sum[i + 1]);
}

#endif  // HOPPER

// Grid: (parts of the tokens, parts of the rows): blocks that run at a time share their weights.
KERNEL(gemm_hopper_bf16, THREADS)(TENSOR_MAP weights, TENSOR_MAP input, bf16* halves, float* floats, u32 add,
                                  u32 tokens, u32 rows, u32 cols) {
#ifdef HOPPER
  SHARED(Barrier, came, STAGES);
  SHARED(Barrier, read, STAGES);
  DYNAMIC_SHARED(u8, memory);
  const Pipeline pipeline{reinterpret_cast<Stage*>(align_tiles(memory)), came, read};
  const u32 steps = ceil_divide(cols, DEPTH);
  if (thread_index() == 0) pipeline.init();
  sync_threads();
  if (thread_index() == 32 * MULTIPLYING_WARPS) return copy_all(pipeline, weights, input, steps);
  wait_for_previous();  // who adds to what is there reads it
  let_next_start();
  if (warp_index() == MULTIPLYING_WARPS) return;
  float sum[64];  // not zeros: registers that others write too would make every product wait for the one before
  multiply_all(pipeline, sum, steps);
  write_all({halves, floats, add, tokens, rows}, sum);
#endif
}
