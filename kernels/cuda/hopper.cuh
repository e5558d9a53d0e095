// What Hopper has besides: barriers in shared memory that count arrivals and bytes (mbarrier), copies of whole tiles that one
// thread starts (TMA), and products of four warps, a warpgroup, that read both operands from shared memory (wgmma). All of it
// runs beside the threads: what a copy writes and what a product sums is there once it was waited for. Blocks that were launched
// in a cluster run at the same time: a copy may write to all of them, and each arrives at the others' barriers.
//
// Code that uses it stands between `#ifdef HOPPER` and `#endif`: for other chips the kernel is empty, and the table lets nobody
// launch it there.
#pragma once
#include "dev.cuh"

// A matrix as tile copies are told of it: made by the driver (CUtensorMap), opaque here.
struct alignas(64) TensorMap {
  u64 word[16];
};

typedef u64 Barrier;

#ifdef CPU_SHIM
#include "shim_hopper.h"
#else

#ifdef __CUDA_ARCH_FEAT_SM90_ALL
#define HOPPER
#endif
// A kernel's parameter that copies read where it is: nothing may be made of it in registers.
#define TENSOR_MAP const __grid_constant__ TensorMap

// Makes a barrier whose phases end after so many arrivals, and all bytes that those announced.
DEVICE void init_barrier(Barrier* barrier, u32 arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(shared_address(barrier)), "r"(arrivals) : "memory");
}

// Lets copies see the barriers that this thread made. Other threads see them behind sync_threads().
DEVICE void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEVICE void arrive(Barrier* barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(shared_address(barrier)) : "memory");
}

// Arrives, and announces bytes that copies will write in this phase.
DEVICE void arrive_expecting(Barrier* barrier, u32 bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
               :: "r"(shared_address(barrier)), "r"(bytes) : "memory");
}

// Waits until a phase of this parity has ended: the first one has 0. Before it, the one that was never there has 1.
DEVICE void wait_phase(Barrier* barrier, u32 parity) {
  u32 ended;
  do {
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%1], %2;\n"
        "selp.u32 %0, 1, 0, ended;\n"
        "}"
        : "=r"(ended) : "r"(shared_address(barrier)), "r"(parity) : "memory");
  } while (!ended);
}

// Starts to copy a tile of a matrix, as large as its map says, whose first value is at this column and row; what lies outside
// becomes zeros. The barrier counts its bytes, these too.
DEVICE void copy_tile(void* shared, const TensorMap& matrix, u32 col, u32 row, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4}], [%2];"
      :: "r"(shared_address(shared)), "l"(&matrix), "r"(shared_address(barrier)), "r"(col), "r"(row) : "memory");
}

// Blocks of this one's cluster, and which of them it is: of a launch without clusters each block is one.
DEVICE u32 cluster_blocks() {
  u32 blocks;
  asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks));
  return blocks;
}
DEVICE u32 cluster_rank() {
  u32 rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// Waits for all threads of the cluster, and sees the barriers that they published, but nothing else that they wrote. Nobody may
// touch another block's shared memory before that block has begun, nor once it has ended.
DEVICE void sync_cluster() {
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
}

// Has each block's barrier at this place arrived at, by a lane for each block of the cluster. It orders no memory of other blocks.
DEVICE void arrive_at_all(Barrier* barrier) {
  asm volatile(
      "{\n"
      ".reg .pred has_block;\n"
      ".reg .u32 there;\n"
      "setp.lt.u32 has_block, %1, %2;\n"
      "@has_block mapa.shared::cluster.u32 there, %0, %1;\n"
      "@has_block mbarrier.arrive.shared::cluster.b64 _, [there];\n"
      "}"
      :: "r"(shared_address(barrier)), "r"(lane_index()), "r"(cluster_blocks()) : "memory");
}

// copy_tile to the same place of the cluster's blocks whose bits `blocks` has: of each the barrier at the same place counts the bytes.
DEVICE void copy_tile_to(u32 blocks, void* shared, const TensorMap& matrix, u32 col, u32 row, Barrier* barrier) {
  asm volatile(
      "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
      "[%0], [%1, {%3, %4}], [%2], %5;"
      :: "r"(shared_address(shared)), "l"(&matrix), "r"(shared_address(barrier)), "r"(col), "r"(row),
         "h"(static_cast<u16>(blocks)) : "memory");
}

// Orders what this thread did to its sums before the products that follow.
DEVICE void fence_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }

