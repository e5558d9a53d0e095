// The gated activation of a feed-forward block (Shazeer 2020): activation(gate) · up.
#pragma once
#include "dev.cuh"

struct Silu {
  DEVICE static float of(float x) { return x / (1.0f + expf(-x)); }
};

// The Gaussian error unit by its hyperbolic tangent: (1 + tanh z) / 2 is 1 / (1 + e^-2z), z = sqrt(2 / pi) (x + 0.044715 x^3).
struct Gelu {
  DEVICE static float of(float x) {
    const float bent = fused(0.044715f, rounded_product(x, x), 1.0f);
    return x / (1.0f + expf(rounded_product(rounded_product(-1.595769122f, x), bent)));
  }
};

// Gate and up stand in rows that are held by eights: eight gates, then their ups.
constexpr u32 EIGHT = 8;
