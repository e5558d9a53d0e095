// Products of many tokens (many.cuh) with weights in superblocks (superblocks.cuh).
#include "many.cuh"
#include "superblocks.cuh"

// As the formats of many.cu.
template <int BITS>
struct InSuperblocks {
  static constexpr int WIDTH = 4, GROUP = 16 * Codes<BITS>::MMAS;
  static constexpr bool SCALED = true, AFFINE = Codes<BITS>::AFFINE;
  const u32* codes;
  const u32* scales;
  u32 rows, cols;

  struct Held {
    Codes<BITS> codes;
    Quad scales;
    u32 factors[2];

    DEVICE void expand(u32 (&out)[4], int mma) const { codes.expand(out, mma / 2, mma % 2); }
  };

  struct Factors : ::Factors<BITS> {
    DEVICE Factors(const Held& held, int group) : ::Factors<BITS>(held.scales, held.factors, group) {}
  };

  DEVICE void load(Held& to, u32 expert, u32 tile, u32 span) const {
    const u32 spans = cols / SPAN;
    const u64 place = static_cast<u64>(expert) * (rows / ROWS) + tile;
    to.codes.template load<load_quad>(codes + (place * spans + span) * Codes<BITS>::SPAN_WORDS);
    const u32* words = scales + (place * (spans / 2) + span / 2) * SCALE_WORDS;
    to.scales = load_quad(words + 32 * (span % 2) + 4 * (lane_index() / 4));
    load_two(to.factors, words + 64 + 2 * (lane_index() / 4));
  }
};

#define SUPERBLOCKS(BITS)                                                                                            \
  (const u32* codes, const u32* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves,        \
   float* floats, u32 add, u32 stride, u32 tokens, u32 rows, u32 cols) {                                             \
    const Output out{halves, floats, add, stride};                                                                   \
    multiply_many(InSuperblocks<BITS>{codes, scales, rows, cols}, input, {tiles, places}, out, tokens);              \
  }

KERNEL(many_q4k, THREADS) SUPERBLOCKS(4)
KERNEL(many_q5k, THREADS) SUPERBLOCKS(5)
KERNEL(many_q6k, THREADS) SUPERBLOCKS(6)
