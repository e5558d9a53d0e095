// What hopper.cuh asks of a GPU, done by fibers.
//
// A tile copy poisons what it will write when it starts, in each block that it goes to, and writes there, swizzled by the address
// as the ISA says, when somebody waits for that block's barrier. Neither a copy nor an arrival may reach a block that has not made
// its barriers or has ended. A product reads both operands through their descriptors when it starts, and again when it is waited
// for: what changed meanwhile is an error, in registers too. Until then its sums are NaNs. What threads write for products is not
// there before they show it.
#pragma once

#define HOPPER
#define TENSOR_MAP const TensorMap

namespace shim {

u32 shared_address(const void* pointer);
void init_barrier(Barrier* barrier, u32 arrivals);
void publish_barriers();
void arrive(Barrier* barrier, u32 bytes, u32 rank);
void arrive_at_all(Barrier* barrier);
void wait_phase(Barrier* barrier, u32 parity, int site);
void copy_tile(u32 blocks, void* shared, const TensorMap& matrix, u32 col, u32 row, Barrier* barrier);
u32 cluster_size();
void cluster_barrier(int site);
void fence_products();
// What operands consist of.
enum class Values { BF16, SIGNED, E4M3 };
// The left operand is at a descriptor, or, where `rows` is not null, in four registers of each thread.
struct Operands {
  Values values;
  u64 a;
  const u32* rows;
  u64 b;
  u32 cols;
  bool transposed;
};
// Into registers of floats, or, where values are signed, of integers.
void multiply(void* sum, const Operands& operands, bool adds, int site);
void commit_products();
void wait_products(u32 pending, int site);
void write_operand(void* shared, const Quad& quad);
void show_operands();

}  // namespace shim

DEVICE u32 shared_address(const void* pointer) { return shim::shared_address(pointer); }
DEVICE void init_barrier(Barrier* barrier, u32 arrivals) { shim::init_barrier(barrier, arrivals); }
DEVICE void publish_barriers() { shim::publish_barriers(); }
DEVICE void arrive(Barrier* barrier) { shim::arrive(barrier, 0, shim::now.rank); }
DEVICE void arrive_expecting(Barrier* barrier, u32 bytes) { shim::arrive(barrier, bytes, shim::now.rank); }
DEVICE void wait_phase(Barrier* barrier, u32 parity, int site = __builtin_LINE()) {
  shim::wait_phase(barrier, parity, site);
}
DEVICE void copy_tile(void* shared, const TensorMap& matrix, u32 col, u32 row, Barrier* barrier) {
  shim::copy_tile(1u << shim::now.rank, shared, matrix, col, row, barrier);
}
DEVICE u32 cluster_blocks() { return shim::cluster_size(); }
DEVICE u32 cluster_rank() { return shim::now.rank; }
DEVICE void sync_cluster(int site = __builtin_LINE()) { shim::cluster_barrier(site); }
DEVICE void arrive_at_all(Barrier* barrier) { shim::arrive_at_all(barrier); }
DEVICE void copy_tile_to(u32 blocks, void* shared, const TensorMap& matrix, u32 col, u32 row, Barrier* barrier) {
  shim::copy_tile(blocks, shared, matrix, col, row, barrier);
}
DEVICE void fence_products() { shim::fence_products(); }
template <size_t SUMS>
DEVICE void multiply_tiles(float (&sum)[SUMS], u64 a, u64 b, bool adds, int site = __builtin_LINE()) {
  shim::multiply(sum, {shim::Values::BF16, a, nullptr, b, 2 * SUMS, false}, adds, site);
}
DEVICE void multiply_byte_tiles(int (&sum)[64], u64 a, u64 b, bool adds, int site = __builtin_LINE()) {
  shim::multiply(sum, {shim::Values::SIGNED, a, nullptr, b, 128, false}, adds, site);
}
DEVICE void multiply_byte_tiles(float (&sum)[64], u64 a, u64 b, bool adds, int site = __builtin_LINE()) {
  shim::multiply(sum, {shim::Values::E4M3, a, nullptr, b, 128, false}, adds, site);
}
template <bool TRANSPOSED, size_t SUMS>
DEVICE void multiply_rows(float (&sum)[SUMS], const u32 (&a)[4], u64 b, bool adds, int site = __builtin_LINE()) {
  shim::multiply(sum, {shim::Values::BF16, 0, a, b, 2 * SUMS, TRANSPOSED}, adds, site);
}
DEVICE void commit_products() { shim::commit_products(); }
template <int PENDING>
DEVICE void wait_products(int site = __builtin_LINE()) { shim::wait_products(PENDING, site); }
template <int PENDING = 0, typename Sum, size_t SUMS>
DEVICE void settle_products(Sum (&)[SUMS], int site = __builtin_LINE()) { shim::wait_products(PENDING, site); }
template <int COUNT>
DEVICE void give_registers() {}
template <int COUNT>
DEVICE void take_registers() {}
DEVICE void write_operand(void* shared, const Quad& quad) { shim::write_operand(shared, quad); }
DEVICE void show_operands() { shim::show_operands(); }
