// The gated activation of a feed-forward block, and the cap of logits.
#include "gate.cuh"

constexpr int THREADS = 256;

// out[t] = activation(gate) · up, of rows that hold `cols` gates and then `cols` ups, or both by eights. Grid: (tokens, parts of a
// row).
template <typename ACTIVATION>
DEVICE void gate(const bf16* gate_up, bf16* out, u32 cols, u32 by_eights) {
  wait_for_previous();
  let_next_start();
  const u32 col = EIGHT * (block_y() * THREADS + thread_index());
  if (col >= cols) return;
  const bf16* own = gate_up + 2 * static_cast<u64>(block_x()) * cols + (by_eights ? 2 * col : col);
  const Quad gates = load_quad(own), ups = load_quad(own + (by_eights ? EIGHT : cols));
  Quad product;
  for (int i = 0; i < 4; ++i) {
    const u32 g = gates.word[i], u = ups.word[i];
    product.word[i] = pack_bf16(rounded_product(ACTIVATION::of(low_float(g)), low_float(u)),
                                rounded_product(ACTIVATION::of(high_float(g)), high_float(u)));
  }
  store_quad(out + static_cast<u64>(block_x()) * cols + col, product);
}

KERNEL(silu_mul, THREADS)(const bf16* gate_up, bf16* out, u32 cols, u32 by_eights) {
  gate<Silu>(gate_up, out, cols, by_eights);
}

KERNEL(gelu_mul, THREADS)(const bf16* gate_up, bf16* out, u32 cols, u32 by_eights) {
  gate<Gelu>(gate_up, out, cols, by_eights);
}

// values = cap · tanh(values / cap). Grid: parts of the values.
KERNEL(soft_cap, THREADS)(float* values, u32 count, float cap) {
  wait_for_previous();
  let_next_start();
  const u32 index = block_x() * THREADS + thread_index();
  if (index < count) values[index] = cap * tanhf(values[index] / cap);
}
