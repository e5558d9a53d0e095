// What the ranks of a tensor-parallel group, one GPU each, exchange: sums, and columns side by side. They meet in memory that all
// of them reach, or a library has carried what all hold to each of them, and then nobody is met here (`…_gathered`).
//
// One shot: every rank reads what all ranks hold and puts it together itself, in the ranks' order, so that all get the same
// bits. Two shots, for many values: every rank adds a share of them up, in the same order and in f32, and then all read all
// shares, so that the bits are those of one shot. Each shot is a round, and the shares are read in every second one. A rank that begins a round tells all others, and its part of it is then complete, for the kernels ahead have ended.
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

// Gives `use` this thread's places among those from `first` to `end`, WIDTH at a time.
template <u32 WIDTH, typename USE>
DEVICE void each_place(u32 first, u32 end, USE use) {
  for (u32 i = first + WIDTH * (block_x() * THREADS + thread_index()); i < end; i += WIDTH * THREADS * blocks_x()) use(i);
}

// What the ranks hold, each where it is.
template <typename T>
struct Reached {
  const Address* parts;
  DEVICE const T* of(u32 rank) const { return reinterpret_cast<const T*>(parts[rank].at); }
};

// The same once it was carried here: so many values of each, one rank's behind the other's.
template <typename T>
struct Gathered {
  const T* all;
  u32 count;
  DEVICE const T* of(u32 rank) const { return all + static_cast<u64>(rank) * count; }
};

// The sum over the ranks of the eight values that each holds at `i`, in bf16.
template <typename PARTS>
DEVICE void add_up(float (&sum)[8], const PARTS& parts, u32 ranks, u32 i) {
  for (int k = 0; k < 8; ++k) sum[k] = 0;
  for (u32 r = 0; r < ranks; ++r) {
    const Quad part = load_quad(parts.of(r) + i);
#pragma unroll
    for (int k = 0; k < 4; ++k) {
      sum[2 * k] += low_float(part.word[k]);
      sum[2 * k + 1] += high_float(part.word[k]);
    }
  }
}

// Gives `put` this thread's sums over the ranks of what they hold from `first` to `end`, eight at a time, and where they are.
template <typename PARTS, typename PUT>
DEVICE void each_sum(const PARTS& parts, u32 ranks, u32 first, u32 end, PUT put) {
  each_place<8>(first, end, [&](u32 i) {
    float sum[8];
    add_up(sum, parts, ranks, i);
    put(i, sum);
  });
}

// The sum over the ranks of the four floats that each holds at `i`.
template <typename PARTS>
DEVICE Quad floats_added_up(const PARTS& parts, u32 ranks, u32 i) {
  Quad sum = {};
  for (u32 r = 0; r < ranks; ++r) {
    const Quad part = load_quad(parts.of(r) + i);
    for (int k = 0; k < 4; ++k) sum.word[k] = bits_of(float_of(sum.word[k]) + float_of(part.word[k]));
  }
  return sum;
}

// residual += eight sums.
DEVICE void add_to(float* residual, const float (&sum)[8]) {
  for (int half = 0; half < 2; ++half) {
    Quad held = load_quad(residual + 4 * half);
    for (int k = 0; k < 4; ++k) held.word[k] = bits_of(float_of(held.word[k]) + sum[4 * half + k]);
    store_quad(residual + 4 * half, held);
  }
}

// out = eight sums, rounded.
DEVICE void round_to(bf16* out, const float (&sum)[8]) {
  Quad pairs;
  for (int k = 0; k < 4; ++k) pairs.word[k] = pack_bf16(sum[2 * k], sum[2 * k + 1]);
  store_quad(out, pairs);
}

// residual += sum over the ranks of what each holds at `parts[rank]`, in bf16. `rounds` counts them, for each block by
// itself. Grid: parts of the values, always as many.
KERNEL(add_reduced, THREADS)(const Address* parts, const Address* flags, const u32* left, u32* rounds, float* residual,
                             u32 rank, u32 ranks, u32 count) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  each_sum(Reached<bf16>{parts}, ranks, 0, count, [&](u32 i, const float (&sum)[8]) { add_to(residual + i, sum); });
  if (thread_index() == 0) rounds[block_x()] = round;
}

// out = the same sum, rounded.
KERNEL(reduced, THREADS)(const Address* parts, const Address* flags, const u32* left, u32* rounds, bf16* out, u32 rank,
                         u32 ranks, u32 count) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  each_sum(Reached<bf16>{parts}, ranks, 0, count, [&](u32 i, const float (&sum)[8]) { round_to(out + i, sum); });
  if (thread_index() == 0) rounds[block_x()] = round;
}

// Where a rank's share of the values begins, and the share before it ends: at whole eights.
DEVICE u32 share_start(u32 rank, u32 ranks, u32 count) {
  return 8 * static_cast<u32>(static_cast<u64>(count / 8) * rank / ranks);
}

