// Rows picked by index. One block per row; an index outside gives zeros.
#include "dev.cuh"

constexpr int THREADS = 128;

KERNEL(embed, THREADS)(const u32* tokens, const bf16* table, float* out, u32 cols, u32 rows) {
  wait_for_previous();
  let_next_start();
  const u32 token = tokens[block_x()];
  const bool inside = token < rows;
  for (u32 col = 8 * thread_index(); col < cols; col += 8 * THREADS) {
    Quad pairs = {};
    if (inside) pairs = load_quad(table + static_cast<u64>(token) * cols + col);
    for (u32 half = 0; half < 2; ++half) {
      const u32 a = pairs.word[2 * half], b = pairs.word[2 * half + 1];
      const Quad floats = {{a << 16, a & 0xffff0000u, b << 16, b & 0xffff0000u}};
      store_quad(out + static_cast<u64>(block_x()) * cols + col + 4 * half, floats);
    }
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
