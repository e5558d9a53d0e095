// Products of a few tokens with weights of 16, 8, 5 or 4 bits (linear.cuh).
//
// In every 32 columns of codes, lane 4g + t holds columns 8t .. 8t + 8: the first mma multiplies the former four of them, the second
// the latter.
#include "linear.cuh"

// Weights in bf16, row after row. An mma multiplies sixteen neighbouring columns.
template <int TILES>
DEVICE void linear_bf16(const bf16* weights, const bf16* input, const Mixture& mixture, const Output& out, u32 tokens,
                        u32 rows, u32 cols) {
  const Part part(mixture, tokens, 8 * TILES);
  if (!part.used) return;
  constexpr u32 SPAN_BLOCKS = SPAN / 32, DEPTH = SPAN_BLOCKS / 2;  // blocks of 32 columns: of a turn, and that a warp reads ahead
  const u32 group = lane_index() / 4, blocks = cols / 32;
  const bf16* row[2];
  for (u32 half = 0; half < 2; ++half) {
    const u32 index = smaller(block_x() * ROWS + group + 8 * half, rows - 1);
    row[half] = weights + (static_cast<u64>(part.expert) * rows + index) * cols + column_of_lane();
  }
  Quad held[DEPTH][2], next[DEPTH][2];
  const auto load = [&](Quad(&to)[DEPTH][2], u32 first) {
    for (u32 i = 0; i < DEPTH; ++i) {
      for (int half = 0; half < 2; ++half) {
        to[i][half] = first + i < blocks ? load_once(row[half] + 32 * (first + i)) : Quad{};
      }
    }
  };
  load(held, warp_index() * SPAN_BLOCKS);
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  const Tokens<TILES> columns(input, part, cols, column_of_lane());
  float sum[TILES][4] = {};
  // A half of a turn is read while the one before is multiplied; behind a turn's latter half comes the warp's next turn.
  for (u32 first = warp_index() * SPAN_BLOCKS, after; first - first % SPAN_BLOCKS < blocks; first = after) {
    after = first + (first % SPAN_BLOCKS == 0 ? DEPTH : (WARPS - 1) * SPAN_BLOCKS + DEPTH);
    load(next, after);
#pragma unroll
    for (u32 i = 0; i < DEPTH; ++i) {
      const Quad own[2] = {as_neighbours(held[i][0]), as_neighbours(held[i][1])};
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const Quad x = as_neighbours(columns.load(n, first + i, first + i < blocks));
#pragma unroll
        for (int part = 0; part < 2; ++part) {
          const u32 a[4] = {own[0].word[2 * part], own[1].word[2 * part], own[0].word[2 * part + 1], own[1].word[2 * part + 1]};
          const u32 b[2] = {x.word[2 * part], x.word[2 * part + 1]};
          multiply_bf16(sum[n], a, b);
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) held[i][half] = next[i][half];
    }
  }
  finish<TILES>(sum, out, part, rows);
}

