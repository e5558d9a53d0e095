// Products of the tiles of two matrices, tokens x columns and rows x columns, whose columns are values of 2 bytes or of 1.
//
// Tiles of 64 bytes of columns of both go through stages of shared memory. A block computes TOKENS tokens x ROWS rows from there,
// each of its warps WARP_TOKENS x WARP_ROWS. Sums run over the columns from first to last, so a token's result is the same
// whatever tokens come with it, and however large the tiles are.
#pragma once
#include "dev.cuh"

DEVICE void multiply_values(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], bf16) { multiply_bf16(sum, a, b); }
template <typename Sum>
DEVICE void multiply_values(Sum (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], u8) {
  multiply_bytes(sum, a, b);
}

template <typename Value, int WARP_TOKENS>
struct Tiles {
  static constexpr int TOKEN_WARPS = 2, ROW_WARPS = 4, WARP_ROWS = 32, STAGES = 4;
  static constexpr int THREADS = 32 * TOKEN_WARPS * ROW_WARPS;
  static constexpr int TOKENS = TOKEN_WARPS * WARP_TOKENS;
  static constexpr int ROWS = ROW_WARPS * WARP_ROWS;
  static constexpr int TOKEN_PARTS = WARP_TOKENS / 16;  // of a warp's sums
  static constexpr int ROW_PARTS = WARP_ROWS / 8;
  static constexpr int DEPTH = 64 / sizeof(Value);  // columns of a stage
  static constexpr int CHUNK = 16 / sizeof(Value);  // columns of a copy

  // Row after row: what eight lanes read at a time, two rows, comes from different banks.
  struct Stage {
    Value input[TOKENS * DEPTH];
    Value weights[ROWS * DEPTH];
  };

  // What a thread adds up: by sixteen tokens, by eight rows, and tokens 0, 0, 8, 8 of rows 0, 1, 0, 1.
  template <typename Sum>
  struct Sums {
    Sum of[TOKEN_PARTS][ROW_PARTS][4] = {};
  };

  const Value* input;
  const Value* weights;
  u32 tokens, rows, cols;

  // The first token and row of a thread's sums.
  DEVICE u32 first_token() const {
    return block_y() * TOKENS + warp_index() % TOKEN_WARPS * WARP_TOKENS + lane_index() / 4;
  }
  DEVICE u32 first_row() const {
    return block_x() * ROWS + warp_index() / TOKEN_WARPS * WARP_ROWS + 2 * (lane_index() % 4);
  }

  // Adds the product up in `sum`, after the kernel ahead; `after(step)` is called when the columns of a stage are in it.
  template <typename Sum, typename After>
  DEVICE void multiply(Stage* stages, Sums<Sum>& sum, After after) const {
    const u32 steps = ceil_divide(cols, DEPTH);
    const u32 ahead = smaller(steps, STAGES - 1);
    for (u32 step = 0; step < ahead; ++step) fetch_weights(stages[step], step * DEPTH);
    wait_for_previous();  // the weights are nobody's output
    let_next_start();
    for (u32 step = 0; step < STAGES - 1; ++step) {
      if (step < ahead) fetch_input(stages[step], step * DEPTH);
      commit_copies();
    }
    for (u32 step = 0; step < steps; ++step) {
      wait_copies<STAGES - 2>();
      sync_threads();  // everybody's copies of this step are there, and the stage of the step before is free
      const u32 later = step + STAGES - 1;
      if (later < steps) {
        fetch_input(stages[later % STAGES], later * DEPTH);
        fetch_weights(stages[later % STAGES], later * DEPTH);
      }
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
    for (int m = 0; m < TOKEN_PARTS; ++m) {
#pragma unroll
      for (int n = 0; n < ROW_PARTS; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 token = first_token() + 16 * m + 8 * (i / 2), row = first_row() + 8 * n + i % 2;
          if (token < tokens && row < rows) use(token, row, sum.of[m][n][i]);
        }
      }
    }
  }

 private:
  DEVICE void fetch_input(Stage& stage, u32 col) const {
    fetch_rows<TOKENS>(stage.input, input, block_y() * TOKENS, tokens, col);
  }
  DEVICE void fetch_weights(Stage& stage, u32 col) const {
    fetch_rows<ROWS>(stage.weights, weights, block_x() * ROWS, rows, col);
  }

  // Starts to copy COUNT rows of a matrix from column `col`; rows behind the last and columns behind the end become zeros.
  template <int COUNT>
  DEVICE void fetch_rows(Value* to, const Value* from, u32 first, u32 count, u32 col) const {
    for (u32 i = thread_index(); i < COUNT * DEPTH / CHUNK; i += THREADS) {
      const u32 row = i / (DEPTH / CHUNK), chunk = CHUNK * (i % (DEPTH / CHUNK));
      const bool valid = first + row < count && col + chunk < cols;
      const Value* source = from + static_cast<u64>(valid ? first + row : 0) * cols + (valid ? col + chunk : 0);
      copy_async(to + row * DEPTH + chunk, source, valid);
    }
  }

  // Lane 4g + t has 16 bytes of a stage's columns of each of its rows, from 16t on: the first mma multiplies the former eight of them,
  // the second the latter.
  template <typename Sum>
  DEVICE void multiply_stage(const Stage& stage, Sums<Sum>& sum) const {
    const u32 own = lane_index() / 4 * DEPTH + lane_index() % 4 * CHUNK;
    const Value* left = stage.input + warp_index() % TOKEN_WARPS * WARP_TOKENS * DEPTH + own;
    const Value* right = stage.weights + warp_index() / TOKEN_WARPS * WARP_ROWS * DEPTH + own;
    Quad columns[ROW_PARTS];
#pragma unroll
    for (int n = 0; n < ROW_PARTS; ++n) columns[n] = load_quad(right + 8 * n * DEPTH);
#pragma unroll
    for (int m = 0; m < TOKEN_PARTS; ++m) {
      const Quad former = load_quad(left + 16 * m * DEPTH), latter = load_quad(left + (16 * m + 8) * DEPTH);
#pragma unroll
      for (int k = 0; k < 4; k += 2) {
        const u32 a[4] = {former.word[k], latter.word[k], former.word[k + 1], latter.word[k + 1]};
#pragma unroll
        for (int n = 0; n < ROW_PARTS; ++n) {
          const u32 b[2] = {columns[n].word[k], columns[n].word[k + 1]};
          multiply_values(sum.of[m][n], a, b, Value());
        }
      }
    }
  }
};
