// The sum over the ranks of a tensor-parallel group, one GPU each, over memory that all of them reach.
//
// One shot: every rank reads what all ranks hold and adds it up itself, in the ranks' order, so that all get the same bits.
// A rank that begins a round tells all others, and its part of it is then complete, for the kernels ahead have ended. What
// a rank holds lies in two buffers by turns: who has begun a round has read what all held in the rounds before the last.
#include "dev.cuh"

constexpr int THREADS = 256;

// Tells every rank that this one has begun `round`, and waits until all have. Each has an array of flags, one of each rank.
DEVICE void meet(const u64* flags, u32 rank, u32 ranks, u32 round) {
  const u32 other = thread_index();
  if (other < ranks) tell_peer(reinterpret_cast<u32*>(flags[other]) + rank, round);
  sync_threads();  // who waits may keep its neighbours from telling
  if (other < ranks) {
    const u32* heard = reinterpret_cast<const u32*>(flags[rank]) + other;
    while (static_cast<int>(hear_peer(heard) - round) < 0) {
    }
  }
  sync_threads();
}

// residual += sum over the ranks of what each holds at `parts[rank]`, in bf16. `rounds` counts them, for each block by
// itself. Grid: parts of the values, always as many.
KERNEL(add_reduced, THREADS)(const u64* parts, const u64* flags, u32* rounds, float* residual, u32 rank, u32 ranks,
                             u32 count) {
  wait_for_previous();
  let_next_start();
  const u32 round = rounds[block_x()] + 1;
  meet(flags, rank, ranks, round);
  for (u32 i = 8 * (block_x() * THREADS + thread_index()); i < count; i += 8 * THREADS * blocks_x()) {
    float sum[8] = {};
    for (u32 r = 0; r < ranks; ++r) {
      const Quad part = load_quad(reinterpret_cast<const bf16*>(parts[r]) + i);
#pragma unroll
      for (int k = 0; k < 4; ++k) {
        sum[2 * k] += low_float(part.word[k]);
        sum[2 * k + 1] += high_float(part.word[k]);
      }
    }
    for (int half = 0; half < 2; ++half) {
      Quad held = load_quad(residual + i + 4 * half);
      for (int k = 0; k < 4; ++k) held.word[k] = bits_of(float_of(held.word[k]) + sum[4 * half + k]);
      store_quad(residual + i + 4 * half, held);
    }
  }
  if (thread_index() == 0) rounds[block_x()] = round;
}
