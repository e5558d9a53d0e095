// How weights of 4, 5 or 6 bits lie in superblocks of 256 columns (Q4_K, Q5_K, Q6_K). A superblock has a factor, in 4 and 5 bits
// one of minimums besides; its groups of 32 columns, in 6 bits of 16, have scales of 8 bits, and minimums. Values are
//
//   4 and 5 bits: factor · scale · code - minimums' factor · minimum        6 bits: factor · scale · (code - 32)
//
// In every 16 columns, lane 4g + t holds columns 4t .. 4t + 4: those of one mma, of which a group has two, in 6 bits one.
//
// Codes of 16 rows and 128 columns are 8 words of low bits for each lane, and then 0, 2 or 4 words of high ones. Words of low bits
// lie as those of linear.cu's 4 bits do, each what the lane multiplies in one mma: code i of the word's low half is at bits 4i
// and is the former value of register i, that of the high half is the latter. A word's halves have the high bits of as many
// registers as there is room for, mmas after one another.
//
// Scales of 16 rows and a superblock are 80 words. 64 are of its former 128 columns and then of its latter, 2 words for each
// row, row g + 8 behind row g: eight scales in their order, or four and then their minimums. 16 are the rows' factors in the
// same order: f16 in the low half, that of minimums in the high one.
#pragma once
#include "linear.cuh"

constexpr int SCALE_WORDS = 80;

// How codes of BITS lie in words.
template <int BITS>
struct Codes {
  static constexpr int HIGH = BITS - 4;            // high bits of a code
  static constexpr int HIGH_WORDS = 2 * HIGH;      // of a lane and a span
  static constexpr int SPAN_WORDS = 32 * (8 + HIGH_WORDS);
  static constexpr int BLOCKS = HIGH ? 2 / HIGH : 1;  // of 32 columns, whose high bits are in one word
  static constexpr u32 MASK = ((1u << HIGH) - 1) << 4;
  static constexpr bool AFFINE = BITS < 6;          // has minimums
  static constexpr int MMAS = AFFINE ? 2 : 1;      // of a group
  static constexpr int MIDDLE = 1 << (BITS - 1);   // of all codes
  static constexpr u32 BIAS = (0xc300u + MIDDLE) * 0x10001u;  // 128 and that, negative, twice in bf16

  u32 low[8], high[HIGH ? HIGH_WORDS : 1];

  // A lane's share of a span, by the function that loads four words.
  template <Quad LOAD(const void*)>
  DEVICE void load(const u32* span) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Quad quad = LOAD(span + 128 * half + 4 * lane_index());
#pragma unroll
      for (int i = 0; i < 4; ++i) low[4 * half + i] = quad.word[i];
    }
    [[maybe_unused]] const u32* own = span + 256 + HIGH_WORDS * lane_index();
    if constexpr (HIGH_WORDS == 4) {
      const Quad quad = LOAD(own);
#pragma unroll
      for (int i = 0; i < 4; ++i) high[i] = quad.word[i];
    } else if constexpr (HIGH_WORDS == 2) {
      load_two(high, own);
    }
  }

  DEVICE void clear() {
    for (u32& word : low) word = 0;
    for (u32& word : high) word = 0;
  }

  // The operand of mma `mma` of 32 columns, each code less the middle one.
  DEVICE void expand(u32 (&out)[4], int block, int mma) const {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      u32 biased = masked_or(low[2 * block + mma] >> 4 * i, 0x000f000fu, 0x43004300u);  // 128 + code: bf16's step is 1 there
      if constexpr (HIGH > 0) {
        const int at = HIGH * (8 * (block % BLOCKS) + 4 * mma + i);
        const u32 word = high[block / BLOCKS];
        biased = masked_or(at < 4 ? word << (4 - at) : word >> (at - 4), MASK * 0x10001u, biased);
      }
      out[i] = fma_bf16(biased, 0x3f803f80u, BIAS);  // exactly
    }
  }
};

DEVICE float signed_byte(u32 word, u32 index) {
  return static_cast<float>(static_cast<signed char>(word >> 8 * index & 0xff));
}

// What a group's codes are multiplied with, and what each of its inputs is, for rows g and g + 8.
template <int BITS>
struct Factors {
  float factor[2], middle[2];

  DEVICE Factors(const Quad& scales, const u32 (&factors)[2], int group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float whole = half_to_float(factors[half] & 0xffff);
      const u32* words = scales.word + 2 * half;
      factor[half] = whole * signed_byte(words[group / 4], group % 4);
      if constexpr (Codes<BITS>::AFFINE) {  // four groups, and their minimums behind them
        middle[half] = Codes<BITS>::MIDDLE * factor[half] - half_to_float(factors[half] >> 16) * signed_byte(words[1], group);
      }
    }
  }
};
