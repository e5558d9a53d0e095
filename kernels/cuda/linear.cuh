// What products of a few tokens with a weight matrix have in common: out[t][r] = sum over k of weights[r][k] · input[t][k].
//
// A block computes 16 rows for up to 64 tokens. The weights are the 16-row operand of mma and the tokens its columns, so
// one token wastes no reading, and every weight is read once, straight into registers. Eight warps take turns along k
// and their sums are added in the warps' order: a token's result depends neither on the batch nor on its place in it.
//
// Of a mixture of experts the weights are those of all experts, rows after rows, and a block's tokens are a tile of those
// that go through one of them.
//
// Sums over k may take any order, as long as both operands take the same.
#pragma once
#include "output.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 16;
constexpr int SPAN = 128;  // columns that a warp takes at a time

// The tiles of a mixture of experts, {expert, first place, end, -} each, and the token at each place; null where places are
// rows of the input. Without tiles every token goes through the same weights.
struct Mixture {
  const u32* tiles;
  const u32* tokens;
};

// The places of a block's tokens in the output, and whose weights they go through.
struct Part {
  u32 first, end, expert;
  const u32* tokens;
  bool used;

  DEVICE Part(const Mixture& mixture, u32 count, u32 width)
      : first(block_y() * width), end(count), expert(0), tokens(nullptr), used(true) {
    if (!mixture.tiles) return;
    wait_for_previous();  // who goes through which expert was computed just now
    const u32* tile = mixture.tiles + 4 * block_y();
    expert = tile[0];
    first = tile[1];
    end = tile[2];
    tokens = mixture.tokens;
    used = expert != 0xffffffffu;
  }

  // The row of the input that a place has.
  DEVICE u32 input_row(u32 place) const { return tokens ? tokens[place] : place; }
};

// This lane's share of the input for the columns of one mma of 8 tokens: WIDTH columns at a time, those of its neighbours beside
// them.
template <int TILES, int WIDTH = 8>
struct Tokens {
  static constexpr u32 NONE = 0xffffffffu;
  const bf16* input;
  u32 first[TILES];  // of its values; NONE where there is no token

  DEVICE Tokens(const bf16* values, const Part& part, u32 cols) : Tokens(values, part, cols, WIDTH * (lane_index() % 4)) {}

  // Of a lane whose columns begin elsewhere.
  DEVICE Tokens(const bf16* values, const Part& part, u32 cols, u32 lane_column) : input(values) {
    for (int n = 0; n < TILES; ++n) {
      const u32 place = part.first + 8 * n + lane_index() / 4;
      first[n] = place < part.end ? part.input_row(place) * cols + lane_column : NONE;
    }
  }

  // Columns 32 block .. 32 block + 32.
  DEVICE Quad load(int n, u32 block, bool inside) const {
    return inside && first[n] != NONE ? load_quad(input + first[n] + 32 * block) : Quad{};
  }

  // Four columns of a lane, from column `col` on.
  DEVICE void load_four(u32 (&four)[2], int n, u32 col) const {
    four[0] = four[1] = 0;
    if (first[n] != NONE) load_two(four, input + first[n] + col);
  }
};

// Of 32 columns of bf16 a lane reads eight at once: lane 4g + t those of quad t / 2 + 2 (t % 2).
DEVICE u32 column_of_lane() { return 8 * (lane_index() % 4 / 2 + 2 * (lane_index() % 2)); }

// Makes of those what two mmas want that multiply sixteen neighbouring columns each, as wgmma has them (many_hopper.cu): columns
// 4t .. 4t + 4 in the former words, 16 + 4t .. 16 + 4t + 4 in the latter. Lanes t and t ^ 1 change a half of theirs.
DEVICE Quad as_neighbours(const Quad& read) {
  const bool odd = lane_index() % 2;
  const u32 taken[2] = {shuffle_xor(odd ? read.word[0] : read.word[2], 1), shuffle_xor(odd ? read.word[1] : read.word[3], 1)};
  return odd ? Quad{taken[0], taken[1], read.word[2], read.word[3]} : Quad{read.word[0], read.word[1], taken[0], taken[1]};
}

