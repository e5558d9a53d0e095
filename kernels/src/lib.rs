//! CPU kernels on std::arch with their scalar references, chosen once at start.
