// Causal attention over paged keys and values.
//
// Pages are [K|V][kv_head][64 tokens][dim]. A block belongs to one key-value head; the query heads that share it are rows
// of the same product: row r of a sequence is head r % group of token r / group. A page at a time is copied to shared
// memory while the one before is computed: S = Q · Kᵀ, online softmax in base 2, O += P · V (FlashAttention 2).
//
// A kernel's heads have up to DIM values; those that a shorter one lacks are zeros in shared memory and in registers. Codes
// of 8 bits have a scale for each token: a key's multiplies its scores, a value's its weights.
//
// Decoding: the block has one token's rows, at most 16, and its four warps take 16 keys each of every page. A long
// context is split over blocks by its own length alone, and the parts are merged in their order. Where the sequences
// behind this one begin with the same pages, the block has their rows, too, as many as are 16: the pages are read once,
// and each row's numbers are what they are alone. Prefill: each warp has 16 rows of its own and takes all keys. A guess on a
// branch does not see all keys before its own: which of the last 32 it does, bits say.
#include "dev.cuh"

constexpr int THREADS = 128;
constexpr int WARPS = THREADS / 32;
constexpr int PAGE = 64;
constexpr int ROWS = 16;
constexpr float LOG2_E = 1.44269504f;
constexpr u32 SEEN_KEYS = 32;  // that bits say something of
constexpr u32 ALL_SEEN = ~u32{0};

// How pages hold values.
enum class Code { Bf16, E4m3, Int8 };

// Keys and values of a layer: `codes` [page][K|V][kv_head][64][dim], and where those are bytes their scales, without dim.
struct Pages {
  const u8* codes;
  const float* scales;
};

// What does not change within a launch.
struct Shape {
  u32 heads, kv_heads, dim, max_pages;
  float scale;    // of scores, before the exponential
  u32 window;     // keys that a query sees, 0 for all
  float cap;      // of scores: cap · tanh(score / cap); 0 for none
};

// Of the keys that a token sees, its own the lowest bit, the nearest ones that its window holds; `left` is the rest of that.
DEVICE u32 nearest(u32 seen, u32 window, u32& left) {
  u32 kept = 0;
  for (left = window; left > 0 && seen != 0; --left) {
    kept |= seen & (0 - seen);
    seen &= seen - 1;
  }
  return kept;
}

// Keys of a split, by the length of the whole sequence (kernels.rs, `split_keys`, says the same).
DEVICE u32 split_keys(u32 length) { return length <= 2048 ? 128 : length <= 8192 ? 256 : 512; }

// One head's keys and values of a page.
template <int DIM, Code CODE>
struct Stage {
  static constexpr bool SCALED = CODE != Code::Bf16;
  static constexpr int VALUE_BYTES = SCALED ? 1 : 2;
  static constexpr int STRIDE = DIM * VALUE_BYTES + 16;  // so that eight rows lie in different banks
  alignas(16) u8 keys[PAGE * STRIDE];
  alignas(16) u8 values[PAGE * STRIDE];
  alignas(16) float scales[2][SCALED ? PAGE : 4];  // of keys, of values
};

// Stages in shared memory: one where two would leave no room for other blocks (table.rs, `attention_shared_bytes`).
template <int DIM, Code CODE>
constexpr int STAGES = sizeof(Stage<DIM, CODE>) > 48 << 10 ? 1 : 2;

// Starts to copy one head's keys and values of a page, `count` of them. What lies behind is nobody's: it becomes zeros, for
// a weight of nothing times a NaN is a NaN.
template <int DIM, Code CODE>
DEVICE void fetch(Stage<DIM, CODE>& stage, const Pages& pages, u32 page, u32 count, u32 head, const Shape& shape) {
  using Place = Stage<DIM, CODE>;
  constexpr u32 CHUNKS = DIM * Place::VALUE_BYTES / 16;
  const u32 row_bytes = shape.dim * Place::VALUE_BYTES;
  const u64 row = (static_cast<u64>(page) * 2 * shape.kv_heads + head) * PAGE;  // of the first key
  const u32 apart = shape.kv_heads * PAGE;                                       // rows to its value
  const u8 *keys = pages.codes + row * row_bytes, *values = keys + static_cast<u64>(apart) * row_bytes;
  for (u32 i = thread_index(); i < PAGE * CHUNKS; i += THREADS) {
    const u32 token = i / CHUNKS, byte = i % CHUNKS * 16;
    const bool valid = token < count && byte < row_bytes;
    copy_async(stage.keys + token * Place::STRIDE + byte, keys + token * row_bytes + byte, valid);
    copy_async(stage.values + token * Place::STRIDE + byte, values + token * row_bytes + byte, valid);
  }
  if (Place::SCALED && thread_index() < 2 * PAGE / 4) {
    const u32 kind = thread_index() / (PAGE / 4), token = 4 * (thread_index() % (PAGE / 4));
    copy_async(stage.scales[kind] + token, pages.scales + row + kind * apart + token, token < count);
  }
}