// Bits `index` of words that have COUNT of each code, the former code's in a word's low half and the latter's in its high one, at bit
// `to` of those halves; other bits are anything.
template <int COUNT, int WORDS>
DEVICE u32 bits_at(const u32 (&words)[WORDS], int index, int to) {
  constexpr int OF_A_WORD = 16 / COUNT;
  const int from = COUNT * (index % OF_A_WORD);
  const u32 word = words[index / OF_A_WORD];
  return from < to ? word << (to - from) : word >> (from - to);
}

// The operand of mma `mma` of a lane's codes, each less the middle one: LOW bits of a code are in some words and HIGH ones in others.
// Both have the codes of register 0 of mma 0 first, then those of its register 1, and so on: what the register holds at a time are a
// former code and a latter one.
template <int LOW, int HIGH, int LOW_WORDS, int HIGH_WORDS>
DEVICE void expand_codes(u32 (&out)[4], const u32 (&low)[LOW_WORDS], [[maybe_unused]] const u32 (&high)[HIGH_WORDS], int mma) {
  constexpr u32 MIDDLE = 1u << (LOW + HIGH - 1), LOW_MASK = (1u << LOW) - 1, HIGH_MASK = ((1u << HIGH) - 1) << LOW;
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    // 128 + code: bf16's step is 1 there.
    u32 biased = masked_or(bits_at<LOW>(low, 4 * mma + i, 0), LOW_MASK * 0x10001u, 0x43004300u);
    if constexpr (HIGH > 0) biased = masked_or(bits_at<HIGH>(high, 4 * mma + i, LOW), HIGH_MASK * 0x10001u, biased);
    out[i] = fma_bf16(biased, 0x3f803f80u, (0xc300u + MIDDLE) * 0x10001u);  // less 128 and the middle one, exactly
  }
}

// A lane's codes of BITS bits, 4 or 5, of 64 columns.
template <int BITS>
struct GroupedCodes {
  static constexpr int WORDS = 32 * BITS;  // of 16 rows
  Quad low;
  u32 high[1];

  // From the lane's first word on, by the function that loads four; zeros where there are none.
  template <Quad LOAD(const void*)>
  DEVICE void load(const u32* own, bool inside) {
    low = inside ? LOAD(own) : Quad{};
    high[0] = BITS > 4 && inside ? own[128 - 3 * lane_index()] : 0;  // a word a lane, behind four
  }

  DEVICE void expand(u32 (&out)[4], int mma) const { expand_codes<4, BITS - 4>(out, low.word, high, mma); }
};

// What such codes are multiplied with, and what each of their inputs is: the value of the middle one. Of a word with an f16 scale in
// its low half and an f16 minimum in its high one.
template <int BITS>
struct GroupScale {
  float factor, middle;

  DEVICE explicit GroupScale(u32 word)
      : factor(half_to_float(word & 0xffff)), middle(half_to_float(word >> 16) + (1 << (BITS - 1)) * factor) {}
};

// Adds the warps' sums in their order and writes the results.
template <int TILES>
DEVICE void finish(const float (&sum)[TILES][4], const Output& out, const Part& part, u32 rows) {
  SHARED(float, partial, WARPS * 8 * TILES * ROWS);
  const u32 group = lane_index() / 4, place = lane_index() % 4;
  for (int n = 0; n < TILES; ++n) {
    for (int i = 0; i < 4; ++i) {
      const u32 token = 8 * n + 2 * place + i % 2, row = group + 8 * (i / 2);
      partial[(warp_index() * 8 * TILES + token) * ROWS + row] = sum[n][i];
    }
  }
  sync_threads();
  for (u32 i = thread_index(); i < 8 * TILES * ROWS; i += THREADS) {  // whole warps
    const u32 token = part.first + i / ROWS, row = block_x() * ROWS + i % ROWS;
    const bool inside = token < part.end && row < rows;
    float total = 0;
    if (inside) {
      for (int warp = 0; warp < WARPS; ++warp) total += partial[warp * 8 * TILES * ROWS + i];
    }
    if (out.gates()) total = out.gated(total, shuffle_xor(total, EIGHT));
    if (inside) out.write_row(token, row, total);
  }
}
