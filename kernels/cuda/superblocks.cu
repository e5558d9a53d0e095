// Products of a few tokens (linear.cuh) with weights in superblocks (superblocks.cuh), and rows of such a table.
#include "linear.cuh"
#include "superblocks.cuh"

template <int TILES, Kind KIND>
DEVICE void linear_superblocks(const u32* codes, const u32* scales, const bf16* input, const Mixture& mixture,
                               const Output& out, u32 tokens, u32 rows, u32 cols) {
  using Held = Codes<KIND>;
  const Part part(mixture, tokens, 8 * TILES);
  if (!part.used) return;
  const u32 spans = cols / SPAN;
  const u64 tile = static_cast<u64>(part.expert) * (rows / ROWS) + block_x();  // experts have whole tiles of rows
  const u32* own_codes = codes + (tile * spans + warp_index()) * Held::SPAN_WORDS;
  const u32* own_scales = scales + tile * (spans / 2) * Scales<KIND>::WORDS;
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
    Scales<KIND> scale;
    scale.load(own_scales, span);
#pragma unroll
    for (int group = 0; group < SPAN / 16 / Held::MMAS; ++group) {
      u32 a[Held::MMAS][4];
#pragma unroll
      for (int mma = 0; mma < Held::MMAS; ++mma) held.expand(a[mma], group * Held::MMAS + mma);
      const Factors<KIND> own(scale, group);
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
template <Kind KIND>
DEVICE void expand_four(float (&values)[4], const u32* codes, const u32* scales, u64 tile, u32 g, u32 upper, u32 col,
                        u32 cols) {
  using Layout = Codes<KIND>;
  constexpr u32 ROW_WORDS = Scales<KIND>::ROW_WORDS;
  const u32* span = codes + (tile * (cols / SPAN) + col / SPAN) * Layout::SPAN_WORDS;
  const u32* own = scales + (tile * (cols / 256) + col / 256) * Scales<KIND>::WORDS;
  const u32* words = own + ROW_WORDS * (16 * (col / SPAN % 2) + 2 * g + upper);
  const u32 factors = own[32 * ROW_WORDS + 2 * g + upper];
  const u32 mma = col % SPAN / 16, lane = 4 * g + col % 16 / 4, group = mma / Layout::MMAS;
  const float factor = factor_of<KIND>(words, factors, group);
  float minimum = 0;
  if constexpr (Layout::AFFINE) minimum = minimum_of<KIND>(words, factors, group);
  for (u32 i = 0; i < 4; ++i) {
    const u32 reg = 2 * (i / 2) + upper, code = Layout::at(span, lane, 4 * mma + reg, i % 2);
    const float number = Layout::NAMED ? signed_byte(named_bytes(code), 0) : static_cast<float>(code);
    const bool centred = !Layout::NAMED && !Layout::AFFINE;
    values[i] = factor * (centred ? number - Layout::MIDDLE : number) - minimum;
  }
}

// Rows of a table by their token, as those of gather.cu.
template <Kind KIND>
DEVICE void embed_superblocks(const u32* tokens, const u32* codes, const u32* scales, float* out, u32 cols, u32 rows,
                              u32 first, float factor) {
  wait_for_previous();
  let_next_start();
  const u32 token = tokens[block_x()] - first;
  for (u32 col = 4 * thread_index(); col < cols; col += 4 * THREADS) {
    float values[4] = {};
    if (token < rows) expand_four<KIND>(values, codes, scales, token / 16, token % 8, token / 8 % 2, col, cols);
    const Quad bits = {{bits_of(values[0] * factor), bits_of(values[1] * factor), bits_of(values[2] * factor),
                        bits_of(values[3] * factor)}};
    store_quad(out + static_cast<u64>(block_x()) * cols + col, bits);
  }
}

#define LINEAR_PARAMETERS                                                                                          \
  (const u32* codes, const u32* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves,      \
   float* floats, u32 action, u32 stride, u32 tokens, u32 rows, u32 cols) {                                                       \
    linear_superblocks
#define LINEAR_ARGUMENTS (codes, scales, input, {tiles, places}, {halves, floats, action, stride}, tokens, rows, cols); }

RESIDENT_KERNEL(linear_q2k_8, THREADS, 2) LINEAR_PARAMETERS<1, Q2K> LINEAR_ARGUMENTS
KERNEL(linear_q2k_16, THREADS) LINEAR_PARAMETERS<2, Q2K> LINEAR_ARGUMENTS
KERNEL(linear_q2k_32, THREADS) LINEAR_PARAMETERS<4, Q2K> LINEAR_ARGUMENTS
KERNEL(linear_q2k_64, THREADS) LINEAR_PARAMETERS<8, Q2K> LINEAR_ARGUMENTS
KERNEL(linear_q3k_8, THREADS) LINEAR_PARAMETERS<1, Q3K> LINEAR_ARGUMENTS
KERNEL(linear_q3k_16, THREADS) LINEAR_PARAMETERS<2, Q3K> LINEAR_ARGUMENTS
KERNEL(linear_q3k_32, THREADS) LINEAR_PARAMETERS<4, Q3K> LINEAR_ARGUMENTS
KERNEL(linear_q3k_64, THREADS) LINEAR_PARAMETERS<8, Q3K> LINEAR_ARGUMENTS
RESIDENT_KERNEL(linear_q4k_8, THREADS, 3) LINEAR_PARAMETERS<1, Q4K> LINEAR_ARGUMENTS
KERNEL(linear_q4k_16, THREADS) LINEAR_PARAMETERS<2, Q4K> LINEAR_ARGUMENTS
KERNEL(linear_q4k_32, THREADS) LINEAR_PARAMETERS<4, Q4K> LINEAR_ARGUMENTS
KERNEL(linear_q4k_64, THREADS) LINEAR_PARAMETERS<8, Q4K> LINEAR_ARGUMENTS
RESIDENT_KERNEL(linear_q5k_8, THREADS, 3) LINEAR_PARAMETERS<1, Q5K> LINEAR_ARGUMENTS
KERNEL(linear_q5k_16, THREADS) LINEAR_PARAMETERS<2, Q5K> LINEAR_ARGUMENTS
KERNEL(linear_q5k_32, THREADS) LINEAR_PARAMETERS<4, Q5K> LINEAR_ARGUMENTS
KERNEL(linear_q5k_64, THREADS) LINEAR_PARAMETERS<8, Q5K> LINEAR_ARGUMENTS
KERNEL(linear_q6k_8, THREADS) LINEAR_PARAMETERS<1, Q6K> LINEAR_ARGUMENTS
KERNEL(linear_q6k_16, THREADS) LINEAR_PARAMETERS<2, Q6K> LINEAR_ARGUMENTS
KERNEL(linear_q6k_32, THREADS) LINEAR_PARAMETERS<4, Q6K> LINEAR_ARGUMENTS
KERNEL(linear_q6k_64, THREADS) LINEAR_PARAMETERS<8, Q6K> LINEAR_ARGUMENTS
KERNEL(linear_iq4xs_8, THREADS) LINEAR_PARAMETERS<1, IQ4XS> LINEAR_ARGUMENTS
KERNEL(linear_iq4xs_16, THREADS) LINEAR_PARAMETERS<2, IQ4XS> LINEAR_ARGUMENTS
KERNEL(linear_iq4xs_32, THREADS) LINEAR_PARAMETERS<4, IQ4XS> LINEAR_ARGUMENTS
KERNEL(linear_iq4xs_64, THREADS) LINEAR_PARAMETERS<8, IQ4XS> LINEAR_ARGUMENTS

#define EMBED_PARAMETERS                                                                                           \
  (const u32* tokens, const u32* codes, const u32* scales, float* out, u32 cols, u32 rows, u32 first, float factor) { \
    embed_superblocks
#define EMBED_ARGUMENTS (tokens, codes, scales, out, cols, rows, first, factor); }

KERNEL(embed_q2k, THREADS) EMBED_PARAMETERS<Q2K> EMBED_ARGUMENTS
KERNEL(embed_q3k, THREADS) EMBED_PARAMETERS<Q3K> EMBED_ARGUMENTS
KERNEL(embed_q4k, THREADS) EMBED_PARAMETERS<Q4K> EMBED_ARGUMENTS
KERNEL(embed_q5k, THREADS) EMBED_PARAMETERS<Q5K> EMBED_ARGUMENTS
KERNEL(embed_q6k, THREADS) EMBED_PARAMETERS<Q6K> EMBED_ARGUMENTS
KERNEL(embed_iq4xs, THREADS) EMBED_PARAMETERS<IQ4XS> EMBED_ARGUMENTS
