// Products of a few tokens (linear.cuh) with weights in superblocks (superblocks.cuh), and rows of such a table.
#include "linear.cuh"
#include "superblocks.cuh"

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
    if (span < spans) to.template load<load_once>(own_codes);
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
    u32 factors[2];
    load_two(factors, words + 64 + 2 * (lane_index() / 4));
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
          sum[n][i] = fused(own.factor[i / 2], dot[i], sum[n][i]);
          if constexpr (Held::AFFINE) sum[n][i] = fused(own.middle[i / 2], total[i], sum[n][i]);
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
