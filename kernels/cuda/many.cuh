// What products of many tokens with a weight matrix have in common that give the bits of those of a few (linear.cuh).
//
// A block computes 128 rows for 64 tokens, a warp 32 of those rows for 32 of the tokens. Tokens go through two stages of shared
// memory, 128 columns each. Weights come straight into registers, as they are and 128 columns ahead, and are expanded there for
// four products each.
//
// There a block's warps take turns along the columns, and their sums are added in the warps' order. Here a warp goes through all
// columns: those of the first warp's turns, then those of the second's, and it adds up what each of them gave. The rest is as
// there, from the columns that one mma multiplies to the order in which a group's sums are scaled and added, so that a token has
// the same bits whichever of the two it goes through.
#pragma once
#include "linear.cuh"

constexpr u32 TOKENS = 64;            // of a block
constexpr u32 ROW_TILES = 8;          // of a block, 16 rows each
constexpr int TILES = 2;              // of a warp
constexpr int EIGHTS = 4;             // of tokens, of a warp
constexpr u32 ROW_WARPS = ROW_TILES / TILES;
constexpr u32 COPY = 8;               // columns of a copy into shared memory
constexpr u32 SPAN_COPIES = SPAN / COPY;
constexpr u32 NONE = 0xffffffffu;

// A span of a block's tokens. A lane has WIDTH neighbouring columns, and those of its mma are four of them.
template <int WIDTH>
struct Stage {
  // Rows lie so that what lanes read at a time comes from different banks.
  static constexpr u32 STRIDE = SPAN + (WIDTH == 4 ? 16 : WIDTH == 8 ? 32 : 8);
  bf16 values[TOKENS * STRIDE];

  // What a lane multiplies of a row, from mma `first` of the span on.
  template <int COUNT>
  DEVICE void load(u32 (&to)[COUNT][2], u32 row, int first) const {
    constexpr int MMAS = WIDTH / 4;  // of neighbouring columns
    const bf16* own = values + row * STRIDE + WIDTH * (lane_index() % 4) + 4 * WIDTH * (first / MMAS) + 4 * (first % MMAS);
    if constexpr (COUNT == 2 && MMAS > 1) {
      const Quad quad = load_quad(own);
#pragma unroll
      for (int i = 0; i < 4; ++i) to[i / 2][i % 2] = quad.word[i];
    } else {
#pragma unroll
      for (int i = 0; i < COUNT; ++i) load_two(to[i], own + 4 * WIDTH * i);
    }
  }
};

// What a thread copies of a block's tokens.
struct TokenRows {
  static constexpr u32 COPIES = TOKENS * SPAN_COPIES / THREADS;
  const bf16* input;
  u32 cols;
  u32 first[COPIES];  // of a row's values; NONE where there is no token

  DEVICE TokenRows(const bf16* values, const Part& part, u32 width) : input(values), cols(width) {
    for (u32 i = 0; i < COPIES; ++i) {
      const u32 place = part.first + row(i);
      first[i] = place < part.end ? part.input_row(place) * cols : NONE;
    }
  }

  // Starts to copy a span; tokens that are none and columns behind the last become zeros.
  template <int WIDTH>
  DEVICE void fetch(Stage<WIDTH>& to, u32 span) const {
    const u32 at = COPY * (thread_index() % SPAN_COPIES), col = SPAN * span + at;
#pragma unroll
    for (u32 i = 0; i < COPIES; ++i) {
      const bool valid = first[i] != NONE && col < cols;
      copy_async(to.values + row(i) * Stage<WIDTH>::STRIDE + at, input + (valid ? first[i] + col : 0), valid);
    }
    commit_copies();
  }

 private:
  DEVICE static u32 row(u32 i) { return (thread_index() + i * THREADS) / SPAN_COPIES; }
};

// The span behind one in the order that is said above; NONE behind the last.
DEVICE u32 span_after(u32 span, u32 spans) {
  if (span + WARPS < spans) return span + WARPS;
  const u32 next = span % WARPS + 1;
  return next < smaller(spans, static_cast<u32>(WARPS)) ? next : NONE;
}

// What a thread adds up: by tiles of 16 rows, by eight tokens, and rows g and g + 8 of tokens 2t and 2t + 1.
typedef float Sums[TILES][EIGHTS][4];

// Goes on to the weights of the next span. Behind the last of a warp's turns there, what they gave is added to the total.
template <typename Held>
DEVICE void end_span(Held (&held)[TILES], const Held (&next)[TILES], Sums& total, Sums& sum, bool last) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
    held[tile] = next[tile];
#pragma unroll
    for (int i = 0; last && i < 4 * EIGHTS; ++i) {
      total[tile][i / 4][i % 4] += sum[tile][i / 4][i % 4];
      sum[tile][i / 4][i % 4] = 0;
    }
  }
}

// Writes what a warp has for its tokens from `first` on, as far as they go, and its tiles of rows from `first_tile` on.
DEVICE void write_sums(const Sums& sum, const Output& out, u32 first, u32 end, u32 first_tile, u32 rows) {
#pragma unroll
  for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
    for (int i = 0; i < 2 * EIGHTS; ++i) {
      const u32 token = first + 8 * (i / 2) + 2 * (lane_index() % 4) + i % 2;
      const float(&of)[4] = sum[tile][i / 2];
      if (token >= end) continue;
      out.write_two(token, ROWS * (first_tile + tile) + lane_index() / 4, rows, of[i % 2], of[i % 2 + 2]);
    }
  }
}

