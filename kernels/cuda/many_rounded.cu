// Products of many tokens with inputs in bytes (rounded.cuh): as many.cuh says, and with the bits that rounded.cu gives.
#include "many.cuh"
#include "rounded.cuh"

constexpr u32 CODES_COPY = 16;      // columns of a copy into shared memory
constexpr u32 FLOATS_COPY = 4;      // what is said of so many, of two tokens
constexpr u32 PAIRS = TOKENS / 2;

// A span of a block's tokens: codes, and those planes that a format reads.
template <typename Format>
struct RoundedStage {
  // Rows lie so that what lanes read at a time comes from different banks.
  static constexpr u32 STRIDE = SPAN + (Format::WIDTH == 8 ? 32 : 16);
  static constexpr u32 READ = PLANE * (!Format::AFFINE ? 1 : Format::GROUP == INPUT_BLOCK ? 2 : PLANES);
  u8 codes[TOKENS * STRIDE];
  float scales[PAIRS * READ];
};

// Starts to copy a span; tokens that are none become zeros.
template <typename Format>
DEVICE void fetch(RoundedStage<Format>& to, const Inputs& input, u32 first_token, u32 span) {
  typedef RoundedStage<Format> Stage;
#pragma unroll
  for (u32 i = 0; i < TOKENS * SPAN / CODES_COPY / THREADS; ++i) {
    const u32 copy = thread_index() + i * THREADS, at = CODES_COPY * (copy % (SPAN / CODES_COPY));
    const u32 place = copy / (SPAN / CODES_COPY), token = first_token + place;
    const bool valid = token < input.tokens;
    const u32 from = valid ? token * input.row() + SPAN * span + at : 0;
    copy_async(to.codes + place * Stage::STRIDE + at, input.codes + from, valid);
  }
#pragma unroll
  for (u32 i = thread_index(); i < PAIRS * Stage::READ / FLOATS_COPY; i += THREADS) {
    const u32 at = FLOATS_COPY * (i % (Stage::READ / FLOATS_COPY)), place = i / (Stage::READ / FLOATS_COPY);
    const u32 pair = first_token / 2 + place;
    const bool valid = pair < input.pairs();
    const u32 from = valid ? (span * input.pairs() + pair) * PAIR + at : 0;
    copy_async(to.scales + place * Stage::READ + at, input.scales + from, valid);
  }
  commit_copies();
}

// Adds a span's products to `sum`.
template <typename Format>
DEVICE void add_rounded_span(Sums& sum, const typename Format::Held (&held)[TILES], const RoundedStage<Format>& stage,
                             u32 first_token) {
  typedef RoundedStage<Format> Stage;
  const u8* codes = stage.codes + (first_token + lane_index() / 4) * Stage::STRIDE + Format::WIDTH * (lane_index() % 4);
  const float* scales = stage.scales + (first_token / 2 + lane_index() % 4) * Stage::READ;
#pragma unroll
  for (int group = 0; group < SPAN / Format::GROUP; ++group) {
    u32 a[TILES][Format::GROUP / 8];
#pragma unroll
    for (int tile = 0; tile < TILES; ++tile) held[tile].expand(a[tile], group);
    const GroupFactors own[TILES] = {held[0].factors(group), held[1].factors(group)};
#pragma unroll
    for (int n = 0; n < EIGHTS; ++n) {
      const GroupInputs<Format> input(codes + 8 * n * Stage::STRIDE, scales + 4 * n * Stage::READ, group);
#pragma unroll
      for (int tile = 0; tile < TILES; ++tile) add_group<Format>(sum[tile][n], a[tile], own[tile], input);
    }
  }
}

// Grid: (parts of the rows, parts of the tokens).
template <typename Format>
DEVICE void multiply_many_rounded(const Format& weights, const Inputs& input, const Output& out) {
  SHARED(RoundedStage<Format>, stages, 2);
  const u32 first = block_y() * TOKENS, spans = input.spans();
  const u32 first_token = warp_index() / ROW_WARPS * 8 * EIGHTS;
  const u32 first_tile = block_x() * ROW_TILES + warp_index() % ROW_WARPS * TILES;
  typename Format::Held held[TILES], next[TILES];
  const auto load = [&](typename Format::Held(&to)[TILES], u32 span) {
#pragma unroll
    for (u32 tile = 0; tile < TILES; ++tile) {
      weights.template load<load_quad>(to[tile], smaller(first_tile + tile, ceil_divide(weights.rows, ROWS) - 1), span);
    }
  };
  load(held, 0);
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  fetch<Format>(stages[0], input, first, 0);
  Sums sum = {}, total = {};
  for (u32 span = 0, turn = 0; span != NONE; turn ^= 1) {
    const u32 after = span_after(span, spans);
    wait_copies<0>();
    sync_threads();  // everybody's copies of this span are there, and the other stage is free
    if (after != NONE) {
      fetch<Format>(stages[turn ^ 1], input, first, after);
      load(next, after);
    }
    add_rounded_span<Format>(sum, held, stages[turn], first_token);
    end_span(held, next, total, sum, span + WARPS >= spans);
    span = after;
  }
  write_sums(total, out, first + first_token, input.tokens, first_tile, weights.rows);
}

#define PARAMETERS(...)                                                                                              \
  (const u32* codes, const u32* scales, const u8* input, const float* input_scales, bf16* halves, float* floats,     \
   u32 action, u32 stride, u32 tokens, u32 rows, u32 cols) {                                                            \
    const Inputs inputs{input, input_scales, tokens, cols};                                                         \
    multiply_many_rounded<__VA_ARGS__>({codes, scales, rows, cols}, inputs, {halves, floats, action, stride});     \
  }

KERNEL(many_rounded_q4_0, THREADS) PARAMETERS(Grouped<4, false>)
KERNEL(many_rounded_q4_1, THREADS) PARAMETERS(Grouped<4, true>)
KERNEL(many_rounded_q5_0, THREADS) PARAMETERS(Grouped<5, false>)
KERNEL(many_rounded_q5_1, THREADS) PARAMETERS(Grouped<5, true>)
KERNEL(many_rounded_q8_0, THREADS) PARAMETERS(Bytes)
KERNEL(many_rounded_q2k, THREADS) PARAMETERS(InSuperblocks<Q2K>)
KERNEL(many_rounded_q3k, THREADS) PARAMETERS(InSuperblocks<Q3K>)
KERNEL(many_rounded_q4k, THREADS) PARAMETERS(InSuperblocks<Q4K>)
KERNEL(many_rounded_q5k, THREADS) PARAMETERS(InSuperblocks<Q5K>)
KERNEL(many_rounded_q6k, THREADS) PARAMETERS(InSuperblocks<Q6K>)
KERNEL(many_rounded_iq4xs, THREADS) PARAMETERS(InSuperblocks<IQ4XS>)
