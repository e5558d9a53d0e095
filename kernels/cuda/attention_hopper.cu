// Causal attention of many tokens over paged keys and values in bf16, on Hopper (attention_hopper.cuh).
//
// One warp has pages copied (TMA) to where products read them. Values that are nobody's it writes over with zeros before it says
// that the values came; copies write zeros for what a head lacks.
#include "attention_hopper.cuh"

#ifdef HOPPER

// A multiprocessor has 504 for three threads: the copying one gives away what the others need.
constexpr int COPYING_REGISTERS = 24;
constexpr int MULTIPLYING_REGISTERS = 240;

// What the copying warp does.
template <u32 DIM>
struct Copies {
  typedef Ring<Stage<DIM>, STAGES> Stages;

  const TensorMap& matrix;  // all pages' rows of keys and values
  const Tile& tile;
  Stages keys, values;
  Barrier* partial;  // that values came which are not all of their step's
  u32 kv_heads;

  DEVICE void init() const {
    keys.init(1, tile.warpgroups() * GROUP_WARPS);
    values.init(1, tile.warpgroups() * GROUP_WARPS);
    init_barrier(partial, 1);
    publish_barriers();
  }

  // In the order in which they are read: the keys of a step, then the values of the step before.
  DEVICE void all() const {
    u32 partials = 0;
    for (u32 step = 0; step <= tile.steps; ++step) {
      if (step < tile.steps) {
        keys.wait_free(step);
        copy(step, 0, keys.stage(step), keys.arrival(step));
      }
      if (step > 0) copy_values(step - 1, partials);
    }
  }

 private:
  // Has a step's keys (0) or values (1) copied.
  DEVICE void copy(u32 step, u32 kind, Stage<DIM>& to, Barrier* barrier) const {
    if (lane_index() != 0) return;
    const u32 page = tile.page(step), end = tile.page_end(step);
    arrive_expecting(barrier, (end - page) * PAGE * DIM * sizeof(bf16));
    for (u32 at = page; at < end; ++at) {
      const u32 row = ((tile.pages[at] * 2 + kind) * kv_heads + tile.head) * PAGE;
      for (u32 part = 0; part < Stage<DIM>::TILES; ++part) {
        copy_tile(to.tiles[part] + at % STEP_PAGES * PAGE * TILE_COLS, matrix, part * TILE_COLS, row, barrier);
      }
    }
  }

  // Has a step's values copied. Where they are not all there, the others become zeros.
  DEVICE void copy_values(u32 step, u32& partials) const {
    Stage<DIM>& stage = values.stage(step);
    values.wait_free(step);
    if (tile.whole(step)) return copy(step, 1, stage, values.arrival(step));
    const u32 start = tile.start(step), ahead = tile.first_page * PAGE;
    copy(step, 1, stage, partial);
    wait_phase(partial, partials++ % 2);
    if (ahead > start) clear(stage, 0, ahead - start);
    if (tile.keys < start + KEYS) clear(stage, tile.keys - start, KEYS);
    show_operands();
    sync_warp();
    values.deliver(step);
  }

  DEVICE static void clear(Stage<DIM>& stage, u32 first, u32 end) {
    constexpr u32 CHUNK = sizeof(Quad) / sizeof(bf16);
    for (u32 part = 0; part < Stage<DIM>::TILES; ++part) {
      for (u32 at = first * TILE_COLS + lane_index() * CHUNK; at < end * TILE_COLS; at += 32 * CHUNK) {
        write_operand(stage.tiles[part] + at, {});
      }
    }
  }
};

// 128 rows of a sequence's tokens in this launch. Blocks with more keys begin first: the others fill in behind them.
template <u32 DIM>
DEVICE void prefill(const bf16* query, const TensorMap& pages, const Chunks& chunks, bf16* out, const Shape& shape) {
  SHARED(Barrier, barriers, 4 * STAGES + 1);
  DYNAMIC_SHARED(u8, memory);
  wait_for_previous();
  let_next_start();
  const Tile tile(chunks, shape, blocks_x() - 1 - block_x());
  Stage<DIM>* stages = reinterpret_cast<Stage<DIM>*>(align_tiles(memory));
  const typename Copies<DIM>::Stages keys{stages, barriers, barriers + STAGES};
  const typename Copies<DIM>::Stages values{stages + STAGES, barriers + 2 * STAGES, barriers + 3 * STAGES};
  const Copies<DIM> copies{pages, tile, keys, values, barriers + 4 * STAGES, shape.kv_heads};
  if (thread_index() == 0) copies.init();
  sync_threads();
  if (warp_index() < FIRST_BRINGING_WARP) {
    return attend<DIM, MULTIPLYING_REGISTERS>(tile, query, shape, keys, values, out);
  }
  give_registers<COPYING_REGISTERS>();
  if (warp_index() == FIRST_BRINGING_WARP) copies.all();
}

#endif  // HOPPER

// Grid: (tiles, kv_heads); tile i has rows from `tile_firsts[i]` of sequence `tile_sequences[i]`.
#ifdef HOPPER
#define PREFILL(DIM)                                                                                                \
  prefill<DIM>(query, pages, {tables, tile_sequences, tile_firsts, first_tokens, token_counts, first_positions}, out, \
               {heads, kv_heads, dim, max_pages, scale, window})
#else
#define PREFILL(DIM)
#endif
#define PREFILL_PARAMETERS                                                                                         \
  (const bf16* query, TENSOR_MAP pages, const u32* tables, const u32* tile_sequences, const u32* tile_firsts,      \
   const u32* first_tokens, const u32* token_counts, const u32* first_positions, bf16* out, u32 heads, u32 kv_heads, \
   u32 dim, u32 max_pages, float scale, u32 window)

LARGE_KERNEL(attention_hopper_64, THREADS) PREFILL_PARAMETERS { PREFILL(64); }
LARGE_KERNEL(attention_hopper_128, THREADS) PREFILL_PARAMETERS { PREFILL(128); }
