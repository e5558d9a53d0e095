// Products of a few tokens (linear.cuh) with weights of 4, 5 or 6 bits in superblocks of 256 columns (Q4_K, Q5_K, Q6_K), and
// rows of such a table. A superblock has a factor, in 4 and 5 bits one of minimums besides; its groups of 32 columns, in 6 bits
// of 16, have scales of 8 bits, and minimums. Values are
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
#include "linear.cuh"

constexpr int SPAN = 128;  // columns that a warp takes at a time
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

  // A lane's share of a span.
  DEVICE void load(const u32* span) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const Quad quad = load_once(span + 128 * half + 4 * lane_index());
#pragma unroll
      for (int i = 0; i < 4; ++i) low[4 * half + i] = quad.word[i];
    }
    [[maybe_unused]] const u32* own = span + 256 + HIGH_WORDS * lane_index();
    if constexpr (HIGH_WORDS == 4) {
      const Quad quad = load_once(own);
#pragma unroll
      for (int i = 0; i < 4; ++i) high[i] = quad.word[i];
    } else if constexpr (HIGH_WORDS == 2) {
      const u64 words = *reinterpret_cast<const u64*>(own);
      high[0] = static_cast<u32>(words);
      high[1] = static_cast<u32>(words >> 32);
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

template <int TILES, int BITS>
DEVICE void linear_superblocks(const u32* codes, const u32* scales, const bf16* input, const Mixture& mixture,
                               const Output& out, u32 tokens, u32 rows, u32 cols) {
  using Held = Codes<BITS>;
  const Part part(mixture, tokens, 8 * TILES);
  if (!part.used) return;
  const u32 spans = cols / SPAN;
  const u64 tile = static_cast<u64>(part.expert) * (rows / ROWS) + block_x();  // experts have whole tiles of rows
  const u32* own_codes = codes + (tile * spans + warp_index()) * Held::SPAN_WORDS;
  const u32* own_scales = scales + tile * (spans / 2) * SCALE_WORDS;
  Held held, next;
  const auto load = [&](Held& to, u32 span) {  // the warp's next
    if (span < spans) to.load(own_codes);
    else to.clear();
    own_codes += WARPS * Held::SPAN_WORDS;
  };
  load(held, warp_index());
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  const Tokens<TILES, 4> columns(input, part, cols);
  [[maybe_unused]] const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  float sum[TILES][4] = {};
  for (u32 span = warp_index(); span < spans; span += WARPS) {
    load(next, span + WARPS);
    const u32* words = own_scales + span / 2 * SCALE_WORDS;
    const Quad scale = load_quad(words + 32 * (span % 2) + 4 * (lane_index() / 4));
    const u64 both = *reinterpret_cast<const u64*>(words + 64 + 2 * (lane_index() / 4));
    const u32 factors[2] = {static_cast<u32>(both), static_cast<u32>(both >> 32)};
#pragma unroll
    for (int group = 0; group < SPAN / 16 / Held::MMAS; ++group) {
      u32 a[Held::MMAS][4];
#pragma unroll
      for (int mma = 0; mma < Held::MMAS; ++mma) {
        const int index = group * Held::MMAS + mma;  // of the span's
        held.expand(a[mma], index / 2, index % 2);
      }
      const Factors<BITS> own(scale, factors, group);
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        float dot[4] = {};
        [[maybe_unused]] float total[4] = {};
#pragma unroll
        for (int mma = 0; mma < Held::MMAS; ++mma) {
          u32 x[2];
          columns.load_four(x, n, SPAN * span + 16 * (group * Held::MMAS + mma));
          multiply_bf16(dot, a[mma], x);
          if constexpr (Held::AFFINE) multiply_bf16(total, ones, x);
        }
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          sum[n][i] += own.factor[i / 2] * dot[i];
          if constexpr (Held::AFFINE) sum[n][i] += own.middle[i / 2] * total[i];
        }
      }
    }
    held = next;
  }
  finish<TILES>(sum, out, part, rows);
}

