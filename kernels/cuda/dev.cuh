// What the kernels know of a GPU. Everything that is not plain C++ is one of these functions, so that the same source
// compiles for a GPU (nvcc, NVRTC: no system header is included) and, with CPU_SHIM, for the shim that runs it on a CPU.
//
// Rules for kernels
// - Blocks have one dimension and whole warps; warp functions are called by all 32 lanes.
// - Every thread calls wait_for_previous() before it reads or writes what an earlier kernel touches. Weights and tables
//   that no kernel writes may be read before.
// - Sums have a fixed order: no float atomics.
// - Every pointer is a multiple of 16.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// A float of 16 bits with f32's exponent.
struct bf16 {
  u16 bits;
};

// Sixteen bytes, the widest load.
struct alignas(16) Quad {
  u32 word[4];
};

// Where memory lies that a kernel finds through other memory: of its own device, or of one that this reaches.
struct Address {
  u64 at;
};

#ifdef CPU_SHIM
#include "shim.h"
#else

#define DEVICE __device__ __forceinline__
// Declares a kernel whose blocks have THREADS threads.
#define KERNEL(name, threads) extern "C" __global__ void __launch_bounds__(threads) name
// The same where one block at a time may have all registers of a multiprocessor.
#define LARGE_KERNEL(name, threads) extern "C" __global__ void __launch_bounds__(threads, 1) name
// The same where so many blocks must find room on a multiprocessor at a time.
#define RESIDENT_KERNEL(name, threads, blocks) extern "C" __global__ void __launch_bounds__(threads, blocks) name
// COUNT values that a block's threads share.
#define SHARED(type, name, count) __shared__ alignas(16) type name[count]
// The shared memory that the launch asked for, as `type* name`.
#define DYNAMIC_SHARED(type, name)                  \
  extern __shared__ __align__(128) u8 dynamic_shared[]; \
  type* name = reinterpret_cast<type*>(dynamic_shared)

DEVICE u32 thread_index() { return threadIdx.x; }
DEVICE u32 block_x() { return blockIdx.x; }
DEVICE u32 block_y() { return blockIdx.y; }
DEVICE u32 block_z() { return blockIdx.z; }
DEVICE u32 blocks_x() { return gridDim.x; }
DEVICE u32 blocks_y() { return gridDim.y; }

DEVICE void sync_threads() { __syncthreads(); }
DEVICE void sync_warp() { __syncwarp(); }

// Waits for the kernel ahead in the stream to end, and sees all it wrote (programmatic dependent launch).
DEVICE void wait_for_previous() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Lets the next kernel of the stream start; it waits in turn for this one's end.
DEVICE void let_next_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

template <typename T>
DEVICE T shuffle(T value, u32 lane) {
  return __shfl_sync(0xffffffffu, value, lane);
}

template <typename T>
DEVICE T shuffle_xor(T value, u32 mask) {
  return __shfl_xor_sync(0xffffffffu, value, mask);
}

DEVICE u32 bits_of(float value) { return __float_as_uint(value); }
DEVICE float float_of(u32 bits) { return __uint_as_float(bits); }

DEVICE bf16 to_bf16(float value) {
  bf16 result;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(result.bits) : "f"(value));
  return result;
}

// Two values in one word, the first in its low half.
DEVICE u32 pack_bf16(float low, float high) {
  u32 result;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(high), "f"(low));
  return result;
}

// a · b + c, rounded once, and a · b, rounded even where something is added to it: said where two kernels give the same bits, as
// the compiler would choose for each.
DEVICE float fused(float a, float b, float c) { return __fmaf_rn(a, b, c); }
DEVICE float rounded_product(float a, float b) { return __fmul_rn(a, b); }

// a · b + c of two pairs.
DEVICE u32 fma_bf16(u32 a, u32 b, u32 c) {
  u32 result;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(c));
  return result;
}

// (a & mask) | bits, as one instruction: of two constants the compiler would make two.
DEVICE u32 masked_or(u32 a, u32 mask, u32 bits) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0xea;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
}

// (a & mask) ^ bits, as one.
DEVICE u32 masked_xor(u32 a, u32 mask, u32 bits) {
  u32 result;
  asm("lop3.b32 %0, %1, %2, %3, 0x6a;" : "=r"(result) : "r"(a), "r"(mask), "r"(bits));
  return result;
}

// sum and the products of the signed bytes of two words.
DEVICE int dot_bytes(u32 a, u32 b, int sum) {
  int result;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  return result;
}

// The bytes that the four digits of `which` name, from the right, of a word; 4 is a byte of zeros.
DEVICE u32 pick_bytes(u32 word, u32 which) { return __byte_perm(word, 0, which); }
// Of two words, whose bytes have numbers from 0 and from 4 on.
DEVICE u32 pick_bytes(u32 first, u32 second, u32 which) { return __byte_perm(first, second, which); }

