// Tokens in 8 bits: signed integers, or floats in e4m3, and a scale for each token.
#pragma once
#include "dev.cuh"

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

// Values that a thread has at a time, of neighbouring columns.
constexpr int RUN_VALUES = 8;

DEVICE void unpack(float (&to)[RUN_VALUES], const Quad& pairs) {
#pragma unroll
  for (int i = 0; i < RUN_VALUES; ++i) to[i] = i % 2 ? high_float(pairs.word[i / 2]) : low_float(pairs.word[i / 2]);
}

// As they are where they are kept in bf16: products that round what they take have the same bits as kernels that do it for them.
DEVICE void keep_as_bf16(float (&values)[RUN_VALUES]) {
#pragma unroll
  for (int i = 0; i < RUN_VALUES; i += 2) {
    const u32 pair = pack_bf16(values[i], values[i + 1]);
    values[i] = low_float(pair);
    values[i + 1] = high_float(pair);
  }
}

// Rounds a block's token to codes, of which the largest becomes the largest code, and their scale; `load(values, col)` gives the
// values from a column on. Where one is not finite the scale is none.
template <typename Code, int THREADS, typename Load>
DEVICE void round_token(u8* codes, float* scale_out, u32 cols, const Load& load) {
  float values[RUN_VALUES], most = 0, nothing = 0;
  for (u32 col = RUN_VALUES * thread_index(); col < cols; col += RUN_VALUES * THREADS) {
    load(values, col);
    for (float value : values) {
      most = larger(most, fabsf(value));
      nothing += value * 0.0f;
    }
  }
  most = block_max<THREADS>(most);
  const float scale = most / Code::LARGEST + block_sum<THREADS>(nothing), factor = most > 0 ? Code::LARGEST / most : 0;
  for (u32 col = RUN_VALUES * thread_index(); col < cols; col += RUN_VALUES * THREADS) {
    u32 words[2] = {};
    load(values, col);
    for (int i = 0; scale == scale && i < RUN_VALUES; ++i) {
      words[i / 4] |= static_cast<u32>(Code::of(values[i] * factor)) << 8 * (i % 4);
    }
    store_two(codes + col, words);
  }
  if (thread_index() == 0) *scale_out = scale;
}
