// Products of many tokens with weights of 4 bits on Hopper: out[t][r] = sum over k of weights[r][k] · input[t][k].
//
// A block computes 128 tokens x 128 rows, and a warpgroup 64 of those rows. One thread has tokens, codes and scales of 64 columns
// copied through stages of shared memory. Threads make weights of the codes, in the registers from where products take their left
// operand; tokens are multiplied where they are. While products of 32 columns run, the weights of the next are made. A block has its
// multiprocessor to itself: two would leave a thread 96 registers, as five of their warps share a quarter of them.
//
// A weight is scale · code + minimum in f32, rounded to bf16. linear.cu rounds none, and scales what exact codes gave: here that
// would take as many registers again for sums, and with groups of 32 more additions than there is time for beside the products.
//
// Codes and scales lie as linear.cu has them. Sums run over the columns from first to last: a token's result is the same whatever
// tokens come with it.
#include "gemm_hopper.cuh"

#ifdef HOPPER

constexpr u32 DEPTH = TILE_ROW_BYTES / sizeof(bf16);  // columns of a stage
constexpr u32 STAGES = 5;
constexpr u32 TILES = ROWS / 16;   // of rows whose codes lie together: each warp has one
constexpr u32 TILE_WORDS = TILE_ROW_BYTES / sizeof(u32);
constexpr u32 CODE_WORDS = 128;    // of 16 rows and a stage's columns
constexpr u32 SCALE_WORDS = 16;    // of 16 rows and a group
constexpr u32 CODE_PARTS = CODE_WORDS / TILE_WORDS;

struct Stage {
  bf16 input[TOKENS * DEPTH];
  u32 codes[CODE_PARTS][TILES * TILE_WORDS];
  u32 scales[TILES * TILE_WORDS];  // of the group in which the columns begin, and of the next one
};

// Makes codes of 32 columns what products want that have columns in their order: lane 4g + t has 8t .. 8t + 8, a pair of columns
// in bytes 0 and 2 and one in bytes 1 and 3 of each word, and is to have 2t, 2t + 1, 2t + 8 and 2t + 9 of the former sixteen in
// the first word, and of the latter in the second. So of four lanes' four pairs each takes the same one of all.
DEVICE void sort_columns(u32 (&words)[2]) {
  const bool latter = lane_index() & 2, odd = lane_index() & 1;
  const u32 taken = shuffle_xor(latter ? words[0] : words[1], 2);
  const u32 first = latter ? taken : words[0], second = latter ? words[1] : taken;
  const u32 pairs = shuffle_xor(pick_bytes(first, second, odd ? 0x6420 : 0x7531), 1);
  words[0] = pick_bytes(first, pairs, odd ? 0x3514 : 0x5240);
  words[1] = pick_bytes(second, pairs, odd ? 0x3716 : 0x7260);
}

// Scales and minimums of a lane's rows g and g + 8, the latter for codes that begin at 128.
struct RowScales {
  float scale[2], base[2];

  DEVICE RowScales(const Stage& stage, u32 group) {
    const u32 at = (SCALE_WORDS * group + 2 * (lane_index() / 4)) * sizeof(u32);
    u32 words[2];
    load_two(words, in_tile(stage.scales, warp_index(), at));
    for (u32 half = 0; half < 2; ++half) {
      scale[half] = half_to_float(words[half] & 0xffff);
      base[half] = fused(-128.0f, scale[half], half_to_float(words[half] >> 16));
    }
  }

  // Eight weights as the left operand of a product of 16 columns. Code i of the word's low half is at bits 4i and is the former
  // value of register i; that of the high half is the latter.
  DEVICE void expand(u32 (&out)[4], u32 word) const {
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      const u32 codes = masked_or(word >> 4 * i, 0x000f000fu, 0x43004300u);  // 128 + code: bf16's step is 1 there
      out[i] = pack_bf16(fused(low_float(codes), scale[i % 2], base[i % 2]), fused(high_float(codes), scale[i % 2], base[i % 2]));
    }
  }
};

// What a warpgroup does. Of a stage's two groups of products each has registers of its own, which are free when only the other's
// run.
DEVICE void multiply_all(const Pipeline<Stage, STAGES>& pipeline, float (&sum)[64], u32 steps, u32 group) {
  u32 weights[2][2][4];
  for (u32 step = 0; step < steps; ++step) {
    const Stage& stage = pipeline.wait_tiles(step);
    u64 input = operand_at(stage.input);
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u8* at = in_tile(stage.codes[lane_index() / 8], warp_index(), sizeof(Quad) * (lane_index() % 8));
      u32 words[2];
      load_two(words, at + sizeof words * half);
      sort_columns(words);
      const RowScales scales(stage, group == 32 ? half : 0);
      wait_products<1>();
      for (u32 k = 0; k < 2; ++k) scales.expand(weights[half][k], words[k]);
      fence_products();
#pragma unroll
      for (u32 k = 0; k < 2; ++k) {
        multiply_rows<false>(sum, weights[half][k], input, step + half + k > 0);
        input = operand_after(input);
      }
      commit_products();
      if (half == 1 && step > 0) pipeline.release(step - 1);  // here: before the products ptxas would run them one by one
    }
  }
  settle_products(sum);
}

DEVICE void product(const TensorMap& codes, const TensorMap& scales, const TensorMap& input, const Results& out, u32 cols, u32 group) {
  const u32 steps = ceil_divide(cols, DEPTH), first_tile = out.part.rows_before / 16 + block_y() * TILES;
  multiply_tiles_of<Stage, STAGES>(
      steps,
      [&](u32 step, Stage& to, Barrier* came) {
        for (u32 part = 0; part < CODE_PARTS; ++part) {
          copy_tile(to.codes[part], codes, step * CODE_WORDS + part * TILE_WORDS, first_tile, came);
        }
        copy_tile(to.scales, scales, step * DEPTH / group * SCALE_WORDS, first_tile, came);
      },
      [&](u32 step, Stage& to, Barrier* came) { copy_tokens(to.input, input, step * DEPTH, out.part, came); },
      [&](const Pipeline<Stage, STAGES>& pipeline) {
        float sum[64];  // not zeros: registers that others write too would make every product wait for the one before
        multiply_all(pipeline, sum, steps, group);
        write_sums(out, sum);
      });
}

#endif  // HOPPER

// `group` columns share a scale: 32, 64 or 128.
KERNEL(int4_hopper, THREADS)(TENSOR_MAP codes, TENSOR_MAP scales, TENSOR_MAP input, bf16* halves, float* floats, u32 action,
                             u32 tokens, u32 rows, u32 cols, u32 group) {
#ifdef HOPPER
  product(codes, scales, input, {{halves, floats, action, rows}, part_of_all(tokens), rows}, cols, group);
#endif
}

// The same for the tiles of a mixture of experts, whose matrices' rows, whole sixteens each, follow each other.
KERNEL(int4_hopper_experts, THREADS)(TENSOR_MAP codes, TENSOR_MAP scales, TENSOR_MAP input, const u32* tiles, bf16* halves,
                                     float* floats, u32 action, u32 stride, u32 rows, u32 cols, u32 group) {
#ifdef HOPPER
  const Part part = part_of_experts(tiles, rows);
  if (part.end > 0) product(codes, scales, input, {{halves, floats, action, stride}, part, rows}, cols, group);
#endif
}
