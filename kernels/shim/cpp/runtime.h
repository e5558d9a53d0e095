// What the shim's parts know of each other: how fibers wait, and what a block leaves behind.
#pragma once

#include "registry.h"

namespace shim {

// Most blocks of a cluster: what every chip that has clusters can run.
constexpr u32 MOST_BLOCKS = 8;

// A thread's fiber: those of a cluster are counted through its blocks.
u32 fiber_of(u32 thread);
// Lets others run until somebody calls `resume` for this thread's fiber; `site` is where it waits.
void suspend(int site);
void resume(u32 fiber);
// Lets others run, and goes on at random.
void step_aside();
u64 next_random();

// Shared memory of a block of the cluster: its first byte, where the launch's arrays end, where what it asked for begins, and the end.
struct SharedWindow {
  u8 *base, *arrays_end, *begin, *end;
};
SharedWindow shared_window(u32 rank);

// Blocks of the cluster, and whether one has threads that have not ended.
u32 cluster_size();
bool is_running(u32 rank);
// Waits for all threads of the cluster.
void cluster_barrier(int site);

// Hopper's part, in hopper.cpp: forgets the blocks before.
void begin_hopper_cluster(u32 blocks, u32 threads);
// Fails where this thread, or with `last` the block, ends before what it started.
void end_hopper_thread(bool last);

}  // namespace shim
