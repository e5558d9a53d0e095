// Draws a token from a row of logits, as engine/model/src/sampler.rs does. One block per row.
//
// Shares are integers: 2^40 · exp((logit - largest) / temperature), rounded down. Their sums are exact, so they may be
// added by atomics in any order and a row gives the same token every time. Tokens stand in order of logit, of equal ones
// the lowest first; what top-k and top-p keep is a beginning of that order. One pass over the row counts and weighs its tokens by
// how far they are below the largest, which tells in which bin that beginning ends; the bin's tokens, mostly a few hundred, are
// put in order alone. Where they are too many, radix selection finds the end: three passes over bins of 11, 11 and 10 bits.
#include "dev.cuh"

constexpr int THREADS = 1024;
constexpr u32 WARPS = THREADS / 32;
constexpr u32 BINS = 2048;
constexpr float BINS_OF_ONE = 72;  // for tokens whose shares are e times apart
constexpr float LOWEST = -27.75f;  // e^-27.73 is 2^-40: there is no share below
constexpr u32 MOST_ORDERED = THREADS;  // tokens that are put in order alone
constexpr u32 AHEAD = 4;  // loads that a thread has on their way
constexpr u32 NOTHING = 0xffffffffu;  // no number: without a share, and behind all tokens in order
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

// A logit's bits in an order that integers share, the largest first.
DEVICE u32 order(float logit) {
  const u32 bits = bits_of(logit);
  return bits & 0x80000000u ? bits : bits ^ 0x7fffffffu;
}

// Calls `use(token, logit)` for tokens begin .. end of a row, in order as each of COUNT neighbouring threads has them: four at a time
// that are one load, beside its neighbours' four, and of those that are no four one. Behind the last come a few of logit `filler`:
// without a branch for each, loads are on their way together.
template <u32 COUNT, typename Use>
DEVICE void each_token(const float* logits, u32 begin, u32 end, u32 filler, Use use) {
  const u32 own = thread_index() % COUNT, shift = static_cast<u32>(reinterpret_cast<u64>(logits + begin) / sizeof(float) % 4);
  const u32 first = smaller(begin + (4 - shift) % 4, end), fours = (end - first) / 4, last = first + 4 * fours;
  if (own < first - begin) use(begin + own, logits[begin + own]);
  for (u32 four = own; four < fours; four += AHEAD * COUNT) {
    Quad held[AHEAD];
#pragma unroll
    for (u32 i = 0; i < AHEAD; ++i) {
      const u32 at = four + i * COUNT;
      held[i] = at < fours ? load_once(logits + first + 4 * at) : Quad{{filler, filler, filler, filler}};
    }
#pragma unroll
    for (u32 i = 0; i < 4 * AHEAD; ++i) use(first + 4 * (four + i / 4 * COUNT) + i % 4, float_of(held[i / 4].word[i % 4]));
  }
  if (own < end - last) use(last + own, logits[last + own]);
}

// A row of logits as it is drawn from.
struct Row {
  const float* logits;
  u32 vocabulary;
  float largest, temperature, inverse, floor;

  DEVICE Row(const float* logits, u32 vocabulary, float largest, float warmth, float floor)
      : logits(logits), vocabulary(vocabulary), largest(largest), temperature(smaller(larger(warmth, 1e-30f), 1e30f)),
        inverse(1 / temperature), floor(larger(floor, LOWEST)) {}

  template <typename Use>
  DEVICE void each(Use use) const {
    each_token<THREADS>(logits, 0, vocabulary, NOTHING, use);
  }

  // The logit relative to the largest over the temperature, rounded as a division is; what is infinitely low becomes no number.
  DEVICE float scaled(float logit) const {
    const float apart = logit - largest, rough = rounded_product(apart, inverse);
    return fused(fused(-rough, temperature, apart), inverse, rough);
  }
  // Whether a token that is scaled so may come: not below the floor (min-p), nor where there are no shares.
  DEVICE bool keeps(float scaled) const { return scaled >= floor; }
  DEVICE u64 share_of(float scaled) const {
    const float share = expf(scaled) * 1099511627776.0f;  // a power of two: exact
    return static_cast<u64>(keeps(scaled) ? share : 0.0f);
  }
  DEVICE u64 share(float logit) const { return share_of(scaled(logit)); }
};