// A float of 16 bits with ten of them for the fraction (IEEE binary16).
DEVICE float half_to_float(u16 bits) {
  float result;
  asm("cvt.f32.f16 %0, %1;" : "=f"(result) : "h"(bits));
  return result;
}

DEVICE float exp2_fast(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// A quotient, to two units in the last place.
DEVICE float divide_fast(float a, float b) {
  float result;
  asm("div.approx.ftz.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

// The upper half of a product of 128 bits.
DEVICE u64 multiply_high(u64 a, u64 b) { return __umul64hi(a, b); }
DEVICE u32 multiply_high(u32 a, u32 b) { return __umulhi(a, b); }

// Adds to what threads of a block share. Integers alone: their sum is the same in any order.
DEVICE void add_shared(u32* to, u32 value) { atomicAdd(to, value); }
// The same, and gives what was there: no two threads get the same.
DEVICE u32 take_shared(u32* from, u32 value) { return atomicAdd(from, value); }

// Writes what other devices read, after all that this block wrote before its last barrier; and reads it, before all that the
// block reads after its next one.
DEVICE void tell_peer(u32* flag, u32 value) {
  asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(flag), "r"(value) : "memory");
}
DEVICE u32 hear_peer(const u32* flag) {
  u32 value;
  asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

// Counts a block that has come so far, and gives how many have: all that it wrote before its last barrier comes first, and whoever
// counts later reads it behind the next barrier.
DEVICE u32 count_arrival(u32* counter) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before + 1;
}

// Reads what is used once: it passes the first-level cache by. As a read of what never changes (.nc) ptxas would have it wait for
// the kernel ahead, wherever it stands.
DEVICE Quad load_once(const void* from) {
  Quad quad;
  asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(quad.word[0]), "=r"(quad.word[1]), "=r"(quad.word[2]), "=r"(quad.word[3])
               : "l"(from));
  return quad;
}

DEVICE u32 shared_address(const void* pointer) { return static_cast<u32>(__cvta_generic_to_shared(pointer)); }

// Four 8 x 8 matrices of 16-bit values: lane `8i + r` names row r of matrix i; lane l receives of each matrix the values
// 2(l % 4) and 2(l % 4) + 1 of row l / 4.
DEVICE void load_matrices(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row)) : "memory");
}

// The same of the transposed matrices: lane l receives rows 2(l % 4) and 2(l % 4) + 1 of column l / 4.
DEVICE void load_matrices_transposed(u32 (&out)[4], const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
               : "r"(shared_address(row)) : "memory");
}

