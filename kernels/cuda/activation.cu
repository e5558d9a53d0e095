// The gated activation of a feed-forward block, and the cap of logits.
#include "codes.cuh"
#include "gate.cuh"

constexpr int THREADS = 256;

// Rows of `cols` gates and then `cols` ups, or of both by eights.
template <typename ACTIVATION>
struct Gates {
  const bf16* rows;
  u32 cols, by_eights;

  // activation(gate) · up of a token's eight columns, as pairs.
  DEVICE Quad eight(u32 token, u32 col) const {
    const bf16* own = rows + 2 * static_cast<u64>(token) * cols + (by_eights ? 2 * col : col);
    const Quad gates = load_quad(own), ups = load_quad(own + (by_eights ? EIGHT : cols));
    Quad product;
    for (int i = 0; i < 4; ++i) {
      const u32 g = gates.word[i], u = ups.word[i];
      product.word[i] = pack_bf16(rounded_product(ACTIVATION::of(low_float(g)), low_float(u)),
                                  rounded_product(ACTIVATION::of(high_float(g)), high_float(u)));
    }
    return product;
  }
};

// Grid: (tokens, parts of a row).
template <typename ACTIVATION>
DEVICE void gate(const Gates<ACTIVATION>& gates, bf16* out) {
  wait_for_previous();
  let_next_start();
  const u32 col = EIGHT * (block_y() * THREADS + thread_index());
  if (col >= gates.cols) return;
  store_quad(out + static_cast<u64>(block_x()) * gates.cols + col, gates.eight(block_x(), col));
}

// The same as codes, with a scale for each token: what products take whose inputs are rounded (w8a8.cu). Grid: tokens.
template <typename Code, typename ACTIVATION>
DEVICE void gate_codes(const Gates<ACTIVATION>& gates, u8* codes, float* scales) {
  wait_for_previous();
  let_next_start();
  const u32 token = block_x(), cols = gates.cols;
  round_token<Code, THREADS>(codes + static_cast<u64>(token) * cols, scales + token, cols, [&](float (&to)[RUN_VALUES], u32 col) {
    unpack(to, gates.eight(token, col));
  });
}

KERNEL(silu_mul, THREADS)(const bf16* gate_up, bf16* out, u32 cols, u32 by_eights) {
  gate<Silu>({gate_up, cols, by_eights}, out);
}

KERNEL(gelu_mul, THREADS)(const bf16* gate_up, bf16* out, u32 cols, u32 by_eights) {
  gate<Gelu>({gate_up, cols, by_eights}, out);
}

KERNEL(silu_mul_int8, THREADS)(const bf16* gate_up, u8* codes, float* scales, u32 cols, u32 by_eights) {
  gate_codes<Int8, Silu>({gate_up, cols, by_eights}, codes, scales);
}

KERNEL(silu_mul_fp8, THREADS)(const bf16* gate_up, u8* codes, float* scales, u32 cols, u32 by_eights) {
  gate_codes<E4m3, Silu>({gate_up, cols, by_eights}, codes, scales);
}

KERNEL(gelu_mul_int8, THREADS)(const bf16* gate_up, u8* codes, float* scales, u32 cols, u32 by_eights) {
  gate_codes<Int8, Gelu>({gate_up, cols, by_eights}, codes, scales);
}

KERNEL(gelu_mul_fp8, THREADS)(const bf16* gate_up, u8* codes, float* scales, u32 cols, u32 by_eights) {
  gate_codes<E4m3, Gelu>({gate_up, cols, by_eights}, codes, scales);
}

// values = cap · tanh(values / cap). Grid: parts of the values.
KERNEL(soft_cap, THREADS)(float* values, u32 count, float cap) {
  wait_for_previous();
  let_next_start();
  const u32 index = block_x() * THREADS + thread_index();
  if (index < count) values[index] = cap * tanhf(values[index] / cap);
}
