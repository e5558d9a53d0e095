// A CUDA block, or a cluster of them, on one CPU thread: what dev.cuh asks of a GPU, done by fibers.
//
// Every CUDA thread is a fiber that runs until it needs others: at a barrier, or at a warp function. Then another that
// can go on is chosen at random, by the launch's seed, so that code which lacks a barrier gives another result. Warp
// functions exchange their operands through a buffer of the warp, and `mma` and `ldmatrix` compute from other lanes'
// registers by the maps of the PTX ISA. Shared memory starts as NaNs and ends at a page that cannot be touched.
#pragma once

#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <sched.h>
#include <type_traits>
#include <utility>

namespace shim {

constexpr u32 LANES = 32;
constexpr size_t SLOT_BYTES = 64;

// What the running fiber knows of itself, set at every switch.
struct Now {
  u32 thread, block[3], grid[3];
  u32 rank;  // of the block in its cluster
  u8 *static_shared, *dynamic_shared;
  u64 launch;  // distinguishes launches
};
extern __thread Now now;

// Waits for all threads of the block; `site` is where, and must be the same for all.
void block_barrier(int site);
// Gives `bytes` at `mine` to the warp, waits for all its lanes, and returns what each gave (until the next but one).
const u8 (*exchange(const void* mine, size_t bytes, int site))[SLOT_BYTES];
void wait_for_previous();
void copy_async(void* shared, const void* global, bool valid);
void commit_copies();
void wait_copies(u32 pending);
[[noreturn]] void fail(const char* format, ...);

// Where the blocks of this launch have one more array of shared memory: so many bytes behind the begin of their own.
u32 place_shared(size_t bytes);

// One array of shared memory; KEY is a type of its own for each declaration and instantiation.
template <typename T, int COUNT, typename KEY>
T* shared_array(KEY) {
  static thread_local u64 launch = 0;
  static thread_local u32 place;
  if (launch != now.launch) {
    launch = now.launch;
    place = place_shared(sizeof(T) * COUNT);
  }
  return reinterpret_cast<T*>(now.static_shared + place);
}

template <typename T>
T value_of(const u8 (&slot)[SLOT_BYTES]) {
  T value;
  memcpy(&value, slot, sizeof value);
  return value;
}

}  // namespace shim

#define DEVICE inline
#define KERNEL(name, threads) \
  constexpr u32 name##_threads = threads; \
  extern "C" void name
#define LARGE_KERNEL(name, threads) KERNEL(name, threads)
#define RESIDENT_KERNEL(name, threads, blocks) KERNEL(name, threads)
#define SHARED(type, name, count) type* name = shim::shared_array<type, count>([] {})
#define DYNAMIC_SHARED(type, name) type* name = reinterpret_cast<type*>(shim::now.dynamic_shared)

DEVICE u32 thread_index() { return shim::now.thread; }
DEVICE u32 block_x() { return shim::now.block[0]; }
DEVICE u32 block_y() { return shim::now.block[1]; }
DEVICE u32 block_z() { return shim::now.block[2]; }
DEVICE u32 blocks_x() { return shim::now.grid[0]; }
DEVICE u32 blocks_y() { return shim::now.grid[1]; }

DEVICE void sync_threads(int site = __builtin_LINE()) { shim::block_barrier(site); }
DEVICE void sync_warp(int site = __builtin_LINE()) {
  const u8 nothing = 0;
  shim::exchange(&nothing, 1, site);
}
DEVICE void wait_for_previous() { shim::wait_for_previous(); }
DEVICE void let_next_start() {}

template <typename T>
DEVICE T shuffle(T value, u32 lane, int site = __builtin_LINE()) {
  return shim::value_of<T>(shim::exchange(&value, sizeof value, site)[lane % shim::LANES]);
}
template <typename T>
DEVICE T shuffle_xor(T value, u32 mask, int site = __builtin_LINE()) {
  return shim::value_of<T>(shim::exchange(&value, sizeof value, site)[(thread_index() ^ mask) % shim::LANES]);
}

DEVICE u32 bits_of(float value) { u32 bits; memcpy(&bits, &value, 4); return bits; }
DEVICE float float_of(u32 bits) { float value; memcpy(&value, &bits, 4); return value; }

