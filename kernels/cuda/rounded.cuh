// What products with inputs in bytes have in common: out[t][r] = sum over k of weights[r][k] · input[t][k], with weights of 2 to 8
// bits as linear.cu and superblocks.cu have them.
//
// Of every 32 values of a token there are signed codes and a scale. A group of weights, 32 columns or 16, is one mma of integers:
// exact. What it gives is scaled by both and added in f32. Minimums multiply the sums of codes, which the rounding has made.
//
// Every four codes of a token lie as 0, 2, 1, 3: so a mask of the weights' words is an operand (code_bytes).
#pragma once
#include "superblocks.cuh"

constexpr u32 INPUT_BLOCK = 32;                // columns that share a scale of the inputs
constexpr u32 SPAN_BLOCKS = SPAN / INPUT_BLOCK;
constexpr u32 TOKEN_ALIGNMENT = 8;             // tokens have scales in such numbers
constexpr u32 PLANES = 4;                      // what is said of a block
constexpr u32 PLANE = 2 * SPAN_BLOCKS;         // of two tokens and a span
constexpr u32 PAIR = PLANES * PLANE;

// Tokens' codes, row after row, and what is said of their blocks: [spans][pairs of tokens][PLANES][SPAN_BLOCKS][2]. Planes are the
// scale, and the scale times the sum of the codes: of all 32, of the former 16, of the latter. Rows have whole spans and tokens
// come in eights: what is behind a row's last column or the last token is zero, but that there are no codes of such a token.
struct Inputs {
  const u8* codes;
  const float* scales;
  u32 tokens, cols;

  DEVICE u32 spans() const { return ceil_divide(cols, SPAN); }
  DEVICE u32 row() const { return spans() * SPAN; }
  DEVICE u32 pairs() const { return ceil_divide(tokens, TOKEN_ALIGNMENT) * (TOKEN_ALIGNMENT / 2); }
};

// A group's place among what is said of two tokens and a span, and that of its sums.
template <int GROUP>
DEVICE u32 scale_place(u32 group) { return 2 * (group * GROUP / INPUT_BLOCK); }
template <int GROUP>
DEVICE u32 sum_place(u32 group) { return scale_place<GROUP>(group) + PLANE * (GROUP == INPUT_BLOCK ? 1 : 2 + group % 2); }

// `out` with bits `index` and `index + 2` of words (bits_at) at bit `to` of their bytes, whose others stay: of the former code of
// the one, of the former of the other, and of the latter codes.
template <int COUNT, int WORDS>
DEVICE u32 with_bits(u32 out, const u32 (&words)[WORDS], int index, int to) {
  constexpr u32 FIRST = ((1u << COUNT) - 1) * 0x10001u;
  if constexpr (COUNT == 4) return masked_xor(bits_at<4>(words, index, to), 0x0f0f0f0fu << to, out);
  const u32 former = masked_xor(bits_at<COUNT>(words, index, to), FIRST << to, out);
  return masked_xor(bits_at<COUNT>(words, index + 2, to + 8), FIRST << (to + 8), former);
}

// Four columns of row g (`half` 0) or g + 8 that a lane has of mma `mma` (expand_codes), as bytes: codes, or (CENTRED) codes less the
// middle one at the top of the byte, which is by a power of two too large.
template <bool CENTRED, int LOW, int HIGH, int LOW_WORDS, int HIGH_WORDS>
DEVICE u32 code_bytes(const u32 (&low)[LOW_WORDS], [[maybe_unused]] const u32 (&high)[HIGH_WORDS], int mma, int half) {
  constexpr int TO = CENTRED ? 8 - LOW - HIGH : 0;
  u32 out = with_bits<LOW>(CENTRED ? 0x80808080u : 0, low, 4 * mma + half, TO);
  if constexpr (HIGH > 0) out = with_bits<HIGH>(out, high, 4 * mma + half, TO + LOW);
  return out;
}

// What a group's products are multiplied with, and what the sum of its inputs is, for rows g and g + 8.
struct GroupFactors {
  float factor[2], minimum[2];
};

