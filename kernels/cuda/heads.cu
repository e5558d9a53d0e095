// What happens to the heads of a token between their projection and attention: bias, norm of each head, rotary position,
// and the append of keys and values to their pages. One warp per head. And their way from one place there to another.
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

// How pages hold values: those of a row relative to its scale, which makes its largest MOST, or as they are.
struct Halves {
  using Type = bf16;
  static constexpr float MOST = 0;
  DEVICE static bf16 of(float value) { return to_bf16(value); }
};
struct E4m3 {
  using Type = u8;
  static constexpr float MOST = 448;
  DEVICE static u8 of(float value) { return to_e4m3(value); }
};
struct Int8 {
  using Type = u8;
  static constexpr float MOST = 127;
  DEVICE static u8 of(float value) { return static_cast<u8>(static_cast<int>(rintf(value))); }
};

// Writes a lane's values of a head, times `factor`.
template <typename CODE>
DEVICE void write_head(typename CODE::Type* to, const float (&value)[PAIRS][2], u32 dim, u32 turning, bool adjacent,
                       float factor) {
  for (int i = 0; i < PAIRS; ++i) {
    const u32 pair = lane_index() + 32 * i;
    if (2 * pair >= dim) break;
    for (u32 k = 0; k < 2; ++k) to[member(pair, k, turning, adjacent)] = CODE::of(value[i][k] * factor);
  }
}

// The largest size among a warp's values; those that a head lacks are zeros.
DEVICE float largest(const float (&value)[PAIRS][2]) {
  float most = 0;
  for (int i = 0; i < PAIRS; ++i) most = larger(most, larger(fabsf(value[i][0]), fabsf(value[i][1])));
  return warp_max(most);
}

// Heads of a token: queries, then keys, then values. `rope` holds cosine and sine of each position and pair; a slot is
// `page · 64 + token in page`; pages are [K|V][head][token][dim], and their scales the same without dim. Grid: (tokens,
// parts of the heads).
template <typename CODE>
DEVICE void place_heads_in(const bf16* projected, const float* bias, const float* query_norm, const float* key_norm,
                           const float* rope, const u32* positions, const u32* slots, bf16* query,
                           typename CODE::Type* pages, float* scales, u32 heads, u32 kv_heads, u32 dim, u32 turning, u32 adjacent,
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
    const u64 first = (static_cast<u64>(token) * heads + head) * dim;
    return write_head<Halves>(query + first, value, dim, turning, adjacent, 1.0f);
  }
  // Keys of all heads come before the values.
  const u32 page = slots[token] / PAGE_TOKENS, place = slots[token] % PAGE_TOKENS;
  const u64 row = (static_cast<u64>(page) * 2 * kv_heads + (head - heads)) * PAGE_TOKENS + place;
  float factor = 1.0f;
  if constexpr (CODE::MOST > 0) {
    const float most = largest(value);
    factor = most > 0 ? CODE::MOST / most : 0.0f;
    if (lane_index() == 0) scales[row] = most / CODE::MOST;
  }
  write_head<CODE>(pages + row * dim, value, dim, turning, adjacent, factor);
}

#define PARAMETERS(code, pages_type)                                                                                   \
  (const bf16* projected, const float* bias, const float* query_norm, const float* key_norm, const float* rope,        \
   const u32* positions, const u32* slots, bf16* query, pages_type* pages, float* scales, u32 heads, u32 kv_heads,     \
   u32 dim, u32 turning, u32 adjacent, float epsilon) {                                                                \
    place_heads_in<code>(projected, bias, query_norm, key_norm, rope, positions, slots, query, pages, scales, heads,   \
                         kv_heads, dim, turning, adjacent, epsilon);                                                   \
  }

KERNEL(place_heads, THREADS) PARAMETERS(Halves, bf16)
KERNEL(place_heads_fp8, THREADS) PARAMETERS(E4m3, u8)
KERNEL(place_heads_int8, THREADS) PARAMETERS(Int8, u8)

// Brings keys and values of tokens from one slot to another in every layer, whose pages follow one another. One token after the
// other, as `moves` has them: what one leaves the next may take, and a lane has the same values of all. Grid: (layers, parts of
// the heads of keys and values).
template <typename VALUE>
DEVICE void move_tokens_in(const u32* moves, VALUE* pages, float* scales, u32 count, u32 kv_heads, u32 dim,
                           u32 layer_pages) {
  wait_for_previous();
  let_next_start();
  constexpr u32 CHUNK = sizeof(Quad) / sizeof(VALUE);
  const u32 head = block_y() * WARPS + warp_index(), at = lane_index() * CHUNK;
  if (head >= 2 * kv_heads) return;
  const auto row = [&](u32 slot) {
    const u64 page = static_cast<u64>(block_x()) * layer_pages + slot / PAGE_TOKENS;
    return (page * 2 * kv_heads + head) * PAGE_TOKENS + slot % PAGE_TOKENS;
  };
  for (u32 i = 0; i < count; ++i) {
    const u64 from = row(moves[2 * i]), to = row(moves[2 * i + 1]);
    if (at < dim) store_quad(pages + to * dim + at, load_quad(pages + from * dim + at));
    if (scales && at == 0) scales[to] = scales[from];
  }
}

#define MOVE(pages_type)                                                                                               \
  (const u32* moves, pages_type* pages, float* scales, u32 count, u32 kv_heads, u32 dim, u32 layer_pages) {            \
    move_tokens_in(moves, pages, scales, count, kv_heads, dim, layer_pages);                                           \
  }

KERNEL(move_tokens, THREADS) MOVE(bf16)
KERNEL(move_tokens_bytes, THREADS) MOVE(u8)
