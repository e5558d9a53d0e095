// How weights of 2 to 6 bits lie in superblocks of 256 columns. A superblock has a factor, and one of minimums where there are such;
// each of its groups has a scale. Values are
//
//   Q4_K, Q5_K: factor · scale · code - minimums' factor · minimum, in groups of 32 columns
//   Q2_K:       the same in groups of 16, scale and minimum of 4 bits each
//   Q3_K, Q6_K: factor · scale · (code - the middle one), in groups of 16
//   IQ4_XS:     factor · scale · the number that the code names, in groups of 32
//
// In every 16 columns, lane 4g + t holds columns 4t .. 4t + 4: those of one mma, of which a group has two or one.
//
// Codes of 16 rows and 128 columns are 8 words of low bits for each lane, or 4 where codes have fewer than four bits, and then 0, 2 or
// 4 words of high ones. A word's halves have the bits of as many registers as there is room for, mmas after one another
// (expand_codes).
//
// Scales of 16 rows and a superblock are words of its former 128 columns and then of its latter: 2 for each row, or 1, row g + 8 behind
// row g. They are eight scales in their order (Q2_K: the minimum in the upper half of the byte), four and then their minimums, or four.
// 16 words behind them are the rows' factors in the same order: f16 in the low half, that of minimums in the high one.
#pragma once
#include "linear.cuh"

enum Kind { Q2K = 2, Q3K, Q4K, Q5K, Q6K, IQ4XS };  // all but the last by their bits

// The numbers that IQ4's codes name, as bytes.
DEVICE u32 named_bytes(u32 codes) {
  const u32 place = codes & 0x7777, latter = 0x3210 | (codes & 0x8888) >> 1;
  return pick_bytes(pick_bytes(0xbfad9881u, 0xf6eaddcfu, place), pick_bytes(0x26190d01u, 0x71594535u, place), latter);
}

// A lane's codes of a span.
template <Kind KIND>
struct Codes {
  static constexpr bool NAMED = KIND == IQ4XS;                               // they name numbers
  static constexpr bool AFFINE = KIND == Q2K || KIND == Q4K || KIND == Q5K;  // there are minimums
  static constexpr int BITS = NAMED ? 4 : KIND;
  static constexpr int LOW = BITS < 4 ? 2 : 4, HIGH = BITS - LOW;  // bits in words of low ones, and in those of high ones
  static constexpr int LOW_WORDS = 2 * LOW, HIGH_WORDS = 2 * HIGH;
  static constexpr int SPAN_WORDS = 32 * (LOW_WORDS + HIGH_WORDS);
  static constexpr int MMAS = BITS == 4 || BITS == 5 ? 2 : 1;  // of a group
  static constexpr int MIDDLE = 1 << (BITS - 1);               // of all codes, where they are numbers

  u32 low[LOW_WORDS], high[HIGH ? HIGH_WORDS : 1];

  // By the function that loads four words.
  template <Quad LOAD(const void*)>
  DEVICE void load(const u32* span) {
#pragma unroll
    for (int part = 0; part < LOW_WORDS / 4; ++part) {
      const Quad quad = LOAD(span + 128 * part + 4 * lane_index());
#pragma unroll
      for (int i = 0; i < 4; ++i) low[4 * part + i] = quad.word[i];
    }
    [[maybe_unused]] const u32* own = span + 32 * LOW_WORDS + HIGH_WORDS * lane_index();
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

  // The operand of mma `mma`: each code less the middle one, or what it names.
  DEVICE void expand(u32 (&out)[4], int mma) const {
    if constexpr (NAMED) {
      const u32 former = named_bytes(low[mma]), latter = named_bytes(low[mma] >> 16);
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = expand_signed(pick_bytes(former, latter, 0x400 + 0x101 * i));
    } else {
      expand_codes<LOW, HIGH>(out, low, high, mma);
    }
  }

  // The former or the latter code at an index (bits_at) of a lane's words.
  DEVICE static u32 at(const u32* span, u32 lane, u32 index, u32 latter) {
    const u32 word = index * LOW / 16;
    u32 code = span[128 * (word / 4) + 4 * lane + word % 4] >> (index * LOW % 16 + 16 * latter) & ((1 << LOW) - 1);
    if constexpr (HIGH > 0) {
      const u32 high = span[32 * LOW_WORDS + HIGH_WORDS * lane + index * HIGH / 16];
      code |= (high >> (index * HIGH % 16 + 16 * latter) & ((1 << HIGH) - 1)) << LOW;
    }
    return code;
  }
};

DEVICE float signed_byte(u32 word, u32 index) {
  return static_cast<float>(static_cast<signed char>(word >> 8 * index & 0xff));
}

// What a row's codes of a group are multiplied with, of its scales of a span and its factors.
template <Kind KIND>
DEVICE float factor_of(const u32* scales, u32 factors, u32 group) {
  const u32 word = scales[group / 4];
  const float scale = KIND == Q2K ? static_cast<float>(word >> 8 * (group % 4) & 15) : signed_byte(word, group % 4);
  return half_to_float(factors & 0xffff) * scale;
}

// What is subtracted from those.
template <Kind KIND>
DEVICE float minimum_of(const u32* scales, u32 factors, u32 group) {
  const u32 word = scales[KIND == Q2K ? group / 4 : 1];
  const float scale = KIND == Q2K ? static_cast<float>(word >> (8 * (group % 4) + 4) & 15) : signed_byte(word, group);
  return half_to_float(factors >> 16) * scale;
}

// The scales of rows g and g + 8.
template <Kind KIND>
struct Scales {
  static constexpr int ROW_WORDS = KIND == IQ4XS ? 1 : 2;
  static constexpr int WORDS = 32 * ROW_WORDS + 16;  // of 16 rows and a superblock
  u32 words[2 * ROW_WORDS], factors[2];

  // Of a span of 16 rows.
  DEVICE void load(const u32* of_rows, u32 span) {
    const u32* superblock = of_rows + span / 2 * WORDS;
    const u32* own = superblock + 16 * ROW_WORDS * (span % 2) + 2 * ROW_WORDS * (lane_index() / 4);
    if constexpr (ROW_WORDS == 2) {
      const Quad quad = load_quad(own);
#pragma unroll
      for (int i = 0; i < 4; ++i) words[i] = quad.word[i];
    } else {
      load_two(words, own);
    }
    load_two(factors, superblock + 32 * ROW_WORDS + 2 * (lane_index() / 4));
  }
};

// What a group's codes are multiplied with, and what each of its inputs is, for rows g and g + 8.
template <Kind KIND>
struct Factors {
  float factor[2], middle[2];

  DEVICE Factors(const Scales<KIND>& scales, int group) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32* words = scales.words + Scales<KIND>::ROW_WORDS * half;
      factor[half] = factor_of<KIND>(words, scales.factors[half], group);
      if constexpr (Codes<KIND>::AFFINE) {
        middle[half] = Codes<KIND>::MIDDLE * factor[half] - minimum_of<KIND>(words, scales.factors[half], group);
      }
    }
  }
};
