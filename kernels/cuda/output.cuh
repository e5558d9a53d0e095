// Where the results of a product go.
#pragma once
#include "dev.cuh"

// To `halves`, or to `floats`, or added to `floats`; a token's are `stride` behind those of the one before.
struct Output {
  bf16* halves;
  float* floats;
  u32 add, stride;

  DEVICE void write(u32 token, u32 row, float value) const {
    const u64 place = static_cast<u64>(token) * stride + row;
    if (halves) halves[place] = to_bf16(value);
    else floats[place] = add ? floats[place] + value : value;
  }
};