// The sum of what each lane gives, up to and with this one.
DEVICE u64 scan_warp(u64 value) {
  for (u32 reach = 1; reach < 32; reach *= 2) {
    const u64 other = shuffle(value, lane_index() - reach);
    if (lane_index() >= reach) value += other;
  }
  return value;
}

// The sum over the block of what each thread gives, and of the threads before this one.
struct Sums {
  u64 whole, before;
};
DEVICE Sums sum_block(u64 value) {
  SHARED(u64, of_warps, WARPS);
  const u64 own = scan_warp(value);
  sync_threads();  // an earlier one may still be read
  if (lane_index() == 31) of_warps[warp_index()] = own;
  sync_threads();
  const u64 warps = scan_warp(of_warps[lane_index()]), with_own = shuffle(warps, warp_index());
  return {shuffle(warps, WARPS - 1), with_own - of_warps[warp_index()] + own - value};
}

// What comes before a bin.
struct Reached {
  u64 count, share;
  u32 bin;
};

// Tokens counted and weighed, in an order of bins that is the tokens' own; once they are added up, up to and with each bin. Shares are
// in halves: no chip adds 64 bits in shared memory but by comparing and swapping until nobody came between.
struct Bins {
  u32 counts[BINS], lows[BINS], highs[BINS];

  DEVICE u64 share(u32 bin) const { return static_cast<u64>(highs[bin]) << 32 | lows[bin]; }
  DEVICE Reached before(u32 bin) const { return bin > 0 ? Reached{counts[bin - 1], share(bin - 1), bin} : Reached{0, 0, bin}; }
  DEVICE u64 sum(u32 bin, bool of_counts) const { return of_counts ? counts[bin] : share(bin); }

  DEVICE void clear() {
    sync_threads();  // they may still be read
    for (u32 bin = thread_index(); bin < BINS; bin += THREADS) counts[bin] = lows[bin] = highs[bin] = 0;
    sync_threads();
  }

  DEVICE void add(u32 bin, u64 share) {
    const u32 low = static_cast<u32>(share), before = take_shared(&lows[bin], low);
    const u32 high = static_cast<u32>(share >> 32) + (before + low < low);  // with what the lower half carries
    if (high > 0) add_shared(&highs[bin], high);
    add_shared(&counts[bin], 1u);
  }

  DEVICE void add_up() {
    const u32 first = 2 * thread_index();
    sync_threads();
    u64 count = sum_block(counts[first] + counts[first + 1]).before;
    u64 weight = sum_block(share(first) + share(first + 1)).before;
    for (u32 bin = first; bin < first + 2; ++bin) {
      count += counts[bin];
      weight += share(bin);
      counts[bin] = static_cast<u32>(count);
      lows[bin] = static_cast<u32>(weight);
      highs[bin] = static_cast<u32>(weight >> 32);
    }
    sync_threads();
  }
};

// The bin in which the number of tokens, or else their share, reaches `target` (at least 1); no bin where it does not.
DEVICE Reached reach(const Bins& bins, u64 target, bool by_count) {
  SHARED(u32, found, 1);
  sync_threads();  // the former one may still be read
  if (thread_index() == 0) *found = BINS;
  sync_threads();
  for (u32 bin = thread_index(); bin < BINS; bin += THREADS) {
    if (bins.sum(bin, by_count) >= target && (bin == 0 || bins.sum(bin - 1, by_count) < target)) *found = bin;
  }
  sync_threads();
  return bins.before(*found);
}

// A token in order, and the share up to and with it.
struct Border {
  u32 token;
  u64 share;
};

