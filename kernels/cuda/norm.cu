// Root-mean-square norms. One block per row.
#include "codes.cuh"

constexpr int THREADS = 256;

// Eight values of a row, 16 bytes of bf16.
DEVICE void load_eight(float (&out)[8], const float* from) {
  for (int half = 0; half < 2; ++half) {
    const Quad quad = load_quad(from + 4 * half);
    for (int i = 0; i < 4; ++i) out[4 * half + i] = float_of(quad.word[i]);
  }
}

DEVICE void store_eight(float* to, const float (&values)[8]) {
  for (int half = 0; half < 2; ++half) {
    Quad quad;
    for (int i = 0; i < 4; ++i) quad.word[i] = bits_of(values[4 * half + i]);
    store_quad(to + 4 * half, quad);
  }
}

DEVICE void store_normed(bf16* to, const float (&values)[8], const float* weight, float factor) {
  float scale[8];
  load_eight(scale, weight);
  Quad quad;
  for (int i = 0; i < 4; ++i) {
    quad.word[i] = pack_bf16(values[2 * i] * factor * scale[2 * i], values[2 * i + 1] * factor * scale[2 * i + 1]);
  }
  store_quad(to, quad);
}

// What a row's values are multiplied with before their weights.
DEVICE float factor_of(const float* row, u32 cols, float epsilon) {
  float values[8], squares = 0;
  for (u32 col = 8 * thread_index(); col < cols; col += 8 * THREADS) {
    load_eight(values, row + col);
    for (int i = 0; i < 8; ++i) squares += values[i] * values[i];
  }
  return 1.0f / sqrtf(block_sum<THREADS>(squares) / cols + epsilon);
}

KERNEL(rms_norm, THREADS)(const float* input, const float* weight, bf16* out, u32 cols, float epsilon) {
  wait_for_previous();
  let_next_start();
  const float* row = input + static_cast<u64>(block_x()) * cols;
  const float factor = factor_of(row, cols, epsilon);
  float values[8];
  for (u32 col = 8 * thread_index(); col < cols; col += 8 * THREADS) {
    load_eight(values, row + col);
    store_normed(out + static_cast<u64>(block_x()) * cols + col, values, weight + col, factor);
  }
}

// The norm as codes, with a scale for each row: what products take whose inputs are rounded (w8a8.cu).
template <typename Code>
DEVICE void norm_codes(const float* input, const float* weight, u8* codes, float* scales, u32 cols, float epsilon) {
  wait_for_previous();
  let_next_start();
  const u64 first = static_cast<u64>(block_x()) * cols;
  const float factor = factor_of(input + first, cols, epsilon);
  round_token<Code, THREADS>(codes + first, scales + block_x(), cols, [&](float (&to)[RUN_VALUES], u32 col) {
    float scale[8];
    load_eight(to, input + first + col);
    load_eight(scale, weight + col);
    for (int i = 0; i < 8; ++i) to[i] = to[i] * factor * scale[i];
    keep_as_bf16(to);
  });
}

KERNEL(rms_norm_int8, THREADS)(const float* input, const float* weight, u8* codes, float* scales, u32 cols, float epsilon) {
  norm_codes<Int8>(input, weight, codes, scales, cols, epsilon);
}

KERNEL(rms_norm_fp8, THREADS)(const float* input, const float* weight, u8* codes, float* scales, u32 cols, float epsilon) {
  norm_codes<E4m3>(input, weight, codes, scales, cols, epsilon);
}

KERNEL(add_rms_norm, THREADS)(float* residual, const bf16* addend, const float* weight, bf16* out, u32 cols,
                              float epsilon) {
  wait_for_previous();
  let_next_start();
  const u64 first = static_cast<u64>(block_x()) * cols;
  float values[8], squares = 0;
  for (u32 col = 8 * thread_index(); col < cols; col += 8 * THREADS) {
    load_eight(values, residual + first + col);
    const Quad added = load_quad(addend + first + col);
    for (int i = 0; i < 4; ++i) {
      values[2 * i] += low_float(added.word[i]);
      values[2 * i + 1] += high_float(added.word[i]);
    }
    store_eight(residual + first + col, values);
    for (int i = 0; i < 8; ++i) squares += values[i] * values[i];
  }
  const float factor = 1.0f / sqrtf(block_sum<THREADS>(squares) / cols + epsilon);
  for (u32 col = 8 * thread_index(); col < cols; col += 8 * THREADS) {
    load_eight(values, residual + first + col);  // written above by this very thread
    store_normed(out + first + col, values, weight + col, factor);
  }
}

// residual += norm(addend) · weight: what a block gave is normed before it is added.
KERNEL(add_normed, THREADS)(float* residual, const bf16* addend, const float* weight, u32 cols, float epsilon) {
  wait_for_previous();
  let_next_start();
  const u64 first = static_cast<u64>(block_x()) * cols;
  const auto load = [&](float(&to)[8], u32 col) {
    const Quad pairs = load_quad(addend + first + col);
    for (int i = 0; i < 4; ++i) {
      to[2 * i] = low_float(pairs.word[i]);
      to[2 * i + 1] = high_float(pairs.word[i]);
    }
  };
  float values[8], squares = 0;
  for (u32 col = 8 * thread_index(); col < cols; col += 8 * THREADS) {
    load(values, col);
    for (int i = 0; i < 8; ++i) squares += values[i] * values[i];
  }
  const float factor = 1.0f / sqrtf(block_sum<THREADS>(squares) / cols + epsilon);
  for (u32 col = 8 * thread_index(); col < cols; col += 8 * THREADS) {
    float scale[8], sum[8];
    load(values, col);
    load_eight(scale, weight + col);
    load_eight(sum, residual + first + col);
    for (int i = 0; i < 8; ++i) sum[i] += values[i] * factor * scale[i];
    store_eight(residual + first + col, sum);
  }
}
