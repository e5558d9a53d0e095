// Draws a token from a row of logits, as engine/model/src/sampler.rs does. One block per row.
//
// Shares are integers: 2^40 · exp((logit - largest) / temperature), rounded down. Their sums are exact, so they may be
// added by atomics in any order and a row gives the same token every time. Tokens stand in order of logit, of equal ones
// the lowest first; what top-k and top-p keep is a beginning of that order, whose end is found by radix selection: three
// passes over histograms of 11, 11 and 10 bits.
#include "dev.cuh"

constexpr int THREADS = 1024;
constexpr int BINS = 2048;
constexpr u32 NOT_FINITE = 0xffffffffu;  // answers that are no token
constexpr u32 ALL_BANNED = 0xfffffffeu;
constexpr u32 MOST_TOLD = 20;  // of a row's most likely tokens
constexpr u32 TOLD = 2 + MOST_TOLD;

// A logit that is a number. Others stay as they are, for the draw to report.
DEVICE bool is_finite(float logit) { return (bits_of(logit) & 0x7fffffffu) < 0x7f800000u; }

// What may not come, and what changes. Allowed tokens are bits of `masks`, row `mask_rows[row]` (or none: 0xffffffff).
// Row i's edits are `first_edits[i] .. first_edits[i + 1]`: a token, and how its logit changes. Edits of one row name
// each token once. Grid: rows.
KERNEL(adjust_logits, THREADS)(float* logits, const u32* mask_rows, const u32* masks, const u32* first_edits,
                               const u32* edit_tokens, const float* edit_values, u32 vocabulary) {
  wait_for_previous();
  let_next_start();
  float* row = logits + static_cast<u64>(block_x()) * vocabulary;
  const u32 mask = mask_rows[block_x()];
  if (mask != 0xffffffffu) {
    const u32* allowed = masks + static_cast<u64>(mask) * ceil_divide(vocabulary, 32);
    for (u32 token = thread_index(); token < vocabulary; token += THREADS) {
      if (!(allowed[token / 32] >> token % 32 & 1) && is_finite(row[token])) row[token] = minus_infinity();
    }
  }
  sync_threads();
  for (u32 i = first_edits[block_x()] + thread_index(); i < first_edits[block_x() + 1]; i += THREADS) {
    const u32 token = edit_tokens[i];
    if (token >= vocabulary) continue;
    const float most = float_of(0x7f7fffffu);  // f32's largest number
    const float bias = edit_values[4 * i], repetition = edit_values[4 * i + 1], cost = edit_values[4 * i + 2];
    const auto kept = [most](float value) { return smaller(larger(value, -most), most); };
    float value = row[token];
    if (!is_finite(value)) continue;
    if (bias != 0) value = kept(value + bias);
    if (repetition != 1) value = kept(value > 0 ? value / repetition : value * repetition);
    if (cost != 0) value = kept(value - cost);
    row[token] = edit_values[4 * i + 3] != 0 ? minus_infinity() : value;  // the last one bans
  }
}

// Philox4x32-10 (Salmon et al. 2011): 53 random bits of a seed and a position.
DEVICE u64 random_bits(u64 seed, u32 position) {
  u32 a = position, b = 0, c = 0, d = 0, key = static_cast<u32>(seed), other = static_cast<u32>(seed >> 32);
  for (int round = 0; round < 10; ++round) {
    const u32 high_a = multiply_high(a, 0xd2511f53u), low_a = a * 0xd2511f53u;
    const u32 high_c = multiply_high(c, 0xcd9e8d57u), low_c = c * 0xcd9e8d57u;
    a = high_c ^ b ^ key;
    b = low_c;
    c = high_a ^ d ^ other;
    d = low_a;
    key += 0x9e3779b9u;
    other += 0xbb67ae85u;
  }
  return (static_cast<u64>(a) << 32 | b) >> 11;
}

