// What attention of many tokens on Hopper shares, whatever pages hold (FlashAttention 3): a block's rows, the stages through which
// their keys and values go, and what warpgroups compute of them.
//
// Pages are [K|V][kv_head][64 tokens][dim], and rows are the query heads that share a key-value head, token after token, as
// attention.cu has them. A block has up to 128 rows, 64 for each of its two warpgroups, and goes through the keys 128 at a time,
// from a multiple of 128 on: so a row's sums have one order, wherever its block begins. A third warpgroup brings keys and values,
// each by themselves, into stages of shared memory. The others hold queries, and then weights, in registers, and multiply them with
// what is there (wgmma): the scores of a step are computed while the values of the step before are added up, and turned into
// weights meanwhile.
//
// A page's tokens behind a sequence's end are nobody's, and so are pages ahead of what a window lets see. Keys there are masked.
// Values there must be numbers, for a weight of nothing times a NaN is a NaN: whoever brings them sees to it. Heads have up to DIM
// values; those that a shorter one lacks are zeros.
#pragma once
#include "hopper.cuh"

constexpr u32 WARPGROUPS = 2;
constexpr u32 GROUP_WARPS = 4;
constexpr u32 FIRST_BRINGING_WARP = WARPGROUPS * GROUP_WARPS;
constexpr int THREADS = 32 * GROUP_WARPS * (WARPGROUPS + 1);

#ifdef HOPPER

constexpr u32 PAGE = 64;
constexpr u32 KEYS = 128;  // of a step
constexpr u32 STEP_PAGES = KEYS / PAGE;
constexpr u32 STAGES = 2;
constexpr u32 GROUP_ROWS = 64;
constexpr u32 TILE_COLS = TILE_ROW_BYTES / sizeof(bf16);
constexpr float LOG2_E = 1.44269504f;

// The keys or the values of a step, in tiles of 64 of a head's values.
template <u32 DIM>
struct Stage {
  static constexpr bool SCALED = false;
  static constexpr u32 TILES = DIM / TILE_COLS;
  bf16 tiles[TILES][KEYS * TILE_COLS];
};

// The same where they are codes: with keys comes what their scores are multiplied with, and their values' weights.
template <u32 DIM>
struct ScaledStage : Stage<DIM> {
  static constexpr bool SCALED = true;
  float scales[2][KEYS];
};

// What a launch gives for all its blocks.
struct Shape {
  u32 heads, kv_heads, dim, max_pages;
  float scale;  // of scores, before the exponential
  u32 window;   // keys that a query sees, 0 for all
};

// The sequences of a launch.
struct Chunks {
  const u32 *tables, *tile_sequences, *tile_firsts, *first_tokens, *token_counts, *first_positions;
};

// A block's rows, and the keys that they see.
struct Tile {
  u32 group, head;          // query heads that share a key-value head, and this one
  u32 first_row, rows_end;  // of the sequence's rows
  u32 position;             // of the sequence's first token in this launch
  u32 first_token;
  const u32* pages;
  u32 window, keys;  // keys that a row sees, 0 for all, and keys that the sequence has
  u32 first_page, first_step, steps;

  DEVICE Tile(const Chunks& chunks, const Shape& shape, u32 index)
      : group(shape.heads / shape.kv_heads), head(block_y()), first_row(chunks.tile_firsts[index]), window(shape.window) {
    const u32 sequence = chunks.tile_sequences[index], tokens = chunks.token_counts[sequence];
    rows_end = smaller(tokens * group, first_row + WARPGROUPS * GROUP_ROWS);
    position = chunks.first_positions[sequence];
    first_token = chunks.first_tokens[sequence];
    pages = chunks.tables + static_cast<u64>(sequence) * shape.max_pages;
    keys = position + tokens;
    first_page = first(end(first_row)) / PAGE;
    first_step = first_page / STEP_PAGES;
    steps = ceil_divide(end(rows_end - 1), KEYS) - first_step;
  }

  // Keys up to that of the row's own token, none where there is no such row; and the first that is seen of so many.
  DEVICE u32 end(u32 row) const { return row < rows_end ? position + row / group + 1 : 0; }
  DEVICE u32 first(u32 end) const { return window && end > window ? end - window : 0; }
  // Warpgroups that have rows.
  DEVICE u32 warpgroups() const { return smaller(ceil_divide(rows_end - first_row, GROUP_ROWS), WARPGROUPS); }
  // The position of a step's first key.
  DEVICE u32 start(u32 step) const { return (first_step + step) * KEYS; }
  // Whether a step's key is in a page that is there, and somebody's.
  DEVICE bool has(u32 step, u32 key) const {
    return first_page * PAGE <= start(step) + key && start(step) + key < keys;
  }
  // The pages of a step that are there, and whether they hold all its keys.
  DEVICE u32 page(u32 step) const { return larger(start(step) / PAGE, first_page); }
  DEVICE u32 page_end(u32 step) const { return smaller(start(step + 1) / PAGE, ceil_divide(keys, PAGE)); }
  DEVICE bool whole(u32 step) const { return first_page * PAGE <= start(step) && start(step) + KEYS <= keys; }
};

