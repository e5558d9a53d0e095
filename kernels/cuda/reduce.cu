// What the ranks of a tensor-parallel group, one GPU each, exchange over memory that all of them reach: sums, and columns
// side by side.
//
// One shot: every rank reads what all ranks hold and puts it together itself, in the ranks' order, so that all get the same
// bits. A rank that begins a round tells all others, and its part of it is then complete, for the kernels ahead have ended.
// No two rounds that follow one another may use the same buffer: who has begun a round has read what all held in the
// rounds before the last, and may still read that of the last.
#include "dev.cuh"

constexpr int THREADS = 256;
// Times that a flag is read before the host's word is.
constexpr u32 PATIENCE = 64;

// Tells every rank that this one has begun `round`, and waits until all have: each has an array of flags, one of each rank.
// Once `left` is not zero, a rank has failed that may never begin, and nobody waits any more.
DEVICE void meet(const Address* flags, const u32* left, u32 rank, u32 ranks, u32 round) {
  const u32 other = thread_index();
  if (other < ranks) tell_peer(reinterpret_cast<u32*>(flags[other].at) + rank, round);
  sync_threads();  // who waits may keep its neighbours from telling
  if (other < ranks) {
    const u32* heard = reinterpret_cast<const u32*>(flags[rank].at) + other;
    for (u32 times = 1; static_cast<int>(hear_peer(heard) - round) < 0; ++times) {
      if (times % PATIENCE == 0 && hear_peer(left) != 0) break;
    }
  }
  sync_threads();
}

// Meets the others in this block's next round, once what is ahead of the kernel has ended. Whoever is done with what all hold
// notes the round in `rounds`.
DEVICE u32 begin_round(const Address* flags, const u32* left, const u32* rounds, u32 rank, u32 ranks) {
  wait_for_previous();
  let_next_start();
  const u32 round = rounds[block_x()] + 1;
  meet(flags, left, rank, ranks, round);
  return round;
}

// The sum over the ranks of the eight values that each holds at `i`, in bf16.
DEVICE void add_up(float (&sum)[8], const Address* parts, u32 ranks, u32 i) {
  for (int k = 0; k < 8; ++k) sum[k] = 0;
  for (u32 r = 0; r < ranks; ++r) {
    const Quad part = load_quad(reinterpret_cast<const bf16*>(parts[r].at) + i);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      sum[2 * k] += low_float(part.word[k]);
      sum[2 * k + 1] += high_float(part.word[k]);
    }
  }
}

// residual += sum over the ranks of what each holds at `parts[rank]`, in bf16. `rounds` counts them, for each block by
// itself. Grid: parts of the values, always as many.
KERNEL(add_reduced, THREADS)(const Address* parts, const Address* flags, const u32* left, u32* rounds, float* residual,
                             u32 rank, u32 ranks, u32 count) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  for (u32 i = 8 * (block_x() * THREADS + thread_index()); i < count; i += 8 * THREADS * blocks_x()) {
    float sum[8];
    add_up(sum, parts, ranks, i);
    for (int half = 0; half < 2; ++half) {
      Quad held = load_quad(residual + i + 4 * half);
      for (int k = 0; k < 4; ++k) held.word[k] = bits_of(float_of(held.word[k]) + sum[4 * half + k]);
      store_quad(residual + i + 4 * half, held);
    }
  }
  if (thread_index() == 0) rounds[block_x()] = round;
}

// out = the same sum, rounded.
KERNEL(reduced, THREADS)(const Address* parts, const Address* flags, const u32* left, u32* rounds, bf16* out, u32 rank,
                         u32 ranks, u32 count) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  for (u32 i = 8 * (block_x() * THREADS + thread_index()); i < count; i += 8 * THREADS * blocks_x()) {
    float sum[8];
    add_up(sum, parts, ranks, i);
    Quad pairs;
    for (int k = 0; k < 4; ++k) pairs.word[k] = pack_bf16(sum[2 * k], sum[2 * k + 1]);
    store_quad(out + i, pairs);
  }
  if (thread_index() == 0) rounds[block_x()] = round;
}

// out = sum over the ranks of floats: embeddings, of which all ranks but one hold zeros.
KERNEL(reduced_floats, THREADS)(const Address* parts, const Address* flags, const u32* left, u32* rounds, float* out,
                                u32 rank, u32 ranks, u32 count) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  for (u32 i = 4 * (block_x() * THREADS + thread_index()); i < count; i += 4 * THREADS * blocks_x()) {
    Quad sum = {};
    for (u32 r = 0; r < ranks; ++r) {
      const Quad part = load_quad(reinterpret_cast<const float*>(parts[r].at) + i);
      for (int k = 0; k < 4; ++k) sum.word[k] = bits_of(float_of(sum.word[k]) + float_of(part.word[k]));
    }
    store_quad(out + i, sum);
  }
  if (thread_index() == 0) rounds[block_x()] = round;
}

// Rows of `cols` values, of which rank r holds columns firsts[r] to firsts[r + 1].
KERNEL(gather_columns, THREADS)(const Address* parts, const Address* flags, const u32* left, u32* rounds, float* out,
                                const u32* firsts, u32 rank, u32 ranks, u32 rows, u32 cols) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  for (u32 r = 0; r < ranks; ++r) {
    const float* part = reinterpret_cast<const float*>(parts[r].at);
    const u32 first = firsts[r], width = firsts[r + 1] - first;
    for (u32 i = block_x() * THREADS + thread_index(); i < rows * width; i += THREADS * blocks_x()) {
      out[static_cast<u64>(i / width) * cols + first + i % width] = part[i];
    }
  }
  if (thread_index() == 0) rounds[block_x()] = round;
}