// Weights scale · code + minimum, of codes of 4 or 5 bits in groups of GROUP columns.
//
// Codes of 16 rows and 64 columns are 128 words, 4 for each lane: word 2s + p is what the lane multiplies of columns
// 32s .. 32s + 32 in mma p. Fifth bits are a word for each lane behind them. Scales of 16 rows and a group are 16 words, those of rows g and g + 8 side by side: f16
// scale in the low half, f16 minimum in the high one.
template <int TILES, int BITS, int GROUP, bool AFFINE>
DEVICE void multiply_grouped(const u32* codes, const u32* scales, const bf16* input, const Mixture& mixture,
                             const Output& out, u32 tokens, u32 rows, u32 cols) {
  using Held = GroupedCodes<BITS>;
  const Part part(mixture, tokens, 8 * TILES);
  if (!part.used) return;
  const u32 blocks = ceil_divide(cols, 64), groups = ceil_divide(cols, GROUP), spans = ceil_divide(cols, SPAN);
  const u64 tile = static_cast<u64>(part.expert) * (rows / ROWS) + block_x();  // experts have whole tiles of rows
  const u32* own_codes = codes + (tile * blocks + 2 * warp_index()) * Held::WORDS + 4 * lane_index();
  const u32* own_scales = scales + tile * groups * ROWS + 2 * (lane_index() / 4);
  Held held[2], next[2];
  const auto load = [&](Held(&to)[2], u32 span) {  // the warp's next
    for (u32 i = 0; i < 2; ++i) to[i].template load<load_once>(own_codes + i * Held::WORDS, 2 * span + i < blocks);
    own_codes += 2 * WARPS * Held::WORDS;
  };
  load(held, warp_index());
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  const Tokens<TILES> columns(input, part, cols);
  const u32 ones[4] = {0x3f803f80u, 0x3f803f80u, 0x3f803f80u, 0x3f803f80u};
  float sum[TILES][4] = {};
  for (u32 span = warp_index(); span < spans; span += WARPS) {
    load(next, span + WARPS);
#pragma unroll
    for (u32 part = 0; part < SPAN / GROUP; ++part) {
      const u32 index = span * (SPAN / GROUP) + part;
      // Behind the last group the codes are zeros and so is the input.
      const u32* words = own_scales + smaller(index, groups - 1) * ROWS;
      const u32 scale[2] = {words[0], words[1]};
      float dot[TILES][4] = {}, total[TILES][4] = {};
#pragma unroll
      for (u32 i = 0; i < GROUP / 32; ++i) {
        const u32 block = part * (GROUP / 32) + i;  // of 32 columns, within the span
        const bool inside = 4 * span + block < cols / 32;
        u32 a[2][4];
#pragma unroll
        for (int mma = 0; mma < 2; ++mma) held[block / 2].expand(a[mma], 2 * (block % 2) + mma);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const Quad x = columns.load(n, 4 * span + block, inside);
          const u32 former[2] = {x.word[0], x.word[1]}, latter[2] = {x.word[2], x.word[3]};
          multiply_bf16(dot[n], a[0], former);
          multiply_bf16(dot[n], a[1], latter);
          if (AFFINE) {
            multiply_bf16(total[n], ones, former);
            multiply_bf16(total[n], ones, latter);
          }
        }
      }
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const GroupScale<BITS> own(scale[half]);
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          for (int i = 2 * half; i < 2 * half + 2; ++i) {
            sum[n][i] = fused(own.factor, dot[n][i], sum[n][i]);
            if (AFFINE) sum[n][i] = fused(own.middle, total[n][i], sum[n][i]);
          }
        }
      }
    }
    held[0] = next[0];
    held[1] = next[1];
  }
  finish<TILES>(sum, out, part, rows);
}

// The same with minimums, or (`affine` is 0) where the middle code is nothing everywhere.
template <int TILES, int BITS, int GROUP>
DEVICE void linear_grouped(const u32* codes, const u32* scales, const bf16* input, const Mixture& mixture,
                           const Output& out, u32 tokens, u32 rows, u32 cols, u32 affine) {
  if (affine) multiply_grouped<TILES, BITS, GROUP, true>(codes, scales, input, mixture, out, tokens, rows, cols);
  else multiply_grouped<TILES, BITS, GROUP, false>(codes, scales, input, mixture, out, tokens, rows, cols);
}

