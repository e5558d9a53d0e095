// Products of 8-bit activations with 8-bit weights: both signed integers (sm_80 on), or both e4m3 (sm_89 on). Activations have
// a scale for each token, found here; weights one for every `group` columns of a row.
//
// A block computes 64 tokens x 128 rows. Tiles of 64 columns of both go through four stages of shared memory; eight warps
// compute 32 x 32 each from there. After every 128 columns what was added up (integers: exactly) is scaled and added in f32,
// from the first column to the last: a token's result is the same whatever tokens come with it.
#include "dev.cuh"

constexpr int THREADS = 256;
constexpr int TILE_TOKENS = 64;
constexpr int TILE_ROWS = 128;
constexpr int DEPTH = 64;           // columns of a stage, a byte each
constexpr int STRIDE = DEPTH + 16;  // so that eight rows lie in different banks
constexpr int STAGES = 4;
constexpr int TOKENS = 32;  // of a warp
constexpr int ROWS = 32;
constexpr u32 RUN = 128;  // columns that are added up before they are scaled; a group has a multiple, or all

struct Stage {
  u8 input[TILE_TOKENS * STRIDE];
  u8 weights[TILE_ROWS * STRIDE];
};

struct Int8 {
  typedef int Sum;
  static constexpr float LARGEST = 127.0f;
  DEVICE static u8 of(float value) { return static_cast<u8>(static_cast<int>(rintf(value))); }
};

struct E4m3 {
  typedef float Sum;
  static constexpr float LARGEST = 448.0f;
  DEVICE static u8 of(float value) { return to_e4m3(value); }
};

// The codes of a token and their scale: its largest value is the largest code. Grid: tokens. A token with a value that is not
// finite has a scale that is none.
template <typename Code>
DEVICE void quantize(const bf16* input, u8* codes, float* scales, u32 cols) {
  wait_for_previous();
  let_next_start();
  SHARED(float, largest, THREADS / 32);
  const bf16* own = input + static_cast<u64>(block_x()) * cols;
  float most = 0, nothing = 0;
  for (u32 col = thread_index(); col < cols; col += THREADS) {
    const float value = to_float(own[col]);
    most = larger(most, fabsf(value));
    nothing += value * 0.0f;
  }
  most = warp_max(most);
  if (lane_index() == 0) largest[warp_index()] = most;
  nothing = block_sum<THREADS>(nothing);
  for (int warp = 0; warp < THREADS / 32; ++warp) most = larger(most, largest[warp]);
  const float scale = most / Code::LARGEST + nothing, factor = most > 0 ? Code::LARGEST / most : 0;
  for (u32 col = thread_index(); col < cols; col += THREADS) {
    codes[static_cast<u64>(block_x()) * cols + col] = scale == scale ? Code::of(to_float(own[col]) * factor) : 0;
  }
  if (thread_index() == 0) scales[block_x()] = scale;
}

KERNEL(quantize_int8, THREADS)(const bf16* input, u8* codes, float* scales, u32 cols) {
  quantize<Int8>(input, codes, scales, cols);
}

KERNEL(quantize_fp8, THREADS)(const bf16* input, u8* codes, float* scales, u32 cols) {
  quantize<E4m3>(input, codes, scales, cols);
}

// Starts to copy COUNT rows of a matrix from column `col`; rows behind the last and columns behind the end become zeros.
template <int COUNT>
DEVICE void fetch(u8* to, const u8* from, u32 first, u32 rows, u32 col, u32 cols) {
  for (u32 i = thread_index(); i < COUNT * DEPTH / 16; i += THREADS) {
    const u32 row = i / (DEPTH / 16), chunk = 16 * (i % (DEPTH / 16));
    const bool valid = first + row < rows && col + chunk < cols;
    const u8* source = from + static_cast<u64>(valid ? first + row : 0) * cols + (valid ? col + chunk : 0);
    copy_async(to + row * STRIDE + chunk, source, valid);
  }
}

DEVICE void fetch_stage(Stage& stage, const u8* input, const u8* weights, u32 tokens, u32 rows, u32 cols, u32 col) {
  fetch<TILE_TOKENS>(stage.input, input, block_y() * TILE_TOKENS, tokens, col, cols);
  fetch<TILE_ROWS>(stage.weights, weights, block_x() * TILE_ROWS, rows, col, cols);
}

