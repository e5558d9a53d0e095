// Whether products of one warp (mma.sync) and of four (wgmma) give the same bits on this card, told as the stages of `gpu prove` tell
// what they find. Where they do, the mode whose bits do not depend on the batch may multiply by warpgroups.
//
// Each case multiplies 64 rows with 8 columns, over some steps of 16 (bf16) or 32 (e4m3) values, from a sum that is zero or not.
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <random>
#include <vector>

#include <cuda_runtime.h>

constexpr int ROWS = 64, COLS = 8, STEP_BYTES = 32, CASES = 512;

struct Operands {
  uint8_t a[ROWS][STEP_BYTES], b[COLS][STEP_BYTES];
};

__device__ uint32_t word(const uint8_t* row, int at) { return *reinterpret_cast<const uint32_t*>(row + at); }

// A descriptor of operands without a swizzle: two matrices of 8 rows of 16 bytes, 128 bytes apart.
__device__ uint64_t descriptor(const void* shared) {
  const uint64_t at = static_cast<uint32_t>(__cvta_generic_to_shared(shared)) >> 4;
  return at | 8ull << 16 | 16ull << 32;
}

template <bool BYTES>
__device__ void by_warp(float (&d)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
  if constexpr (BYTES) {
    asm volatile("mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  } else {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
  }
}

template <bool BYTES>
__device__ void by_warpgroup(float (&d)[4], const uint32_t (&a)[4], uint64_t b) {
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
  if constexpr (BYTES) {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  } else {
    asm volatile("wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {%0,%1,%2,%3}, {%4,%5,%6,%7}, %8, 1, 1, 1, 0;"
                 : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
  }
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// Block: a case of 128 threads, of which each warp has 16 rows. Both sums go on from `starts`, over `steps` operands.
template <bool BYTES>
__global__ void multiply(const Operands* operands, int steps, const float* starts, float* by_one, float* by_four) {
  __shared__ alignas(128) uint8_t columns[2][8][16];
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, row = 16 * warp + lane / 4, part = lane % 4 * 4;
  const size_t first = (size_t(blockIdx.x) * ROWS + row) * COLS + lane % 4 * 2, second = first + 8 * COLS;
  float one[4] = {starts[first], starts[first + 1], starts[second], starts[second + 1]};
  float four[4] = {one[0], one[1], one[2], one[3]};
  for (int step = 0; step < steps; ++step) {
    const Operands& own = operands[size_t(blockIdx.x) * steps + step];
    __syncthreads();
    for (int i = threadIdx.x; i < COLS * STEP_BYTES; i += blockDim.x) {
      columns[i % STEP_BYTES / 16][i / STEP_BYTES][i % 16] = own.b[i / STEP_BYTES][i % STEP_BYTES];
    }
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    __syncthreads();
    const uint32_t a[4] = {word(own.a[row], part), word(own.a[row + 8], part), word(own.a[row], 16 + part),
                           word(own.a[row + 8], 16 + part)};
    // The kernel for few tokens has a lane's values side by side: the same sum, whose products stand in other places.
    const int beside = 2 * part;
    const uint32_t placed[4] = {word(own.a[row], beside), word(own.a[row + 8], beside), word(own.a[row], beside + 4),
                                word(own.a[row + 8], beside + 4)};
    const uint32_t b[2] = {word(own.b[lane / 4], beside), word(own.b[lane / 4], beside + 4)};
    by_warp<BYTES>(one, placed, b);
    by_warpgroup<BYTES>(four, a, descriptor(columns));
  }
  const size_t places[4] = {first, first + 1, second, second + 1};
  for (int i = 0; i < 4; ++i) {
    by_one[places[i]] = one[i];
    by_four[places[i]] = four[i];
  }
}

double value(bool bytes, const uint8_t* row, int index) {
  if (!bytes) {
    const uint32_t bits = uint32_t(row[2 * index] | row[2 * index + 1] << 8) << 16;
    float number;
    memcpy(&number, &bits, 4);
    return number;
  }
  const int code = row[index], exponent = code >> 3 & 15, fraction = code & 7;
  const double magnitude = exponent ? std::ldexp(8 + fraction, exponent - 10) : std::ldexp(fraction, -9);
  return code & 128 ? -magnitude : magnitude;
}

// Values whose exponents lie so many apart: how far from the largest a value may be and still count is what may differ.
void fill(bool bytes, uint8_t* row, int spread, std::mt19937& random) {
  for (int i = 0; i < STEP_BYTES; i += bytes ? 1 : 2) {
    const uint32_t bits = random(), exponent = random() % spread;
    if (bytes) {
      row[i] = uint8_t((bits & 0x87) | (2 + exponent % 12) << 3);
    } else {
      const uint16_t half = uint16_t((bits & 0x807f) | (120 + exponent) << 7);
      memcpy(row + i, &half, 2);
    }
  }
}

#define CHECKED(call)                                                        \
  if (const cudaError_t error = call; error != cudaSuccess) {                \
    printf("%s: %s\n", #call, cudaGetErrorString(error));                    \
    exit(1);                                                                 \
  }

template <bool BYTES>
void compare(const char* name, int steps, int spread, bool from_zero) {
  std::mt19937 random(7 + steps + spread);
  std::vector<Operands> operands(size_t(CASES) * steps);
  for (Operands& own : operands) {
    for (auto& row : own.a) fill(BYTES, row, spread, random);
    for (auto& row : own.b) fill(BYTES, row, spread, random);
  }
  const size_t count = size_t(CASES) * ROWS * COLS;
  std::vector<float> starts(count), one(count), four(count);
  std::normal_distribution<float> normal;
  for (float& start : starts) start = from_zero ? 0 : normal(random) * std::ldexp(1.f, int(random() % 12) - 4);
  Operands* d_operands;
  float *d_starts, *d_one, *d_four;
  CHECKED(cudaMalloc(&d_operands, operands.size() * sizeof(Operands)));
  CHECKED(cudaMalloc(&d_starts, 4 * count));
  CHECKED(cudaMalloc(&d_one, 4 * count));
  CHECKED(cudaMalloc(&d_four, 4 * count));
  CHECKED(cudaMemcpy(d_operands, operands.data(), operands.size() * sizeof(Operands), cudaMemcpyHostToDevice));
  CHECKED(cudaMemcpy(d_starts, starts.data(), 4 * count, cudaMemcpyHostToDevice));
  multiply<BYTES><<<CASES, 128>>>(d_operands, steps, d_starts, d_one, d_four);
  CHECKED(cudaGetLastError());
  CHECKED(cudaMemcpy(one.data(), d_one, 4 * count, cudaMemcpyDeviceToHost));
  CHECKED(cudaMemcpy(four.data(), d_four, 4 * count, cudaMemcpyDeviceToHost));
  size_t different = 0, wrong = 0;
  for (size_t i = 0; i < count; ++i) {
    const size_t own = i / (ROWS * COLS);
    const int row = i / COLS % ROWS, column = i % COLS, values = BYTES ? 32 : 16;
    double sum = starts[i], magnitude = std::fabs(starts[i]);
    for (int k = 0; k < steps * values; ++k) {
      const Operands& step = operands[own * steps + k / values];
      const double product = value(BYTES, step.a[row], k % values) * value(BYTES, step.b[column], k % values);
      sum += product;
      magnitude += std::fabs(product);
    }
    different += memcmp(&one[i], &four[i], 4) != 0;
    wrong += !(std::fabs(one[i] - sum) <= 1e-3 * magnitude) + !(std::fabs(four[i] - sum) <= 1e-3 * magnitude);
  }
  printf("finding {\"kind\": \"check\", \"name\": \"%s: both are right\", \"passed\": %s}\n", name, wrong ? "false" : "true");
  printf("finding {\"kind\": \"figure\", \"name\": \"%s: sums whose bits differ\", \"value\": %.6f, \"unit\": \"%%\"}\n", name,
         100.0 * different / count);
  fflush(stdout);
  for (void* memory : {(void*)d_operands, (void*)d_starts, (void*)d_one, (void*)d_four}) cudaFree(memory);
}

int main() {
  compare<false>("bf16, 1 step from zero", 1, 1, true);
  compare<false>("bf16, 1 step from zero, exponents 24 apart", 1, 24, true);
  compare<false>("bf16, 1 step from a sum, exponents 12 apart", 1, 12, false);
  compare<false>("bf16, 4 steps from zero, exponents 8 apart", 4, 8, true);
  compare<false>("bf16, 16 steps from a sum, exponents 6 apart", 16, 6, false);
  compare<true>("e4m3, 1 step from zero", 1, 12, true);
  compare<true>("e4m3, 4 steps from zero", 4, 12, true);
}