// Weights scale · code of 8-bit codes, row after row, with a scale for every `group` columns of a row: whole spans of 128,
// or all of them. In every 64 columns, lane 4g + t holds columns 16t .. 16t + 16.
template <int TILES, bool FP8>
DEVICE void linear_8bit(const u8* codes, const float* scales, const bf16* input, const Mixture& mixture,
                        const Output& out, u32 tokens, u32 rows, u32 cols, u32 group) {
  const Part part(mixture, tokens, 8 * TILES);
  if (!part.used) return;
  [[maybe_unused]] constexpr int UNROLLED = TILES < 4 ? 2 : 1;  // halves of one: registers do not hold all of it for many tokens
  const u32 lane_col = 16 * (lane_index() % 4), spans = ceil_divide(cols, SPAN), groups = ceil_divide(cols, group);
  const u8* row[2];
  const float* scale[2];
  for (u32 half = 0; half < 2; ++half) {
    const u32 index = smaller(block_x() * ROWS + lane_index() / 4 + 8 * half, rows - 1);
    const u64 weight_row = static_cast<u64>(part.expert) * rows + index;
    row[half] = codes + weight_row * cols + lane_col + SPAN * warp_index();
    scale[half] = scales + weight_row * groups;
  }
  Quad held[2][2], next[2][2];
  const auto load = [&](Quad(&to)[2][2], u32 span) {  // the warp's next
    for (int half = 0; half < 2; ++half) {
      for (u32 i = 0; i < 2; ++i) {
        to[i][half] = SPAN * span + 64 * i + lane_col < cols ? load_once(row[half] + 64 * i) : Quad{};
      }
      row[half] += SPAN * WARPS;
    }
  };
  load(held, warp_index());
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  // Pointers: with places in the input, as above, the compiler has too few registers here.
  const bf16* columns[TILES];
  bool valid[TILES];
  for (int n = 0; n < TILES; ++n) {
    const u32 place = part.first + 8 * n + lane_index() / 4;
    valid[n] = place < part.end;
    columns[n] = input + static_cast<u64>(valid[n] ? part.input_row(place) : 0) * cols + lane_col;
  }
  float sum[TILES][4] = {};
  for (u32 span = warp_index(); span < spans; span += WARPS) {
    load(next, span + WARPS);
    const u32 index = groups > 1 ? smaller(span * SPAN / group, groups - 1) : 0;
    const float factor[2] = {scale[0][index], scale[1][index]};
    float dot[TILES][4] = {};
#pragma unroll UNROLLED
    for (u32 i = 0; i < 2; ++i) {
      const u32 col = SPAN * span + 64 * i;
#pragma unroll
      for (u32 quarter = 0; quarter < 4; ++quarter) {
        u32 a[4];
#pragma unroll
        for (u32 r = 0; r < 4; ++r) {
          const u32 word = held[0][r % 2].word[quarter];
          a[r] = FP8 ? expand_two_e4m3(word, r / 2) : expand_two_signed(word, r / 2);
        }
#pragma unroll
        for (int n = 0; n < TILES; ++n) {
          const bool inside = valid[n] && col + lane_col < cols;
          u64 pairs = 0;
          if (inside) pairs = *reinterpret_cast<const u64*>(columns[n] + col + 4 * quarter);
          const u32 b[2] = {static_cast<u32>(pairs), static_cast<u32>(pairs >> 32)};
          multiply_bf16(dot[n], a, b);
        }
      }
      held[0][0] = held[1][0];
      held[0][1] = held[1][1];
    }
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[n][i] = fused(factor[i / 2], dot[n][i], sum[n][i]);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) held[i / 2][i % 2] = next[i / 2][i % 2];
  }
  finish<TILES>(sum, out, part, rows);
}

