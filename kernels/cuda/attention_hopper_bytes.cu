// Causal attention of many tokens over paged keys and values in bytes, on Hopper (attention_hopper.cuh): in e4m3, or signed, with a
// scale for each token and head.
//
// Products want bf16. So one thread has pages copied as they are (TMA), through stages of their own, and a warpgroup makes bf16 of
// their codes, exactly, where products read them: once for all 128 rows of a block. Scales come with the keys: a key's multiplies its
// scores, a value's its weights. What is nobody's gets scales of zero: any code is a number here, e4m3's NaN too (480).
#include "attention_hopper.cuh"

enum class Code { E4m3, Int8 };

#ifdef HOPPER

constexpr u32 RAW_STAGES = 4;
constexpr u32 AHEAD = RAW_STAGES - 1;  // copies that are under way while one is converted
constexpr u32 ROW_SCALES = TILE_ROW_BYTES / sizeof(float);
// A multiprocessor has 504 for three threads: the converting one gives away what the others need.
constexpr int CONVERTING_REGISTERS = 40;
constexpr int MULTIPLYING_REGISTERS = 232;

// A step's keys or values as pages hold them, of which a head has a row's first bytes; and with keys the scales of both, in rows of
// ROW_SCALES.
struct RawStage {
  u8 codes[KEYS * TILE_ROW_BYTES];
  float scales[2][KEYS];
};

// Of four codes the former or the latter two, as a pair of bf16, exactly.
template <Code CODE>
DEVICE u32 expand_two(u32 bytes, u32 latter) {
  return CODE == Code::E4m3 ? expand_two_e4m3(bytes, latter) : expand_two_signed(bytes, latter);
}

// What the converting warpgroup does. Keys and values, step after step, are its items: 2 · step and the one behind it.
template <u32 DIM, Code CODE>
struct Converter {
  typedef ScaledStage<DIM> To;
  typedef Ring<To, STAGES> Stages;

  const TensorMap &codes, &scales;  // all pages' rows of keys and values, and their scales
  const Tile& tile;
  Stages keys;  // and behind it the values'
  Ring<RawStage, RAW_STAGES> raw;
  u32 kv_heads;

  DEVICE Stages values() const { return of_kind(1); }

  DEVICE void init() const {
    raw.init(1, GROUP_WARPS);
    for (u32 kind = 0; kind < 2; ++kind) of_kind(kind).init(GROUP_WARPS, tile.warpgroups() * GROUP_WARPS);
    publish_barriers();
  }

  DEVICE void all() const {
    for (u32 item = 0; item < AHEAD; ++item) copy(item);
    for (u32 item = 0; item < 2 * tile.steps; ++item) convert(item);
  }

 private:
  // The stages of keys (0) or values (1).
  DEVICE Stages of_kind(u32 kind) const {
    return {keys.stages + kind * STAGES, keys.came + kind * STAGES, keys.read + kind * STAGES};
  }

  // Has an item copied, if there is such a one.
  DEVICE void copy(u32 item) const {
    if (thread_index() != 32 * FIRST_BRINGING_WARP || item >= 2 * tile.steps) return;
    raw.wait_free(item);
    const u32 step = item / 2, kind = item % 2, page = tile.page(step), end = tile.page_end(step);
    const u32 kinds_scaled = kind == 0 ? 2 : 0;
    RawStage& to = raw.stage(item);
    Barrier* came = raw.arrival(item);
    arrive_expecting(came, (end - page) * PAGE * (TILE_ROW_BYTES + kinds_scaled * sizeof(float)));
    for (u32 at = page; at < end; ++at) {
      const u32 first = at % STEP_PAGES * PAGE;
      copy_tile(to.codes + first * TILE_ROW_BYTES, codes, 0, row(at, kind), came);
      for (u32 scaled = 0; scaled < kinds_scaled; ++scaled) {
        copy_tile(to.scales[scaled] + first, scales, 0, row(at, scaled) / ROW_SCALES, came);
      }
    }
  }

  // The row of a page's first key (0) or value (1).
  DEVICE u32 row(u32 page, u32 kind) const { return ((tile.pages[page] * 2 + kind) * kv_heads + tile.head) * PAGE; }

  // Makes an item's keys or values, when nobody reads any more what is there.
  DEVICE void convert(u32 item) const {
    const u32 step = item / 2, kind = item % 2;
    const Stages stages = of_kind(kind);
    copy(item + AHEAD);
    const RawStage& from = raw.wait(item);
    stages.wait_free(step);
    To& to = stages.stage(step);
    expand(to, from);
    if (kind == 0) copy_scales(to, from, step);
    show_operands();
    sync_warp();
    raw.release(item);
    stages.deliver(step);
  }

  // Each thread has sixteen values of every TOKENS_APARTth token, all of which a swizzle leaves in the same places; eight
  // neighbours have those of as many tokens, which lie in different banks.
  static constexpr u32 CHUNKS = DIM / sizeof(Quad);
  static constexpr u32 TOKENS_APART = 32 * GROUP_WARPS / CHUNKS;
  DEVICE static u32 first_token() { return thread_index() % 8 + thread_index() / (8 * CHUNKS) * 8 % TOKENS_APART; }
  DEVICE static u32 first_value() { return thread_index() / 8 % CHUNKS * sizeof(Quad); }

