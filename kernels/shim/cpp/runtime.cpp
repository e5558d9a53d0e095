// Runs a launch: its blocks one after the other in random order, a block's threads as fibers.
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
constexpr int NOWHERE = -1;

struct Copy {
  void* to;
  const void* from;
  bool valid;
};

struct Fiber {
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

struct Run {
  const Entry* entry;
  const u64* arguments;
  u64 random;
  u32 threads, live;
  std::vector<Fiber> fibers;
  std::vector<Warp> warps;
  std::vector<u32> ready, at_barrier;
  int barrier_site, last_site;
  void* main_stack_pointer;
#if !defined(__x86_64__)
  ucontext_t main_context;
#endif
  char error[512];
};

thread_local Run run;
thread_local u8* shared_end = nullptr;
u64 serial = 0;

void body() {
  run.entry->call(run.arguments);
  if (!run.fibers[now.thread].waited) fail("ended without wait_for_previous()");
  if (run.fibers[now.thread].groups.size() > 1 || !run.fibers[now.thread].groups[0].empty()) {
    fail("ended with copies that it did not wait for");
  }
  end_hopper_thread(run.live == 1);
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

void enter_fiber(u32 thread) {
  now.thread = thread;
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

// Goes on with a random fiber that can. `self` waits, or has ended (NOWHERE).
void yield(int self) {
  if (run.ready.empty()) {
    if (run.live == 0) to_main();
    fail("%u of %u threads wait for what never comes (one of them at line %d)", run.live, run.threads, run.last_site);
  }
  const size_t pick = next_random() % run.ready.size();
  const u32 next = run.ready[pick];
  run.ready[pick] = run.ready.back();
  run.ready.pop_back();
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
  --run.live;
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

// Shared memory of `bytes`, poisoned, which ends where a page begins that cannot be touched.
u8* poisoned_shared(u32 bytes) {
  if (!shared_end) {
    const size_t page = sysconf(_SC_PAGESIZE);
    u8* base = static_cast<u8*>(
        mmap(nullptr, MAX_SHARED_BYTES + page, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    mprotect(base + MAX_SHARED_BYTES, page, PROT_NONE);
    shared_end = base + MAX_SHARED_BYTES;
  }
  u8* start = shared_end - (bytes + 15) / 16 * 16;
  memset(start, 0xff, shared_end - start);
  return start;
}

void run_block(u32 shared_bytes) {
  now.block_serial = __atomic_add_fetch(&serial, 1, __ATOMIC_RELAXED);
  now.dynamic_shared = poisoned_shared(shared_bytes);
  run.live = run.threads;
  run.ready.clear();
  run.at_barrier.clear();
  for (u32 thread = 0; thread < run.threads; ++thread) {
    prepare(run.fibers[thread]);
    run.ready.push_back(thread);
  }
  for (Warp& warp : run.warps) warp.arrived = 0;
  begin_hopper_block(run.threads);
  const u32 first = run.ready.back();
  run.ready.pop_back();
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

void suspend(int site) {
  run.last_site = site;
  yield(now.thread);
}

void resume(u32 thread) { run.ready.push_back(thread); }

void step_aside() {
  resume(now.thread);
  yield(now.thread);
}

SharedWindow shared_window() { return {shared_end - MAX_SHARED_BYTES, now.dynamic_shared, shared_end}; }

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

void block_barrier(int site) {
  if (run.at_barrier.empty()) run.barrier_site = site;
  if (run.barrier_site != site) fail("waits at the barrier of line %d, others at line %d", site, run.barrier_site);
  if (run.at_barrier.size() + 1 == run.threads) {
    run.ready.insert(run.ready.end(), run.at_barrier.begin(), run.at_barrier.end());
    run.at_barrier.clear();
    run.ready.push_back(now.thread);
  } else {
    run.at_barrier.push_back(now.thread);
  }
  suspend(site);
}

const u8 (*exchange(const void* mine, size_t bytes, int site))[SLOT_BYTES] {
  const u32 thread = now.thread, lane = thread % LANES;
  Warp& warp = run.warps[thread / LANES];
  u8(&slots)[LANES][SLOT_BYTES] = warp.slots[run.fibers[thread].turn++ % 2];
  memcpy(slots[lane], mine, bytes);
  if (warp.arrived == 0) warp.site = site;
  if (warp.site != site) fail("is at the warp function of line %d, others of its warp at line %d", site, warp.site);
  warp.waiting[warp.arrived++] = thread;
  if (warp.arrived == LANES) {
    run.ready.insert(run.ready.end(), warp.waiting, warp.waiting + LANES);
    warp.arrived = 0;
  }
  suspend(site);
  return slots;
}

void wait_for_previous() { run.fibers[now.thread].waited = true; }

void copy_async(void* shared, const void* global, bool valid) {
  const uintptr_t at = reinterpret_cast<uintptr_t>(shared) | reinterpret_cast<uintptr_t>(valid ? global : nullptr);
  if (at % 16) fail("copies 16 bytes from or to an address that is no multiple of 16");
  memset(shared, 0xff, 16);  // until it is waited for, nobody can know what is there
  run.fibers[now.thread].groups.back().push_back({shared, global, valid});
}

void commit_copies() { run.fibers[now.thread].groups.emplace_back(); }

void wait_copies(u32 pending) {
  auto& groups = run.fibers[now.thread].groups;
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
extern "C" bool shim_launch(size_t index, const u32* grid, u32 shared_bytes, const u64* arguments, u64 seed,
                            char* error, size_t error_bytes) {
  using namespace shim;
  report_faults();
  run.entry = shim_entry(index);
  run.arguments = arguments;
  run.random = seed;
  run.threads = run.entry->threads;
  run.error[0] = 0;
  if (run.fibers.size() < run.threads) run.fibers.resize(run.threads);
  if (run.warps.size() < run.threads / LANES) run.warps.resize(run.threads / LANES);
  memcpy(now.grid, grid, sizeof now.grid);
  const u64 blocks = u64{grid[0]} * grid[1] * grid[2];
  // A step that has no factor in common with their number visits all blocks.
  u64 step = next_random() % blocks + 1;
  const auto common = [](u64 a, u64 b) { while (b) { const u64 c = a % b; a = b; b = c; } return a; };
  while (common(step, blocks) != 1) ++step;
  u64 block = next_random() % blocks;
  for (u64 done = 0; done < blocks && !run.error[0]; ++done, block = (block + step) % blocks) {
    now.block[0] = block % grid[0];
    now.block[1] = block / grid[0] % grid[1];
    now.block[2] = block / grid[0] / grid[1];
    run_block(shared_bytes);
  }
  snprintf(error, error_bytes, "%s", run.error);
  return !run.error[0];
}