// To the nearest, ties to even; a NaN stays one.
DEVICE bf16 to_bf16(float value) {
  const u32 bits = bits_of(value);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return {0x7fff};
  return {static_cast<u16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
DEVICE u32 pack_bf16(float low, float high) { return to_bf16(low).bits | static_cast<u32>(to_bf16(high).bits) << 16; }
DEVICE float fused(float a, float b, float c) { return std::fma(a, b, c); }
DEVICE float rounded_product(float a, float b) { return a * b; }
DEVICE u32 fma_bf16(u32 a, u32 b, u32 c) {
  const auto low = [](u32 pair) { return double(float_of(pair << 16)); };
  const auto high = [](u32 pair) { return double(float_of(pair & 0xffff0000u)); };
  return pack_bf16(float(low(a) * low(b) + low(c)), float(high(a) * high(b) + high(c)));
}
DEVICE u32 masked_or(u32 a, u32 mask, u32 bits) { return (a & mask) | bits; }
DEVICE u32 masked_xor(u32 a, u32 mask, u32 bits) { return (a & mask) ^ bits; }
DEVICE int dot_bytes(u32 a, u32 b, int sum) {
  for (u32 k = 0; k < 32; k += 8) sum += static_cast<signed char>(a >> k & 0xff) * static_cast<signed char>(b >> k & 0xff);
  return sum;
}
DEVICE u32 pick_bytes(u32 first, u32 second, u32 which) {
  u32 result = 0;
  for (u32 i = 0; i < 4; ++i) {
    const u32 from = which >> 4 * i & 7;
    result |= ((from < 4 ? first : second) >> 8 * (from % 4) & 0xff) << 8 * i;
  }
  return result;
}
DEVICE u32 pick_bytes(u32 word, u32 which) { return pick_bytes(word, 0, which); }
DEVICE float half_to_float(u16 bits) {
  const u32 exponent = bits >> 10 & 31, fraction = bits & 1023;
  float value = exponent == 31 ? (fraction ? NAN : INFINITY) : std::ldexp(float(fraction + (exponent ? 1024 : 0)), int(exponent ? exponent : 1) - 25);
  return bits >> 15 ? -value : value;
}
DEVICE float exp2_fast(float value) { return exp2f(value); }
DEVICE float divide_fast(float a, float b) { return a / b; }
DEVICE u64 multiply_high(u64 a, u64 b) { return static_cast<u64>(static_cast<unsigned __int128>(a) * b >> 64); }
DEVICE u32 multiply_high(u32 a, u32 b) { return static_cast<u32>(static_cast<u64>(a) * b >> 32); }
DEVICE void add_shared(u32* to, u32 value) { *to += value; }
DEVICE u32 take_shared(u32* from, u32 value) {
  const u32 before = *from;
  *from += value;
  return before;
}
DEVICE u32 count_arrival(u32* counter) { return __atomic_add_fetch(counter, 1, __ATOMIC_ACQ_REL); }
DEVICE void tell_peer(u32* flag, u32 value) { __atomic_store_n(flag, value, __ATOMIC_RELEASE); }
DEVICE u32 hear_peer(const u32* flag) {
  // Who is waited for may need this processor; but on a busy machine each yield costs as long as others may run at a time.
  static thread_local u32 heard = 0;
  if (heard++ % 16 == 0) sched_yield();
  return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}
DEVICE Quad load_once(const void* from) { return *static_cast<const Quad*>(from); }

DEVICE void load_matrices(u32 (&out)[4], const void* row, int site = __builtin_LINE()) {
  const u8(*rows)[shim::SLOT_BYTES] = shim::exchange(&row, sizeof row, site);
  const u32 lane = thread_index() % shim::LANES;
  for (u32 i = 0; i < 4; ++i) {
    const u8* from = shim::value_of<const u8*>(rows[8 * i + lane / 4]);
    memcpy(&out[i], from + 4 * (lane % 4), 4);
  }
}
DEVICE void load_matrices_transposed(u32 (&out)[4], const void* row, int site = __builtin_LINE()) {
  const u8(*rows)[shim::SLOT_BYTES] = shim::exchange(&row, sizeof row, site);
  const u32 lane = thread_index() % shim::LANES;
  for (u32 i = 0; i < 4; ++i) {
    u16 pair[2];
    for (u32 k = 0; k < 2; ++k) {
      memcpy(&pair[k], shim::value_of<const u8*>(rows[8 * i + 2 * (lane % 4) + k]) + 2 * (lane / 4), 2);
    }
    out[i] = pair[0] | static_cast<u32>(pair[1]) << 16;
  }
}

DEVICE void multiply_bf16(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], int site = __builtin_LINE()) {
  // Each lane gives its operands as floats: of its two rows of a, and of its column of b, four each.
  struct Operands { float a[2][4], b[4]; } mine;
  for (u32 half = 0; half < 2; ++half) {  // of the sixteen columns of a
    for (u32 row = 0; row < 2; ++row) {
      mine.a[row][2 * half] = float_of(a[2 * half + row] << 16);
      mine.a[row][2 * half + 1] = float_of(a[2 * half + row] & 0xffff0000u);
    }
    mine.b[2 * half] = float_of(b[half] << 16);
    mine.b[2 * half + 1] = float_of(b[half] & 0xffff0000u);
  }
  const u8(*all)[shim::SLOT_BYTES] = shim::exchange(&mine, sizeof mine, site);
  const auto of = [all](u32 lane) -> const Operands& { return *reinterpret_cast<const Operands*>(all[lane]); };
  const u32 lane = thread_index() % shim::LANES, group = lane / 4, place = lane % 4;
  for (u32 i = 0; i < 4; ++i) {  // sum[i] is at row `group + 8 (i / 2)`, column `2 place + i % 2`
    double dot = 0;
    for (u32 t = 0; t < 4; ++t) {
      const float* left = of(4 * group + t).a[i / 2];
      const float* right = of(4 * (2 * place + i % 2) + t).b;
      for (u32 k = 0; k < 4; ++k) dot += double(left[k]) * right[k];
    }
    sum[i] = static_cast<float>(sum[i] + dot);
  }
}

// The value of a byte: a signed integer, or e4m3 (its two NaNs are all ones but the sign).
DEVICE double byte_value(u32 bits, int) { return static_cast<signed char>(bits); }
DEVICE double byte_value(u32 bits, float) {
  const u32 exponent = bits >> 3 & 15, fraction = bits & 7;
  const double size = (bits & 0x7f) == 0x7f ? double(NAN) : std::ldexp(double(fraction + (exponent ? 8 : 0)), int(exponent ? exponent : 1) - 10);
  return bits >> 7 & 1 ? -size : size;
}

template <typename Sum>
DEVICE void multiply_bytes(Sum (&sum)[4], const u32 (&a)[4], const u32 (&b)[2], int site = __builtin_LINE()) {
  struct Operands { u32 a[4], b[2]; } mine;
  memcpy(mine.a, a, sizeof mine.a);
  memcpy(mine.b, b, sizeof mine.b);
  const u8(*all)[shim::SLOT_BYTES] = shim::exchange(&mine, sizeof mine, site);
  const auto of = [all](u32 lane) -> const Operands& { return *reinterpret_cast<const Operands*>(all[lane]); };
  const u32 lane = thread_index() % shim::LANES, group = lane / 4, place = lane % 4;
  for (u32 i = 0; i < 4; ++i) {  // sum[i] is at row `group + 8 (i / 2)`, column `2 place + i % 2`
    double dot = 0;
    for (u32 t = 0; t < 4; ++t) {
      for (u32 half = 0; half < 2; ++half) {  // of the 32 columns of a
        const u32 left = of(4 * group + t).a[2 * half + i / 2], right = of(4 * (2 * place + i % 2) + t).b[half];
        for (u32 k = 0; k < 32; k += 8) {
          dot += byte_value(left >> k & 0xff, Sum{}) * byte_value(right >> k & 0xff, Sum{});
        }
      }
    }
    sum[i] = static_cast<Sum>(sum[i] + dot);
  }
}

DEVICE void multiply_bytes(int (&sum)[4], const u32 (&a)[2], const u32 (&b)[1], int site = __builtin_LINE()) {
  const u32 former[4] = {a[0], a[1], 0, 0}, column[2] = {b[0], 0};
  multiply_bytes(sum, former, column, site);
}

DEVICE void copy_async(void* shared, const void* global, bool valid) { shim::copy_async(shared, global, valid); }
DEVICE void commit_copies() { shim::commit_copies(); }
template <int PENDING>
DEVICE void wait_copies() { shim::wait_copies(PENDING); }