// Of the formats' members: a lane's share of 16 rows and a span is `Held`. `expand` makes the operand of a group, GROUP columns of
// rows g and g + 8, and `factors` what its products are multiplied with: zeros behind the last column. A lane has WIDTH neighbouring
// columns.

// Codes of 4 or 5 bits in groups of 32 columns.
template <int BITS, bool WITH_MINIMUMS>
struct Grouped {
  static constexpr int GROUP = 32, WIDTH = 8;
  static constexpr bool AFFINE = WITH_MINIMUMS;
  const u32* codes;
  const u32* scales;
  u32 rows, cols;

  struct Held {
    GroupedCodes<BITS> codes[SPAN / 64];
    u32 scales[SPAN / GROUP][2];

    DEVICE void expand(u32 (&out)[4], int group) const {
      const GroupedCodes<BITS>& own = codes[group / 2];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        out[i] = code_bytes<!AFFINE, 4, BITS - 4>(own.low.word, own.high, 2 * (group % 2) + i / 2, i % 2);
      }
    }

    DEVICE GroupFactors factors(int group) const {
      GroupFactors own;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32 word = scales[group][half];
        own.factor[half] = half_to_float(word & 0xffff) * (AFFINE ? 1.0f : 1.0f / (1 << (8 - BITS)));
        own.minimum[half] = AFFINE ? half_to_float(word >> 16) : 0;
      }
      return own;
    }
  };

  template <Quad LOAD(const void*)>
  DEVICE void load(Held& to, u32 tile, u32 span) const {
    const u32 packs = ceil_divide(cols, 64), groups = cols / GROUP;
    const u32* own_codes = codes + (static_cast<u64>(tile) * packs + 2 * span) * GroupedCodes<BITS>::WORDS + 4 * lane_index();
    const u32* own_scales = scales + (static_cast<u64>(tile) * groups + SPAN / GROUP * span) * ROWS + 2 * (lane_index() / 4);
#pragma unroll
    for (u32 i = 0; i < SPAN / 64; ++i) {
      to.codes[i].template load<LOAD>(own_codes + i * GroupedCodes<BITS>::WORDS, 2 * span + i < packs);
    }
#pragma unroll
    for (u32 i = 0; i < SPAN / GROUP; ++i) {
      to.scales[i][0] = to.scales[i][1] = 0;
      if (SPAN / GROUP * span + i < groups) load_two(to.scales[i], own_scales + i * ROWS);
    }
  }
};

// Signed codes of 8 bits in groups of 32 columns.
struct Bytes {
  static constexpr int GROUP = 32, WIDTH = 8;
  static constexpr bool AFFINE = false;
  const u32* codes;
  const u32* scales;
  u32 rows, cols;

  struct Held {
    Quad codes[SPAN / GROUP];
    u32 scales[SPAN / GROUP];

    // Two words of row g and then two of row g + 8, in the tokens' order of columns.
    DEVICE void expand(u32 (&out)[4], int group) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = pick_bytes(codes[group].word[2 * (i % 2) + i / 2], 0x3120);
    }

    DEVICE GroupFactors factors(int group) const {
      return {{half_to_float(scales[group] & 0xffff), half_to_float(scales[group] >> 16)}, {}};
    }
  };

  template <Quad LOAD(const void*)>
  DEVICE void load(Held& to, u32 tile, u32 span) const {
    const u32 groups = cols / GROUP;
    const u64 place = static_cast<u64>(tile) * groups + SPAN / GROUP * span;
#pragma unroll
    for (u32 i = 0; i < SPAN / GROUP; ++i) {
      const bool inside = SPAN / GROUP * span + i < groups;
      to.codes[i] = {};
      to.scales[i] = 0;
      if (inside) to.codes[i] = LOAD(codes + place * 128 + 4 * lane_index() + i * 128);
      if (inside) to.scales[i] = scales[place * 8 + lane_index() / 4 + i * 8];
    }
  }
};

// Codes of 2 to 6 bits in superblocks, whose columns are whole spans.
template <Kind KIND>
struct InSuperblocks {
  static constexpr int GROUP = 16 * Codes<KIND>::MMAS, WIDTH = 4;
  static constexpr bool AFFINE = Codes<KIND>::AFFINE, CENTRED = !AFFINE && !Codes<KIND>::NAMED;
  const u32* codes;
  const u32* scales;
  u32 rows, cols;

