// Products of 8-bit activations with 8-bit weights: both signed integers (sm_80 on), or both e4m3 (sm_89 on). Activations have
// a scale for each token, found here; weights one for every `group` columns of a row.
//
// After every 128 columns what was added up (integers: exactly) is scaled and added in f32.
#include "codes.cuh"
#include "output.cuh"
#include "tile.cuh"

typedef Tiles<u8, 32> Product;  // of many tokens
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr u32 RUN = 128;          // columns that are added up before they are scaled; a group has a multiple, or all
constexpr int PARTS = RUN / 64;
constexpr u32 FEW = 16;           // tokens, and rows, of a block for few tokens
constexpr int AHEAD = 2;          // runs that a warp of it has on their way
constexpr int TURN = AHEAD * WARPS;

// The codes and the scale of each of `count` tokens, or of those that `order` names; where it names none of them, the row stays as it
// is. Grid: rows.
template <typename Code>
DEVICE void quantize(const bf16* input, const u32* order, u8* codes, float* scales, u32 count, u32 cols) {
  wait_for_previous();
  let_next_start();
  const u32 token = order ? order[block_x()] : block_x();
  if (token >= count) return;
  const bf16* own = input + static_cast<u64>(token) * cols;
  round_token<Code, THREADS>(codes + static_cast<u64>(block_x()) * cols, scales + block_x(), cols,
                             [&](float (&to)[RUN_VALUES], u32 col) { unpack(to, load_quad(own + col)); });
}

KERNEL(quantize_int8, THREADS)(const bf16* input, const u32* order, u8* codes, float* scales, u32 count, u32 cols) {
  quantize<Int8>(input, order, codes, scales, count, cols);
}

KERNEL(quantize_fp8, THREADS)(const bf16* input, const u32* order, u8* codes, float* scales, u32 count, u32 cols) {
  quantize<E4m3>(input, order, codes, scales, count, cols);
}

// total += sum · scale of each row's group, and the sum begins again.
template <typename Sums>
DEVICE void scale_up(Product::Sums<float>& total, Sums& sum, const float* scales, u32 first_row, u32 rows, u32 groups, u32 group) {
#pragma unroll
  for (int n = 0; n < Product::ROW_PARTS; ++n) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const u32 row = first_row + 8 * n + i;
      const float scale = row < rows ? scales[static_cast<u64>(row) * groups + group] : 0;
#pragma unroll
      for (int m = 0; m < Product::TOKEN_PARTS; ++m) {
        for (int half = 0; half < 2; ++half) {
          float& value = total.of[m][n][2 * half + i];
          value = fused(static_cast<float>(sum.of[m][n][2 * half + i]), scale, value);
          sum.of[m][n][2 * half + i] = 0;
        }
      }
    }
  }
}

// Grid: (parts of the rows, parts of the tokens).
template <typename Code>
DEVICE void multiply_many(const u8* weights, const float* scales, const u8* input, const float* input_scales, const Output& out,
                          u32 tokens, u32 rows, u32 cols, u32 group) {
  DYNAMIC_SHARED(Product::Stage, stages);
  const Product product{input, weights, tokens, rows, cols};
  const u32 groups = ceil_divide(cols, group);
  Product::Sums<typename Code::Sum> sum;
  Product::Sums<float> total;
  product.multiply(stages, sum, [&](u32 step) {
    const u32 begin = step * Product::DEPTH, end = begin + Product::DEPTH;
    if (end % RUN && end < cols) return;
    scale_up(total, sum, scales, product.first_row(), rows, groups, begin / group);
  });
  product.each(total, [&](u32 token, u32 row, float sum) {
    out.write(token, row, rounded_product(sum, input_scales[token]));
  });
}

// Where a lane finds its codes of 16 rows: of every 64 columns sixteen of rows g and g + 8, as in tile.cuh. From its warp's first run
// of a turn on.
struct Sixteen {
  const u8* row;
  u32 cols;
  int parts[2];  // of 64 columns that are left of each; none where there is no row

  DEVICE Sixteen(const u8* codes, u32 first, u32 rows, u32 width) : cols(width) {
    const u32 col = RUN * warp_index() + 16 * (lane_index() % 4), index = first + lane_index() / 4;
    row = codes + static_cast<u64>(index) * cols + col;
    const int left = col < cols ? ceil_divide(cols - col, 64) : 0;
    parts[0] = index < rows ? left : 0;
    parts[1] = index + 8 < rows ? left : 0;
  }

  // Part `at`, zeros where there is none.
  template <Quad LOAD(const void*)>
  DEVICE void load(Quad (&to)[2], int at) const {
    to[0] = at < parts[0] ? LOAD(row + 64 * at) : Quad{};
    to[1] = at < parts[1] ? LOAD(row + 8 * cols + 64 * at) : Quad{};
  }

  DEVICE void go_on() {
    row += TURN * RUN;
    for (int& left : parts) left -= TURN * PARTS;
  }
};

