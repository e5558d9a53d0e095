// The gated activation of a feed-forward block.
#include "dev.cuh"

constexpr int THREADS = 256;

DEVICE float silu(float x) { return x / (1.0f + expf(-x)); }

// out[t] = silu(gate) · up, of rows that hold `cols` gates and then `cols` ups. Grid: (parts of a row, tokens).
KERNEL(silu_mul, THREADS)(const bf16* gate_up, bf16* out, u32 cols) {
  wait_for_previous();
  let_next_start();
  const u32 col = 8 * (block_x() * THREADS + thread_index());
  if (col >= cols) return;
  const bf16* row = gate_up + 2 * static_cast<u64>(block_y()) * cols + col;
  const Quad gate = load_quad(row), up = load_quad(row + cols);
  Quad product;
  for (int i = 0; i < 4; ++i) {
    const u32 g = gate.word[i], u = up.word[i];
    product.word[i] = pack_bf16(silu(low_float(g)) * low_float(u), silu(high_float(g)) * high_float(u));
  }
  store_quad(out + static_cast<u64>(block_y()) * cols + col, product);
}
