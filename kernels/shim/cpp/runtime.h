// What the shim's parts know of each other: how fibers wait, and what a block leaves behind.
#pragma once

#include "registry.h"

namespace shim {

// Lets others run until somebody calls `resume` for this thread; `site` is where it waits.
void suspend(int site);
void resume(u32 thread);
// Lets others run, and goes on at random.
void step_aside();
u64 next_random();

// Shared memory that a block may address: its first byte, the launch's first byte, and the end.
struct SharedWindow {
  u8 *base, *begin, *end;
};
SharedWindow shared_window();

// Hopper's part, in hopper.cpp: forgets the block before.
void begin_hopper_block(u32 threads);
// Fails where this thread, or with `last` the block, ends before what it started.
void end_hopper_thread(bool last);

}  // namespace shim
