// A mixture of experts between its products: which experts a token goes through, who goes through which, and the sum of
// what they give. The products themselves are linear.cu's, of tiles of tokens that go through the same expert.
#include "dev.cuh"

constexpr u32 NOBODY = 0xffffffffu;
constexpr int MAX_EXPERTS = 512;
constexpr u32 WARPS = 4;

// What a lane knows of a token's scores: those of experts lane, lane + 32, …
struct Scores {
  static constexpr int SLOTS = MAX_EXPERTS / 32;
  float value[SLOTS];
  u32 taken = 0;  // a bit for each slot

  DEVICE Scores(const float* row, u32 experts) {
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const u32 expert = lane_index() + 32 * i;
      const float score = expert < experts ? row[expert] : minus_infinity();
      value[i] = score == score ? score : minus_infinity();  // its token is lost, but nobody else's memory
    }
  }

  // The best that is not taken, the first of equals; takes it. The same in every lane.
  DEVICE u32 take_best(u32 experts, float& best) {
    u32 at = NOBODY;
    best = minus_infinity();
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) {
      const u32 expert = lane_index() + 32 * i;
      if (expert >= experts || taken >> i & 1 || !(at == NOBODY || value[i] > best)) continue;
      best = value[i];
      at = expert;
    }
    for (u32 mask = 16; mask > 0; mask /= 2) {
      const float other = shuffle_xor(best, mask);
      const u32 other_at = shuffle_xor(at, mask);
      if (other_at != NOBODY && (at == NOBODY || other > best || (other == best && other_at < at))) {
        best = other;
        at = other_at;
      }
    }
    if (at % 32 == lane_index()) taken |= 1u << at / 32;
    return at;
  }

  // The sum of all, relative to the largest.
  DEVICE float total(float largest) const {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < SLOTS; ++i) sum += expf(value[i] - largest);
    return warp_sum(sum);
  }
};

// The `used` experts with the highest scores of each token, in their order, each with its share of the softmax, over all
// experts or over the chosen ones. With `shared`, a row of scores ends with one more: of the expert that every token goes
// through, whose weight, the last, is its logistic function. One warp for each token.
KERNEL(choose_experts, 32 * WARPS)(const float* scores, u32* chosen, float* weights, u32 tokens, u32 experts, u32 used,
                                   u32 shared, u32 sum_to_one) {
  wait_for_previous();
  let_next_start();
  const u32 token = block_x() * WARPS + warp_index(), lane = lane_index();
  if (token >= tokens) return;  // whole warps
  const float* row = scores + static_cast<u64>(token) * (experts + shared);
  Scores all(row, experts);
  float largest = 0, own = minus_infinity();
  u32 pick = NOBODY;
  for (u32 round = 0; round < used; ++round) {
    float best;
    const u32 expert = all.take_best(experts, best);
    if (round == 0) largest = best;
    if (round == lane) {
      own = best;
      pick = expert;
    }
  }
  const float weight = lane < used ? expf(own - largest) : 0;
  const float sum = sum_to_one ? warp_sum(weight) : all.total(largest);
  u32 place = 0;
  for (u32 other = 0; other < used; ++other) place += shuffle(pick, other) < pick;
  float* own_weights = weights + static_cast<u64>(token) * (used + shared);
  if (lane < used) {
    chosen[static_cast<u64>(token) * used + place] = pick;
    own_weights[place] = weight / sum;
  }
  if (shared && lane == 0) own_weights[used] = 1.0f / (1.0f + expf(-row[experts]));
}

// Sorts `pairs` of token and expert by expert: those of the `experts` from `first_expert` on, which the rest counts from
// there; the others have no place. `tokens` is the token at each place, `places` is the place of each pair, and a tile {expert,
// first place, end, -} has at most `width` places of one expert; tiles that are left over are nobody's. Which of an expert's places
// a token gets is anybody's guess, and makes no difference to it. One block.
KERNEL(group_tokens, MAX_EXPERTS)(const u32* chosen, u32* tokens, u32* places, u32* tiles, u32 pairs,
                                  u32 first_expert, u32 experts, u32 used, u32 width, u32 tile_count) {
  SHARED(u32, counts, MAX_EXPERTS);
  SHARED(u32, next, MAX_EXPERTS);
  wait_for_previous();
  let_next_start();
  const u32 expert = thread_index();
  counts[expert] = 0;
  sync_threads();
  for (u32 pair = thread_index(); pair < pairs; pair += MAX_EXPERTS) {
    const u32 own = chosen[pair] - first_expert;
    if (own < experts) add_shared(&counts[own], 1u);
  }
  for (u32 tile = thread_index(); tile < tile_count; tile += MAX_EXPERTS) tiles[4 * tile] = NOBODY;
  sync_threads();
  u32 first = 0, tile = 0;
  for (u32 before = 0; before < expert; ++before) {
    first += counts[before];
    tile += ceil_divide(counts[before], width);
  }
  next[expert] = first;
  const u32 end = first + counts[expert];
  for (u32 at = first; expert < experts && at < end; at += width, ++tile) {
    u32* own = tiles + 4 * tile;
    own[0] = expert;
    own[1] = at;
    own[2] = smaller(at + width, end);
  }
  sync_threads();
  for (u32 pair = thread_index(); pair < pairs; pair += MAX_EXPERTS) {
    const u32 own = chosen[pair] - first_expert;
    if (own >= experts) {
      places[pair] = NOBODY;
      continue;
    }
    const u32 place = take_shared(&next[own], 1u);
    tokens[place] = pair / used;
    places[pair] = place;
  }
}

// residual[t] += sum over its experts that have a place of weight · what that one gave, in the experts' order, and at last
// the shared one's. With `halves`, the sum goes there instead.
// Grid: (tokens, parts of a row).
KERNEL(mix_experts, 32 * WARPS)(const bf16* given, const u32* places, const float* weights, const bf16* shared,
                                bf16* halves, float* residual, u32 used, u32 cols) {
  wait_for_previous();
  let_next_start();
  const u32 col = 2 * (block_y() * 32 * WARPS + thread_index()), token = block_x();
  if (col >= cols) return;
  const float* own_weights = weights + static_cast<u64>(token) * (used + (shared ? 1 : 0));
  float sum[2] = {};
  const auto add = [&](const bf16* row, float weight) {
    const u32 pair = *reinterpret_cast<const u32*>(row + col);
    sum[0] += weight * low_float(pair);
    sum[1] += weight * high_float(pair);
  };
  for (u32 i = 0; i < used; ++i) {
    const u32 place = places[static_cast<u64>(token) * used + i];
    if (place != NOBODY) add(given + static_cast<u64>(place) * cols, own_weights[i]);
  }
  if (shared) add(shared + static_cast<u64>(token) * cols, own_weights[used]);
  const u64 at = static_cast<u64>(token) * cols + col;
  if (halves) {
    *reinterpret_cast<u32*>(halves + at) = pack_bf16(sum[0], sum[1]);
    return;
  }
  float* to = residual + at;
  to[0] += sum[0];
  to[1] += sum[1];
}