// A logit's bits in an order that integers share.
DEVICE u32 order(float logit) {
  const u32 bits = bits_of(logit);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// A row of logits as it is drawn from.
struct Row {
  const float* logits;
  u32 vocabulary;
  float largest, temperature, floor;

  // The token's share; nothing below the floor (min-p), nor where f32's smallest normal number ends.
  DEVICE u64 share(float logit) const {
    const float scaled = (logit - largest) / temperature;
    if (!(scaled >= floor) || scaled < -87.0f) return 0;
    return static_cast<u64>(expf(scaled) * 1099511627776.0f);  // a power of two: exact
  }
  DEVICE bool kept(float logit) const { return (logit - largest) / temperature >= floor; }
};

// Where a count or a share is reached in the tokens' order.
struct Place {
  u32 key;       // the logit there
  u32 ordinal;   // of the tokens that have it, in the order of ids
  u64 share;     // up to and with it
};

// The sum over the block of what each thread gives, and of the threads before this one.
struct Sums {
  u64 whole, before;
};
DEVICE Sums sum_block(u64 value) {
  SHARED(u64, scan, THREADS);
  sync_threads();
  scan[thread_index()] = value;
  sync_threads();
  u64 whole = 0, before = 0;
  for (u32 reach = 1; reach < THREADS; reach *= 2) {
    const u64 other = thread_index() >= reach ? scan[thread_index() - reach] : 0;
    sync_threads();
    scan[thread_index()] += other;
    sync_threads();
  }
  whole = scan[THREADS - 1];
  before = scan[thread_index()] - value;
  return {whole, before};
}

// The first token in order at which the number of tokens kept, or else their share, reaches `target` (at least 1).
DEVICE Place select(const Row& row, u64 target, bool by_count) {
  SHARED(u64, shares, BINS);
  SHARED(u32, counts, BINS);
  SHARED(u32, found, 2);
  SHARED(u64, above, 2);
  u32 prefix = 0, known = 0;         // the key's upper bits
  u64 count_above = 0, share_above = 0;  // of tokens that come before those with this prefix
  u32 same = 0;
  u64 same_share = 0;
  for (int pass = 0; pass < 3; ++pass) {
    const u32 width = pass < 2 ? 11 : 10, shift = 32 - known - width;
    sync_threads();
    for (u32 bin = thread_index(); bin < BINS; bin += THREADS) {
      shares[bin] = 0;
      counts[bin] = 0;
    }
    sync_threads();
    for (u32 token = thread_index(); token < row.vocabulary; token += THREADS) {
      const float logit = row.logits[token];
      const u32 key = order(logit);
      if (!row.kept(logit) || (known && key >> (32 - known) != prefix)) continue;
      const u32 bin = key >> shift & ((1u << width) - 1);
      add_shared(&shares[bin], row.share(logit));
      add_shared(&counts[bin], 1u);
    }
    sync_threads();
    // Two bins a thread, the highest keys first.
    const u32 high = BINS - 1 - 2 * thread_index();
    const Sums count = sum_block(counts[high] + counts[high - 1]), share = sum_block(shares[high] + shares[high - 1]);
    const u64 count_before = count_above + count.before, share_before = share_above + share.before;
    if (thread_index() == 0) found[0] = 0xffffffffu;
    sync_threads();
    // At most one thread crosses the target.
    u64 passed = by_count ? count_before : share_before;
    u64 counted = count_before, shared = share_before;
    for (u32 bin = high; bin + 2 > high; --bin) {
      const u64 own = by_count ? counts[bin] : shares[bin];
      if (passed < target && passed + own >= target) {
        found[0] = bin;
        above[0] = counted;
        above[1] = shared;
      }
      passed += own;
      counted += counts[bin];
      shared += shares[bin];
      if (bin == 0) break;
    }
    sync_threads();
    const u32 bin = found[0];
    if (bin >= BINS) return {0, 0, 0};  // fewer are kept than that: no caller asks so
    prefix = prefix << width | bin;
    known += width;
    count_above = above[0];
    share_above = above[1];
    same = counts[bin];
    same_share = shares[bin];
  }
  const u64 each = same_share / same;  // equal logits have equal shares
  const u64 needed = by_count ? target - count_above : each ? (target - share_above + each - 1) / each : 1;
  return {prefix, static_cast<u32>(needed - 1), share_above + needed * each};
}

// The id of the token at a place, to be found in `answer`.
DEVICE void find(const Row& row, const Place& place, u32* answer) {
  const u32 each = ceil_divide(row.vocabulary, THREADS);
  const u32 begin = smaller(thread_index() * each, row.vocabulary), end = smaller(begin + each, row.vocabulary);
  u32 own = 0;
  for (u32 token = begin; token < end; ++token) own += order(row.logits[token]) == place.key;
  u64 before = sum_block(own).before;
  for (u32 token = begin; token < end; ++token) {
    if (order(row.logits[token]) == place.key && before++ == place.ordinal) *answer = token;
  }
}

// The token at which the running share in the order of ids passes `target`.
DEVICE void find_by_id(const Row& row, u64 bits, u32* answer) {
  const u32 each = ceil_divide(row.vocabulary, THREADS);
  const u32 begin = smaller(thread_index() * each, row.vocabulary), end = smaller(begin + each, row.vocabulary);
  u64 own = 0;
  for (u32 token = begin; token < end; ++token) own += row.share(row.logits[token]);
  const Sums sums = sum_block(own);
  const u64 target = multiply_high(bits << 11, sums.whole);
  u64 passed = sums.before;
  for (u32 token = begin; token < end; ++token) {
    const u64 share = row.share(row.logits[token]);
    if (passed <= target && passed + share > target) *answer = token;
    passed += share;
  }
}

// The largest of a row's logits, of equal ones the first (0xffffffff where all are minus infinity), and whether any is no number.
struct Best {
  float logit;
  u32 token, wrong;
};
DEVICE Best best_of(const float* logits, u32 vocabulary) {
  SHARED(float, tops, THREADS / 32);
  SHARED(u32, places, THREADS / 32);
  SHARED(u32, bad, THREADS / 32);
  float most = minus_infinity();
  u32 at = 0xffffffffu, wrong = 0;
  for (u32 token = thread_index(); token < vocabulary; token += THREADS) {
    const float logit = logits[token];
    wrong |= !is_finite(logit) && logit != minus_infinity();
    if (logit > most) {
      most = logit;
      at = token;
    }
  }
  for (u32 mask = 16; mask > 0; mask /= 2) {
    const float other = shuffle_xor(most, mask);
    const u32 place = shuffle_xor(at, mask);
    wrong |= shuffle_xor(wrong, mask);
    if (other > most || (other == most && place < at)) {
      most = other;
      at = place;
    }
  }
  if (lane_index() == 0) {
    tops[warp_index()] = most;
    places[warp_index()] = at;
    bad[warp_index()] = wrong;
  }
  sync_threads();
  for (u32 warp = 0; warp < THREADS / 32; ++warp) {
    if (tops[warp] > most || (tops[warp] == most && places[warp] < at)) {
      most = tops[warp];
      at = places[warp];
    }
    wrong |= bad[warp];
  }
  return {most, at, wrong};
}

// Draws a token for each row. `floors` are the logarithms of min-p (minus infinity for none); top-k 0 keeps all; a
// temperature of 0 takes the most likely. Grid: rows.
LARGE_KERNEL(sample, THREADS)(const float* logits, const float* temperatures, const u32* top_ks, const float* top_ps,
                        const float* floors, const u64* seeds, const u32* positions, u32* out, u32 vocabulary) {
  wait_for_previous();
  let_next_start();
  SHARED(u32, answer, 1);
  const u32 index = block_x();
  const float* own = logits + static_cast<u64>(index) * vocabulary;
  const float temperature = temperatures[index];
  const Best best = best_of(own, vocabulary);
  if (best.wrong || best.token == 0xffffffffu || temperature <= 0) {
    if (thread_index() == 0) out[index] = best.wrong ? NOT_FINITE : best.token == 0xffffffffu ? ALL_BANNED : best.token;
    return;
  }
  const Row row = {own, vocabulary, best.logit, temperature, floors[index]};
  const u64 bits = random_bits(seeds[index], positions[index]);
  if (thread_index() == 0) *answer = NOT_FINITE;
  const u32 top_k = top_ks[index];
  const float top_p = top_ps[index];
  if ((top_k == 0 || top_k >= vocabulary) && top_p >= 1) {
    find_by_id(row, bits, answer);
  } else {
    u64 own_kept = 0, own_share = 0;
    for (u32 token = thread_index(); token < vocabulary; token += THREADS) {
      own_kept += row.kept(own[token]);
      own_share += row.share(own[token]);
    }
    const u64 kept = sum_block(own_kept).whole;
    u64 share = sum_block(own_share).whole;
    if (top_k != 0 && top_k < kept) share = select(row, top_k, true).share;
    if (top_p < 1) {
      const u64 part = static_cast<u64>(static_cast<double>(top_p) * static_cast<double>(share));
      share = select(row, part > 0 ? part : 1, false).share;
    }
    find(row, select(row, multiply_high(bits << 11, share) + 1, false), answer);
  }
  sync_threads();
  if (thread_index() == 0) out[index] = answer[0];
}

// Writes the first `count` tokens in order, and their logits; more of the vocabulary than that.
DEVICE void write_first(const Row& row, u32 count, float* logits, u32* tokens) {
  SHARED(u32, taken, 1);
  SHARED(u32, ids, MOST_TOLD);
  const Place last = select(row, count, true);
  const u32 each = ceil_divide(row.vocabulary, THREADS);
  const u32 begin = smaller(thread_index() * each, row.vocabulary), end = smaller(begin + each, row.vocabulary);
  u32 own = 0;
  for (u32 token = begin; token < end; ++token) own += order(row.logits[token]) == last.key;
  u64 before = sum_block(own).before;
  if (thread_index() == 0) *taken = 0;
  sync_threads();
  for (u32 token = begin; token < end; ++token) {
    const u32 key = order(row.logits[token]);
    if (key < last.key || (key == last.key && before++ > last.ordinal)) continue;
    if (const u32 place = take_shared(taken, 1u); place < MOST_TOLD) ids[place] = token;
  }
  sync_threads();
  if (thread_index() >= count) return;
  const u32 token = ids[thread_index()], key = order(row.logits[token]);
  u32 place = 0;
  for (u32 i = 0; i < count; ++i) {
    const u32 other = order(row.logits[ids[i]]);
    place += other > key || (other == key && ids[i] < token);
  }
  logits[place] = row.logits[token];
  tokens[place] = token;
}

// What the model thinks of a row's token and of its `asked[row]` most likely ones, for rows that ask: 0xffffffff is none. The
// token is `targets[row]`, or the one drawn where that is 0xffffffff. A row has TOLD numbers of each kind: its largest logit, its token's, and then those of the most likely; and how many tokens come before
// its own, nothing, and the most likely. `wholes` are the shares of all tokens at a temperature of 1. Of a row that `sample` has no
// token for, nothing is told: shares and an order are of numbers alone. Grid: rows.
LARGE_KERNEL(tell, THREADS)(const float* logits, const u32* drawn, const u32* targets, const u32* asked, u64* wholes,
                            float* told_logits, u32* told_tokens, u32 vocabulary) {
  wait_for_previous();
  let_next_start();
  const u32 index = block_x(), count = asked[index];
  const u32 token = targets[index] != 0xffffffffu ? targets[index] : drawn[index];
  if (count > MOST_TOLD || token >= vocabulary) return;
  const float* own = logits + static_cast<u64>(index) * vocabulary;
  const Best best = best_of(own, vocabulary);
  if (best.wrong || best.token == 0xffffffffu) return;
  const Row row = {own, vocabulary, best.logit, 1, minus_infinity()};
  u64 own_share = 0, own_before = 0;
  for (u32 other = thread_index(); other < vocabulary; other += THREADS) {
    own_share += row.share(own[other]);
    own_before += own[other] > own[token] || (own[other] == own[token] && other < token);
  }
  const u64 whole = sum_block(own_share).whole, before = sum_block(own_before).whole;
  float* own_logits = told_logits + static_cast<u64>(index) * TOLD;
  u32* own_tokens = told_tokens + static_cast<u64>(index) * TOLD;
  if (thread_index() == 0) {
    wholes[index] = whole;
    own_logits[0] = row.largest;
    own_logits[1] = own[token];
    own_tokens[0] = static_cast<u32>(before);
  }
  if (count > 0) write_first(row, count, own_logits + 2, own_tokens + 2);
}
