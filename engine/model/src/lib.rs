//! The config-driven decoder over the kernels, sampling, and the CPU executor.