// The registers of sums as an instruction's operands, and their names in its text: of 32 (half), or of 64 (all).
#define EIGHT_SUMS(kind, i) \
  kind(sum[i]), kind(sum[i + 1]), kind(sum[i + 2]), kind(sum[i + 3]), kind(sum[i + 4]), kind(sum[i + 5]), \
  kind(sum[i + 6]), kind(sum[i + 7])
#define HALF_OF_SUMS(kind) EIGHT_SUMS(kind, 0), EIGHT_SUMS(kind, 8), EIGHT_SUMS(kind, 16), EIGHT_SUMS(kind, 24)
#define ALL_SUMS(kind) \
  HALF_OF_SUMS(kind), EIGHT_SUMS(kind, 32), EIGHT_SUMS(kind, 40), EIGHT_SUMS(kind, 48), EIGHT_SUMS(kind, 56)
#define HALF_OF_NAMES \
  "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define ALL_NAMES \
  HALF_OF_NAMES ", %32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
  "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"

// One product of two operands that are where their descriptors say; `rest` is what the instruction has behind `adds`.
#define PRODUCT_OF_TILES(kind, instruction, rest)                         \
  asm volatile(                                                           \
      "{\n"                                                               \
      ".reg .pred adds;\n"                                                \
      "setp.ne.u32 adds, %66, 0;\n"                                       \
      "wgmma.mma_async.sync.aligned." instruction " {" ALL_NAMES "}, "    \
      "%64, %65, adds" rest ";\n"                                         \
      "}"                                                                    \
      : ALL_SUMS(kind) : "l"(a), "l"(b), "r"(static_cast<u32>(adds)) : "memory")

// Starts sum = a · bᵀ of a warpgroup, or sum += a · bᵀ where it `adds`: a is 64 x 16, b is 128 x 16, sum is 64 x 128 (PTX ISA, wgmma.m64n128k16). Operands are
// where their descriptors say (`operand_at`). With g = lane / 4, t = lane % 4, warp w of the four has rows 16w .. 16w + 16:
// sum[4j .. 4j + 4] hold (16w + g, 8j + 2t), (…, 8j + 2t + 1), (16w + g + 8, 8j + 2t), (…, 8j + 2t + 1).
DEVICE void multiply_tiles(float (&sum)[64], u64 a, u64 b, bool adds) {
  PRODUCT_OF_TILES("+f", "m64n128k16.f32.bf16.bf16", ", 1, 1, 0, 0");
}

// The same where b is 64 x 16 and sum is 64 x 64.
DEVICE void multiply_tiles(float (&sum)[32], u64 a, u64 b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.u32 adds, %34, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HALF_OF_NAMES "}, %32, %33, adds, 1, 1, 0, 0;\n"
      "}"
      : HALF_OF_SUMS("+f") : "l"(a), "l"(b), "r"(static_cast<u32>(adds)) : "memory");
}

// The same of bytes, 32 of each row (PTX ISA, wgmma.m64n128k32): signed integers, added up exactly.
DEVICE void multiply_byte_tiles(int (&sum)[64], u64 a, u64 b, bool adds) {
  PRODUCT_OF_TILES("+r", "m64n128k32.s32.s8.s8", "");
}

// The same of bytes that are floats in e4m3. Of what is added up, sum and products, Hopper keeps 14 bits from the largest's first
// on (DeepSeek-V3's report, 3.5.2): whoever adds up much takes the sum away in time.
DEVICE void multiply_byte_tiles(float (&sum)[64], u64 a, u64 b, bool adds) {
  PRODUCT_OF_TILES("+f", "m64n128k32.f32.e4m3.e4m3", ", 1, 1");
}

// A product of bf16 where the threads hold a: of the 64 rows each warp has sixteen, its registers are those of multiply_bf16's a. They
// must be as they are until the product is waited for. With TRANSPOSED b's columns, which are the sum's, lie along the rows of
// its tile. There are sums of 64 x 128, and of 64 x 64.
template <bool TRANSPOSED>
DEVICE void multiply_rows(float (&sum)[64], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.u32 adds, %69, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {" ALL_NAMES "}, "
      "{%64, %65, %66, %67}, %68, adds, 1, 1, %70;\n"
      "}"
      : ALL_SUMS("+f")
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)), "n"(int{TRANSPOSED})
      : "memory");
}