// One stage's part of a warp's sums.
template <typename Sum>
DEVICE void multiply(Sum (&sum)[TOKENS / 16][ROWS / 8][4], const Stage& stage) {
  const u32 matrix = lane_index() / 8, row = lane_index() % 8;
  const u8* input = stage.input + warp_index() % 2 * TOKENS * STRIDE;
  const u8* weights = stage.weights + warp_index() / 2 * ROWS * STRIDE;
#pragma unroll
  for (int k = 0; k < DEPTH; k += 32) {
    u32 a[TOKENS / 16][4], b[ROWS / 16][4];
#pragma unroll
    for (int m = 0; m < TOKENS / 16; ++m) {
      load_matrices(a[m], input + (16 * m + row + 8 * (matrix % 2)) * STRIDE + k + 16 * (matrix / 2));
    }
#pragma unroll
    for (int n = 0; n < ROWS / 16; ++n) {
      load_matrices(b[n], weights + (16 * n + row + 8 * (matrix / 2)) * STRIDE + k + 16 * (matrix % 2));
    }
#pragma unroll
    for (int m = 0; m < TOKENS / 16; ++m) {
#pragma unroll
      for (int n = 0; n < ROWS / 8; ++n) {
        const u32 column[2] = {b[n / 2][2 * (n % 2)], b[n / 2][2 * (n % 2) + 1]};
        multiply_bytes(sum[m][n], a[m], column);
      }
    }
  }
}

// total += sum · scale of each row's group, and the sum begins again.
template <typename Sum>
DEVICE void scale_up(float (&total)[TOKENS / 16][ROWS / 8][4], Sum (&sum)[TOKENS / 16][ROWS / 8][4], const float* scales,
                     u32 first_row, u32 rows, u32 groups, u32 group) {
#pragma unroll
  for (int n = 0; n < ROWS / 8; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 row = first_row + 8 * n + i;
      const float scale = row < rows ? scales[static_cast<u64>(row) * groups + group] : 0;
#pragma unroll
      for (int m = 0; m < TOKENS / 16; ++m) {
        for (int half = 0; half < 2; ++half) {
          total[m][n][2 * half + i] += static_cast<float>(sum[m][n][2 * half + i]) * scale;
          sum[m][n][2 * half + i] = 0;
        }
      }
    }
  }
}

// Grid: (parts of the rows, parts of the tokens).
template <typename Code>
DEVICE void product(const u8* weights, const float* scales, const u8* input, const float* input_scales, bf16* halves,
                    float* floats, u32 add, u32 tokens, u32 rows, u32 cols, u32 group) {
  DYNAMIC_SHARED(Stage, stages);
  const u32 steps = ceil_divide(cols, DEPTH), groups = ceil_divide(cols, group);
  const u32 token = block_y() * TILE_TOKENS + warp_index() % 2 * TOKENS + lane_index() / 4;
  const u32 row = block_x() * TILE_ROWS + warp_index() / 2 * ROWS + 2 * (lane_index() % 4);
  wait_for_previous();
  let_next_start();
  for (u32 step = 0; step < STAGES - 1; ++step) {
    if (step < steps) fetch_stage(stages[step], input, weights, tokens, rows, cols, step * DEPTH);
    commit_copies();
  }
  typename Code::Sum sum[TOKENS / 16][ROWS / 8][4] = {};
  float total[TOKENS / 16][ROWS / 8][4] = {};
  for (u32 step = 0; step < steps; ++step) {
    wait_copies<STAGES - 2>();
    sync_threads();  // everybody's copies of this step are there, and the stage of the step before is free
    const u32 later = step + STAGES - 1;
    if (later < steps) fetch_stage(stages[later % STAGES], input, weights, tokens, rows, cols, later * DEPTH);
    commit_copies();
    multiply(sum, stages[step % STAGES]);
    const u32 end = (step + 1) * DEPTH;
    if (end % RUN == 0 || step + 1 == steps) scale_up(total, sum, scales, row, rows, groups, step * DEPTH / group);
  }
  wait_copies<0>();
#pragma unroll
  for (int m = 0; m < TOKENS / 16; ++m) {
#pragma unroll
    for (int n = 0; n < ROWS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 own_token = token + 16 * m + 8 * (i / 2), own_row = row + 8 * n + i % 2;
        if (own_token >= tokens || own_row >= rows) continue;
        const u64 place = static_cast<u64>(own_token) * rows + own_row;
        const float value = total[m][n][i] * input_scales[own_token];
        if (halves) halves[place] = to_bf16(value);
        else floats[place] = add ? floats[place] + value : value;
      }
    }
  }
}

KERNEL(w8a8_int8, THREADS)(const u8* weights, const float* scales, const u8* input, const float* input_scales, bf16* halves,
                           float* floats, u32 add, u32 tokens, u32 rows, u32 cols, u32 group) {
  product<Int8>(weights, scales, input, input_scales, halves, floats, add, tokens, rows, cols, group);
}

KERNEL(w8a8_fp8, THREADS)(const u8* weights, const float* scales, const u8* input, const float* input_scales, bf16* halves,
                          float* floats, u32 add, u32 tokens, u32 rows, u32 cols, u32 group) {
  product<E4m3>(weights, scales, input, input_scales, halves, floats, add, tokens, rows, cols, group);
}
