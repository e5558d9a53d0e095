// The gated activation of a feed-forward block (Shazeer 2020): activation(gate) · up.
#pragma once
#include "dev.cuh"

constexpr float LOG2_OF_E = 1.44269504f;

// x / (1 + 2^-z): e^-x is 2^-z of z = x · log2 e. Both are a few roundings of f32 from exact; what comes of them is rounded to bf16.
DEVICE float times_logistic(float x, float z) { return divide_fast(x, 1.0f + exp2_fast(-z)); }

struct Silu {
  DEVICE static float of(float x) { return times_logistic(x, rounded_product(LOG2_OF_E, x)); }
};

// The Gaussian error unit by its hyperbolic tangent: (1 + tanh z) / 2 is 1 / (1 + e^-2z), z = sqrt(2 / pi) (x + 0.044715 x^3).
struct Gelu {
  DEVICE static float of(float x) {
    const float bent = fused(0.044715f, rounded_product(x, x), 1.0f);
    return times_logistic(x, rounded_product(rounded_product(1.595769122f * LOG2_OF_E, x), bent));
  }
};

// Gate and up stand in rows that are held by eights: eight gates, then their ups.
constexpr u32 EIGHT = 8;
