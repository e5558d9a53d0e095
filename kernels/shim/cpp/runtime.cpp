// Runs a launch: its clusters, of one block or several, one after the other in random order, and the threads of each as fibers.
#include "runtime.h"

#include <csignal>
#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <sys/mman.h>
#include <unistd.h>
#include <vector>
#if !defined(__x86_64__)
#include <ucontext.h>
#endif

namespace shim {

__thread Now now;

namespace {

constexpr size_t STACK_BYTES = 64 << 10;
constexpr size_t MAX_SHARED_BYTES = 256 << 10;
constexpr size_t STATIC_BYTES = 48 << 10;  // most bytes of arrays that a kernel declares
constexpr int NOWHERE = -1;
constexpr u64 STAY = 256;  // of so many turns one may be another block's: so blocks of a cluster part

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

struct Fiber {
  u32 rank, thread;
  void* stack_pointer;
  u8* stack;
  bool waited;
  u32 turn;                            // of the warp's two buffers
  std::vector<std::vector<Copy>> groups;  // of copies; the last is open
#if !defined(__x86_64__)
  ucontext_t context;
#endif
};

struct Warp {
  alignas(16) u8 slots[2][LANES][SLOT_BYTES];
  u32 waiting[LANES];
  u32 arrived;
  int site;
};

// Fibers that meet at one place.
struct Barrier {
  std::vector<u32> waiting;
  int site;
};

struct Block {
  u32 index[3];
  u8* dynamic_shared;
  u32 live;
  std::vector<Warp> warps;
  std::vector<u32> ready;
  Barrier barrier;
};

struct Run {
  const Entry* entry;
  const u64* arguments;
  u64 random;
  u32 threads, blocks;  // of a block, and of a cluster
  u32 placed;           // bytes of arrays
  std::vector<Fiber> fibers;
  Block block[MOST_BLOCKS];
  Barrier cluster_barrier;
  int last_site;
  void* main_stack_pointer;
#if !defined(__x86_64__)
  ucontext_t main_context;
#endif
  char error[512];
};

thread_local Run run;
thread_local u8* shared_base = nullptr;
u64 launches = 0;

Fiber& own_fiber() { return run.fibers[fiber_of(now.thread)]; }
Block& own_block() { return run.block[now.rank]; }

void body() {
  run.entry->call(run.arguments);
  const Fiber& own = own_fiber();
  if (!own.waited) fail("ended without wait_for_previous()");
  if (own.groups.size() > 1 || !own.groups[0].empty()) fail("ended with copies that it did not wait for");
  end_hopper_thread(own_block().live == 1);
}

#if defined(__x86_64__)
asm(R"(
.text
.globl shim_switch
shim_switch:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
)");
extern "C" void shim_switch(void** save, void* load);
#endif

void enter_block(u32 rank) {
  const Block& block = run.block[rank];
  now.rank = rank;
  memcpy(now.block, block.index, sizeof now.block);
  now.dynamic_shared = block.dynamic_shared;
  now.static_shared = shared_window(rank).base;
}

void enter_fiber(u32 fiber) {
  now.thread = run.fibers[fiber].thread;
  if (now.rank != run.fibers[fiber].rank) enter_block(run.fibers[fiber].rank);
}

void to_main() {
#if defined(__x86_64__)
  void* unused;
  shim_switch(&unused, run.main_stack_pointer);
#else
  setcontext(&run.main_context);
#endif
  __builtin_unreachable();
}

u32 live_threads() {
  u32 live = 0;
  for (u32 rank = 0; rank < run.blocks; ++rank) live += run.block[rank].live;
  return live;
}

// A block some of whose fibers can go on: mostly the one that ran.
Block& next_block() {
  u32 rank = now.rank;
  if (run.blocks > 1 && next_random() % STAY == 0) rank = next_random() % run.blocks;
  for (u32 tried = 0; tried < run.blocks && run.block[rank].ready.empty(); ++tried) rank = (rank + 1) % run.blocks;
  return run.block[rank];
}

// A random fiber that can go on, which is then nobody's to choose.
u32 take_ready() {
  std::vector<u32>& ready = next_block().ready;
  if (ready.empty()) {
    fail("%u of %u threads wait for what never comes (one of them at line %d)", live_threads(), run.blocks * run.threads, run.last_site);
  }
  const size_t pick = next_random() % ready.size();
  const u32 fiber = ready[pick];
  ready[pick] = ready.back();
  ready.pop_back();
  return fiber;
}

// Goes on with a random fiber. `self` waits, or has ended (NOWHERE).
void yield(int self) {
  if (live_threads() == 0) to_main();
  const u32 next = take_ready();
  if (self >= 0 && next == static_cast<u32>(self)) return;
  enter_fiber(next);
#if defined(__x86_64__)
  void* unused;
  shim_switch(self >= 0 ? &run.fibers[self].stack_pointer : &unused, run.fibers[next].stack_pointer);
#else
  if (self >= 0) swapcontext(&run.fibers[self].context, &run.fibers[next].context);
  else setcontext(&run.fibers[next].context);
#endif
}

void start() {
  body();
  --own_block().live;
  yield(NOWHERE);
  __builtin_unreachable();
}

void prepare(Fiber& fiber) {
  if (!fiber.stack) fiber.stack = static_cast<u8*>(malloc(STACK_BYTES));
  fiber.waited = false;
  fiber.turn = 0;
  fiber.groups.assign(1, {});
#if defined(__x86_64__)
  void** top = reinterpret_cast<void**>((reinterpret_cast<uintptr_t>(fiber.stack) + STACK_BYTES) & ~uintptr_t{15});
  *--top = nullptr;  // where start() would return to
  *--top = reinterpret_cast<void*>(start);
  top -= 6;
  memset(top, 0, 6 * sizeof *top);
  fiber.stack_pointer = top;
#else
  getcontext(&fiber.context);
  fiber.context.uc_stack = {fiber.stack, 0, STACK_BYTES};
  fiber.context.uc_link = nullptr;
  makecontext(&fiber.context, start, 0);
#endif
}

// What nobody can touch behind each block's shared memory.
size_t guard_bytes() {
  static const size_t page = sysconf(_SC_PAGESIZE);
  return page;
}

// Memory for the shared memory of MOST_BLOCKS blocks: each ends where a page begins that cannot be touched.
void reserve_shared() {
  if (shared_base) return;
  shared_base = static_cast<u8*>(mmap(nullptr, MOST_BLOCKS * (MAX_SHARED_BYTES + guard_bytes()), PROT_READ | PROT_WRITE,
                                      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
  for (u32 rank = 0; rank < MOST_BLOCKS; ++rank) mprotect(shared_window(rank).end, guard_bytes(), PROT_NONE);
}

// Makes a block of the cluster ready, its shared memory poisoned.
void prepare_block(u32 rank, const u32 (&index)[3], u32 shared_bytes) {
  Block& block = run.block[rank];
  memcpy(block.index, index, sizeof index);
  const SharedWindow window = shared_window(rank);
  block.dynamic_shared = window.end - (shared_bytes + 15) / 16 * 16;
  memset(block.dynamic_shared, 0xff, window.end - block.dynamic_shared);
  memset(window.base, 0xff, run.placed);
  block.live = run.threads;
  block.warps.resize(run.threads / LANES);
  for (Warp& warp : block.warps) warp.arrived = 0;
  block.ready.clear();
  block.barrier.waiting.clear();
  for (u32 thread = 0; thread < run.threads; ++thread) {
    Fiber& fiber = run.fibers[rank * run.threads + thread];
    fiber.rank = rank;
    fiber.thread = thread;
    prepare(fiber);
    block.ready.push_back(rank * run.threads + thread);
  }
}

void run_cluster() {
  run.cluster_barrier.waiting.clear();
  begin_hopper_cluster(run.blocks, run.threads);
  enter_block(next_random() % run.blocks);
  const u32 first = take_ready();
  enter_fiber(first);
#if defined(__x86_64__)
  shim_switch(&run.main_stack_pointer, run.fibers[first].stack_pointer);
#else
  swapcontext(&run.main_context, &run.fibers[first].context);
#endif
}

// Says where a kernel touched memory that is not there, and dies of it.
void on_fault(int signal, siginfo_t* info, void*) {
  char text[256];
  const int length = snprintf(text, sizeof text, "kernel %s, block (%u, %u, %u), thread %u touched %p, which is not its memory\n",
                              run.entry ? run.entry->name : "none", now.block[0], now.block[1], now.block[2], now.thread, info->si_addr);
  (void)!write(2, text, length);
  ::signal(signal, SIG_DFL);
}

void report_faults() {
  static const bool once = [] {
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigaction(SIGSEGV, &action, nullptr);
    return true;
  }();
  (void)once;
}

std::vector<Entry>& entries() {
  static std::vector<Entry> all;
  return all;
}

}  // namespace

void enter(const Entry& entry) { entries().push_back(entry); }

u64 next_random() {  // splitmix64
  u64 x = run.random += 0x9e3779b97f4a7c15ull;
  x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9ull;
  x = (x ^ x >> 27) * 0x94d049bb133111ebull;
  return x ^ x >> 31;
}

u32 fiber_of(u32 thread) { return now.rank * run.threads + thread; }

void suspend(int site) {
  run.last_site = site;
  yield(fiber_of(now.thread));
}

void resume(u32 fiber) { run.block[run.fibers[fiber].rank].ready.push_back(fiber); }

void step_aside() {
  resume(fiber_of(now.thread));
  yield(fiber_of(now.thread));
}

SharedWindow shared_window(u32 rank) {
  u8* base = shared_base + rank * (MAX_SHARED_BYTES + guard_bytes());
  return {base, base + run.placed, run.block[rank].dynamic_shared, base + MAX_SHARED_BYTES};
}

u32 place_shared(size_t bytes) {
  const u32 place = run.placed;
  run.placed += (bytes + 15) / 16 * 16;
  const SharedWindow window = shared_window(now.rank);
  if (run.placed > STATIC_BYTES || window.arrays_end > window.begin) fail("declares more shared memory than there is");
  for (u32 rank = 0; rank < run.blocks; ++rank) memset(shared_window(rank).base + place, 0xff, run.placed - place);
  return place;
}

u32 cluster_size() { return run.blocks; }

bool is_running(u32 rank) { return run.block[rank].live > 0; }

void fail(const char* format, ...) {
  char reason[256];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(reason, sizeof reason, format, arguments);
  va_end(arguments);
  snprintf(run.error, sizeof run.error, "kernel %s, block (%u, %u, %u), thread %u: %s", run.entry->name, now.block[0],
           now.block[1], now.block[2], now.thread, reason);
  to_main();
  __builtin_unreachable();
}

namespace {

// Waits until so many fibers have come, all at the same place.
void meet(Barrier& barrier, u32 count, int site) {
  if (barrier.waiting.empty()) barrier.site = site;
  if (barrier.site != site) fail("waits at the barrier of line %d, others at line %d", site, barrier.site);
  barrier.waiting.push_back(fiber_of(now.thread));
  if (barrier.waiting.size() == count) {
    for (u32 fiber : barrier.waiting) resume(fiber);
    barrier.waiting.clear();
  }
  suspend(site);
}

}  // namespace

void block_barrier(int site) { meet(own_block().barrier, run.threads, site); }

void cluster_barrier(int site) { meet(run.cluster_barrier, run.blocks * run.threads, site); }

const u8 (*exchange(const void* mine, size_t bytes, int site))[SLOT_BYTES] {
  const u32 thread = now.thread, lane = thread % LANES;
  Warp& warp = own_block().warps[thread / LANES];
  u8(&slots)[LANES][SLOT_BYTES] = warp.slots[own_fiber().turn++ % 2];
  memcpy(slots[lane], mine, bytes);
  if (warp.arrived == 0) warp.site = site;
  if (warp.site != site) fail("is at the warp function of line %d, others of its warp at line %d", site, warp.site);
  warp.waiting[warp.arrived++] = fiber_of(thread);
  if (warp.arrived == LANES) {
    std::vector<u32>& ready = own_block().ready;
    ready.insert(ready.end(), warp.waiting, warp.waiting + LANES);
    warp.arrived = 0;
  }
  suspend(site);
  return slots;
}

void wait_for_previous() { own_fiber().waited = true; }

void copy_async(void* shared, const void* global, bool valid) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(valid ? global : nullptr);
  if (at % 16) fail("copies 16 bytes from or to an address that is no multiple of 16");
  memset(shared, 0xff, 16);  // until it is waited for, nobody can know what is there
  own_fiber().groups.back().push_back({shared, global, valid});
}

void commit_copies() { own_fiber().groups.emplace_back(); }

void wait_copies(u32 pending) {
  auto& groups = own_fiber().groups;
  while (groups.size() > pending + 1) {
    for (const Copy& copy : groups.front()) {
      if (copy.valid) memcpy(copy.to, copy.from, 16);
      else memset(copy.to, 0, 16);
    }
    groups.erase(groups.begin());
  }
}

}  // namespace shim

extern "C" void shim_enter_all();

// The kernel at `index`, or null after the last.
extern "C" const shim::Entry* shim_entry(size_t index) {
  static const bool once = (shim_enter_all(), true);
  (void)once;
  return index < shim::entries().size() ? &shim::entries()[index] : nullptr;
}

// Runs a kernel to its end. False with a reason when it does what CUDA forbids.
extern "C" bool shim_launch(size_t index, const u32* grid, const u32* cluster, u32 shared_bytes, const u64* arguments, u64 seed,
                            char* error, size_t error_bytes) {
  using namespace shim;
  report_faults();
  run.entry = shim_entry(index);
  run.arguments = arguments;
  run.random = seed;
  run.threads = run.entry->threads;
  run.blocks = cluster[0] * cluster[1] * cluster[2];
  run.placed = 0;
  run.error[0] = 0;
  if (run.fibers.size() < run.blocks * run.threads) run.fibers.resize(run.blocks * run.threads);
  reserve_shared();
  memcpy(now.grid, grid, sizeof now.grid);
  now.launch = __atomic_add_fetch(&launches, 1, __ATOMIC_RELAXED);
  const u32 clusters_x = grid[0] / cluster[0], clusters_y = grid[1] / cluster[1];
  const u64 clusters = u64{clusters_x} * clusters_y * (grid[2] / cluster[2]);
  // A step that has no factor in common with their number visits all clusters.
  u64 step = next_random() % clusters + 1;
  const auto common = [](u64 a, u64 b) { while (b) { const u64 c = a % b; a = b; b = c; } return a; };
  while (common(step, clusters) != 1) ++step;
  u64 at = next_random() % clusters;
  for (u64 done = 0; done < clusters && !run.error[0]; ++done, at = (at + step) % clusters) {
    const u64 first[3] = {at % clusters_x, at / clusters_x % clusters_y, at / clusters_x / clusters_y};
    for (u32 rank = 0; rank < run.blocks; ++rank) {
      const u32 inside[3] = {rank % cluster[0], rank / cluster[0] % cluster[1], rank / cluster[0] / cluster[1]};
      u32 index[3];
      for (u32 i = 0; i < 3; ++i) index[i] = first[i] * cluster[i] + inside[i];
      prepare_block(rank, index, shared_bytes);
    }
    run_cluster();
  }
  snprintf(error, error_bytes, "%s", run.error);
  return !run.error[0];
}