// The token at which the sum of weights in the order of ids passes what `target(whole)` gives. A warp first sums a piece of the row,
// and then all of them search one piece.
template <typename Weight, typename Target>
DEVICE u32 pass(const Row& row, Weight weight, Target target) {
  SHARED(Reached, piece, 1);
  SHARED(u32, answer, 1);
  const u32 each = ceil_divide(row.vocabulary, 128 * WARPS) * 128;
  if (thread_index() == 0) *piece = {0, 0, 0};
  const auto begin_of = [&](u32 piece) { return smaller(piece * each, row.vocabulary); };
  u64 own = 0;
  each_token<32>(row.logits, begin_of(warp_index()), begin_of(warp_index() + 1), NOTHING,
                 [&](u32, float logit) { own += weight(logit); });
  const Sums sums = sum_block(own);
  const u64 goal = target(sums.whole), before = shuffle(sums.before, 0), behind = shuffle(sums.before + own, 31);
  if (thread_index() == 0) *answer = NOT_FINITE;
  if (lane_index() == 0 && before <= goal && behind > goal) *piece = {0, before, warp_index()};
  sync_threads();
  const u32 share = ceil_divide(each, THREADS), end = begin_of(piece->bin + 1);
  const u32 first = smaller(begin_of(piece->bin) + thread_index() * share, end), last = smaller(first + share, end);
  own = 0;
  for (u32 token = first; token < last; ++token) own += weight(row.logits[token]);
  u64 passed = piece->share + sum_block(own).before;
  for (u32 token = first; token < last; ++token) {
    const u64 next = passed + weight(row.logits[token]);
    if (passed <= goal && next > goal) *answer = token;
    passed = next;
  }
  sync_threads();
  return *answer;
}

// The first token in order at which the number of tokens, or else their share, reaches `target`, whatever the tokens are.
DEVICE Border by_radix(const Row& row, Bins& bins, u64 target, bool by_count) {
  u32 prefix = 0, known = 0;  // the key's upper bits
  u64 share = 0, same = 0, each = 0;  // of tokens that come before those with this prefix, and of these
#pragma unroll 1
  for (int round = 0; round < 3; ++round) {
    const u32 width = round < 2 ? 11 : 10, shift = 32 - known - width;
    bins.clear();
    row.each([&](u32, float logit) {
      const u32 key = order(logit);
      if (!known || key >> (32 - known) == prefix) bins.add(key >> shift & ((1u << width) - 1), row.share(logit));
    });
    bins.add_up();
    const Reached found = reach(bins, target, by_count);
    if (found.bin == BINS) return {NOT_FINITE, 0};  // there are fewer: no caller asks so
    prefix = prefix << width | found.bin;
    known += width;
    target -= by_count ? found.count : found.share;
    share += found.share;
    same = bins.counts[found.bin] - found.count;
    each = bins.share(found.bin) - found.share;
  }
  each /= same;  // equal logits have equal shares
  const u64 needed = by_count ? target : each ? (target + each - 1) / each : 1;
  const u32 token = pass(row, [=](float logit) -> u64 { return order(logit) == prefix; }, [=](u64) { return needed - 1; });
  return {token, share + needed * each};
}

// Bins first .. last + 1.
struct Range {
  u32 first, last;
  DEVICE bool has(u32 bin) const { return bin - first <= last - first; }
};
constexpr u32 RANGES = 3;
constexpr Range NO_BINS = {BINS, BINS};

// Tokens of a few bins: their keys above their ids, their shares and their bins.
struct List {
  u64 tokens[MOST_ORDERED], shares[MOST_ORDERED];
  u32 bins[MOST_ORDERED];
  Range ranges[RANGES];
  u32 count;
};

// A row's tokens by how far they are below the largest, and those of a few bins.
struct Ordered {
  const Row& row;
  Bins& bins;
  List& list;
  bool binned;  // nothing else is in the bins

  // Fills the bins with the tokens that may come.
  DEVICE void weigh() {
    bins.clear();
    row.each([&](u32, float logit) {
      const float scaled = row.scaled(logit);
      if (row.keeps(scaled)) bins.add(bin_of(scaled), row.share_of(scaled));
    });
    bins.add_up();
    binned = true;
  }

  DEVICE void forget() {
    sync_threads();  // it may still be read
    if (thread_index() < RANGES) list.ranges[thread_index()] = NO_BINS;
    if (thread_index() == 0) list.count = 0;
  }