// Of four codes of a page two neighbours, or those at even or odd places, as a pair of bf16, exactly.
template <Code CODE>
DEVICE u32 expand_two(u32 bytes, u32 latter) {
  return CODE == Code::E4m3 ? expand_two_e4m3(bytes, latter) : expand_two_signed(bytes, latter);
}
template <Code CODE>
DEVICE u32 expand_even(u32 bytes) {
  return CODE == Code::E4m3 ? expand_e4m3(bytes << 8) : expand_signed(bytes);
}
template <Code CODE>
DEVICE u32 expand_odd(u32 bytes) {
  return CODE == Code::E4m3 ? expand_e4m3(bytes) : expand_signed(bytes >> 8);
}

// Sixteen rows of a warp: rows g and g + 8 in lane 4g + t, as mma has them.
//
// Of bytes, a lane reads four neighbours where it reads two neighbouring values of bf16. So the values of sixteen
// take another order along them: lane 4g + t has values 4t .. 4t + 4 of a query and of a key, and of the two products
// with sixteen of a value's columns the former has the even ones and the latter the odd ones.
template <int DIM, Code CODE>
struct Rows {
  using Place = Stage<DIM, CODE>;
  static constexpr bool BYTES = Place::SCALED;
  u32 query[DIM / 16][4];
  float out[DIM / 8][4];
  float largest[2], sum[2];
  u32 first[2], end[2];  // keys that each row sees

  DEVICE void clear() {
#pragma unroll
    for (int n = 0; n < DIM / 8; ++n) {
      for (int i = 0; i < 4; ++i) out[n][i] = 0;
    }
    for (int half = 0; half < 2; ++half) {
      largest[half] = minus_infinity();
      sum[half] = 0;
    }
  }

  // Row `half` reads its query from `from`; a row that is none (null) sees no keys.
  DEVICE void load(int half, const bf16* from, u32 position, const Shape& shape) {
    end[half] = from ? position + 1 : 0;
    first[half] = shape.window && end[half] > shape.window ? end[half] - shape.window : 0;
    const u32 place = lane_index() % 4;
#pragma unroll
    for (int k = 0; k < DIM / 16; ++k) {
      for (int part = 0; part < 2; ++part) {
        const u32 at = 16 * k + (BYTES ? 4 * place + 2 * part : 2 * place + 8 * part);
        const u32* pair = reinterpret_cast<const u32*>(from + at);
        query[k][2 * part + half] = from && at < shape.dim ? *pair : 0;
      }
    }
  }

  // Of a row's last keys those that it sees: of what bits say the ones in its window, which counts none of the others.
  DEVICE u32 limit(int half, u32 bits, const Shape& shape) {
    if (bits == ALL_SEEN || shape.window == 0) return bits;
    u32 left = 0;
    const u32 seen = nearest(bits, shape.window, left);
    first[half] = end[half] > SEEN_KEYS + left ? end[half] - SEEN_KEYS - left : 0;
    return seen;
  }

  // Which of the values is column `i % 2` of this lane's in product `n`.
  DEVICE static u32 column(int n, int i) {
    const u32 place = lane_index() % 4;
    return BYTES ? 16 * (n / 2) + 4 * place + 2 * (i % 2) + n % 2 : 8 * n + 2 * place + i % 2;
  }

