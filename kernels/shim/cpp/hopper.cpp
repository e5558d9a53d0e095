// Barriers, tile copies and warpgroup products of Hopper: their state, and when they take effect.
#include "operands.h"

#include <map>
#include <memory>

namespace shim {
namespace {

constexpr u32 GROUP_THREADS = 128;  // of a warpgroup
constexpr u32 GROUP_WARPS = GROUP_THREADS / LANES;
constexpr u32 PRODUCT_ROWS = 64, MOST_COLS = 128, MOST_SUMS = MOST_COLS / 2;
constexpr u32 ROW_REGISTERS = 4;  // of a left operand that threads hold

// What kernels/shim/src/kernels.rs writes into a TensorMap.
struct Matrix {
  const u8* at;
  u64 rows, cols, element_bytes, box_rows, box_cols, swizzle_bytes;
};

struct TileCopy {
  u32 to;  // an address of shared memory
  Matrix from;
  u32 col, row;
};

struct State {  // of a barrier
  u32 arrivals, missing, phase;
  long long bytes;
  u32 maker;
  bool published;
  std::vector<TileCopy> copies;
  std::vector<u32> waiting;
};

struct RowRegisters {
  u32 value[ROW_REGISTERS];
};

struct Product {
  Operands operands;
  u64 group;
  std::vector<u8> shared;                // what it read there, as it was when it started
  const u32* registers[GROUP_THREADS];   // and what threads held
  RowRegisters held[GROUP_THREADS];
};

struct Sums {  // of one thread, while products add to them
  u32* registers;
  u32 count;
  u64 group;  // of the last product
  u32 value[MOST_SUMS];  // floats or integers
};

struct Use {  // of registers as a left operand: what they held, and the fence behind which they did
  RowRegisters held;
  u64 fence;
};

struct Thread {
  u64 group;  // of products, the open one
  bool fenced;
  u64 fences;
  std::vector<Sums> sums;
  std::map<const u32*, Use> uses;
  std::vector<std::pair<void*, Quad>> unshown;  // parts of operands
};

// Threads of a block that meet.
struct Meeting {
  u32 arrived;
  int site;
  u32 threads[GROUP_THREADS];
};

struct WarpPart {
  Meeting meeting;
  std::vector<std::shared_ptr<Product>> products;
};

struct Warpgroup {
  Meeting meeting;
  Operands operands;
  bool adds;
  u32* registers[GROUP_THREADS];
  const u32* rows[GROUP_THREADS];
};

struct Block {
  std::map<u32, State> barriers;  // by their addresses
  std::vector<Thread> threads;
  std::vector<WarpPart> warps;
  std::vector<Warpgroup> groups;
};

thread_local Block cluster[MOST_BLOCKS];

Block& own_block() { return cluster[now.rank]; }

// The barrier that a block of the cluster has where this one has that.
State& state_of(const Barrier* barrier, u32 rank = now.rank) {
  if (rank >= cluster_size()) fail("reaches for block %u of a cluster of %u", rank, cluster_size());
  if (!is_running(rank)) fail("uses a barrier of a block that has ended");
  auto& barriers = cluster[rank].barriers;
  const auto found = barriers.find(shared_address(barrier));
  if (found == barriers.end()) fail("uses a barrier that nobody made, or made behind a barrier of the threads");
  return found->second;
}

u32 size_of(const TileCopy& copy) { return copy.from.box_rows * copy.from.box_cols * copy.from.element_bytes; }

// Writes a tile into a block's shared memory: 16 bytes go together, and what is outside of the matrix becomes zeros.
void land(const TileCopy& copy, u32 rank) {
  const Matrix& from = copy.from;
  const u64 row_bytes = from.cols * from.element_bytes, box_bytes = from.box_cols * from.element_bytes;
  u8* base = shared_window(rank).base;
  for (u64 row = 0; row < from.box_rows; ++row) {
    for (u64 byte = 0; byte < box_bytes; byte += 16) {
      const u64 source = copy.col * from.element_bytes + byte;
      u8* target = base + swizzled(copy.to + row * box_bytes + byte, from.swizzle_bytes);
      memset(target, 0, 16);
      if (copy.row + row >= from.rows || source >= row_bytes) continue;
      memcpy(target, from.at + (copy.row + row) * row_bytes + source, row_bytes - source < 16 ? row_bytes - source : 16);
    }
  }
}

// Ends the phase of a block's barrier if all came that it waits for. Copies come, in any order, only when somebody waits.
void progress(State& state, u32 rank) {
  while (state.missing == 0 && state.bytes != 0) {
    if (state.waiting.empty() || state.copies.empty()) return;
    const size_t pick = next_random() % state.copies.size();
    const TileCopy copy = state.copies[pick];
    state.copies.erase(state.copies.begin() + pick);
    land(copy, rank);
    state.bytes -= size_of(copy);
  }
  if (state.missing > 0) return;
  ++state.phase;
  state.missing = state.arrivals;
  for (u32 fiber : state.waiting) resume(fiber);
  state.waiting.clear();
}

// Waits for `count` threads at this site. The last one to come calls `all` before any of them goes on.
template <typename All>
void meet(Meeting& meeting, u32 count, int site, All all) {
  if (meeting.arrived == 0) meeting.site = site;
  if (meeting.site != site) fail("is at line %d, others that must be there too at line %d", site, meeting.site);
  meeting.threads[meeting.arrived++] = now.thread;
  if (meeting.arrived == count) {
    meeting.arrived = 0;
    all();
    for (u32 i = 0; i < count; ++i) resume(fiber_of(meeting.threads[i]));
  }
  suspend(site);
}

// What a product reads from shared memory: the right operand, and the left one where threads do not hold it.
std::vector<u8> shared_of(const Operands& operands) {
  std::vector<u8> values;
  values.reserve((PRODUCT_ROWS + MOST_COLS) * PRODUCT_BYTES);
  read_operand(operands.b, operands.transposed, operands.cols, values);
  if (!operands.rows) read_operand(operands.a, false, PRODUCT_ROWS, values);
  return values;
}

// A left operand that threads hold: registers 0 .. 4 of lane 4g + t are (row, columns) (g, 2t..), (g + 8, 2t..), (g, 2t + 8..),
// (g + 8, 2t + 8..) of their warp's sixteen rows (PTX ISA, wgmma.mma_async.m64nNk16, matrix A in registers).
void spread_rows(const Product& product, float* a) {
  for (u32 i = 0; i < GROUP_THREADS * ROW_REGISTERS; ++i) {
    const u32 thread = i / ROW_REGISTERS, place = i % ROW_REGISTERS, lane = thread % LANES;
    const u32 row = 16 * (thread / LANES) + lane / 4 + 8 * (place % 2), col = 2 * (lane % 4) + 8 * (place / 2);
    const u32 pair = product.held[thread].value[place];
    a[row * depth_of(Values::BF16) + col] = low_float(pair);
    a[row * depth_of(Values::BF16) + col + 1] = high_float(pair);
  }
}

// Sums that products add to already, or those that this thread's registers hold now.
Sums& pending_sums(u32 thread, u32* registers, u32 count) {
  Thread& own = own_block().threads[thread];
  for (Sums& sums : own.sums) {
    if (sums.registers == registers) return sums;
  }
  if (!own.fenced) fail("multiplies into registers without a fence behind what it did to them");
  own.sums.push_back({registers, count, 0, {}});
  memcpy(own.sums.back().value, registers, count * sizeof *registers);
  return own.sums.back();
}

// Notes what a thread's registers hold that products read: what has changed since others read it was fenced since.
void use_rows(const u32* rows) {
  Thread& own = own_block().threads[now.thread];
  const auto found = own.uses.find(rows);
  const bool same = found != own.uses.end() && !memcmp(&found->second.held, rows, sizeof(RowRegisters));
  const u64 last = found == own.uses.end() ? 0 : found->second.fence;
  if (!same && own.fences == last) fail("multiplies registers without a fence behind what it did to them");
  Use& use = own.uses[rows];
  memcpy(&use.held, rows, sizeof use.held);
  use.fence = own.fences;
}

// The product that a warpgroup starts.
std::shared_ptr<Product> started(const Warpgroup& group) {
  const auto product = std::make_shared<Product>();
  product->operands = group.operands;
  product->group = own_block().threads[now.thread].group;
  product->shared = shared_of(group.operands);
  for (u32 i = 0; group.operands.rows && i < GROUP_THREADS; ++i) {
    product->registers[i] = group.rows[i];
    memcpy(&product->held[i], group.rows[i], sizeof product->held[i]);
  }
  return product;
}

// All of a warpgroup's product: its sums wait with each thread.
void multiply_group(const Warpgroup& group) {
  const u32 first = group.meeting.threads[0] / GROUP_THREADS * GROUP_THREADS;
  const auto product = started(group);
  const u32 depth = depth_of(group.operands.values), count = group.operands.cols / 2;
  std::vector<float> values = decoded(group.operands.values, product->shared);
  values.resize((group.operands.cols + PRODUCT_ROWS) * depth);
  float *b = values.data(), *a = b + group.operands.cols * depth;
  if (group.operands.rows) spread_rows(*product, a);
  for (u32 i = 0; i < GROUP_THREADS; ++i) {
    const u32 warp = i / LANES, lane = i % LANES;
    Sums& sums = pending_sums(first + i, group.registers[i], count);
    if (!group.adds) memset(sums.value, 0, sizeof sums.value);
    for (u32 s = 0; s < count; ++s) {
      const u32 row = 16 * warp + lane / 4 + 8 * (s / 2 % 2), col = 8 * (s / 4) + 2 * (lane % 4) + s % 2;
      sums.value[s] = added(group.operands.values, sums.value[s], a + row * depth, b + col * depth);
    }
    sums.group = product->group;
    memset(sums.registers, 0xff, count * sizeof *sums.registers);
  }
  for (u32 warp = 0; warp < GROUP_WARPS; ++warp) own_block().warps[first / LANES + warp].products.push_back(product);
}

// Fails where a product reads something else now than when it started.
void check_unchanged(const Product& product, const WarpPart& warp) {
  if (shared_of(product.operands) != product.shared) fail("lets shared memory change while a product reads it");
  for (u32 lane = 0; product.operands.rows && lane < LANES; ++lane) {
    const u32 thread = warp.meeting.threads[lane] % GROUP_THREADS;
    if (memcmp(product.registers[thread], &product.held[thread], sizeof(RowRegisters))) {
      fail("changes registers while a product reads them");
    }
  }
}

// Ends a warp's products of the groups before `end`.
void finish_products(WarpPart& warp, u64 end) {
  for (const auto& product : warp.products) {
    if (product->group < end) check_unchanged(*product, warp);
  }
  auto& products = warp.products;
  while (!products.empty() && products.front()->group < end) products.erase(products.begin());
  for (u32 lane = 0; lane < LANES; ++lane) {
    Thread& own = own_block().threads[warp.meeting.threads[lane]];
    for (size_t i = own.sums.size(); i-- > 0;) {
      if (own.sums[i].group >= end) continue;
      memcpy(own.sums[i].registers, own.sums[i].value, own.sums[i].count * sizeof(u32));
      own.sums.erase(own.sums.begin() + i);
      own.fenced = false;
    }
  }
}

}  // namespace

void begin_hopper_cluster(u32 blocks, u32 threads) {
  for (u32 rank = 0; rank < blocks; ++rank) {
    cluster[rank].barriers.clear();
    cluster[rank].threads.assign(threads, {});
    cluster[rank].warps.assign(threads / LANES, {});
    cluster[rank].groups.assign(threads / GROUP_THREADS, {});
  }
}

void end_hopper_thread(bool last) {
  if (!own_block().threads[now.thread].sums.empty()) fail("ended with products that it did not wait for");
  if (!own_block().threads[now.thread].unshown.empty()) fail("ended with parts of operands that it did not show");
  if (!last) return;
  for (const auto& entry : own_block().barriers) {
    if (!entry.second.copies.empty()) fail("ended the block with copies that nobody waited for");
  }
}

u32 shared_address(const void* pointer) {
  const SharedWindow window = shared_window(now.rank);
  const u8* at = static_cast<const u8*>(pointer);
  if (at < window.base || (at > window.arrays_end && at < window.begin) || at > window.end) fail("takes the address of what is not in its shared memory");
  return at - window.base;
}

void init_barrier(Barrier* barrier, u32 arrivals) {
  const State made{arrivals, arrivals, 0, 0, now.thread, false, {}, {}};
  if (!own_block().barriers.emplace(shared_address(barrier), made).second) fail("makes a barrier twice");
}

void publish_barriers() {
  for (auto& entry : own_block().barriers) {
    if (entry.second.maker == now.thread) entry.second.published = true;
  }
}

void arrive(Barrier* barrier, u32 bytes, u32 rank) {
  State& state = state_of(barrier, rank);
  if (state.missing == 0) fail("arrives more often than its barrier counts");
  --state.missing;
  state.bytes += bytes;
  progress(state, rank);
  step_aside();
}

void arrive_at_all(Barrier* barrier) {
  const u32 lane = now.thread % LANES;
  if (lane < cluster_size()) arrive(barrier, 0, lane);
}

void wait_phase(Barrier* barrier, u32 parity, int site) {
  State& state = state_of(barrier);
  if (state.phase % 2 != parity) return;
  state.waiting.push_back(fiber_of(now.thread));
  progress(state, now.rank);
  suspend(site);
}

namespace {

// Starts a copy to one block of the cluster.
void start_copy(const TileCopy& copy, Barrier* barrier, u32 rank) {
  State& state = state_of(barrier, rank);
  if (!state.published) fail("copies to a barrier that copies were not shown");
  const SharedWindow window = shared_window(rank);
  if (copy.to % 128) fail("copies a tile to an address that is no multiple of 128");
  if (size_of(copy) > window.end - (window.base + copy.to)) fail("copies a tile behind its shared memory");
  memset(window.base + copy.to, 0xff, size_of(copy));  // until it is waited for, nobody can know what is there
  state.copies.push_back(copy);
  progress(state, rank);
}

}  // namespace

void copy_tile(u32 blocks, void* shared, const TensorMap& map, u32 col, u32 row, Barrier* barrier) {
  TileCopy copy{shared_address(shared), {}, col, row};
  memcpy(&copy.from, &map, sizeof copy.from);
  for (u32 rank = 0; blocks >> rank; ++rank) {
    if (blocks >> rank & 1) start_copy(copy, barrier, rank);
  }
}

void fence_products() {
  Thread& own = own_block().threads[now.thread];
  own.fenced = true;
  ++own.fences;
}

bool alike(const Operands& one, const Operands& other) {
  return one.values == other.values && one.a == other.a && one.b == other.b && one.cols == other.cols && one.transposed == other.transposed &&
         !one.rows == !other.rows;
}

void multiply(void* sum, const Operands& operands, bool adds, int site) {
  if (now.thread / GROUP_THREADS >= own_block().groups.size()) fail("multiplies without a whole warpgroup");
  Warpgroup& group = own_block().groups[now.thread / GROUP_THREADS];
  if (group.meeting.arrived == 0) group.operands = operands, group.adds = adds;
  if (!alike(group.operands, operands) || group.adds != adds) fail("multiplies other operands than its warpgroup");
  if (operands.rows) use_rows(operands.rows);
  group.registers[now.thread % GROUP_THREADS] = static_cast<u32*>(sum);
  group.rows[now.thread % GROUP_THREADS] = operands.rows;
  meet(group.meeting, GROUP_THREADS, site, [&] { multiply_group(group); });
}

void commit_products() { ++own_block().threads[now.thread].group; }

void wait_products(u32 pending, int site) {
  WarpPart& warp = own_block().warps[now.thread / LANES];
  const u64 committed = own_block().threads[now.thread].group;
  meet(warp.meeting, LANES, site, [&] { finish_products(warp, committed > pending ? committed - pending : 0); });
}

void write_operand(void* shared, const Quad& quad) {
  if (shared_address(shared) % sizeof quad) fail("writes 16 bytes to an address that is no multiple of 16");
  own_block().threads[now.thread].unshown.emplace_back(shared, quad);
}

void show_operands() {
  auto& unshown = own_block().threads[now.thread].unshown;
  for (const auto& [to, quad] : unshown) memcpy(to, &quad, sizeof quad);
  unshown.clear();
}

}  // namespace shim