  // Lists the tokens of the list's ranges, in any order, as many as there is room for.
  DEVICE void fill() {
    sync_threads();
    const Range a = list.ranges[0], b = list.ranges[1], c = list.ranges[2];
    row.each([&](u32 token, float logit) {
      const float scaled = row.scaled(logit);
      const u32 bin = bin_of(scaled);
      if (!row.keeps(scaled) || !(a.has(bin) || b.has(bin) || c.has(bin))) return;
      const u32 place = take_shared(&list.count, 1u);
      if (place >= MOST_ORDERED) return;
      list.tokens[place] = static_cast<u64>(order(logit)) << 32 | token;
      list.shares[place] = row.share_of(scaled);
      list.bins[place] = bin;
    });
    sync_threads();
  }

  DEVICE bool has(u32 bin) const {
    bool listed = false;
    for (u32 i = 0; i < RANGES; ++i) listed |= list.ranges[i].has(bin);
    return listed && list.count <= MOST_ORDERED;
  }

  // How many listed tokens of bins from `first` on come before this thread's, and their share.
  DEVICE Reached before(u32 first) const {
    Reached sum = {0, 0, first};
    const u64 own = list.tokens[thread_index()];
    for (u32 i = 0; i < list.count; ++i) {
      const bool comes = list.tokens[i] < own && list.bins[i] >= first;
      sum.count += comes;
      sum.share += comes ? list.shares[i] : 0;
    }
    return sum;
  }

  // The first token at which the number of tokens, or else their share, reaches `target`.
  DEVICE Border border(u64 target, bool by_count) {
    SHARED(Border, found, 1);
    const Reached at = binned ? reach(bins, target, by_count) : Reached{0, 0, BINS};
    if (at.bin == BINS || bins.counts[at.bin] - at.count > MOST_ORDERED) {
      binned = false;
      return by_radix(row, bins, target, by_count);
    }
    if (!has(at.bin)) {
      forget();
      if (thread_index() == 0) list.ranges[0] = {at.bin, at.bin};
      fill();
    }
    if (thread_index() < list.count && list.bins[thread_index()] == at.bin) {
      const Reached own = before(at.bin);
      const u64 share = list.shares[thread_index()], passed = by_count ? at.count + own.count : at.share + own.share;
      if (passed < target && passed + (by_count ? 1 : share) >= target) {
        *found = {static_cast<u32>(list.tokens[thread_index()]), at.share + own.share + share};
      }
    }
    sync_threads();
    return *found;
  }

 private:
  DEVICE static u32 bin_of(float scaled) { return static_cast<u32>(-scaled * BINS_OF_ONE); }
};

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
  each_token<THREADS>(logits, 0, vocabulary, bits_of(minus_infinity()), [&](u32 token, float logit) {
    wrong |= !(logit < -minus_infinity());
    if (logit > most) {
      most = logit;
      at = token;
    }
  });
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

// What a row's tokens are weighed and put in order with.
DEVICE Ordered in_order(const Row& row) {
  SHARED(Bins, bins, 1);
  SHARED(List, list, 1);
  Ordered ordered = {row, *bins, *list, false};
  ordered.weigh();
  ordered.forget();
  return ordered;
}

// How the block's row is drawn from, read where it is used: what a thread has of its row takes its registers.
struct Sampler {
  const u32* top_ks;
  const float* top_ps;
  const u64* seeds;
  const u32* positions;

  DEVICE u32 top_k() const { return top_ks[block_x()]; }
  DEVICE float top_p() const { return top_ps[block_x()]; }
  // What top-p keeps of a whole.
  DEVICE u64 most_likely(u64 whole) const {
    const u64 part = static_cast<u64>(static_cast<double>(top_p()) * static_cast<double>(whole));
    return part > 0 ? part : 1;
  }
  // A random part of a whole: less than that.
  DEVICE u64 part_of(u64 whole) const { return multiply_high(random_bits(seeds[block_x()], positions[block_x()]) << 11, whole); }
};