  // Takes KEYS keys and values of a stage, from `at` on; the stage's first key is at position `start`. Where some are guesses on
  // branches, `seen` says of the warp's rows which of their last keys they see.
  template <int KEYS>
  DEVICE void attend(const Place& stage, u32 at, u32 start, const Shape& shape, bool branches, const u32* seen) {
    float score[KEYS / 8][4] = {};
#pragma unroll
    for (int n = 0; n < KEYS / 16; ++n) compare(score[2 * n], score[2 * n + 1], stage.keys + (at + 16 * n) * STRIDE);
    mask<KEYS>(score, stage.scales[0] + at, start + at, shape);
    if (branches) hide<KEYS>(score, start + at, seen);
    soften<KEYS>(score);
    if (BYTES) weigh<KEYS>(score, stage.scales[1] + at);
#pragma unroll
    for (int k = 0; k < KEYS / 16; ++k) {
      const u32 weights[4] = {pack_bf16(score[2 * k][0], score[2 * k][1]), pack_bf16(score[2 * k][2], score[2 * k][3]),
                              pack_bf16(score[2 * k + 1][0], score[2 * k + 1][1]),
                              pack_bf16(score[2 * k + 1][2], score[2 * k + 1][3])};
      add(weights, stage.values + (at + 16 * k) * STRIDE);
    }
  }

  static constexpr int STRIDE = Place::STRIDE;

  // Scores of sixteen keys.
  DEVICE void compare(float (&former)[4], float (&latter)[4], const u8* keys) const {
    const u32 matrix = lane_index() / 8, row = lane_index() % 8;
#pragma unroll
    for (int k = 0; k < DIM / 16; k += BYTES ? 2 : 1) {
      u32 b[4];
      if constexpr (BYTES) {  // eight keys and sixteen values each: former, latter, and both of the next sixteen
        load_matrices(b, keys + (row + 8 * (matrix % 2)) * STRIDE + 16 * (k + matrix / 2));
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          const u32 key[2] = {expand_two<CODE>(b[i], 0), expand_two<CODE>(b[i], 1)};
          multiply_bf16(i % 2 ? latter : former, query[k + i / 2], key);
        }
      } else {
        load_matrices(b, keys + (row + 8 * (matrix / 2)) * STRIDE + 32 * k + 16 * (matrix % 2));
        const u32 low[2] = {b[0], b[1]}, high[2] = {b[2], b[3]};
        multiply_bf16(former, query[k], low);
        multiply_bf16(latter, query[k], high);
      }
    }
  }

  // Sixteen values by their weights.
  DEVICE void add(const u32 (&weights)[4], const u8* values) {
    const u32 matrix = lane_index() / 8, row = lane_index() % 8;
#pragma unroll
    for (int n = 0; n < DIM / 16; n += BYTES ? 2 : 1) {
      u32 b[4];
      if constexpr (BYTES) {  // eight values and sixteen columns each: former and latter eight, and both of the next sixteen
        load_matrices_transposed(b, values + (row + 8 * (matrix % 2)) * STRIDE + 16 * (n + matrix / 2));
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const u32 even[2] = {expand_even<CODE>(b[2 * i]), expand_even<CODE>(b[2 * i + 1])};
          const u32 odd[2] = {expand_odd<CODE>(b[2 * i]), expand_odd<CODE>(b[2 * i + 1])};
          multiply_bf16(out[2 * (n + i)], weights, even);
          multiply_bf16(out[2 * (n + i) + 1], weights, odd);
        }
      } else {
        load_matrices_transposed(b, values + (row + 8 * (matrix % 2)) * STRIDE + 32 * n + 16 * (matrix / 2));
        const u32 former[2] = {b[0], b[1]}, latter[2] = {b[2], b[3]};
        multiply_bf16(out[2 * n], weights, former);
        multiply_bf16(out[2 * n + 1], weights, latter);
      }
    }
  }

  // Scores in base 2; minus infinity where a row does not see the key, whose scale may be anything.
  template <int KEYS>
  DEVICE void mask(float (&score)[KEYS / 8][4], const float* scales, u32 start, const Shape& shape) {
    for (int n = 0; n < KEYS / 8; ++n) {
      for (int i = 0; i < 4; ++i) {
        const u32 index = 8 * n + 2 * (lane_index() % 4) + i % 2, key = start + index;
        float value = score[n][i] * shape.scale;
        if (BYTES) value *= scales[index];
        if (shape.cap > 0) value = shape.cap * tanhf(value / shape.cap);
        score[n][i] = key >= first[i / 2] && key < end[i / 2] ? value * LOG2_E : minus_infinity();
      }
    }
  }

  // Minus infinity where a guess does not see one of the last keys before its own.
  template <int KEYS>
  DEVICE void hide(float (&score)[KEYS / 8][4], u32 start, const u32* seen) const {
    const u32 bits[2] = {seen[lane_index() / 4], seen[lane_index() / 4 + 8]};
#pragma unroll
    for (int n = 0; n < KEYS / 8; ++n) {
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const u32 key = start + 8 * n + 2 * (lane_index() % 4) + i % 2, back = end[i / 2] - 1 - key;
        if (back < SEEN_KEYS && (bits[i / 2] >> back & 1) == 0) score[n][i] = minus_infinity();
      }
    }
  }

  // Gives the values' scales to their weights; what no row sees keeps none.
  template <int KEYS>
  DEVICE void weigh(float (&weight)[KEYS / 8][4], const float* scales) {
    for (int n = 0; n < KEYS / 8; ++n) {
      for (int i = 0; i < 4; ++i) {
        const float scale = scales[8 * n + 2 * (lane_index() % 4) + i % 2];
        weight[n][i] = weight[n][i] > 0 ? weight[n][i] * scale : 0;
      }
    }
  }

  // Turns scores into weights relative to the largest so far, and what was summed before along with them.
  template <int KEYS>
  DEVICE void soften(float (&score)[KEYS / 8][4]) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float most = largest[half];
      for (int n = 0; n < KEYS / 8; ++n) most = larger(most, larger(score[n][2 * half], score[n][2 * half + 1]));
      most = larger(most, shuffle_xor(most, 1));
      most = larger(most, shuffle_xor(most, 2));
      const float base = most == minus_infinity() ? 0 : most;  // a row that sees none of these keys
      const float factor = exp2_fast(largest[half] - base);
      largest[half] = most;
      sum[half] *= factor;