template <bool TRANSPOSED>
DEVICE void multiply_rows(float (&sum)[32], const u32 (&a)[4], u64 b, bool adds) {
  asm volatile(
      "{\n"
      ".reg .pred adds;\n"
      "setp.ne.u32 adds, %37, 0;\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {" HALF_OF_NAMES "}, "
      "{%32, %33, %34, %35}, %36, adds, 1, 1, %38;\n"
      "}"
      : HALF_OF_SUMS("+f")
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<u32>(adds)), "n"(int{TRANSPOSED})
      : "memory");
}

// Closes the group of products that this warpgroup started since the last one.
DEVICE void commit_products() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }

// Waits until at most PENDING of the latest groups are unfinished: what the others read may be written over.
template <int PENDING>
DEVICE void wait_products() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory");
}

// The same where these sums are of the finished ones: they may be read.
template <int PENDING = 0>
DEVICE void settle_products(float (&sum)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : ALL_SUMS("+f") : "n"(PENDING) : "memory");
}
template <int PENDING = 0>
DEVICE void settle_products(int (&sum)[64]) {
  asm volatile("wgmma.wait_group.sync.aligned %64;" : ALL_SUMS("+r") : "n"(PENDING) : "memory");
}
template <int PENDING = 0>
DEVICE void settle_products(float (&sum)[32]) {
  asm volatile("wgmma.wait_group.sync.aligned %32;" : HALF_OF_SUMS("+f") : "n"(PENDING) : "memory");
}

// All of a warpgroup's threads have so many registers from here on: fewer than before, or more when others have given enough.
template <int COUNT>
DEVICE void give_registers() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(COUNT));
}
template <int COUNT>
DEVICE void take_registers() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(COUNT));
}

// Writes a part of an operand that is no copy's. Products see what this thread wrote so behind show_operands(), in threads that
// know of it by a barrier.
DEVICE void write_operand(void* shared, const Quad& quad) { *static_cast<Quad*>(shared) = quad; }
DEVICE void show_operands() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

#endif  // CPU_SHIM

// Bytes of a row of a tile, and those after which tiles swizzled by so many repeat: the multiple where one begins.
constexpr u32 TILE_ROW_BYTES = 128;
constexpr u32 TILE_ALIGNMENT = 8 * TILE_ROW_BYTES;

// Bytes of a row that a product sums over.
constexpr u32 PRODUCT_BYTES = 32;

// Where wgmma finds an operand in tiles as copies leave them (PTX ISA, matrix descriptor of wgmma). What is summed over lies
// along their rows of TILE_ROW_BYTES: it reads PRODUCT_BYTES of each from `shared` on. Or, TRANSPOSED, it lies across them: it reads
// sixteen whole rows from there on, and those of the tiles that follow `apart` bytes from each other. In units of 16 bytes: the
// start at bit 0, at 16 that distance, which others have no use for, at 32 that from eight rows to the next eight; at 62 the
// swizzle, of which 1 is 128 bytes.
DEVICE u64 operand_at(const void* shared, u32 apart = 16) {
  const u64 start = (shared_address(shared) & 0x3ffffu) / 16, eight_rows = TILE_ALIGNMENT / 16;
  return start | u64{apart / 16} << 16 | eight_rows << 32 | u64{1} << 62;
}

// The operand of the next product in the same rows.
DEVICE u64 operand_after(u64 operand) { return operand + PRODUCT_BYTES / 16; }

// The operand of the ROWS rows further on.
template <int ROWS>
DEVICE u64 operand_below(u64 operand) {
  static_assert(ROWS % 8 == 0, "the swizzle repeats after eight rows");
  return operand + ROWS * TILE_ROW_BYTES / 16;
}

// Where a tile has the 16 bytes, or a part of them, that are `byte` bytes from a row's begin: their places are swizzled.
DEVICE u32 tile_offset(u32 row, u32 byte) { return row * TILE_ROW_BYTES + (byte ^ row % 8 * 16); }
DEVICE const u8* in_tile(const void* tile, u32 row, u32 byte) { return static_cast<const u8*>(tile) + tile_offset(row, byte); }
DEVICE u8* in_tile(void* tile, u32 row, u32 byte) { return static_cast<u8*>(tile) + tile_offset(row, byte); }

// The first place in dynamic shared memory where a tile may begin, at most TILE_ALIGNMENT - 128 bytes from its start.
DEVICE u8* align_tiles(u8* shared) {
  return shared + (TILE_ALIGNMENT - shared_address(shared) % TILE_ALIGNMENT) % TILE_ALIGNMENT;
}
