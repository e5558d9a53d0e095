// Products of many tokens (many.cuh) with weights of 16, 8, 5 or 4 bits, which lie as linear.cu says.
#include "many.cuh"

// Of the formats' members: a lane's share of 16 rows and a span is `Held`, zeros behind the last column. `expand` makes one mma's
// operand of it, and Factors are what a group's products are multiplied with, for rows g and g + 8.

struct Bf16 {
  static constexpr int WIDTH = 4, GROUP = SPAN;
  static constexpr bool SCALED = false, AFFINE = false;
  const bf16* weights;
  u32 rows, cols;

  struct Held {
    Quad values[SPAN / 32][2];

    DEVICE void expand(u32 (&out)[4], int mma) const {
#pragma unroll
      for (int i = 0; i < 4; ++i) out[i] = values[mma / 2][i % 2].word[2 * (mma % 2) + i / 2];
    }
  };

  // Columns 4t .. 4t + 4 of two neighbouring sixteens.
  DEVICE static Quad neighbours(const bf16* own) {
    u32 former[2], latter[2];
    load_two(former, own);
    load_two(latter, own + 16);
    return {former[0], former[1], latter[0], latter[1]};
  }

  DEVICE void load(Held& to, u32 expert, u32 tile, u32 span) const {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 row = smaller(ROWS * tile + lane_index() / 4 + 8 * half, rows - 1);
      const bf16* own = weights + (static_cast<u64>(expert) * rows + row) * cols + SPAN * span + 4 * (lane_index() % 4);
#pragma unroll
      for (u32 i = 0; i < SPAN / 32; ++i) {
        to.values[i][half] = SPAN * span + 32 * i < cols ? neighbours(own + 32 * i) : Quad{};
      }
    }
  }
};

// Codes of 4 or 5 bits in groups of COLS.
template <int BITS, int COLS, bool WITH_MINIMUMS>
struct Grouped {
  static constexpr int WIDTH = 8, GROUP = COLS;
  static constexpr bool SCALED = true, AFFINE = WITH_MINIMUMS;
  const u32* codes;
  const u32* scales;
  u32 rows, cols;

  struct Held {
    GroupedCodes<BITS> codes[SPAN / 64];
    u32 scales[SPAN / GROUP][2];

    DEVICE void expand(u32 (&out)[4], int mma) const { codes[mma / 4].expand(out, mma % 4); }
  };

  struct Factors {
    float factor[2], middle[2];

    DEVICE Factors(const Held& held, int group) {
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const GroupScale<BITS> own(held.scales[group][half]);
        factor[half] = own.factor;
        middle[half] = own.middle;
      }
    }
  };

  DEVICE void load(Held& to, u32 expert, u32 tile, u32 span) const {
    const u32 blocks = ceil_divide(cols, 64), groups = ceil_divide(cols, GROUP);
    const u64 place = static_cast<u64>(expert) * (rows / ROWS) + tile;
#pragma unroll
    for (u32 i = 0; i < SPAN / 64; ++i) {
      const u32 block = SPAN / 64 * span + i;
      const u32* own = codes + (place * blocks + block) * GroupedCodes<BITS>::WORDS + 4 * lane_index();
      to.codes[i].template load<load_quad>(own, block < blocks);
    }
#pragma unroll
    for (u32 i = 0; i < SPAN / GROUP; ++i) {  // behind the last group the codes are zeros and so is the input
      const u32 group = smaller(SPAN / GROUP * span + i, groups - 1);
      load_two(to.scales[i], scales + (place * groups + group) * ROWS + 2 * (lane_index() / 4));
    }
  }
};

// Codes of 8 bits, row after row: e4m3 or signed integers.
template <bool FP8>
struct EightBits {
  static constexpr int WIDTH = 16, GROUP = SPAN;
  static constexpr bool SCALED = true, AFFINE = false;
  const u8* codes;
  const float* scales;
  u32 rows, cols, group;

  struct Held {
    Quad codes[SPAN / 64][2];
    float scale[2];

