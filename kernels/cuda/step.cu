// Prepares the next decoding step from the tokens just drawn, without the host.
#include "dev.cuh"

constexpr int THREADS = 128;
constexpr u32 PAGE_TOKENS = 64;

// Each row's drawn token becomes its next input, one position further. What was drawn is no token (`vocabulary` or more)
// where a row failed: it goes on with token 0 until the host ends it. Grid: parts of the rows.
KERNEL(advance, THREADS)(const u32* drawn, const u32* tables, u32* tokens, u32* positions, u32* lengths, u32* slots,
                         u32 rows, u32 max_pages, u32 vocabulary) {
  wait_for_previous();
  let_next_start();
  const u32 row = block_x() * THREADS + thread_index();
  if (row >= rows) return;
  const u32 position = positions[row] + 1, page = smaller(position / PAGE_TOKENS, max_pages - 1);
  tokens[row] = drawn[row] < vocabulary ? drawn[row] : 0;
  positions[row] = position;
  lengths[row] = position + 1;
  slots[row] = tables[static_cast<u64>(row) * max_pages + page] * PAGE_TOKENS + position % PAGE_TOKENS;
}
