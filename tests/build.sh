# Sourced by what builds (tests/run, tests/demo and others): builds every program in one go, so that all of them share one build of each
# dependency, and says where they are.

BINARIES=$(cargo metadata --format-version 1 --no-deps --offline 2>/dev/null |
  python3 -c 'import json, sys; print(json.load(sys.stdin)["target_directory"])' 2>/dev/null || echo target)/release

# Everything but examples, which lint checks and nothing runs.
TESTED=(--lib --bins --tests)

compile() { # --bins, or TESTED; the two resolve to different features, so one run keeps to one of them
  local quiet=--quiet
  [ ! -t 2 ] || quiet=             # a terminal gets cargo's progress bar, a log stays short
  [ -x "$BINARIES/windlass-engine" ] || echo "Compiling; the first time takes some minutes." >&2
  cargo build --release --workspace "$@" $quiet
}

# Machine code of every kernel, by NVRTC 12.9, whose code drivers of CUDA 12 and 13 load: what is compiled next carries it.
machine_code() { # ROOT of the checkout
  export WINDLASS_CUDA_IMAGES; WINDLASS_CUDA_IMAGES=$(realpath "$1")/target/cuda-images
  rm -rf "$WINDLASS_CUDA_IMAGES"
  "$1/tests/cuda/check" --images "$WINDLASS_CUDA_IMAGES"
}