    DEVICE void expand(u32 (&out)[4], int mma) const {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) {
        const u32 word = codes[mma / 4][i % 2].word[mma % 4];
        out[i] = FP8 ? expand_two_e4m3(word, i / 2) : expand_two_signed(word, i / 2);
      }
    }
  };

  struct Factors {
    float factor[2];
    DEVICE Factors(const Held& held, int) : factor{held.scale[0], held.scale[1]} {}
  };

  DEVICE void load(Held& to, u32 expert, u32 tile, u32 span) const {
    const u32 col = SPAN * span + 16 * (lane_index() % 4);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 row = smaller(ROWS * tile + lane_index() / 4 + 8 * half, rows - 1);
      const u64 place = static_cast<u64>(expert) * rows + row;
#pragma unroll
      for (u32 i = 0; i < SPAN / 64; ++i) {
        to.codes[i][half] = col + 64 * i < cols ? load_quad(codes + place * cols + col + 64 * i) : Quad{};
      }
      to.scale[half] = scales[place * ceil_divide(cols, group) + SPAN * span / group];
    }
  }
};

// Signed codes in groups of 32 (Q8_0).
struct Int8G32 {
  static constexpr int WIDTH = 8, GROUP = 32;
  static constexpr bool SCALED = true, AFFINE = false;
  const u32* codes;
  const u32* scales;
  u32 rows, cols;

  struct Held {
    Quad codes[SPAN / GROUP];
    u32 scales[SPAN / GROUP];

    DEVICE void expand(u32 (&out)[4], int mma) const {
#pragma unroll
      for (u32 i = 0; i < 4; ++i) out[i] = expand_two_signed(codes[mma / 2].word[2 * (i % 2) + mma % 2], i / 2);
    }
  };

  struct Factors {
    float factor[2];
    DEVICE Factors(const Held& held, int group)
        : factor{half_to_float(held.scales[group] & 0xffff), half_to_float(held.scales[group] >> 16)} {}
  };

  DEVICE void load(Held& to, u32 expert, u32 tile, u32 span) const {
    const u32 blocks = cols / GROUP;
    const u64 place = static_cast<u64>(expert) * (rows / ROWS) + tile;
#pragma unroll
    for (u32 i = 0; i < SPAN / GROUP; ++i) {
      const u32 block = SPAN / GROUP * span + i;
      to.codes[i] = block < blocks ? load_quad(codes + (place * blocks + block) * 128 + 4 * lane_index()) : Quad{};
      to.scales[i] = scales[(place * blocks + smaller(block, blocks - 1)) * 8 + lane_index() / 4];
    }
  }
};

KERNEL(many_bf16, THREADS)
(const bf16* weights, const bf16* input, const u32* tiles, const u32* places, bf16* halves, float* floats, u32 action,
 u32 stride, u32 tokens, u32 rows, u32 cols) {
  multiply_many(Bf16{weights, rows, cols}, input, {tiles, places}, {halves, floats, action, stride}, tokens);
}

#define GROUPED(BITS, GROUP)                                                                                         \
  (const u32* codes, const u32* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves,        \
   float* floats, u32 action, u32 stride, u32 tokens, u32 rows, u32 cols, u32 affine) {                                 \
    const Mixture mixture{tiles, places};                                                                            \
    const Output out{halves, floats, action, stride};                                                                   \
    if (affine) multiply_many(Grouped<BITS, GROUP, true>{codes, scales, rows, cols}, input, mixture, out, tokens);   \
    else multiply_many(Grouped<BITS, GROUP, false>{codes, scales, rows, cols}, input, mixture, out, tokens);         \
  }

KERNEL(many_int4_g32, THREADS) GROUPED(4, 32)
KERNEL(many_int4_g64, THREADS) GROUPED(4, 64)
KERNEL(many_int4_g128, THREADS) GROUPED(4, 128)
KERNEL(many_int5_g32, THREADS) GROUPED(5, 32)

#define EIGHT_BITS(FP8)                                                                                              \
  (const u8* codes, const float* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves,       \
   float* floats, u32 action, u32 stride, u32 tokens, u32 rows, u32 cols, u32 group) {                                  \
    const Output out{halves, floats, action, stride};                                                                   \
    multiply_many(EightBits<FP8>{codes, scales, rows, cols, group}, input, {tiles, places}, out, tokens);            \
  }

KERNEL(many_fp8, THREADS) EIGHT_BITS(true)
KERNEL(many_int8, THREADS) EIGHT_BITS(false)

KERNEL(many_int8_g32, THREADS)
(const u32* codes, const u32* scales, const bf16* input, const u32* tiles, const u32* places, bf16* halves, float* floats,
 u32 action, u32 stride, u32 tokens, u32 rows, u32 cols) {
  multiply_many(Int8G32{codes, scales, rows, cols}, input, {tiles, places}, {halves, floats, action, stride}, tokens);
}