// How a format's span is divided: mmas of a group, and how many of them are multiplied at a time.
template <typename Format>
struct Groups {
  static constexpr int MMAS = Format::GROUP / 16;
  static constexpr int COUNT = SPAN / Format::GROUP;
  static constexpr int CHUNK = MMAS < 2 ? 1 : 2;
};

// The sum of a token's inputs, for each of a span's groups, in the bits that mma gives it with ones for weights: a warp has eight
// of the block's tokens.
template <typename Format>
DEVICE void add_inputs(float* totals, const Stage<Format::WIDTH>& stage) {
  constexpr int MMAS = Groups<Format>::MMAS, CHUNK = Groups<Format>::CHUNK;
  const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u}, first = 8 * warp_index();
#pragma unroll
  for (int group = 0; group < Groups<Format>::COUNT; ++group) {
    float total[4] = {};
#pragma unroll
    for (int mma = 0; mma < MMAS; mma += CHUNK) {
      u32 x[CHUNK][2];
      stage.load(x, first + lane_index() / 4, group * MMAS + mma);
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) multiply_bf16(total, ones, x[i]);
    }
    for (int i = 0; lane_index() < 4 && i < 2; ++i) {  // all rows are the same
      totals[TOKENS * group + first + 2 * lane_index() + i] = total[i];
    }
  }
}

// Adds the products of a group of columns with a warp's tokens, from `first_token` of the stage on.
template <typename Format>
DEVICE void add_products(Sums& to, const typename Format::Held (&held)[TILES], const Stage<Format::WIDTH>& stage,
                         u32 first_token, int group) {
  constexpr int MMAS = Groups<Format>::MMAS, CHUNK = Groups<Format>::CHUNK;
#pragma unroll
  for (int mma = group * MMAS; mma < group * MMAS + MMAS; mma += CHUNK) {
    u32 a[TILES][CHUNK][4];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
      for (int i = 0; i < CHUNK; ++i) held[tile].expand(a[tile][i], mma + i);
    }
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
      u32 x[CHUNK][2];
      stage.load(x, first_token + 8 * n + lane_index() / 4, mma);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
#pragma unroll
        for (int i = 0; i < CHUNK; ++i) multiply_bf16(to[tile][n], a[tile][i], x[i]);
      }
    }
  }
}

// Adds a span's products to `sum`, each group's scaled.
template <typename Format>
DEVICE void add_span(Sums& sum, const typename Format::Held (&held)[TILES], const Stage<Format::WIDTH>& stage,
                     [[maybe_unused]] const float* totals, u32 first_token) {
#pragma unroll
  for (int group = 0; group < Groups<Format>::COUNT; ++group) {
    if constexpr (!Format::SCALED) {
      add_products<Format>(sum, held, stage, first_token, group);
    } else {
      Sums dot = {};
      add_products<Format>(dot, held, stage, first_token, group);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) {
        const typename Format::Factors own(held[tile], group);
#pragma unroll
        for (int n = 0; n < EIGHTS; ++n) {
#pragma unroll
          for (int i = 0; i < 4; ++i) {
            float& value = sum[tile][n][i];
            value = fused(own.factor[i / 2], dot[tile][n][i], value);
            if constexpr (Format::AFFINE) {
              const u32 token = first_token + 8 * n + 2 * (lane_index() % 4) + i % 2;
              value = fused(own.middle[i / 2], totals[TOKENS * group + token], value);
            }
          }
        }
      }
    }
  }
}

// What the formats of a kernel share.
template <int WIDTH>
DEVICE Stage<WIDTH>* shared_stages() {
  SHARED(Stage<WIDTH>, stages, 2);
  return stages;
}
template <int GROUPS>
DEVICE float* shared_totals() {
  SHARED(float, totals, GROUPS * TOKENS);
  return totals;
}

// Grid: (parts of the rows, parts of the tokens or tiles).
template <typename Format>
DEVICE void multiply_many(const Format& weights, const bf16* input, const Mixture& mixture, const Output& out, u32 tokens) {
  const Part part(mixture, tokens, TOKENS);
  if (!part.used) return;
  Stage<Format::WIDTH>* stages = shared_stages<Format::WIDTH>();
  float* totals = Format::AFFINE ? shared_totals<Groups<Format>::COUNT>() : nullptr;
  const u32 spans = ceil_divide(weights.cols, SPAN), first_token = warp_index() / ROW_WARPS * 8 * EIGHTS;
  const u32 first_tile = block_x() * ROW_TILES + warp_index() % ROW_WARPS * TILES;
  typename Format::Held held[TILES], next[TILES];
  const auto load = [&](typename Format::Held(&to)[TILES], u32 span) {
#pragma unroll
    for (u32 tile = 0; tile < TILES; ++tile) {
      weights.load(to[tile], part.expert, smaller(first_tile + tile, ceil_divide(weights.rows, ROWS) - 1), span);
    }
  };
  load(held, 0);
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  const TokenRows rows(input, part, weights.cols);
  rows.fetch(stages[0], 0);
  Sums sum = {}, total = {};
  for (u32 span = 0, turn = 0; span != NONE; turn ^= 1) {
    const u32 after = span_after(span, spans);
    wait_copies<0>();
    sync_threads();  // everybody's copies of this span are there, and the other stage is free
    if (after != NONE) {
      rows.fetch(stages[turn ^ 1], after);
      load(next, after);
    }
    if constexpr (Format::AFFINE) {
      add_inputs<Format>(totals, stages[turn]);
      sync_threads();
    }
    add_span<Format>(sum, held, stages[turn], totals, first_token);
    end_span(held, next, total, sum, span + WARPS >= spans);
    span = after;
  }
  write_sums(total, out, part.first + first_token, part.end, first_tile, weights.rows);
}