// The token at which a random part of the shares is passed: of those that are kept in their order, or of all in that of ids.
DEVICE u32 draw(const Row& row, const Sampler& sampler) {
  if ((sampler.top_k() == 0 || sampler.top_k() >= row.vocabulary) && sampler.top_p() >= 1) {
    return pass(row, [&](float logit) { return row.share(logit); }, [&](u64 whole) { return sampler.part_of(whole); });
  }
  // What is looked for: the last token that top-k keeps, then the last of top-p, then the one drawn.
  Ordered ordered = in_order(row);
  const u64 whole = ordered.bins.share(BINS - 1);
  const u32 first = sampler.top_k() != 0 && sampler.top_k() < ordered.bins.counts[BINS - 1] ? 0 : 1;
  const auto target = [&](u32 step, u64 share) {
    return step == 0 ? sampler.top_k() : step == 1 ? sampler.most_likely(share) : sampler.part_of(share) + 1;
  };
  // In which bins that will be follows from what has a bin's share to choose from: one pass lists them all.
  u64 least = whole, most = whole;
#pragma unroll 1
  for (u32 step = first; step < 3; ++step) {
    if (step == 1 && sampler.top_p() >= 1) continue;
    const Reached from = reach(ordered.bins, target(step, least), step == 0), to = reach(ordered.bins, target(step, most), step == 0);
    if (thread_index() == 0) ordered.list.ranges[step] = {from.bin, to.bin};
    least = from.share + 1;
    most = ordered.bins.share(to.bin);
  }
  ordered.fill();
  Border last = {NOT_FINITE, whole};
#pragma unroll 1
  for (u32 step = first; step < 3; ++step) {
    if (step == 1 && sampler.top_p() >= 1) continue;
    last = ordered.border(target(step, last.share), step == 0);
  }
  return last.token;
}

// Draws a token for each row. `floors` are the logarithms of min-p (minus infinity for none); top-k 0 keeps all; a
// temperature of 0 takes the most likely. Grid: rows.
LARGE_KERNEL(sample, THREADS)(const float* logits, const float* temperatures, const u32* top_ks, const float* top_ps,
                        const float* floors, const u64* seeds, const u32* positions, u32* out, u32 vocabulary) {
  wait_for_previous();
  let_next_start();
  const u32 index = block_x();
  const float* own = logits + static_cast<u64>(index) * vocabulary;
  const float temperature = temperatures[index];
  const Best best = best_of(own, vocabulary);
  if (best.wrong || best.token == 0xffffffffu || temperature <= 0) {
    if (thread_index() == 0) out[index] = best.wrong ? NOT_FINITE : best.token == 0xffffffffu ? ALL_BANNED : best.token;
    return;
  }
  const Row row(own, vocabulary, best.logit, temperature, floors[index]);
  const u32 token = draw(row, {top_ks, top_ps, seeds, positions});
  if (thread_index() == 0) out[index] = token;
}

// Writes the first `count` tokens in order, and their logits.
DEVICE void write_first(Ordered& ordered, u32 count, float* logits, u32* tokens) {
  const auto write = [&](u64 place, u32 token) {
    logits[place] = ordered.row.logits[token];
    tokens[place] = token;
  };
  const Reached last = reach(ordered.bins, count, true);
  if (last.bin == BINS || ordered.bins.counts[last.bin] > MOST_ORDERED) {
    for (u32 i = 0; i < count; ++i) {
      const u32 token = by_radix(ordered.row, ordered.bins, i + 1, true).token;
      if (thread_index() == 0) write(i, token);
    }
    return;
  }
  if (thread_index() == 0) ordered.list.ranges[0] = {0, last.bin};
  ordered.fill();
  if (thread_index() >= ordered.list.count) return;
  const u64 place = ordered.before(0).count;
  if (place < count) write(place, static_cast<u32>(ordered.list.tokens[thread_index()]));
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
  const Row row(own, vocabulary, best.logit, 1, minus_infinity());
  const float logit = own[token];
  u64 own_before = 0;
  row.each([&](u32 other, float its) { own_before += its > logit || (its == logit && other < token); });
  const u64 before = sum_block(own_before).whole;
  Ordered ordered = in_order(row);
  float* own_logits = told_logits + static_cast<u64>(index) * TOLD;
  u32* own_tokens = told_tokens + static_cast<u64>(index) * TOLD;
  if (thread_index() == 0) {
    wholes[index] = ordered.bins.share(BINS - 1);
    own_logits[0] = row.largest;
    own_logits[1] = logit;
    own_tokens[0] = static_cast<u32>(before);
  }
  if (count > 0) write_first(ordered, count, own_logits + 2, own_tokens + 2);
}
