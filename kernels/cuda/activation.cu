// The gated activation of a feed-forward block, and the cap of logits.
#include "dev.cuh"

constexpr int THREADS = 256;

struct Silu {
  DEVICE static float of(float x) { return x / (1.0f + expf(-x)); }
};

// The Gaussian error unit by its hyperbolic tangent: (1 + tanh z) / 2 is 1 / (1 + e^-2z), z = sqrt(2 / pi) (x + 0.044715 x^3).
struct Gelu {
  DEVICE static float of(float x) { return x / (1.0f + expf(-1.595769122f * x * (1.0f + 0.044715f * x * x))); }
};

// out[t] = activation(gate) · up, of rows that hold `cols` gates and then `cols` ups: of all, or of the first `*taken`.
// Grid: (tokens, parts of a row).
template <typename ACTIVATION>
DEVICE void gate(const bf16* gate_up, const u32* taken, bf16* out, u32 cols) {
  wait_for_previous();
  let_next_start();
  if (taken && block_x() >= *taken) return;
  const u32 col = 8 * (block_y() * THREADS + thread_index());
  if (col >= cols) return;
  const bf16* row = gate_up + 2 * static_cast<u64>(block_x()) * cols + col;
  const Quad gates = load_quad(row), ups = load_quad(row + cols);
  Quad product;
  for (int i = 0; i < 4; ++i) {
    const u32 g = gates.word[i], u = ups.word[i];
    product.word[i] = pack_bf16(ACTIVATION::of(low_float(g)) * low_float(u), ACTIVATION::of(high_float(g)) * high_float(u));
  }
  store_quad(out + static_cast<u64>(block_x()) * cols + col, product);
}

KERNEL(silu_mul, THREADS)(const bf16* gate_up, const u32* taken, bf16* out, u32 cols) {
  gate<Silu>(gate_up, taken, out, cols);
}

KERNEL(gelu_mul, THREADS)(const bf16* gate_up, const u32* taken, bf16* out, u32 cols) {
  gate<Gelu>(gate_up, taken, out, cols);
}

// values = cap · tanh(values / cap). Grid: parts of the values.
KERNEL(soft_cap, THREADS)(float* values, u32 count, float cap) {
  wait_for_previous();
  let_next_start();
  const u32 index = block_x() * THREADS + thread_index();
  if (index < count) values[index] = cap * tanhf(values[index] / cap);
}
