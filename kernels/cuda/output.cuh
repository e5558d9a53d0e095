// Where the results of a product go.
#pragma once
#include "gate.cuh"

// What is done to them (ops/linear.rs, `Output::arguments`, says the same).
enum class Action : u32 { Store, Add, Silu, Gelu };

// To `halves`, or to `floats`, or added to `floats`; a token's are `stride` behind those of the one before. Or they are gates and
// ups by eights, and what comes of the two goes to `halves`: both are rounded before, as where another kernel gates them.
struct Output {
  bf16* halves;
  float* floats;
  u32 action, stride;

  DEVICE void write(u32 token, u32 row, float value) const {
    const u64 place = static_cast<u64>(token) * stride + row;
    if (halves) halves[place] = to_bf16(value);
    else floats[place] = is(Action::Add) ? floats[place] + value : value;
  }

  DEVICE bool gates() const { return is(Action::Silu) || is(Action::Gelu); }

  // What comes of a gate and its up.
  DEVICE float gated(float gate, float up) const {
    const float rounded = to_float(to_bf16(gate)), bent = is(Action::Silu) ? Silu::of(rounded) : Gelu::of(rounded);
    return rounded_product(bent, to_float(to_bf16(up)));
  }

  // The result of a row, gated where that is to be: then of the first eight rows of a tile of 16 alone.
  DEVICE void write_row(u32 token, u32 row, float value) const {
    if (!gates()) return write(token, row, value);
    if (row % 16 < EIGHT) write(token, row / 16 * EIGHT + row % EIGHT, value);
  }

  // The results of row `row`, one of the first eight of a tile of 16, and of row `row + 8`, as far as there are `rows`.
  DEVICE void write_two(u32 token, u32 row, u32 rows, float former, float latter) const {
    if (row >= rows) return;
    write_row(token, row, gates() ? gated(former, latter) : former);
    if (row + EIGHT < rows && !gates()) write(token, row + EIGHT, latter);
  }

 private:
  DEVICE bool is(Action what) const { return action == static_cast<u32>(what); }
};