// Weights scale · code of signed 8-bit codes in groups of 32 columns (Q8_0).
//
// Codes of 16 rows and 32 columns are 128 words, 4 for each lane: lane 4g + t has columns 8t .. 8t + 8 of row g and then of
// row g + 8. Their scales are 8 words: f16 of row g in the low half, of row g + 8 in the high one.
template <int TILES>
DEVICE void linear_int8_g32(const u32* codes, const u32* scales, const bf16* input, const Mixture& mixture,
                            const Output& out, u32 tokens, u32 rows, u32 cols) {
  const Part part(mixture, tokens, 8 * TILES);
  if (!part.used) return;
  constexpr int DEPTH = 4;  // blocks of 32 columns that a warp reads ahead
  const u32 blocks = cols / 32;
  const u64 tile = static_cast<u64>(part.expert) * (rows / ROWS) + block_x();  // experts have whole tiles of rows
  const u32* own_codes = codes + (tile * blocks + warp_index() * DEPTH) * 128 + 4 * lane_index();
  const u32* own_scales = scales + tile * blocks * 8 + lane_index() / 4;
  Quad held[DEPTH], next[DEPTH];
  const auto load = [&](Quad(&to)[DEPTH], u32 first) {  // the warp's next
    for (int i = 0; i < DEPTH; ++i) to[i] = first + i < blocks ? load_once(own_codes + i * 128) : Quad{};
    own_codes += WARPS * DEPTH * 128;
  };
  load(held, warp_index() * DEPTH);
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  const Tokens<TILES> columns(input, part, cols);
  float sum[TILES][4] = {};
  for (u32 first = warp_index() * DEPTH; first < blocks; first += WARPS * DEPTH) {
    load(next, first + WARPS * DEPTH);
#pragma unroll
    for (int i = 0; i < DEPTH; ++i) {
      const u32 scale = own_scales[smaller(first + i, blocks - 1) * 8];
      const float factor[2] = {half_to_float(scale & 0xffff), half_to_float(scale >> 16)};
      u32 a[2][4];
#pragma unroll
      for (int part = 0; part < 2; ++part) {
#pragma unroll
        for (int r = 0; r < 4; ++r) a[part][r] = expand_two_signed(held[i].word[2 * (r % 2) + part], r / 2);
      }
#pragma unroll
      for (int n = 0; n < TILES; ++n) {
        const Quad x = columns.load(n, first + i, first + i < blocks);
        const u32 former[2] = {x.word[0], x.word[1]}, latter[2] = {x.word[2], x.word[3]};
        float dot[4] = {};
        multiply_bf16(dot, a[0], former);
        multiply_bf16(dot, a[1], latter);
#pragma unroll
        for (int k = 0; k < 4; ++k) sum[n][k] = fused(factor[k / 2], dot[k], sum[n][k]);
      }
      held[i] = next[i];
    }
  }
  finish<TILES>(sum, out, part, rows);
}

