// What happens to the heads of a token between their projection and attention: bias, norm of each head, rotary position,
// and the append of keys and values to their pages. One warp per head.
#include "dev.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int PAIRS = 4;  // of values that a lane holds: heads of up to 256
constexpr u32 PAGE_TOKENS = 64;

// Which two values of a head pair `index` are. Those that do not turn come after those that do.
DEVICE u32 member(u32 index, u32 second, u32 turning, bool adjacent) {
  if (index >= turning || adjacent) return 2 * index + second;
  return index + second * turning;
}

DEVICE void store(bf16* to, float value, float) { *to = to_bf16(value); }
DEVICE void store(u8* to, float value, float scale) { *to = to_e4m3(value / scale); }

// Writes a lane's values of a head.
template <typename T>
DEVICE void write_head(T* to, const float (&value)[PAIRS][2], u32 dim, u32 turning, bool adjacent, float scale) {
  for (int i = 0; i < PAIRS; ++i) {
    const u32 pair = lane_index() + 32 * i;
    if (2 * pair >= dim) break;
    for (u32 k = 0; k < 2; ++k) store(to + member(pair, k, turning, adjacent), value[i][k], scale);
  }
}

// Heads of a token: queries, then keys, then values. `rope` holds cosine and sine of each position and pair; a slot is
// `page · 64 + token in page`; pages are [K|V][head][token][dim], in e4m3 relative to `scales` [K|V][head]. Grid: (tokens,
// parts of the heads).
template <typename KV>
DEVICE void place_heads_in(const bf16* projected, const float* bias, const float* query_norm, const float* key_norm,
                           const float* rope, const u32* positions, const u32* slots, bf16* query, KV* pages,
                           const float* scales, u32 heads, u32 kv_heads, u32 dim, u32 turning, u32 adjacent,
                           float epsilon) {
  wait_for_previous();
  let_next_start();
  const u32 token = block_x(), head = block_y() * WARPS + warp_index(), all = heads + 2 * kv_heads;
  if (head >= all) return;  // whole warps
  const bool is_query = head < heads, is_key = !is_query && head < heads + kv_heads;
  const bf16* from = projected + (static_cast<u64>(token) * all + head) * dim;
  float value[PAIRS][2] = {}, squares = 0;
  for (int i = 0; i < PAIRS; ++i) {
    const u32 pair = lane_index() + 32 * i;
    if (2 * pair >= dim) break;
    for (u32 k = 0; k < 2; ++k) {
      const u32 at = member(pair, k, turning, adjacent);
      value[i][k] = to_float(from[at]) + (bias ? bias[head * dim + at] : 0.0f);
      squares += value[i][k] * value[i][k];
    }
  }
  const float* norm = is_query ? query_norm : is_key ? key_norm : nullptr;
  if (norm) {
    const float factor = 1.0f / sqrtf(warp_sum(squares) / dim + epsilon);
    for (int i = 0; i < PAIRS; ++i) {
      const u32 pair = lane_index() + 32 * i;
      if (2 * pair >= dim) break;
      for (u32 k = 0; k < 2; ++k) value[i][k] *= factor * norm[member(pair, k, turning, adjacent)];
    }
  }
  if (rope && (is_query || is_key)) {
    const float* turns = rope + 2 * static_cast<u64>(positions[token]) * turning;
    for (int i = 0; i < PAIRS; ++i) {
      const u32 pair = lane_index() + 32 * i;
      if (pair >= turning) break;
      const float cosine = turns[2 * pair], sine = turns[2 * pair + 1], x = value[i][0], y = value[i][1];
      value[i][0] = x * cosine - y * sine;
      value[i][1] = y * cosine + x * sine;
    }
  }
  if (is_query) {
    write_head(query + (static_cast<u64>(token) * heads + head) * dim, value, dim, turning, adjacent, 1.0f);
    return;
  }
  const u32 page = slots[token] / PAGE_TOKENS, place = slots[token] % PAGE_TOKENS;
  const u32 row = head - heads;  // keys of all heads come before the values
  const u64 at = ((static_cast<u64>(page) * 2 * kv_heads + row) * PAGE_TOKENS + place) * dim;
  write_head(pages + at, value, dim, turning, adjacent, scales ? scales[row] : 1.0f);
}

#define PARAMETERS(pages_type)                                                                                         \
  (const bf16* projected, const float* bias, const float* query_norm, const float* key_norm, const float* rope,        \
   const u32* positions, const u32* slots, bf16* query, pages_type* pages, const float* scales, u32 heads,             \
   u32 kv_heads, u32 dim, u32 turning, u32 adjacent, float epsilon) {                                                  \
    place_heads_in(projected, bias, query_norm, key_norm, rope, positions, slots, query, pages, scales, heads,         \
                   kv_heads, dim, turning, adjacent, epsilon);                                                         \
  }

KERNEL(place_heads, THREADS) PARAMETERS(bf16)
KERNEL(place_heads_fp8, THREADS) PARAMETERS(u8)
