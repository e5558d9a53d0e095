// Products of many tokens with a bf16 matrix: out[t][r] = sum over k of weights[r][k] · input[t][k].
//
// A block computes 128 tokens x 128 rows. Tiles of 32 columns of both go through four stages of shared memory; eight
// warps compute 64 x 32 each from there. Sums run over k from first to last.
#include "dev.cuh"

constexpr int THREADS = 256;
constexpr int TILE = 128;   // tokens, and rows, of a block
constexpr int DEPTH = 32;   // columns of a stage
constexpr int STRIDE = DEPTH + 8;  // so that eight rows lie in different banks
constexpr int STAGES = 4;
constexpr int TOKENS = 64;  // of a warp
constexpr int ROWS = 32;

struct Stage {
  bf16 input[TILE * STRIDE];
  bf16 weights[TILE * STRIDE];
};

// Starts to copy 128 rows of a matrix from column `col`; rows behind the last and columns behind the end become zeros.
DEVICE void fetch(bf16* to, const bf16* from, u32 first, u32 rows, u32 col, u32 cols) {
  for (u32 i = thread_index(); i < TILE * DEPTH / 8; i += THREADS) {
    const u32 row = i / (DEPTH / 8), chunk = 8 * (i % (DEPTH / 8));
    const bool valid = first + row < rows && col + chunk < cols;
    const bf16* source = from + static_cast<u64>(valid ? first + row : 0) * cols + (valid ? col + chunk : 0);
    copy_async(to + row * STRIDE + chunk, source, valid);
  }
}

// One stage's part of a warp's sums.
DEVICE void multiply(float (&sum)[TOKENS / 16][ROWS / 8][4], const Stage& stage) {
  const u32 matrix = lane_index() / 8, row = lane_index() % 8;
  const bf16* input = stage.input + warp_index() % 2 * TOKENS * STRIDE;
  const bf16* weights = stage.weights + warp_index() / 2 * ROWS * STRIDE;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 16) {
    u32 a[TOKENS / 16][4], b[ROWS / 16][4];
#pragma unroll
    for (int m = 0; m < TOKENS / 16; ++m) {
      load_matrices(a[m], input + (16 * m + row + 8 * (matrix % 2)) * STRIDE + k + 8 * (matrix / 2));
    }
#pragma unroll
    for (int n = 0; n < ROWS / 16; ++n) {
      load_matrices(b[n], weights + (16 * n + row + 8 * (matrix / 2)) * STRIDE + k + 8 * (matrix % 2));
    }
#pragma unroll
    for (int m = 0; m < TOKENS / 16; ++m) {
#pragma unroll
      for (int n = 0; n < ROWS / 8; ++n) {
        const u32 column[2] = {b[n / 2][2 * (n % 2)], b[n / 2][2 * (n % 2) + 1]};
        multiply_bf16(sum[m][n], a[m], column);
      }
    }
  }
}

// Grid: (parts of the rows, parts of the tokens).
KERNEL(gemm_bf16, THREADS)(const bf16* weights, const bf16* input, bf16* halves, float* floats, u32 add, u32 tokens,
                           u32 rows, u32 cols) {
  DYNAMIC_SHARED(Stage, stages);
  const u32 first_row = block_x() * TILE, first_token = block_y() * TILE, steps = ceil_divide(cols, DEPTH);
  wait_for_previous();
  let_next_start();
  for (u32 step = 0; step < STAGES - 1; ++step) {
    if (step < steps) {
      fetch(stages[step].input, input, first_token, tokens, step * DEPTH, cols);
      fetch(stages[step].weights, weights, first_row, rows, step * DEPTH, cols);
    }
    commit_copies();
  }
  float sum[TOKENS / 16][ROWS / 8][4] = {};
  for (u32 step = 0; step < steps; ++step) {
    wait_copies<STAGES - 2>();
    sync_threads();  // everybody's copies of this step are there, and the stage of the step before is free
    const u32 later = step + STAGES - 1;
    if (later < steps) {
      fetch(stages[later % STAGES].input, input, first_token, tokens, later * DEPTH, cols);
      fetch(stages[later % STAGES].weights, weights, first_row, rows, later * DEPTH, cols);
    }
    commit_copies();
    multiply(sum, stages[step % STAGES]);
  }
  wait_copies<0>();
  const u32 token = first_token + warp_index() % 2 * TOKENS + lane_index() / 4;
  const u32 row = first_row + warp_index() / 2 * ROWS + 2 * (lane_index() % 4);
#pragma unroll
  for (int m = 0; m < TOKENS / 16; ++m) {
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 own_token = token + 16 * m + 8 * (i / 2), own_row = row + 8 * n + i % 2;
        if (own_token >= tokens || own_row >= rows) continue;
        const u64 place = static_cast<u64>(own_token) * rows + own_row;
        if (halves) halves[place] = to_bf16(sum[m][n][i]);
        else floats[place] = add ? floats[place] + sum[m][n][i] : sum[m][n][i];
      }
    }
  }
}
