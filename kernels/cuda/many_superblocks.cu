// Products of many tokens (many.cuh) with weights in superblocks (superblocks.cuh).
#include "many.cuh"
#include "superblocks.cuh"

// As the formats of many.cu.
template <Kind KIND>
struct InSuperblocks {
  static constexpr int WIDTH = 4, GROUP = 16 * Codes<KIND>::MMAS;
  static constexpr bool SCALED = true, AFFINE = Codes<KIND>::AFFINE;
  const u32* codes;
  const u32* scales;
  u32 rows, cols;

  struct Held {
    Codes<KIND> codes;
    Scales<KIND> scales;

    DEVICE void expand(u32 (&out)[4], int mma) const { codes.expand(out, mma); }
  };

  struct Factors : ::Factors<KIND> {
    DEVICE Factors(const Held& held, int group) : ::Factors<KIND>(held.scales, group) {}
  };

  DEVICE void load(Held& to, u32 expert, u32 tile, u32 span) const {
    const u32 spans = cols / SPAN;
    const u64 place = static_cast<u64>(expert) * (rows / ROWS) + tile;
    to.codes.template load<load_quad>(codes + (place * spans + span) * Codes<KIND>::SPAN_WORDS);
    to.scales.load(scales + place * (spans / 2) * Scales<KIND>::WORDS, span);
  }
};

#define SUPERBLOCKS(KIND)                                                                                            \
  (const u32* codes, const u32* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves,        \
   float* floats, u32 action, u32 stride, u32 tokens, u32 rows, u32 cols) {                                             \
    const Output out{halves, floats, action, stride};                                                                   \
    multiply_many(InSuperblocks<KIND>{codes, scales, rows, cols}, input, {tiles, places}, out, tokens);              \
  }

KERNEL(many_q2k, THREADS) SUPERBLOCKS(Q2K)
KERNEL(many_q3k, THREADS) SUPERBLOCKS(Q3K)
KERNEL(many_q4k, THREADS) SUPERBLOCKS(Q4K)
KERNEL(many_q5k, THREADS) SUPERBLOCKS(Q5K)
KERNEL(many_q6k, THREADS) SUPERBLOCKS(Q6K)
KERNEL(many_iq4xs, THREADS) SUPERBLOCKS(IQ4XS)