#pragma unroll
      for (int n = 0; n < DIM / 8; ++n) {
        out[n][2 * half] *= factor;
        out[n][2 * half + 1] *= factor;
      }
      for (int n = 0; n < KEYS / 8; ++n) {
        for (int k = 0; k < 2; ++k) {
          float& value = score[n][2 * half + k];
          value = exp2_fast(value - base);
          sum[half] += value;
        }
      }
    }
  }

  // The whole row's sum, in each of its four lanes.
  DEVICE float whole(int half) const {
    float total = sum[half] + shuffle_xor(sum[half], 1);
    return total + shuffle_xor(total, 2);
  }
};

// Goes through a sequence's keys from page `page` to `keys`: STEP(stage, position of the page's first key) computes one.
template <int DIM, Code CODE, typename STEP>
DEVICE void for_pages(const Pages& pages, const u32* table, u32 page, u32 keys, u32 head, const Shape& shape, STEP step) {
  using Place = Stage<DIM, CODE>;
  constexpr int AHEAD = STAGES<DIM, CODE> - 1;
  DYNAMIC_SHARED(Place, stages);
  const u32 end = ceil_divide(keys, PAGE);
  const auto start = [&](u32 next) {
    if (next < end) fetch(stages[next % (AHEAD + 1)], pages, table[next], keys - next * PAGE, head, shape);
    commit_copies();
  };
  if (AHEAD) start(page);
  for (; page < end; ++page) {
    start(page + AHEAD);
    wait_copies<AHEAD>();
    sync_threads();  // everybody's copies are there
    step(stages[page % (AHEAD + 1)], page * PAGE);
    sync_threads();  // nobody reads the stage any more that is filled next
  }
  wait_copies<0>();
}

// Sequences from `row` on whose pages of a split are the same: those behind it that have more leading splits in common with the
// sequence before. No more do than there are rows for (sharing.rs sees to it).
DEVICE u32 count_sharers(const u32* common, u32 row, u32 split, u32 group) {
  u32 count = 1;
  for (u32 next = 1; (next + 1) * group <= ROWS && row + next < blocks_x(); ++next) {
    const bool shares = common[row + next] > split;
    if (shares && count == next) ++count;
  }
  return count;
}