// Stages that go round: step after step has the next one. Of a stage's two barriers one says that what it holds came, the other
// that all warps have read it.
template <typename Stage, u32 STAGES>
struct Ring {
  Stage* stages;
  Barrier* came;
  Barrier* read;

  DEVICE void init(u32 writers, u32 readers) const {
    for (u32 stage = 0; stage < STAGES; ++stage) {
      init_barrier(&came[stage], writers);
      init_barrier(&read[stage], readers);
    }
  }
  DEVICE Stage& stage(u32 step) const { return stages[step % STAGES]; }
  DEVICE Barrier* arrival(u32 step) const { return &came[step % STAGES]; }
  // Says that this warp has written its part of a step's stage.
  DEVICE void deliver(u32 step) const {
    if (lane_index() == 0) arrive(arrival(step));
  }
  // Waits until all have read what the stage of this step held before.
  DEVICE void wait_free(u32 step) const {
    if (step >= STAGES) wait_phase(&read[step % STAGES], (step / STAGES + 1) % 2);
  }
  DEVICE const Stage& wait(u32 step) const {
    wait_phase(&came[step % STAGES], step / STAGES % 2);
    return stage(step);
  }
  // Says that this warp has read the stage of a step.
  DEVICE void release(u32 step) const {
    if (lane_index() == 0) arrive(&read[step % STAGES]);
  }
};

// A warpgroup's rows, sixteen of each warp: rows g and g + 8 in lane 4g + t, as products have them.
template <u32 DIM, typename From>
struct Rows {
  typedef Ring<From, STAGES> Stages;

  const Tile& tile;
  float scale;   // of scores in base 2
  u32 warp_row;  // the first of the warp
  u32 end[2];    // of the keys that each row sees
  u32 all_first, all_end;  // keys that all rows of the warp see
  u32 query[DIM / 16][4];
  u32 weights[KEYS / 16][4];
  float score[KEYS / 2];
  float out[DIM / 2];
  float largest[2], sum[2], factor[2];

  DEVICE Rows(const Tile& tile, float scale)
      : tile(tile), scale(scale * LOG2_E),
        warp_row(tile.first_row + 16 * shuffle(warp_index(), 0)) {  // the same in all lanes: that saves registers
    for (int half = 0; half < 2; ++half) {
      largest[half] = minus_infinity();
      sum[half] = 0;
      end[half] = tile.end(row(half));
    }
    all_first = tile.first(tile.end(smaller(warp_row + 15, tile.rows_end - 1)));
    all_end = tile.end(warp_row);
  }

  DEVICE u32 row(int half) const { return warp_row + lane_index() / 4 + 8 * half; }

  // The place of a row's first value among queries and results.
  DEVICE u64 place(u32 row, const Shape& shape) const {
    const u32 token = tile.first_token + row / tile.group, head = tile.head * tile.group + row % tile.group;
    return (static_cast<u64>(token) * shape.heads + head) * shape.dim;
  }

  DEVICE void load(const bf16* queries, const Shape& shape) {
    for (int half = 0; half < 2; ++half) {
      const bool valid = end[half] > 0;
      const bf16* from = queries + (valid ? place(row(half), shape) : 0);
#pragma unroll
      for (u32 k = 0; k < DIM / 16; ++k) {
        for (u32 part = 0; part < 2; ++part) {
          const u32 at = 16 * k + 2 * (lane_index() % 4) + 8 * part;
          query[k][2 * part + half] = valid && at < shape.dim ? *reinterpret_cast<const u32*>(from + at) : 0;
        }
      }
    }
  }

  // Goes through all keys.
  DEVICE void attend(const Stages& keys, const Stages& values) {
    compare(keys.wait(0));
    settle_products<0>(score);
    turn(keys, 0);
    for (u32 step = 1; step < tile.steps; ++step) {
      weigh();
      compare(keys.wait(step));
      add(values.wait(step - 1), step > 1);
      settle_products<1>(score);
      turn(keys, step);
      settle_products<0>(out);
      values.release(step - 1);
      rescale();
    }
    weigh();
    add(values.wait(tile.steps - 1), tile.steps > 1);
    settle_products<0>(out);
  }