#define BF16_PARAMETERS                                                                                            \
  (const bf16* weights, const bf16* input, const u32* tiles, const u32* places, bf16* halves, float* floats,       \
   u32 action, u32 stride, u32 tokens, u32 rows, u32 cols) {                                                                      \
    linear_bf16
#define BF16_ARGUMENTS (weights, input, {tiles, places}, {halves, floats, action, stride}, tokens, rows, cols); }

RESIDENT_KERNEL(linear_bf16_8, THREADS, 4) BF16_PARAMETERS<1> BF16_ARGUMENTS
RESIDENT_KERNEL(linear_bf16_16, THREADS, 3) BF16_PARAMETERS<2> BF16_ARGUMENTS
KERNEL(linear_bf16_32, THREADS) BF16_PARAMETERS<4> BF16_ARGUMENTS
KERNEL(linear_bf16_64, THREADS) BF16_PARAMETERS<8> BF16_ARGUMENTS

#define GROUPED_PARAMETERS                                                                                         \
  (const u32* codes, const u32* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves,      \
   float* floats, u32 action, u32 stride, u32 tokens, u32 rows, u32 cols, u32 affine) {                                           \
    linear_grouped
#define GROUPED_ARGUMENTS                                                                                          \
  (codes, scales, input, {tiles, places}, {halves, floats, action, stride}, tokens, rows, cols, affine); }

RESIDENT_KERNEL(linear_int4_g32_8, THREADS, 3) GROUPED_PARAMETERS<1, 4, 32> GROUPED_ARGUMENTS
RESIDENT_KERNEL(linear_int4_g32_16, THREADS, 2) GROUPED_PARAMETERS<2, 4, 32> GROUPED_ARGUMENTS
KERNEL(linear_int4_g32_32, THREADS) GROUPED_PARAMETERS<4, 4, 32> GROUPED_ARGUMENTS
KERNEL(linear_int4_g32_64, THREADS) GROUPED_PARAMETERS<8, 4, 32> GROUPED_ARGUMENTS
RESIDENT_KERNEL(linear_int4_g64_8, THREADS, 3) GROUPED_PARAMETERS<1, 4, 64> GROUPED_ARGUMENTS
KERNEL(linear_int4_g64_16, THREADS) GROUPED_PARAMETERS<2, 4, 64> GROUPED_ARGUMENTS
KERNEL(linear_int4_g64_32, THREADS) GROUPED_PARAMETERS<4, 4, 64> GROUPED_ARGUMENTS
KERNEL(linear_int4_g64_64, THREADS) GROUPED_PARAMETERS<8, 4, 64> GROUPED_ARGUMENTS
KERNEL(linear_int4_g128_8, THREADS) GROUPED_PARAMETERS<1, 4, 128> GROUPED_ARGUMENTS
KERNEL(linear_int4_g128_16, THREADS) GROUPED_PARAMETERS<2, 4, 128> GROUPED_ARGUMENTS
KERNEL(linear_int4_g128_32, THREADS) GROUPED_PARAMETERS<4, 4, 128> GROUPED_ARGUMENTS
KERNEL(linear_int4_g128_64, THREADS) GROUPED_PARAMETERS<8, 4, 128> GROUPED_ARGUMENTS
RESIDENT_KERNEL(linear_int5_g32_8, THREADS, 3) GROUPED_PARAMETERS<1, 5, 32> GROUPED_ARGUMENTS
KERNEL(linear_int5_g32_16, THREADS) GROUPED_PARAMETERS<2, 5, 32> GROUPED_ARGUMENTS
KERNEL(linear_int5_g32_32, THREADS) GROUPED_PARAMETERS<4, 5, 32> GROUPED_ARGUMENTS
KERNEL(linear_int5_g32_64, THREADS) GROUPED_PARAMETERS<8, 5, 32> GROUPED_ARGUMENTS

#define EIGHT_BIT_PARAMETERS                                                                                       \
  (const u8* codes, const float* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves,     \
   float* floats, u32 action, u32 stride, u32 tokens, u32 rows, u32 cols, u32 group) {                                            \
    linear_8bit
#define EIGHT_BIT_ARGUMENTS                                                                                        \
  (codes, scales, input, {tiles, places}, {halves, floats, action, stride}, tokens, rows, cols, group); }

KERNEL(linear_fp8_8, THREADS) EIGHT_BIT_PARAMETERS<1, true> EIGHT_BIT_ARGUMENTS
KERNEL(linear_fp8_16, THREADS) EIGHT_BIT_PARAMETERS<2, true> EIGHT_BIT_ARGUMENTS
LARGE_KERNEL(linear_fp8_32, THREADS) EIGHT_BIT_PARAMETERS<4, true> EIGHT_BIT_ARGUMENTS
KERNEL(linear_fp8_64, THREADS) EIGHT_BIT_PARAMETERS<8, true> EIGHT_BIT_ARGUMENTS
KERNEL(linear_int8_8, THREADS) EIGHT_BIT_PARAMETERS<1, false> EIGHT_BIT_ARGUMENTS
KERNEL(linear_int8_16, THREADS) EIGHT_BIT_PARAMETERS<2, false> EIGHT_BIT_ARGUMENTS
KERNEL(linear_int8_32, THREADS) EIGHT_BIT_PARAMETERS<4, false> EIGHT_BIT_ARGUMENTS
KERNEL(linear_int8_64, THREADS) EIGHT_BIT_PARAMETERS<8, false> EIGHT_BIT_ARGUMENTS

#define INT8_G32_PARAMETERS                                                                                        \
  (const u32* codes, const u32* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves,      \
   float* floats, u32 action, u32 stride, u32 tokens, u32 rows, u32 cols) {                                                       \
    linear_int8_g32
#define INT8_G32_ARGUMENTS (codes, scales, input, {tiles, places}, {halves, floats, action, stride}, tokens, rows, cols); }

KERNEL(linear_int8_g32_8, THREADS) INT8_G32_PARAMETERS<1> INT8_G32_ARGUMENTS
KERNEL(linear_int8_g32_16, THREADS) INT8_G32_PARAMETERS<2> INT8_G32_ARGUMENTS
KERNEL(linear_int8_g32_32, THREADS) INT8_G32_PARAMETERS<4> INT8_G32_ARGUMENTS
KERNEL(linear_int8_g32_64, THREADS) INT8_G32_PARAMETERS<8> INT8_G32_ARGUMENTS