// sum += a · b: a is 16 x 16, b is 16 x 8, sum is 16 x 8 (PTX ISA, mma.m16n8k16). With g = lane / 4, t = lane % 4:
// a[0..4] hold (row, columns) = (g, 2t..), (g + 8, 2t..), (g, 2t + 8..), (g + 8, 2t + 8..); b[0..2] hold
// (rows, column) = (2t.., g), (2t + 8.., g); sum holds (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
DEVICE void multiply_bf16(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// sum += a · b over bytes: a is 16 x 32, b is 32 x 8, sum is 16 x 8 (PTX ISA, mma.m16n8k32). As above with four columns of a
// byte each where that has two: a[0..4] hold (row, columns) = (g, 4t..), (g + 8, 4t..), (g, 4t + 16..), (g + 8, 4t + 16..);
// b[0..2] hold (rows, column) = (4t.., g), (4t + 16.., g). Signed integers, added up exactly.
DEVICE void multiply_bytes(int (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

// The same of 16 columns, the former two and the former one of those words.
DEVICE void multiply_bytes(int (&sum)[4], const u32 (&a)[2], const u32 (&b)[1]) {
  asm volatile(
      "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
      : "+r"(sum[0]), "+r"(sum[1]), "+r"(sum[2]), "+r"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

// The former of floats in e4m3. No earlier chip than Ada has it, and nothing is launched there that needs it.
DEVICE void multiply_bytes(float (&sum)[4], const u32 (&a)[4], const u32 (&b)[2]) {
#if __CUDA_ARCH__ >= 890
  asm volatile(
      "mma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
      "{%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
#else
  asm volatile("trap;" ::: "memory");
#endif
}

// Starts a copy of 16 bytes into shared memory; with `valid` false it writes zeros and reads nothing.
DEVICE void copy_async(void* shared, const void* global, bool valid) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;"
               :: "r"(shared_address(shared)), "l"(global), "r"(valid ? 16 : 0) : "memory");
}

// Closes the group of copies that this thread started since the last one.
DEVICE void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most PENDING of this thread's latest groups are unfinished.
template <int PENDING>
DEVICE void wait_copies() {
  asm volatile("cp.async.wait_group %0;" :: "n"(PENDING) : "memory");
}

#endif  // CPU_SHIM

DEVICE float minus_infinity() { return float_of(0xff800000u); }

DEVICE float to_float(bf16 value) { return float_of(static_cast<u32>(value.bits) << 16); }
DEVICE float low_float(u32 pair) { return float_of(pair << 16); }
DEVICE float high_float(u32 pair) { return float_of(pair & 0xffff0000u); }

// Two floats in e4m3 (a sign, 4 bits of exponent, 3 of fraction), at bits 8 and 24 whatever else is there, as a pair of bf16,
// exactly: their bits at bf16's place are the value over 2^120.
DEVICE u32 expand_e4m3(u32 bytes) {
  return fma_bf16(masked_or(bytes >> 4, 0x07f007f0u, bytes & 0x80008000u), 0x7b807b80u, 0x80008000u);
}

// Two signed bytes, at bits 0 and 16 whatever else is there, as a pair of bf16, exactly: 128 and the last seven bits, less 128 or
// 256.
DEVICE u32 expand_signed(u32 bytes) {
  return fma_bf16(masked_or(bytes, 0x007f007fu, 0x43004300u), 0x3f803f80u, masked_or(bytes, 0x00800080u, 0xc300c300u));
}

// The former or the latter two of four bytes.
DEVICE u32 expand_two_e4m3(u32 bytes, u32 latter) { return expand_e4m3(pick_bytes(bytes, latter ? 0x3424 : 0x1404)); }
DEVICE u32 expand_two_signed(u32 bytes, u32 latter) { return expand_signed(pick_bytes(bytes, latter ? 0x4342 : 0x4140)); }

// The nearest float in e4m3, ties to even, at most 448: by their bits as above, in f32.
DEVICE u8 to_e4m3(float value) {
  const u32 bits = bits_of(value), size = bits_of((fabsf(value) < 448.0f ? fabsf(value) : 448.0f) * 0x1p-120f);
  return static_cast<u8>((size + 0x7ffff + (size >> 20 & 1)) >> 20 | (bits >> 24 & 0x80));
}

DEVICE u32 lane_index() { return thread_index() % 32; }
DEVICE u32 warp_index() { return thread_index() / 32; }

DEVICE Quad load_quad(const void* from) { return *static_cast<const Quad*>(from); }
// Two words, at a multiple of 8.
DEVICE void load_two(u32 (&to)[2], const void* from) {
  const u64 both = *static_cast<const u64*>(from);
  to[0] = static_cast<u32>(both);
  to[1] = static_cast<u32>(both >> 32);
}
DEVICE void store_two(void* to, const u32 (&words)[2]) { *static_cast<u64*>(to) = words[0] | static_cast<u64>(words[1]) << 32; }
DEVICE void store_quad(void* to, const Quad& quad) { *static_cast<Quad*>(to) = quad; }

DEVICE float smaller(float a, float b) { return a < b ? a : b; }
DEVICE float larger(float a, float b) { return a > b ? a : b; }
DEVICE u32 smaller(u32 a, u32 b) { return a < b ? a : b; }
DEVICE u32 larger(u32 a, u32 b) { return a > b ? a : b; }
DEVICE u32 ceil_divide(u32 a, u32 b) { return (a + b - 1) / b; }

// The sum over a warp, in every lane.
DEVICE float warp_sum(float value) {
  for (u32 mask = 16; mask > 0; mask /= 2) value += shuffle_xor(value, mask);
  return value;
}

DEVICE float warp_max(float value) {
  for (u32 mask = 16; mask > 0; mask /= 2) value = larger(value, shuffle_xor(value, mask));
  return value;
}

// What comes of one value of each of a block's warps, in every thread: `add(so far, value)` takes them in their order, from 0 on.
template <int THREADS, typename Add>
DEVICE float over_warps(float value, Add add) {
  SHARED(float, partial, THREADS / 32);
  sync_threads();  // an earlier one may still be read
  if (lane_index() == 0) partial[warp_index()] = value;
  sync_threads();
  float all = 0;
  for (int warp = 0; warp < THREADS / 32; ++warp) all = add(all, partial[warp]);
  return all;
}

// The sum over a block of THREADS threads.
template <int THREADS>
DEVICE float block_sum(float value) {
  return over_warps<THREADS>(warp_sum(value), [](float sum, float value) { return sum + value; });
}

// The largest of a block's values, which are not negative.
template <int THREADS>
DEVICE float block_max(float value) {
  return over_warps<THREADS>(warp_max(value), [](float most, float value) { return larger(most, value); });
}