// Adds to the sums of tokens g, g, g + 8, g + 8 and rows 2t, 2t + 1, 2t, 2t + 1 of each eight rows what 64 columns give.
template <typename Sum>
DEVICE void multiply_part(Sum (&sum)[2][4], const Quad (&tokens)[2], const Quad (&rows)[2]) {
#pragma unroll
  for (int k = 0; k < 4; k += 2) {
    const u32 a[4] = {tokens[0].word[k], tokens[1].word[k], tokens[0].word[k + 1], tokens[1].word[k + 1]};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const u32 b[2] = {rows[half].word[k], rows[half].word[k + 1]};
      multiply_bytes(sum[half], a, b);
    }
  }
}

// What a block's runs gave in a turn, and the scales of their rows.
template <typename Sum>
struct Turn {
  Sum sums[TURN][FEW * FEW];
  float scales[TURN][FEW];

  DEVICE void put(u32 run, const Sum (&sum)[2][4]) {
    const u32 group = lane_index() / 4, place = lane_index() % 4;
#pragma unroll
    for (u32 i = 0; i < 8; ++i) sums[run][FEW * (group + i / 2 % 2 * 8) + i / 4 * 8 + 2 * place + i % 2] = sum[i / 4][i % 4];
  }

  // The total of a thread's token and row with those runs, in the order of columns.
  DEVICE float added(float total, u32 runs) const {
#pragma unroll 4
    for (u32 run = 0; run < runs; ++run) {
      total = fused(static_cast<float>(sums[run][thread_index()]), scales[run][thread_index() % FEW], total);
    }
    return total;
  }
};

// Of few tokens the weights are what is waited for, and go straight into registers: a block's warps take the runs of columns by turns.
// What those gave, one thread for each token and row scales and adds up as it is done for many tokens, with the same bits.
// Grid: (parts of the rows, parts of the tokens).
template <typename Code>
DEVICE void multiply_few(const u8* weights, const float* scales, const u8* input, const float* input_scales, const Output& out,
                         u32 tokens, u32 rows, u32 cols, u32 group) {
  typedef Turn<typename Code::Sum> Given;
  SHARED(Given, turn, 1);
  const u32 first_row = FEW * block_x(), first_token = FEW * block_y(), runs = ceil_divide(cols, RUN);
  const u32 first_scale = smaller(first_row + lane_index() % FEW, rows - 1) * ceil_divide(cols, group);
  Sixteen of_rows(weights, first_row, rows, cols), of_tokens(input, first_token, tokens, cols);
  Quad held[AHEAD][PARTS][2];
  const auto place = [](int i, int part) { return i * WARPS * PARTS + part; };  // among a turn's parts
  for (int i = 0; i < AHEAD; ++i) {
    for (int part = 0; part < PARTS; ++part) of_rows.load<load_once>(held[i][part], place(i, part));
  }
  of_rows.go_on();
  wait_for_previous();  // the weights are nobody's output
  let_next_start();
  float total = 0;
  for (u32 first = 0; first < runs; first += TURN) {
#pragma unroll
    for (int i = 0; i < AHEAD; ++i) {
      const u32 own = i * WARPS + warp_index(), run = first + own;
      if (run >= runs) continue;
      if (lane_index() < FEW) turn->scales[own][lane_index()] = scales[first_scale + run * RUN / group];
      typename Code::Sum sum[2][4] = {};
#pragma unroll
      for (int part = 0; part < PARTS; ++part) {
        Quad columns[2];
        of_tokens.load<load_quad>(columns, place(i, part));
        multiply_part(sum, columns, held[i][part]);
        of_rows.load<load_once>(held[i][part], place(i, part));
      }
      turn->put(own, sum);
    }
    of_rows.go_on();
    of_tokens.go_on();
    sync_threads();
    total = turn->added(total, smaller(runs - first, static_cast<u32>(TURN)));
    sync_threads();  // before the next one's are written there
  }
  const u32 token = first_token + thread_index() / FEW, row = first_row + thread_index() % FEW;
  if (token < tokens && row < rows) out.write(token, row, rounded_product(total, input_scales[token]));
}

#define PARAMETERS                                                                                                   \
  (const u8* weights, const float* scales, const u8* input, const float* input_scales, bf16* halves, float* floats, \
   u32 action, u32 tokens, u32 rows, u32 cols, u32 group)
#define ARGUMENTS (weights, scales, input, input_scales, {halves, floats, action, rows}, tokens, rows, cols, group)

KERNEL(w8a8_int8_few, THREADS) PARAMETERS { multiply_few<Int8> ARGUMENTS; }
KERNEL(w8a8_fp8_few, THREADS) PARAMETERS { multiply_few<E4m3> ARGUMENTS; }
KERNEL(w8a8_int8_many, Product::THREADS) PARAMETERS { multiply_many<Int8> ARGUMENTS; }
KERNEL(w8a8_fp8_many, Product::THREADS) PARAMETERS { multiply_many<E4m3> ARGUMENTS; }
