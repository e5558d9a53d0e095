// Rows picked by index; those of a table of embeddings times `factor`. One block per row; an index outside gives zeros. A
// table holds the rows of tokens from `first` on. And columns in another order.
#include "dev.cuh"

constexpr int THREADS = 128;

KERNEL(embed_bf16, THREADS)(const u32* tokens, const bf16* table, float* out, u32 cols, u32 rows, u32 first,
                            float factor) {
  wait_for_previous();
  let_next_start();
  const u32 token = tokens[block_x()] - first;
  const bool inside = token < rows;
  for (u32 col = 8 * thread_index(); col < cols; col += 8 * THREADS) {
    Quad pairs = {};
    if (inside) pairs = load_quad(table + static_cast<u64>(token) * cols + col);
    for (u32 half = 0; half < 2; ++half) {
      const u32 a = pairs.word[2 * half], b = pairs.word[2 * half + 1];
      const Quad floats = {{bits_of(low_float(a) * factor), bits_of(high_float(a) * factor),
                            bits_of(low_float(b) * factor), bits_of(high_float(b) * factor)}};
      store_quad(out + static_cast<u64>(block_x()) * cols + col + 4 * half, floats);
    }
  }
}

// A table of codes of 4 or 5 bits as linear.cu packs it: a word of low bits holds four columns of a row and of the eighth after it.
template <int BITS>
DEVICE void embed_grouped(const u32* tokens, const u32* codes, const u32* scales, float* out, u32 cols, u32 rows, u32 first,
                          float factor, u32 group) {
  wait_for_previous();
  let_next_start();
  const u32 token = tokens[block_x()] - first, tile = token / 16, lane_group = token % 8, upper = token / 8 % 2;
  const u32 blocks = ceil_divide(cols, 64), groups = ceil_divide(cols, group);
  for (u32 col = 4 * thread_index(); col < cols; col += 4 * THREADS) {
    Quad values = {};
    if (token < rows) {
      const u32 lane = 4 * lane_group + col % 32 / 8, mma = 2 * (col % 64 / 32) + col % 8 / 4;
      const u32* block = codes + (static_cast<u64>(tile) * blocks + col / 64) * 32 * BITS;
      const u32 low = block[4 * lane + mma], high = BITS > 4 ? block[128 + lane] : 0;
      const u32 scale = scales[(static_cast<u64>(tile) * groups + col / group) * 16 + 2 * lane_group + upper];
      for (u32 i = 0; i < 4; ++i) {
        const u32 reg = 2 * (i / 2) + upper, latter = 16 * (i % 2);
        const u32 code = (low >> (4 * reg + latter) & 15) | (high >> (4 * mma + reg + latter) & 1) << 4;
        values.word[i] = bits_of((half_to_float(scale & 0xffff) * code + half_to_float(scale >> 16)) * factor);
      }
    }
    store_quad(out + static_cast<u64>(block_x()) * cols + col, values);
  }
}

#define GROUPED(BITS)                                                                                                     \
  (const u32* tokens, const u32* codes, const u32* scales, float* out, u32 cols, u32 rows, u32 first, float factor,       \
   u32 group) {                                                                                                           \
    embed_grouped<BITS>(tokens, codes, scales, out, cols, rows, first, factor, group);                                    \
  }

KERNEL(embed_int4, THREADS) GROUPED(4)
KERNEL(embed_int5, THREADS) GROUPED(5)

// A table of signed 8-bit codes in groups of 32 as linear.cu packs it: a word holds four columns of a row.
KERNEL(embed_int8_g32, THREADS)(const u32* tokens, const u32* codes, const u32* scales, float* out, u32 cols, u32 rows,
                                u32 first, float factor) {
  wait_for_previous();
  let_next_start();
  const u32 token = tokens[block_x()] - first, lane_group = token % 8, upper = token / 8 % 2;
  for (u32 col = 4 * thread_index(); col < cols; col += 4 * THREADS) {
    Quad values = {};
    if (token < rows) {
      const u64 block = static_cast<u64>(token / 16) * (cols / 32) + col / 32;
      const u32 word = codes[block * 128 + 4 * (4 * lane_group + col % 32 / 8) + 2 * upper + col % 8 / 4];
      const float scale = half_to_float(scales[block * 8 + lane_group] >> 16 * upper & 0xffff);
      for (u32 i = 0; i < 4; ++i) {
        values.word[i] = bits_of(scale * static_cast<float>(static_cast<signed char>(word >> 8 * i & 0xff)) * factor);
      }
    }
    store_quad(out + static_cast<u64>(block_x()) * cols + col, values);
  }
}

// A table of 8-bit codes, row after row: e4m3, or signed integers.
KERNEL(embed_8bit, THREADS)(const u32* tokens, const u8* codes, const float* scales, float* out, u32 cols, u32 rows,
                            u32 first, float factor, u32 group, u32 e4m3) {
  wait_for_previous();
  let_next_start();
  const u32 token = tokens[block_x()] - first;
  for (u32 col = thread_index(); col < cols; col += THREADS) {
    float value = 0;
    if (token < rows) {
      const u32 code = codes[static_cast<u64>(token) * cols + col];
      // e4m3's bits at bf16's place are the value over 2^120.
      const float scaled = float_of((code & 0x7f) << 20 | (code & 0x80) << 24) * 0x1p120f;
      value = e4m3 ? scaled : static_cast<float>(static_cast<signed char>(code));
      value *= scales[static_cast<u64>(token) * ceil_divide(cols, group) + col / group];
    }
    out[static_cast<u64>(block_x()) * cols + col] = value * factor;
  }
}

KERNEL(gather_rows, THREADS)(const u32* indices, const float* input, float* out, u32 cols, u32 rows) {
  wait_for_previous();
  let_next_start();
  const u32 index = indices[block_x()];
  for (u32 col = 4 * thread_index(); col < cols; col += 4 * THREADS) {
    Quad values = {};
    if (index < rows) values = load_quad(input + static_cast<u64>(index) * cols + col);
    store_quad(out + static_cast<u64>(block_x()) * cols + col, values);
  }
}

// out[t][c] = input[t][order[c]], or 0 where the order names no input: inputs in the order of a matrix's columns. One block per
// token.
KERNEL(sort_columns, THREADS)(const u32* order, const bf16* input, bf16* out, u32 cols, u32 inputs) {
  wait_for_previous();
  let_next_start();
  const bf16* row = input + static_cast<u64>(block_x()) * inputs;
  for (u32 col = 8 * thread_index(); col < cols; col += 8 * THREADS) {
    Quad values;
    for (u32 half = 0; half < 2; ++half) {
      const Quad from = load_quad(order + col + 4 * half);
      for (u32 pair = 0; pair < 2; ++pair) {
        const u32 first = from.word[2 * pair], second = from.word[2 * pair + 1];
        const u32 low = first < inputs ? row[first].bits : 0, high = second < inputs ? row[second].bits : 0;
        values.word[2 * half + pair] = low | high << 16;
      }
    }
    store_quad(out + static_cast<u64>(block_x()) * cols + col, values);
  }
}