  DEVICE void write(bf16* to, const Shape& shape) const {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float four = sum[half] + shuffle_xor(sum[half], 1);
      const float factor = 1.0f / (four + shuffle_xor(four, 2));
      if (!end[half]) continue;
      bf16* own = to + place(row(half), shape);
#pragma unroll
      for (u32 n = 0; n < DIM / 8; ++n) {
        const u32 at = 8 * n + 2 * (lane_index() % 4);
        const float *pair = out + 4 * n + 2 * half;
        if (at < shape.dim) *reinterpret_cast<u32*>(own + at) = pack_bf16(pair[0] * factor, pair[1] * factor);
      }
    }
  }

 private:
  // Starts to compute the scores of a step's keys.
  DEVICE void compare(const Stage<DIM>& stage) {
    fence_products();
#pragma unroll
    for (u32 part = 0; part < Stage<DIM>::TILES; ++part) {
      u64 keys = operand_at(stage.tiles[part]);
#pragma unroll
      for (u32 k = 0; k < TILE_COLS / 16; ++k) {
        multiply_rows<false>(score, query[part * TILE_COLS / 16 + k], keys, part + k > 0);
        keys = operand_after(keys);
      }
    }
    commit_products();
  }

  // Starts to add up a step's values by their weights.
  DEVICE void add(const Stage<DIM>& stage, bool adds) {
    u64 values = operand_at(stage.tiles, sizeof stage.tiles[0]);
    fence_products();
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; ++k) {
      multiply_rows<true>(out, weights[k], values, adds || k > 0);
      values = operand_below<16>(values);
    }
    commit_products();
  }

  // Turns a step's scores into weights, and gives its keys back: at once where they have no scales.
  DEVICE void turn(const Stages& keys, u32 step) {
    if constexpr (From::SCALED) {
      scale_columns(keys.stage(step).scales[0]);
      soften(step);
      scale_columns(keys.stage(step).scales[1]);
      sync_warp();  // all lanes have read
      keys.release(step);
    } else {
      keys.release(step);
      soften(step);
    }
  }

  // Multiplies scores or weights with the scale of each key.
  DEVICE void scale_columns(const float* scales) {
    const float* own = scales + 2 * (lane_index() % 4);
#pragma unroll
    for (u32 n = 0; n < KEYS / 8; ++n) {
      u32 two[2];
      load_two(two, own + 8 * n);
      for (u32 i = 0; i < 4; ++i) score[4 * n + i] *= float_of(two[i % 2]);
    }
  }

  // Minus infinity where a row does not see the key.
  DEVICE void mask(u32 start) {
    if (start >= all_first && start + KEYS <= all_end) return;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int own = start + 2 * (lane_index() % 4);  // the thread's first key
      const int seen_first = tile.first(end[half]) - own, seen_end = end[half] - own;
#pragma unroll
      for (int n = 0; n < int{KEYS / 8}; ++n) {
        for (int i = 0; i < 2; ++i) {
          if (8 * n + i < seen_first || 8 * n + i >= seen_end) score[4 * n + 2 * half + i] = minus_infinity();
        }
      }
    }
  }

  // Turns a step's scores into weights relative to the largest so far, and the sum of those before along with them.
  DEVICE void soften(u32 step) {
    mask(tile.start(step));
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[half];
#pragma unroll
      for (u32 n = 0; n < KEYS / 8; ++n) {
        most = larger(most, larger(score[4 * n + 2 * half], score[4 * n + 2 * half + 1]));
      }
      most = larger(most, shuffle_xor(most, 1));
      most = larger(most, shuffle_xor(most, 2));
      const float base = most == minus_infinity() ? 0 : most * scale;  // a row that sees none of these keys
      factor[half] = exp2_fast(largest[half] * scale - base);
      largest[half] = most;
      sum[half] *= factor[half];
#pragma unroll
      for (u32 n = 0; n < KEYS / 8; ++n) {
        for (u32 i = 0; i < 2; ++i) {
          float& value = score[4 * n + 2 * half + i];
          value = exp2_fast(value * scale - base);
          sum[half] += value;
        }
      }
    }
  }

  // Rounds weights: the sums of a product are the rows of the next.
  DEVICE void weigh() {
#pragma unroll
    for (u32 k = 0; k < KEYS / 16; ++k) {
      for (u32 i = 0; i < 4; ++i) weights[k][i] = pack_bf16(score[8 * k + 2 * i], score[8 * k + 2 * i + 1]);
    }
  }

  // Gives what was summed the base of the weights that come next.
  DEVICE void rescale() {
#pragma unroll
    for (u32 i = 0; i < DIM / 2; ++i) out[i] *= factor[i / 2 % 2];
  }
};

// What a multiplying warpgroup does.
template <u32 DIM, int REGISTERS, typename From>
DEVICE void attend(const Tile& tile, const bf16* query, const Shape& shape, const Ring<From, STAGES>& keys,
                   const Ring<From, STAGES>& values, bf16* out) {
  take_registers<REGISTERS>();
  if (warp_index() >= tile.warpgroups() * GROUP_WARPS) return;
  Rows<DIM, From> rows(tile, shape.scale);
  rows.load(query, shape);
  rows.attend(keys, values);
  rows.write(out, shape);
}

#endif  // HOPPER
