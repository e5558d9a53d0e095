// Products of the tiles of two matrices, tokens x columns and rows x columns, whose columns are values of 2 bytes or of 1.
//
// Tiles of 64 bytes of columns of both go through four stages of shared memory. A block of eight warps computes
// 2 · WARP_TOKENS tokens x 128 rows from there, each warp WARP_TOKENS x 32. Sums run over the columns from first to last, so a
// token's result is the same whatever tokens come with it.
#pragma once
#include "dev.cuh"

DEVICE void multiply_values(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) { multiply_bf16(sum, a, b); }
template <typename Sum>
DEVICE void multiply_values(Sum (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], u8) {
  multiply_bytes(sum, a, b);
}

template <typename Value, int WARP_TOKENS>
struct Tiles {
  static constexpr int THREADS = 256;
  static constexpr int TOKENS = 2 * WARP_TOKENS;
  static constexpr int ROWS = 128;
  static constexpr int WARP_ROWS = 32;
  static constexpr int DEPTH = 64 / sizeof(Value);  // columns of a stage
  static constexpr int CHUNK = 16 / sizeof(Value);  // columns of a copy
  static constexpr int STRIDE = DEPTH + CHUNK;      // so that eight rows lie in different banks
  static constexpr int STAGES = 4;

  struct Stage {
    Value input[TOKENS * STRIDE];
    Value weights[ROWS * STRIDE];
  };

  // What a thread adds up: by sixteen tokens, by eight rows, and tokens 0, 0, 8, 8 of rows 0, 1, 0, 1.
  template <typename Sum>
  struct Sums {
    Sum of[WARP_TOKENS / 16][WARP_ROWS / 8][4] = {};
  };

  const Value* input;
  const Value* weights;
  u32 tokens, rows, cols;

  // The first token and row of a thread's sums.
  DEVICE u32 first_token() const { return block_y() * TOKENS + warp_index() % 2 * WARP_TOKENS + lane_index() / 4; }
  DEVICE u32 first_row() const { return block_x() * ROWS + warp_index() / 2 * WARP_ROWS + 2 * (lane_index() % 4); }

  // Adds the product up in `sum`; `after(step)` is called when the columns of a stage are in it.
  template <typename Sum, typename After>
  DEVICE void multiply(Stage* stages, Sums<Sum>& sum, After after) const {
    const u32 steps = ceil_divide(cols, DEPTH);
    for (u32 step = 0; step < STAGES - 1; ++step) {
      if (step < steps) fetch(stages[step], step * DEPTH);
      commit_copies();
    }
    for (u32 step = 0; step < steps; ++step) {
      wait_copies<STAGES - 2>();
      sync_threads();  // everybody's copies of this step are there, and the stage of the step before is free
      const u32 later = step + STAGES - 1;
      if (later < steps) fetch(stages[later % STAGES], later * DEPTH);
      commit_copies();
      multiply_stage(stages[step % STAGES], sum);
      after(step);
    }
    wait_copies<0>();
  }

  // Calls `use(token, row, value)` for every sum of this thread that is one of the result.
  template <typename Sum, typename Use>
  DEVICE void each(const Sums<Sum>& sum, Use use) const {
#pragma unroll
    for (int m = 0; m < WARP_TOKENS / 16; ++m) {
#pragma unroll
      for (int n = 0; n < WARP_ROWS / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 token = first_token() + 16 * m + 8 * (i / 2), row = first_row() + 8 * n + i % 2;
          if (token < tokens && row < rows) use(token, row, sum.of[m][n][i]);
        }
      }
    }
  }

 private:
  DEVICE void fetch(Stage& stage, u32 col) const {
    fetch_rows<TOKENS>(stage.input, input, block_y() * TOKENS, tokens, col);
    fetch_rows<ROWS>(stage.weights, weights, block_x() * ROWS, rows, col);
  }

  // Starts to copy COUNT rows of a matrix from column `col`; rows behind the last and columns behind the end become zeros.
  template <int COUNT>
  DEVICE void fetch_rows(Value* to, const Value* from, u32 first, u32 count, u32 col) const {
    for (u32 i = thread_index(); i < COUNT * DEPTH / CHUNK; i += THREADS) {
      const u32 row = i / (DEPTH / CHUNK), chunk = CHUNK * (i % (DEPTH / CHUNK));
      const bool valid = first + row < count && col + chunk < cols;
      const Value* source = from + static_cast<u64>(valid ? first + row : 0) * cols + (valid ? col + chunk : 0);
      copy_async(to + row * STRIDE + chunk, source, valid);
    }
  }

  template <typename Sum>
  DEVICE void multiply_stage(const Stage& stage, Sums<Sum>& sum) const {
    const u32 matrix = lane_index() / 8, row = lane_index() % 8;
    const Value* left = stage.input + warp_index() % 2 * WARP_TOKENS * STRIDE;
    const Value* right = stage.weights + warp_index() / 2 * WARP_ROWS * STRIDE;
#pragma unroll
    for (int k = 0; k < DEPTH; k += 2 * CHUNK) {
      u32 a[WARP_TOKENS / 16][4], b[WARP_ROWS / 16][4];
#pragma unroll
      for (int m = 0; m < WARP_TOKENS / 16; ++m) {
        load_matrices(a[m], left + (16 * m + row + 8 * (matrix % 2)) * STRIDE + k + CHUNK * (matrix / 2));
      }
#pragma unroll
      for (int n = 0; n < WARP_ROWS / 16; ++n) {
        load_matrices(b[n], right + (16 * n + row + 8 * (matrix / 2)) * STRIDE + k + CHUNK * (matrix % 2));
      }
#pragma unroll
      for (int m = 0; m < WARP_TOKENS / 16; ++m) {
#pragma unroll
        for (int n = 0; n < WARP_ROWS / 8; ++n) {
          const u32 column[2] = {b[n / 2][2 * (n % 2)], b[n / 2][2 * (n % 2) + 1]};
          multiply_values(sum.of[m][n], a[m], column, Value());
        }
      }
    }
  }
};