// sums = the same sums of this rank's share: the first of two shots.
KERNEL(reduced_share, THREADS)(const Address* parts, const Address* flags, const u32* left, u32* rounds, float* sums,
                               u32 rank, u32 ranks, u32 count) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  const u32 first = share_start(rank, ranks, count), end = share_start(rank + 1, ranks, count);
  each_sum(Reached<bf16>{parts}, ranks, first, end, [&](u32 i, const float (&sum)[8]) {
    for (int half = 0; half < 2; ++half) {
      Quad bits;
      for (int k = 0; k < 4; ++k) bits.word[k] = bits_of(sum[4 * half + k]);
      store_quad(sums + (i - first) + 4 * half, bits);
    }
  });
  if (thread_index() == 0) rounds[block_x()] = round;
}

// Gives `put` eights of sums and where they are, from the shares that the ranks hold. Each rank begins with its own, so that
// not all read of the same one at once.
template <typename PUT>
DEVICE void each_shared_sum(const Address* shares, u32 rank, u32 ranks, u32 count, PUT put) {
  for (u32 nth = 0; nth < ranks; ++nth) {
    const u32 other = (rank + nth) % ranks;
    const float* share = reinterpret_cast<const float*>(shares[other].at);
    const u32 first = share_start(other, ranks, count), end = share_start(other + 1, ranks, count);
    each_place<8>(first, end, [&](u32 i) {
      const Quad low = load_quad(share + (i - first)), high = load_quad(share + (i - first) + 4);
      float sum[8];
      for (int k = 0; k < 4; ++k) {
        sum[k] = float_of(low.word[k]);
        sum[4 + k] = float_of(high.word[k]);
      }
      put(i, sum);
    });
  }
}

// residual += the shares that the ranks hold at `shares[rank]`: the second shot.
KERNEL(add_shares, THREADS)(const Address* shares, const Address* flags, const u32* left, u32* rounds, float* residual,
                            u32 rank, u32 ranks, u32 count) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  each_shared_sum(shares, rank, ranks, count, [&](u32 i, const float (&sum)[8]) { add_to(residual + i, sum); });
  if (thread_index() == 0) rounds[block_x()] = round;
}

// out = the same shares, rounded.
KERNEL(round_shares, THREADS)(const Address* shares, const Address* flags, const u32* left, u32* rounds, bf16* out,
                              u32 rank, u32 ranks, u32 count) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  each_shared_sum(shares, rank, ranks, count, [&](u32 i, const float (&sum)[8]) { round_to(out + i, sum); });
  if (thread_index() == 0) rounds[block_x()] = round;
}

// out = sum over the ranks of floats: embeddings, of which all ranks but one hold zeros.
KERNEL(reduced_floats, THREADS)(const Address* parts, const Address* flags, const u32* left, u32* rounds, float* out,
                                u32 rank, u32 ranks, u32 count) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  each_place<4>(0, count, [&](u32 i) { store_quad(out + i, floats_added_up(Reached<float>{parts}, ranks, i)); });
  if (thread_index() == 0) rounds[block_x()] = round;
}

// Rows of `cols` values, of which rank r holds columns firsts[r] to firsts[r + 1].
template <typename PARTS>
DEVICE void place_columns(float* out, const PARTS& parts, const u32* firsts, u32 ranks, u32 rows, u32 cols) {
  for (u32 r = 0; r < ranks; ++r) {
    const float* part = parts.of(r);
    const u32 first = firsts[r], width = firsts[r + 1] - first;
    each_place<1>(0, rows * width, [&](u32 i) { out[static_cast<u64>(i / width) * cols + first + i % width] = part[i]; });
  }
}

KERNEL(gather_columns, THREADS)(const Address* parts, const Address* flags, const u32* left, u32* rounds, float* out,
                                const u32* firsts, u32 rank, u32 ranks, u32 rows, u32 cols) {
  const u32 round = begin_round(flags, left, rounds, rank, ranks);
  place_columns(out, Reached<float>{parts}, firsts, ranks, rows, cols);
  if (thread_index() == 0) rounds[block_x()] = round;
}

// residual += sum over the ranks of the `count` values that each had, in bf16, in the same order as above. Grid: parts of the
// values.
KERNEL(add_gathered, THREADS)(const bf16* all, float* residual, u32 ranks, u32 count) {
  wait_for_previous();
  let_next_start();
  each_sum(Gathered<bf16>{all, count}, ranks, 0, count, [&](u32 i, const float (&sum)[8]) { add_to(residual + i, sum); });
}

// out = the same sum, rounded.
KERNEL(round_gathered, THREADS)(const bf16* all, bf16* out, u32 ranks, u32 count) {
  wait_for_previous();
  let_next_start();
  each_sum(Gathered<bf16>{all, count}, ranks, 0, count, [&](u32 i, const float (&sum)[8]) { round_to(out + i, sum); });
}

// out = sum over the ranks of the `count` floats that each had.
KERNEL(floats_gathered, THREADS)(const float* all, float* out, u32 ranks, u32 count) {
  wait_for_previous();
  let_next_start();
  each_place<4>(0, count, [&](u32 i) { store_quad(out + i, floats_added_up(Gathered<float>{all, count}, ranks, i)); });
}

// As `gather_columns`, where each rank's begin `stride` floats behind those of the rank before.
KERNEL(columns_gathered, THREADS)(const float* all, float* out, const u32* firsts, u32 ranks, u32 rows, u32 cols,
                                  u32 stride) {
  wait_for_previous();
  let_next_start();
  place_columns(out, Gathered<float>{all, stride}, firsts, ranks, rows, cols);
}