// The four values of a row from a column on: row 16 tile + g, or that behind it by eight (`upper`).
template <int BITS>
DEVICE void expand_four(float (&values)[4], const u32* codes, const u32* scales, u64 tile, u32 g, u32 upper, u32 col,
                        u32 cols) {
  using Layout = Codes<BITS>;
  const u32* span = codes + (tile * (cols / SPAN) + col / SPAN) * Layout::SPAN_WORDS;
  const u32 block = col % SPAN / 32, mma = col % 32 / 16, lane = 4 * g + col % 16 / 4;
  const u32 low = span[128 * (block / 2) + 4 * lane + 2 * (block % 2) + mma];
  const u32 high = Layout::HIGH ? span[256 + Layout::HIGH_WORDS * lane + block / Layout::BLOCKS] : 0;
  const u32* own = scales + (tile * (cols / 256) + col / 256) * SCALE_WORDS;
  const u32* words = own + 32 * (col / SPAN % 2) + 4 * g + 2 * upper;
  const u32 factors = own[64 + 2 * g + upper], group = col % SPAN / (16 * Layout::MMAS);
  const float factor = half_to_float(factors & 0xffff) * signed_byte(words[group / 4], group % 4);
  const float minimum = half_to_float(factors >> 16) * signed_byte(words[1], group % 4);
  const float least = Layout::AFFINE ? -minimum : -Layout::MIDDLE * factor;
  for (u32 i = 0; i < 4; ++i) {
    const u32 reg = 2 * (i / 2) + upper, at = Layout::HIGH * (8 * (block % Layout::BLOCKS) + 4 * mma + reg);
    const u32 top = (high >> (at + 16 * (i % 2))) << 4 & Layout::MASK;
    values[i] = factor * static_cast<float>((low >> (4 * reg + 16 * (i % 2)) & 15) | top) + least;
  }
}

// Rows of a table by their token, as those of gather.cu.
template <int BITS>
DEVICE void embed_superblocks(const u32* tokens, const u32* codes, const u32* scales, float* out, u32 cols, u32 rows,
                              u32 first, float factor) {
  wait_for_previous();
  let_next_start();
  const u32 token = tokens[block_x()] - first;
  for (u32 col = 4 * thread_index(); col < cols; col += 4 * THREADS) {
    float values[4] = {};
    if (token < rows) expand_four<BITS>(values, codes, scales, token / 16, token % 8, token / 8 % 2, col, cols);
    const Quad bits = {{bits_of(values[0] * factor), bits_of(values[1] * factor), bits_of(values[2] * factor),
                        bits_of(values[3] * factor)}};
    store_quad(out + static_cast<u64>(block_x()) * cols + col, bits);
  }
}

#define LINEAR_PARAMETERS                                                                                          \
  (const u32* codes, const u32* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves,      \
   float* floats, u32 add, u32 stride, u32 tokens, u32 rows, u32 cols) {                                                       \
    linear_superblocks
#define LINEAR_ARGUMENTS (codes, scales, input, {tiles, places}, {halves, floats, add, stride}, tokens, rows, cols); }

RESIDENT_KERNEL(linear_q4k_8, THREADS, 3) LINEAR_PARAMETERS<1, 4> LINEAR_ARGUMENTS
KERNEL(linear_q4k_16, THREADS) LINEAR_PARAMETERS<2, 4> LINEAR_ARGUMENTS
KERNEL(linear_q4k_32, THREADS) LINEAR_PARAMETERS<4, 4> LINEAR_ARGUMENTS
KERNEL(linear_q4k_64, THREADS) LINEAR_PARAMETERS<8, 4> LINEAR_ARGUMENTS
RESIDENT_KERNEL(linear_q5k_8, THREADS, 3) LINEAR_PARAMETERS<1, 5> LINEAR_ARGUMENTS
KERNEL(linear_q5k_16, THREADS) LINEAR_PARAMETERS<2, 5> LINEAR_ARGUMENTS
KERNEL(linear_q5k_32, THREADS) LINEAR_PARAMETERS<4, 5> LINEAR_ARGUMENTS
KERNEL(linear_q5k_64, THREADS) LINEAR_PARAMETERS<8, 5> LINEAR_ARGUMENTS
KERNEL(linear_q6k_8, THREADS) LINEAR_PARAMETERS<1, 6> LINEAR_ARGUMENTS
KERNEL(linear_q6k_16, THREADS) LINEAR_PARAMETERS<2, 6> LINEAR_ARGUMENTS
KERNEL(linear_q6k_32, THREADS) LINEAR_PARAMETERS<4, 6> LINEAR_ARGUMENTS
KERNEL(linear_q6k_64, THREADS) LINEAR_PARAMETERS<8, 6> LINEAR_ARGUMENTS

#define EMBED_PARAMETERS                                                                                           \
  (const u32* tokens, const u32* codes, const u32* scales, float* out, u32 cols, u32 rows, u32 first, float factor) { \
    embed_superblocks
#define EMBED_ARGUMENTS (tokens, codes, scales, out, cols, rows, first, factor); }

KERNEL(embed_q4k, THREADS) EMBED_PARAMETERS<4> EMBED_ARGUMENTS
KERNEL(embed_q5k, THREADS) EMBED_PARAMETERS<5> EMBED_ARGUMENTS
KERNEL(embed_q6k, THREADS) EMBED_PARAMETERS<6> EMBED_ARGUMENTS