  struct Held {
    Codes<KIND> codes;
    Scales<KIND> scales;

    DEVICE void expand(u32 (&out)[GROUP / 8], int group) const {
#pragma unroll
      for (int i = 0; i < GROUP / 8; ++i) out[i] = four(group * Codes<KIND>::MMAS + i / 2, i % 2);
    }

    DEVICE GroupFactors factors(int group) const {
      GroupFactors own;
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const u32* words = scales.words + Scales<KIND>::ROW_WORDS * half;
        constexpr float SMALLER = CENTRED ? 1.0f / (1 << (8 - Codes<KIND>::BITS)) : 1.0f;
        own.factor[half] = factor_of<KIND>(words, scales.factors[half], group) * SMALLER;
        own.minimum[half] = 0;
        if constexpr (AFFINE) own.minimum[half] = -minimum_of<KIND>(words, scales.factors[half], group);
      }
      return own;
    }

   private:
    // Of row g, or g + 8.
    DEVICE u32 four(int mma, int half) const {
      if constexpr (Codes<KIND>::NAMED) {
        return pick_bytes(named_bytes(codes.low[mma]), named_bytes(codes.low[mma] >> 16), half ? 0x7531 : 0x6420);
      } else {
        return code_bytes<CENTRED, Codes<KIND>::LOW, Codes<KIND>::HIGH>(codes.low, codes.high, mma, half);
      }
    }
  };

  template <Quad LOAD(const void*)>
  DEVICE void load(Held& to, u32 tile, u32 span) const {
    const u32 spans = cols / SPAN;
    if (span >= spans) return to.codes.clear();
    to.codes.template load<LOAD>(codes + (static_cast<u64>(tile) * spans + span) * Codes<KIND>::SPAN_WORDS);
    to.scales.load(scales + static_cast<u64>(tile) * (spans / 2) * Scales<KIND>::WORDS, span);
  }
};

// A lane's codes of a group, from the first of a token's that are its own (WIDTH neighbours) on.
template <typename Format>
DEVICE void load_codes(u32 (&to)[Format::GROUP / 16], const u8* own, int group) {
  if constexpr (Format::WIDTH == 8) {
    load_two(to, own + Format::GROUP * group);
  } else {
#pragma unroll
    for (int i = 0; i < Format::GROUP / 16; ++i) to[i] = *reinterpret_cast<const u32*>(own + Format::GROUP * group + 16 * i);
  }
}

// Two floats, at a multiple of 8.
DEVICE void load_pair(float (&to)[2], const float* from) {
  u32 bits[2];
  load_two(bits, from);
  to[0] = float_of(bits[0]);
  to[1] = float_of(bits[1]);
}

// What a span says of a token's group to a lane: its codes of token g, and of tokens 2t and 2t + 1 the scales and the sums.
template <typename Format>
struct GroupInputs {
  u32 codes[Format::GROUP / 16];
  float scales[2], sums[2];

  DEVICE GroupInputs(const u8* own_codes, const float* pair, int group) {
    load_codes<Format>(codes, own_codes, group);
    load_pair(scales, pair + scale_place<Format::GROUP>(group));
    if constexpr (Format::AFFINE) load_pair(sums, pair + sum_place<Format::GROUP>(group));
  }
};

// Adds what a group gives, for rows g and g + 8 of tokens 2t and 2t + 1.
template <typename Format>
DEVICE void add_group(float (&sum)[4], const u32 (&weights)[Format::GROUP / 8], const GroupFactors& own,
                      const GroupInputs<Format>& input) {
  int dot[4] = {};
  multiply_bytes(dot, weights, input.codes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    sum[i] = fused(rounded_product(own.factor[i / 2], input.scales[i % 2]), static_cast<float>(dot[i]), sum[i]);
    if constexpr (Format::AFFINE) sum[i] = fused(own.minimum[i / 2], input.sums[i % 2], sum[i]);
  }
}