  // Where the former and the latter eight of a thread's values of its first token are to be.
  DEVICE static u8* place(To& to, u32 half) {
    const u32 byte = first_value() % TILE_COLS * sizeof(bf16) + half * sizeof(Quad);
    return in_tile(to.tiles[first_value() / TILE_COLS], first_token(), byte);
  }

  DEVICE static void expand(To& to, const RawStage& from) {
    const u8* own = in_tile(from.codes, first_token(), first_value());
    u8* places[2] = {place(to, 0), place(to, 1)};
    Quad next = load_quad(own);  // ahead of the writes, behind which the compiler would put it
#pragma unroll
    for (u32 token = 0; token < KEYS; token += TOKENS_APART) {
      const Quad codes = next;
      if (token + TOKENS_APART < KEYS) next = load_quad(own + (token + TOKENS_APART) * TILE_ROW_BYTES);
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        Quad pairs;
        for (u32 i = 0; i < 4; ++i) pairs.word[i] = expand_two<CODE>(codes.word[2 * half + i / 2], i % 2);
        write_operand(places[half] + token * TILE_ROW_BYTES, pairs);
      }
    }
  }

  // Each thread has a token's scales.
  DEVICE void copy_scales(To& to, const RawStage& from, u32 step) const {
    static_assert(32 * GROUP_WARPS == KEYS, "a thread for each token");
    const u32 token = thread_index() % KEYS;
    for (u32 kind = 0; kind < 2; ++kind) {
      const u32 at = kind * KEYS + token;
      const u8* scale = in_tile(from.scales, at / ROW_SCALES, at % ROW_SCALES * sizeof(float));
      to.scales[kind][token] = tile.has(step, token) ? *reinterpret_cast<const float*>(scale) : 0;
    }
  }
};

// 128 rows of a sequence's tokens in this launch. Blocks with more keys begin first: the others fill in behind them.
template <u32 DIM, Code CODE>
DEVICE void prefill(const bf16* query, const TensorMap& codes, const TensorMap& scales, const Chunks& chunks, bf16* out,
                    const Shape& shape) {
  SHARED(Barrier, barriers, 4 * STAGES + 2 * RAW_STAGES);
  DYNAMIC_SHARED(u8, memory);
  wait_for_previous();
  let_next_start();
  const Tile tile(chunks, shape, blocks_x() - 1 - block_x());
  typedef Converter<DIM, CODE> Converter;
  auto* stages = reinterpret_cast<typename Converter::To*>(align_tiles(memory));
  auto* raw_stages = reinterpret_cast<RawStage*>(stages + 2 * STAGES);
  Barrier* for_raw = barriers + 4 * STAGES;
  const Converter converter{codes, scales, tile, {stages, barriers, barriers + 2 * STAGES},
                            {raw_stages, for_raw, for_raw + RAW_STAGES}, shape.kv_heads};
  if (thread_index() == 0) converter.init();
  sync_threads();
  if (warp_index() < FIRST_BRINGING_WARP) {
    return attend<DIM, MULTIPLYING_REGISTERS>(tile, query, shape, converter.keys, converter.values(), out);
  }
  give_registers<CONVERTING_REGISTERS>();
  converter.all();
}

#endif  // HOPPER

// Grid: (tiles, kv_heads); tile i has rows from `tile_firsts[i]` of sequence `tile_sequences[i]`.
#ifdef HOPPER
#define PREFILL(DIM, CODE)                                                                                       \
  prefill<DIM, Code::CODE>(query, codes, scales,                                                                 \
                           {tables, tile_sequences, tile_firsts, first_tokens, token_counts, first_positions}, out, \
                           {heads, kv_heads, dim, max_pages, scale, window})
#else
#define PREFILL(DIM, CODE)
#endif
#define PREFILL_PARAMETERS                                                                                     \
  (const bf16* query, TENSOR_MAP codes, TENSOR_MAP scales, const u32* tables, const u32* tile_sequences,       \
   const u32* tile_firsts, const u32* first_tokens, const u32* token_counts, const u32* first_positions, bf16* out, \
   u32 heads, u32 kv_heads, u32 dim, u32 max_pages, float scale, u32 window)

LARGE_KERNEL(attention_hopper_fp8_64, THREADS) PREFILL_PARAMETERS { PREFILL(64, E4m3); }
LARGE_KERNEL(attention_hopper_fp8_128, THREADS) PREFILL_PARAMETERS { PREFILL(128, E4m3); }
LARGE_KERNEL(attention_hopper_int8_64, THREADS) PREFILL_PARAMETERS { PREFILL(64, Int8); }
LARGE_KERNEL(attention_hopper_int8_128, THREADS) PREFILL_PARAMETERS { PREFILL(128, Int8); }
