// Inputs in bytes, and products of a few tokens of them (rounded.cuh).
#include "rounded.cuh"

constexpr float NEGLIGIBLE = 1e-36f;  // 127 over less is not finite

// A lane's eight values.
struct Eight {
  float values[8];

  DEVICE explicit Eight(const Quad& pairs) {
#pragma unroll
    for (int i = 0; i < 8; ++i) values[i] = i % 2 ? high_float(pairs.word[i / 2]) : low_float(pairs.word[i / 2]);
  }

  DEVICE float largest() const {
    float most = 0;
    for (float value : values) most = larger(most, fabsf(value));
    return most;
  }

  // None where a value is not finite, else 0.
  DEVICE float nothing() const {
    float nothing = 0;
    for (float value : values) nothing += value * 0.0f;
    return nothing;
  }

  // The codes of the former or of the latter four, as 0, 2, 1, 3.
  DEVICE u32 codes(int latter, float factor) const {
    u32 word = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int place = i == 1 ? 2 : i == 2 ? 1 : i;
      word |= (static_cast<u32>(static_cast<int>(rintf(values[4 * latter + place] * factor))) & 0xff) << 8 * i;
    }
    return word;
  }
};

// The largest over four neighbouring lanes, and the sum.
DEVICE float largest_of_four(float value) {
  value = larger(value, shuffle_xor(value, 1));
  return larger(value, shuffle_xor(value, 2));
}
DEVICE float sum_of_four(float value) {
  value += shuffle_xor(value, 1);
  return value + shuffle_xor(value, 2);
}

// Rounds each 32 values of a token to bytes: the largest becomes 127. Where one is not finite the scale is none. A warp has a block
// of eight tokens, a lane eight values. Grid: (eighths of the rows' blocks, eighths of the tokens).
KERNEL(round_inputs, THREADS)(const bf16* input, u8* codes, float* scales, u32 tokens, u32 cols) {
  wait_for_previous();
  let_next_start();
  const Inputs all{codes, scales, tokens, cols};
  const u32 block = block_x() * WARPS + warp_index(), token = block_y() * TOKEN_ALIGNMENT + lane_index() / 4;
  const u32 place = lane_index() % 4, col = INPUT_BLOCK * block + 8 * place, span = block / SPAN_BLOCKS;
  if (span >= all.spans()) return;
  const Eight own(token < tokens && col < cols ? load_quad(input + static_cast<u64>(token) * cols + col) : Quad{});
  const float most = largest_of_four(own.largest()), scale = most / 127.0f + sum_of_four(own.nothing());
  const float factor = most > NEGLIGIBLE ? 127.0f / most : 0;
  const u32 words[2] = {scale == scale ? own.codes(0, factor) : 0, scale == scale ? own.codes(1, factor) : 0};
  if (token < tokens) store_two(codes + static_cast<u64>(token) * all.row() + col, words);
  const int sum = dot_bytes(words[1], 0x01010101u, dot_bytes(words[0], 0x01010101u, 0));
  const int half = sum + shuffle_xor(sum, 1), whole = half + shuffle_xor(half, 2);
  // A lane writes one of the planes; the latter two have the latter half.
  const int of_plane = place == 1 ? whole : place == 2 ? whole - half : half;
  const u64 pair = static_cast<u64>(span) * all.pairs() + token / 2;
  scales[pair * PAIR + place * PLANE + 2 * (block % SPAN_BLOCKS) + token % 2] =
      place == 0 ? scale : scale * static_cast<float>(of_plane);
}

// This lane's share of a block's tokens.
template <typename Format, int TILES>
struct FewTokens {
  const Inputs& input;
  u32 first[TILES];  // of the codes of token g
  u32 pair[TILES];   // tokens 2t and 2t + 1

  // Places behind the last token have that one's codes, and nobody writes what they give.
  DEVICE FewTokens(const Inputs& of, const Part& part) : input(of) {
#pragma unroll
    for (int n = 0; n < TILES; ++n) {
      const u32 eight = smaller(part.first + 8 * n, 2 * input.pairs() - TOKEN_ALIGNMENT);
      first[n] = smaller(eight + lane_index() / 4, input.tokens - 1) * input.row() + Format::WIDTH * (lane_index() % 4);
      pair[n] = eight / 2 + lane_index() % 4;
    }
  }

  DEVICE const u8* codes(int n, u32 span) const { return input.codes + first[n] + SPAN * span; }
  DEVICE const float* scales(int n, u32 span) const { return input.scales + (span * input.pairs() + pair[n]) * PAIR; }
};

template <typename Format, int TILES>
DEVICE void multiply_few(const Format& weights, const Inputs& input, const Output& out) {
  const Part part({}, input.tokens, 8 * TILES);
  const u32 spans = input.spans();
  typename Format::Held held, next;
  weights.template load<load_once>(held, block_x(), warp_index());
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  const FewTokens<Format, TILES> tokens(input, part);
  float sum[TILES][4] = {};
  for (u32 span = warp_index(); span < spans; span += WARPS) {
    weights.template load<load_once>(next, block_x(), span + WARPS);
#pragma unroll
    for (int group = 0; group < SPAN / Format::GROUP; ++group) {
      u32 a[Format::GROUP / 8];
      held.expand(a, group);
      const GroupFactors own = held.factors(group);
#pragma unroll
      for (int n = 0; n < TILES; ++n) add_group<Format>(sum[n], a, own, {tokens.codes(n, span), tokens.scales(n, span), group});
    }
    held = next;
  }
  finish<TILES>(sum, out, part, weights.rows);
}