// What a head's splits, from `first` on, give together in column `at`: added up in their order.
DEVICE bf16 merge_splits(const float* partial, const float* partial_log, u64 first, u32 used, u32 dim, u32 at) {
  float most = minus_infinity(), sum = 0, value = 0;
  for (u32 s = 0; s < used; ++s) most = larger(most, partial_log[first + s]);
  for (u32 s = 0; s < used; ++s) {
    const float weight = exp2_fast(partial_log[first + s] - most);
    sum += weight;
    value = fused(weight, partial[(first + s) * dim + at], value);
  }
  return to_bf16(value / sum);
}

// One token of a sequence, or of several that share the split's pages, one key-value head, one split. Row r of the product is head
// r % group of sequence r / group; where more heads share a key head than there are rows, a block has a part of them.
// Where blocks count in `arrived`, one number for each sequence and part, zeros before and behind, the one that ends last of a
// sequence's merges its splits; else another kernel does. Grid: (sequences, kv_heads times such parts, splits).
template <int DIM, Code CODE>
DEVICE void decode(const bf16* query, const Pages& pages, const u32* tables, const u32* lengths, const u32* row_tokens,
                   const u32* common, bf16* out, float* partial, float* partial_log, u32* arrived, const Shape& shape,
                   u32 splits) {
  wait_for_previous();
  let_next_start();
  const u32 first = block_x(), split = block_z(), length = lengths[first], size = split_keys(length);
  if (split * size >= length || common[first] > split) return;  // none, or a block ahead reads it
  const u32 all = shape.heads / shape.kv_heads, parts_of_all = ceil_divide(all, ROWS), head = block_y() / parts_of_all;
  const u32 skipped = block_y() % parts_of_all * ROWS, group = smaller(all - skipped, u32{ROWS});
  const u32 first_head = head * all + skipped, lane = lane_index(), warp = warp_index();
  const u32 sharers = count_sharers(common, first, split, group), members = sharers * group;
  const auto query_head = [&](u32 member) {
    return static_cast<u64>(row_tokens[first + member / group]) * shape.heads + first_head + member % group;
  };
  Rows<DIM, CODE> rows;
  rows.clear();
  for (int half = 0; half < 2; ++half) {
    const u32 member = lane / 4 + 8 * half;
    const bool valid = member < members;
    const u32 position = valid ? lengths[first + member / group] - 1 : 0;
    rows.load(half, valid ? query + query_head(member) * shape.dim : nullptr, position, shape);
  }
  u32 shortest = length;  // its window begins first
  for (u32 next = 1; next < sharers; ++next) shortest = smaller(shortest, lengths[first + next]);
  const u32 seen = shape.window && shortest > shape.window ? (shortest - shape.window) / PAGE : 0;
  const u32 keys = smaller((split + 1) * size, length);
  const u32* table = tables + static_cast<u64>(first) * shape.max_pages;
  for_pages<DIM, CODE>(pages, table, larger(split * (size / PAGE), seen), keys, head, shape,
                       [&](const Stage<DIM, CODE>& stage, u32 start) {
                         rows.template attend<16>(stage, 16 * warp, start, shape, false, nullptr);
                       });

  // The warps' parts of every row, merged in the warps' order.
  SHARED(float, logs, WARPS * ROWS);
  SHARED(float, sums, WARPS * ROWS);
  DYNAMIC_SHARED(float, parts);  // the pages are done with
  sync_threads();
  for (int half = 0; half < 2; ++half) {
    const u32 member = lane / 4 + 8 * half;
    const float total = rows.whole(half);
    if (lane % 4 == 0) {
      logs[warp * ROWS + member] = rows.largest[half];
      sums[warp * ROWS + member] = total;
    }
#pragma unroll
    for (int n = 0; n < DIM / 8; ++n) {
      float* to = parts + (warp * ROWS + member) * DIM;
      for (int i = 0; i < 2; ++i) to[rows.column(n, i)] = rows.out[n][2 * half + i];
    }
  }
  sync_threads();
  for (u32 i = thread_index(); i < members * DIM; i += THREADS) {
    const u32 member = i / DIM, at = i % DIM, row = first + member / group;
    if (at >= shape.dim) continue;
    float most = minus_infinity(), sum = 0, value = 0;
    for (u32 w = 0; w < WARPS; ++w) most = larger(most, logs[w * ROWS + member]);
    const float base = most == minus_infinity() ? 0 : most;  // a split that lies before the window
    for (u32 w = 0; w < WARPS; ++w) {
      const float factor = exp2_fast(logs[w * ROWS + member] - base);
      sum += factor * sums[w * ROWS + member];
      value += factor * parts[w * ROWS * DIM + i];
    }
    value = sum > 0 ? value / sum : 0;
    if (lengths[row] <= size) {  // no other split
      out[query_head(member) * shape.dim + at] = to_bf16(value);
      continue;
    }
    const u64 place = (static_cast<u64>(row) * shape.heads + first_head + member % group) * splits + split;
    partial[place * shape.dim + at] = value;
    if (at == 0) partial_log[place] = sum > 0 ? most + log2f(sum) : minus_infinity();
  }
  if (!arrived) return;
  SHARED(u32, ready, ROWS);  // splits of each sequence that are now complete; 0 where some are not, or it has one
  sync_threads();            // all of the block's parts are written
  if (thread_index() < sharers) {
    const u32 row = first + thread_index(), used = ceil_divide(lengths[row], size);
    u32* counter = arrived + static_cast<u64>(row) * blocks_y() + block_y();
    const bool last = used > 1 && count_arrival(counter) == used;
    if (last) *counter = 0;
    ready[thread_index()] = last ? used : 0;
  }
  sync_threads();
  for (u32 i = thread_index(); i < members * DIM; i += THREADS) {
    const u32 member = i / DIM, at = i % DIM, used = ready[member / group];
    if (used == 0 || at >= shape.dim) continue;
    const u64 row = first + member / group, place = (row * shape.heads + first_head + member % group) * splits;
    out[query_head(member) * shape.dim + at] = merge_splits(partial, partial_log, place, used, shape.dim, at);
  }
}

