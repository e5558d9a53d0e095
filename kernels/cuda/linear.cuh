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
#include "dev.cuh"

constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int ROWS = 16;

// Where results go: to `halves`, or to `floats`, or are added to `floats`; a token's are `stride` behind those of the one before.
struct Output {
  bf16* halves;
  float* floats;
  u32 add, stride;
};

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

  DEVICE Tokens(const bf16* values, const Part& part, u32 cols) : input(values) {
    for (int n = 0; n < TILES; ++n) {
      const u32 place = part.first + 8 * n + lane_index() / 4;
      first[n] = place < part.end ? part.input_row(place) * cols + WIDTH * (lane_index() % 4) : NONE;
    }
  }

  // Columns 32 block .. 32 block + 32.
  DEVICE Quad load(int n, u32 block, bool inside) const {
    return inside && first[n] != NONE ? load_quad(input + first[n] + 32 * block) : Quad{};
  }

  // Four columns of a lane, from column `col` on.
  DEVICE void load_four(u32 (&four)[2], int n, u32 col) const {
    u64 pairs = 0;
    if (first[n] != NONE) pairs = *reinterpret_cast<const u64*>(input + first[n] + col);
    four[0] = static_cast<u32>(pairs);
    four[1] = static_cast<u32>(pairs >> 32);
  }
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
  for (u32 i = thread_index(); i < 8 * TILES * ROWS; i += THREADS) {
    const u32 token = part.first + i / ROWS, row = block_x() * ROWS + i % ROWS;
    if (token >= part.end || row >= rows) continue;
    float total = 0;
    for (int warp = 0; warp < WARPS; ++warp) total += partial[warp * 8 * TILES * ROWS + i];
    const u64 place = static_cast<u64>(token) * out.stride + row;
    if (out.halves) out.halves[place] = to_bf16(total);
    else out.floats[place] = out.add ? out.floats[place] + total : total;
  }
}
