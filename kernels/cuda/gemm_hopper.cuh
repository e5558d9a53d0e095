// What products of many tokens on Hopper share: stages of tiles that one thread has copied (TMA) while two warpgroups multiply
// them, and where results go.
//
// A block computes TOKENS tokens x ROWS rows, its grid is (parts of the tokens, parts of the rows): blocks that run at a time share
// their weights.
//
// Two blocks of a cluster have the same tokens and different rows. Each copies half of the tokens to both, so that of what a
// block's stage holds it asks for half the tokens and all of its weights. Tokens rather than weights, because these are the same
// number of bytes or fewer (weights of 4 bits are a third), and because a matrix has an even number of parts more often than a
// prompt. Where it has an odd one, each block is by itself and copies both halves.
//
// Of a mixture of experts a block has up to TOKENS tokens of one expert, side by side, with the rows of that expert's matrix. Tiles
// begin at any row: what is copied behind the last token or row is another expert's, is computed and goes nowhere.
#pragma once
#include "hopper.cuh"
#include "output.cuh"

constexpr u32 MULTIPLYING_WARPS = 8;
constexpr int THREADS = 32 * (MULTIPLYING_WARPS + 1);

#ifdef HOPPER

constexpr u32 TOKENS = 128;
constexpr u32 ROWS = 128;
constexpr u32 PRODUCT_ROWS = 64;  // of a warpgroup's product
constexpr u32 SHARES = 2;         // of a block's tokens: the most blocks of a cluster
constexpr u32 SHARE_TOKENS = TOKENS / SHARES;

// A block's tokens: rows of the input from the first on, of which those before `end` are its own. Its matrix has so many rows of
// others before it.
struct Part {
  u32 first, end, rows_before;
};

// Of tokens that all go through one matrix.
DEVICE Part part_of_all(u32 tokens) { return {block_x() * TOKENS, tokens, 0}; }

// Of a mixture of experts with `rows` rows each, by its tiles {expert, first token, end, -}: what is nobody's has no tokens.
DEVICE Part part_of_experts(const u32* tiles, u32 rows) {
  wait_for_previous();  // who goes through which expert was computed just now
  const u32* tile = tiles + 4 * block_x();
  if (tile[0] == 0xffffffffu) return {0, 0, 0};
  return {tile[1], tile[2], tile[0] * rows};
}

// Stages that go round: step after step of the columns has the next one. Of a stage's two barriers one says that what it holds
// came, the other that all multiplying warps of the cluster have read it: each of its blocks copies to all.
template <typename Stage, u32 STAGES>
struct Pipeline {
  Stage* stages;
  Barrier* came;
  Barrier* read;
  u32 steps;

  DEVICE void init() const {
    for (u32 stage = 0; stage < STAGES; ++stage) {
      init_barrier(&came[stage], 1);
      init_barrier(&read[stage], MULTIPLYING_WARPS * cluster_blocks());
    }
    publish_barriers();
  }

  // What the thread does that has tiles copied: `weights(step, stage, barrier)` and `input(…)` start a step's copies.
  template <typename Weights, typename Input>
  DEVICE void copy_all(Weights weights, Input input) const {
    const u32 ahead = smaller(steps, STAGES);
    for (u32 step = 0; step < ahead; ++step) {
      expect(step);
      weights(step, stages[step], &came[step]);
    }
    wait_for_previous();  // the weights are nobody's output
    let_next_start();
    for (u32 step = 0; step < ahead; ++step) input(step, stages[step], &came[step]);
    for (u32 step = ahead; step < steps; ++step) {
      wait_free(step);
      expect(step);
      weights(step, stages[step % STAGES], &came[step % STAGES]);
      input(step, stages[step % STAGES], &came[step % STAGES]);
    }
  }

  // Waits until the tiles of a step came.
  DEVICE const Stage& wait_tiles(u32 step) const {
    wait_phase(&came[step % STAGES], step / STAGES % 2);
    return stages[step % STAGES];
  }
  // Says that this warp has read the tiles of a step, where others come in their place: each lane to another block. Of the last
  // stages nobody is told: so a block, which waits until it has been told of all others, ends after whoever arrives there.
  DEVICE void release(u32 step) const {
    if (step + STAGES < steps) arrive_at_all(&read[step % STAGES]);
  }

 private:
  DEVICE void expect(u32 step) const { arrive_expecting(&came[step % STAGES], sizeof(Stage)); }
  // Waits until all have read what the stage of this step, not one of the first, held before.
  DEVICE void wait_free(u32 step) const { wait_phase(&read[step % STAGES], (step / STAGES + 1) % 2); }
};