// Adds up the splits of decoding in their order. Grid: (rows, heads).
KERNEL(attention_merge, THREADS)(const float* partial, const float* partial_log, const u32* lengths,
                                 const u32* row_tokens, bf16* out, u32 heads, u32 dim, u32 splits) {
  wait_for_previous();
  let_next_start();
  const u32 row = block_x(), head = block_y(), length = lengths[row];
  const u32 used = ceil_divide(length, split_keys(length));
  if (used <= 1) return;  // written already
  const u64 first = (static_cast<u64>(row) * heads + head) * splits;
  for (u32 at = thread_index(); at < dim; at += THREADS) {
    out[(static_cast<u64>(row_tokens[row]) * heads + head) * dim + at] =
        merge_splits(partial, partial_log, first, used, dim, at);
  }
}

// 64 rows of a sequence's tokens in this step. Grid: (two for each tile, kv_heads); tile i has 128 rows from `tile_firsts[i]` of
// sequence `tile_sequences[i]`, or as many as there are. `seen` has the bits of each token, or is null where all see all keys.
template <int DIM, Code CODE>
DEVICE void prefill(const bf16* query, const Pages& pages, const u32* tables, const u32* tile_sequences,
                    const u32* tile_firsts, const u32* first_tokens, const u32* token_counts,
                    const u32* first_positions, const u32* seen, bf16* out, const Shape& shape) {
  // Registers do not hold the scores of a whole page beside rows of many values.
  constexpr int KEYS = DIM > 128 ? 16 : PAGE;
  wait_for_previous();
  let_next_start();
  const u32 tile = block_x() / 2, sequence = tile_sequences[tile], head = block_y();
  const u32 first_row = tile_firsts[tile] + block_x() % 2 * WARPS * ROWS;
  const u32 group = shape.heads / shape.kv_heads, lane = lane_index();
  const u32 rows_end = token_counts[sequence] * group, position = first_positions[sequence];
  if (first_row >= rows_end) return;
  const u64 first_token = first_tokens[sequence];
  const auto place = [&](u32 row) {
    return ((first_token + row / group) * shape.heads + head * group + row % group) * shape.dim;
  };
  Rows<DIM, CODE> rows;
  rows.clear();
  SHARED(u32, seen_rows, WARPS * ROWS);  // what each row sees of its last keys
  u32* const seen_own = seen_rows + warp_index() * ROWS;
  u32 own[2];
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    own[half] = first_row + warp_index() * ROWS + lane / 4 + 8 * half;
    const bool valid = own[half] < rows_end;
    rows.load(half, valid ? query + place(own[half]) : nullptr, position + own[half] / group, shape);
    if (seen) {
      const u32 bits = rows.limit(half, valid ? seen[first_token + own[half] / group] : ALL_SEEN, shape);
      if (lane % 4 == 0) seen_own[lane / 4 + 8 * half] = bits;
    }
  }
  sync_warp();
  // Keys that the row has whose window begins first: what a guess does not see its window does not count.
  const u32 before = first_row / group, uncounted = seen ? smaller(before, SEEN_KEYS - 1) : 0;
  const u32 first_seen = position + before - uncounted + 1;
  const u32 last_row = smaller(first_row + WARPS * ROWS, rows_end) - 1;
  const u32 page = shape.window && first_seen > shape.window ? (first_seen - shape.window) / PAGE : 0;
  const u32 keys = position + last_row / group + 1;
  const u32* table = tables + static_cast<u64>(sequence) * shape.max_pages;
  for_pages<DIM, CODE>(pages, table, page, keys, head, shape, [&](const Stage<DIM, CODE>& stage, u32 start) {
#pragma unroll 1
    for (u32 at = 0; at < PAGE; at += KEYS) {
      rows.template attend<KEYS>(stage, at, start, shape, seen != nullptr, seen_own);
    }
  });
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const float total = rows.whole(half);
    if (own[half] >= rows_end) continue;
    const float factor = 1.0f / total;
    bf16* to = out + place(own[half]);