#define PARAMETERS(...)                                                                                              \
  (const u32* codes, const u32* scales, const u8* input, const float* input_scales, bf16* halves, float* floats,     \
   u32 action, u32 stride, u32 tokens, u32 rows, u32 cols) {                                                            \
    const Inputs inputs{input, input_scales, tokens, cols};                                                         \
    multiply_few<__VA_ARGS__>({codes, scales, rows, cols}, inputs, {halves, floats, action, stride});              \
  }

RESIDENT_KERNEL(rounded_q4_0_8, THREADS, 3) PARAMETERS(Grouped<4, false>, 1)
KERNEL(rounded_q4_0_16, THREADS) PARAMETERS(Grouped<4, false>, 2)
KERNEL(rounded_q4_0_32, THREADS) PARAMETERS(Grouped<4, false>, 4)
KERNEL(rounded_q4_0_64, THREADS) PARAMETERS(Grouped<4, false>, 8)
RESIDENT_KERNEL(rounded_q4_1_8, THREADS, 2) PARAMETERS(Grouped<4, true>, 1)
KERNEL(rounded_q4_1_16, THREADS) PARAMETERS(Grouped<4, true>, 2)
KERNEL(rounded_q4_1_32, THREADS) PARAMETERS(Grouped<4, true>, 4)
KERNEL(rounded_q4_1_64, THREADS) PARAMETERS(Grouped<4, true>, 8)
KERNEL(rounded_q5_0_8, THREADS) PARAMETERS(Grouped<5, false>, 1)
KERNEL(rounded_q5_0_16, THREADS) PARAMETERS(Grouped<5, false>, 2)
KERNEL(rounded_q5_0_32, THREADS) PARAMETERS(Grouped<5, false>, 4)
KERNEL(rounded_q5_0_64, THREADS) PARAMETERS(Grouped<5, false>, 8)
KERNEL(rounded_q5_1_8, THREADS) PARAMETERS(Grouped<5, true>, 1)
KERNEL(rounded_q5_1_16, THREADS) PARAMETERS(Grouped<5, true>, 2)
LARGE_KERNEL(rounded_q5_1_32, THREADS) PARAMETERS(Grouped<5, true>, 4)
KERNEL(rounded_q5_1_64, THREADS) PARAMETERS(Grouped<5, true>, 8)
KERNEL(rounded_q8_0_8, THREADS) PARAMETERS(Bytes, 1)
RESIDENT_KERNEL(rounded_q8_0_16, THREADS, 2) PARAMETERS(Bytes, 2)
KERNEL(rounded_q8_0_32, THREADS) PARAMETERS(Bytes, 4)
KERNEL(rounded_q8_0_64, THREADS) PARAMETERS(Bytes, 8)
KERNEL(rounded_q2k_8, THREADS) PARAMETERS(InSuperblocks<Q2K>, 1)
KERNEL(rounded_q2k_16, THREADS) PARAMETERS(InSuperblocks<Q2K>, 2)
KERNEL(rounded_q2k_32, THREADS) PARAMETERS(InSuperblocks<Q2K>, 4)
KERNEL(rounded_q2k_64, THREADS) PARAMETERS(InSuperblocks<Q2K>, 8)
KERNEL(rounded_q3k_8, THREADS) PARAMETERS(InSuperblocks<Q3K>, 1)
KERNEL(rounded_q3k_16, THREADS) PARAMETERS(InSuperblocks<Q3K>, 2)
KERNEL(rounded_q3k_32, THREADS) PARAMETERS(InSuperblocks<Q3K>, 4)
KERNEL(rounded_q3k_64, THREADS) PARAMETERS(InSuperblocks<Q3K>, 8)
KERNEL(rounded_q4k_8, THREADS) PARAMETERS(InSuperblocks<Q4K>, 1)
KERNEL(rounded_q4k_16, THREADS) PARAMETERS(InSuperblocks<Q4K>, 2)
KERNEL(rounded_q4k_32, THREADS) PARAMETERS(InSuperblocks<Q4K>, 4)
KERNEL(rounded_q4k_64, THREADS) PARAMETERS(InSuperblocks<Q4K>, 8)
KERNEL(rounded_q5k_8, THREADS) PARAMETERS(InSuperblocks<Q5K>, 1)
KERNEL(rounded_q5k_16, THREADS) PARAMETERS(InSuperblocks<Q5K>, 2)
KERNEL(rounded_q5k_32, THREADS) PARAMETERS(InSuperblocks<Q5K>, 4)
KERNEL(rounded_q5k_64, THREADS) PARAMETERS(InSuperblocks<Q5K>, 8)
KERNEL(rounded_q6k_8, THREADS) PARAMETERS(InSuperblocks<Q6K>, 1)
KERNEL(rounded_q6k_16, THREADS) PARAMETERS(InSuperblocks<Q6K>, 2)
KERNEL(rounded_q6k_32, THREADS) PARAMETERS(InSuperblocks<Q6K>, 4)
KERNEL(rounded_q6k_64, THREADS) PARAMETERS(InSuperblocks<Q6K>, 8)
KERNEL(rounded_iq4xs_8, THREADS) PARAMETERS(InSuperblocks<IQ4XS>, 1)
KERNEL(rounded_iq4xs_16, THREADS) PARAMETERS(InSuperblocks<IQ4XS>, 2)
KERNEL(rounded_iq4xs_32, THREADS) PARAMETERS(InSuperblocks<IQ4XS>, 4)
KERNEL(rounded_iq4xs_64, THREADS) PARAMETERS(InSuperblocks<IQ4XS>, 8)