// What a block does: one thread has the tiles of `steps` copied, as Pipeline::copy_all says, and eight warps call
// `multiply(pipeline)`.
template <typename Stage, u32 STAGES, typename Weights, typename Input, typename Multiply>
DEVICE void multiply_tiles_of(u32 steps, Weights weights, Input input, Multiply multiply) {
  SHARED(Barrier, came, STAGES);
  SHARED(Barrier, read, STAGES);
  DYNAMIC_SHARED(u8, memory);
  const Pipeline<Stage, STAGES> pipeline{reinterpret_cast<Stage*>(align_tiles(memory)), came, read, steps};
  if (thread_index() == 0) pipeline.init();
  sync_cluster();
  if (thread_index() == 32 * MULTIPLYING_WARPS) return pipeline.copy_all(weights, input);
  wait_for_previous();  // who adds to what is there reads it
  let_next_start();
  if (warp_index() < MULTIPLYING_WARPS) multiply(pipeline);
}

// Starts to copy columns of a block's tokens, of which each block of its cluster copies a share to all.
template <typename Value>
DEVICE void copy_tokens(Value* to, const TensorMap& input, u32 col, const Part& part, Barrier* came) {
  constexpr u32 DEPTH = TILE_ROW_BYTES / sizeof(Value);
  const u32 blocks = cluster_blocks();
  for (u32 share = cluster_rank(); share < SHARES; share += blocks) {
    Value* const place = to + share * SHARE_TOKENS * DEPTH;
    const u32 first = part.first + share * SHARE_TOKENS;
    if (blocks == 1) copy_tile(place, input, col, first, came);
    else copy_tile_to((1u << blocks) - 1, place, input, col, first, came);
  }
}

// A stage's tiles of both matrices, whose columns are of one type.
template <typename Value>
struct TilePair {
  static constexpr u32 DEPTH = TILE_ROW_BYTES / sizeof(Value);  // columns
  Value input[TOKENS * DEPTH];
  Value weights[ROWS * DEPTH];
};

// The same where stages are such pairs.
template <typename Value, u32 STAGES, typename Multiply>
DEVICE void multiply_matrices(u32 steps, const Part& part, const TensorMap& weights, const TensorMap& input, Multiply multiply) {
  typedef TilePair<Value> Stage;
  multiply_tiles_of<Stage, STAGES>(
      steps,
      [&](u32 step, Stage& to, Barrier* came) {
        copy_tile(to.weights, weights, step * Stage::DEPTH, part.rows_before + block_y() * ROWS, came);
      },
      [&](u32 step, Stage& to, Barrier* came) { copy_tokens(to.input, input, step * Stage::DEPTH, part, came); },
      multiply);
}

// Results of tiles, of which some are none.
struct Results {
  Output out;
  Part part;
  u32 rows;

  DEVICE void write(u32 token, u32 row, float value) const {
    if (token >= part.end || row >= rows) return;
    out.write(token, row, value);
  }

  // Two neighbours, at once where they lie in one word.
  DEVICE void write_pair(u32 token, u32 row, float first, float second) const {
    if (out.halves && out.stride % 2 == 0 && token < part.end && row < rows) {
      *reinterpret_cast<u32*>(out.halves + static_cast<u64>(token) * out.stride + row) = pack_bf16(first, second);
      return;
    }
    write(token, row, first);
    write(token, row + 1, second);
  }

  // Of row `row`, one of the first eight of sixteen, and of row `row + 8`.
  DEVICE void write_two(u32 token, u32 row, float former, float latter) const {
    if (token < part.end) out.write_two(token, row, rows, former, latter);
  }
};

// The places of a thread's sums where the weights are the left operand: rows g and g + 8 of its warp's sixteen, and tokens 2t and
// 2t + 1 of every eight.
DEVICE u32 row_of(u32 i) { return block_y() * ROWS + 16 * warp_index() + lane_index() / 4 + 8 * (i / 2 % 2); }
DEVICE u32 token_of(const Part& part, u32 i) { return part.first + 2 * (lane_index() % 4) + 8 * (i / 4) + i % 2; }

template <u32 SUMS>
DEVICE void write_sums(const Results& out, const float (&sum)[SUMS]) {
#pragma unroll
  for (u32 i = 0; i < SUMS; i += 4) {
#pragma unroll
    for (u32 k = i; k < i + 2; ++k) out.write_two(token_of(out.part, k), row_of(k), sum[k], sum[k + 2]);
  }
}

#endif  // HOPPER