#pragma unroll
    for (int n = 0; n < DIM / 8; ++n) {
      for (int i = 0; i < 2; ++i) {
        const u32 at = rows.column(n, i);
        if (at < shape.dim) to[at] = to_bf16(rows.out[n][2 * half + i] * factor);
      }
    }
  }
}

#define DECODE_PARAMETERS(pages_type)                                                                                  \
  (const bf16* query, const pages_type* pages, const float* scales, const u32* tables, const u32* lengths,             \
   const u32* row_tokens, const u32* common, bf16* out, float* partial, float* partial_log, u32* arrived, u32 heads,   \
   u32 kv_heads, u32 dim, u32 max_pages, u32 splits, float scale, u32 window, float cap) {                             \
    decode
#define DECODE_ARGUMENTS                                                                                           \
  (query, {reinterpret_cast<const u8*>(pages), scales}, tables, lengths, row_tokens, common, out, partial,         \
   partial_log, arrived, {heads, kv_heads, dim, max_pages, scale, window, cap}, splits); }

#define PREFILL_PARAMETERS(pages_type)                                                                                 \
  (const bf16* query, const pages_type* pages, const float* scales, const u32* tables, const u32* tile_sequences,      \
   const u32* tile_firsts, const u32* first_tokens, const u32* token_counts, const u32* first_positions,               \
   const u32* seen, bf16* out, u32 heads, u32 kv_heads, u32 dim, u32 max_pages, float scale, u32 window, float cap) {  \
    prefill
#define PREFILL_ARGUMENTS                                                                                             \
  (query, {reinterpret_cast<const u8*>(pages), scales}, tables, tile_sequences, tile_firsts, first_tokens,            \
   token_counts, first_positions, seen, out, {heads, kv_heads, dim, max_pages, scale, window, cap}); }

RESIDENT_KERNEL(attention_decode_32, THREADS, 7) DECODE_PARAMETERS(bf16)<32, Code::Bf16> DECODE_ARGUMENTS
RESIDENT_KERNEL(attention_decode_64, THREADS, 5) DECODE_PARAMETERS(bf16)<64, Code::Bf16> DECODE_ARGUMENTS
KERNEL(attention_decode_96, THREADS) DECODE_PARAMETERS(bf16)<96, Code::Bf16> DECODE_ARGUMENTS
KERNEL(attention_decode_128, THREADS) DECODE_PARAMETERS(bf16)<128, Code::Bf16> DECODE_ARGUMENTS
KERNEL(attention_decode_256, THREADS) DECODE_PARAMETERS(bf16)<256, Code::Bf16> DECODE_ARGUMENTS
RESIDENT_KERNEL(attention_decode_fp8_32, THREADS, 7) DECODE_PARAMETERS(u8)<32, Code::E4m3> DECODE_ARGUMENTS
RESIDENT_KERNEL(attention_decode_fp8_64, THREADS, 5) DECODE_PARAMETERS(u8)<64, Code::E4m3> DECODE_ARGUMENTS
KERNEL(attention_decode_fp8_96, THREADS) DECODE_PARAMETERS(u8)<96, Code::E4m3> DECODE_ARGUMENTS
KERNEL(attention_decode_fp8_128, THREADS) DECODE_PARAMETERS(u8)<128, Code::E4m3> DECODE_ARGUMENTS
KERNEL(attention_decode_fp8_256, THREADS) DECODE_PARAMETERS(u8)<256, Code::E4m3> DECODE_ARGUMENTS
RESIDENT_KERNEL(attention_decode_int8_32, THREADS, 7) DECODE_PARAMETERS(u8)<32, Code::Int8> DECODE_ARGUMENTS
RESIDENT_KERNEL(attention_decode_int8_64, THREADS, 5) DECODE_PARAMETERS(u8)<64, Code::Int8> DECODE_ARGUMENTS
KERNEL(attention_decode_int8_96, THREADS) DECODE_PARAMETERS(u8)<96, Code::Int8> DECODE_ARGUMENTS
KERNEL(attention_decode_int8_128, THREADS) DECODE_PARAMETERS(u8)<128, Code::Int8> DECODE_ARGUMENTS
KERNEL(attention_decode_int8_256, THREADS) DECODE_PARAMETERS(u8)<256, Code::Int8> DECODE_ARGUMENTS

KERNEL(attention_prefill_32, THREADS) PREFILL_PARAMETERS(bf16)<32, Code::Bf16> PREFILL_ARGUMENTS
KERNEL(attention_prefill_64, THREADS) PREFILL_PARAMETERS(bf16)<64, Code::Bf16> PREFILL_ARGUMENTS
KERNEL(attention_prefill_96, THREADS) PREFILL_PARAMETERS(bf16)<96, Code::Bf16> PREFILL_ARGUMENTS
KERNEL(attention_prefill_128, THREADS) PREFILL_PARAMETERS(bf16)<128, Code::Bf16> PREFILL_ARGUMENTS
KERNEL(attention_prefill_256, THREADS) PREFILL_PARAMETERS(bf16)<256, Code::Bf16> PREFILL_ARGUMENTS
KERNEL(attention_prefill_fp8_32, THREADS) PREFILL_PARAMETERS(u8)<32, Code::E4m3> PREFILL_ARGUMENTS
KERNEL(attention_prefill_fp8_64, THREADS) PREFILL_PARAMETERS(u8)<64, Code::E4m3> PREFILL_ARGUMENTS
KERNEL(attention_prefill_fp8_96, THREADS) PREFILL_PARAMETERS(u8)<96, Code::E4m3> PREFILL_ARGUMENTS
KERNEL(attention_prefill_fp8_128, THREADS) PREFILL_PARAMETERS(u8)<128, Code::E4m3> PREFILL_ARGUMENTS
KERNEL(attention_prefill_fp8_256, THREADS) PREFILL_PARAMETERS(u8)<256, Code::E4m3> PREFILL_ARGUMENTS
KERNEL(attention_prefill_int8_32, THREADS) PREFILL_PARAMETERS(u8)<32, Code::Int8> PREFILL_ARGUMENTS
KERNEL(attention_prefill_int8_64, THREADS) PREFILL_PARAMETERS(u8)<64, Code::Int8> PREFILL_ARGUMENTS
KERNEL(attention_prefill_int8_96, THREADS) PREFILL_PARAMETERS(u8)<96, Code::Int8> PREFILL_ARGUMENTS
KERNEL(attention_prefill_int8_128, THREADS) PREFILL_PARAMETERS(u8)<128, Code::Int8> PREFILL_ARGUMENTS
KERNEL(attention_prefill_int8_256, THREADS) PREFILL_PARAMETERS(u8)<256, Code::Int8> PREFILL_ARGUMENTS
