"""Instructions per token on one thread: what a change costs, whatever else the machine does.

Two runs that differ only in their tokens are counted, and the difference divided: loading cancels out. The counters
are the processor's where they can be read, with the fastest kernels of both; elsewhere valgrind's, which knows no
AVX-512, so that both sides are built for AVX2.
"""

import re
import subprocess

from programs import PEER, model_file

# Tokens of the shorter and the longer run.
PREFILL, DECODE = (64, 128), (4, 12)


def counter():
    """How to count and a word on it; nothing where neither way works."""
    perf = ["perf", "stat", "-x,", "-e", "instructions:u", "--"]
    if (PEER / "bin").exists() and works([*perf, "true"]) and counted([*perf, "true"]):
        return perf, PEER / "bin", "the processor's counters"
    if works(["valgrind", "--version"]) and (PEER / "bin-avx2").exists():
        return ["valgrind", "--tool=callgrind", "--callgrind-out-file=/dev/null"], PEER / "bin-avx2", "valgrind, AVX2"
    return None


def works(command):
    try:
        return subprocess.run(command, capture_output=True).returncode == 0
    except FileNotFoundError:
        return False


def counted(command):
    complaint = subprocess.run([str(word) for word in command], capture_output=True, text=True).stderr
    found = re.search(r"Collected : (\d+)", complaint) or re.search(r"^(\d+),.*instructions", complaint, re.M)
    return int(found[1]) if found else None


def per_token(count, command, sizes):
    """Instructions of a token: `command` gives the program's words for a number of tokens."""
    short, long = (counted([*count, *command(tokens)]) for tokens in sizes)
    if short is None or long is None:
        raise SystemExit(f"no instructions were counted for {' '.join(map(str, command(sizes[0])))}")
    return (long - short) / (sizes[1] - sizes[0])


def engine(count, program, model, kind, sizes):
    fixed = [program, model_file(model), "threads=1", "repeats=1"]
    return per_token(count, lambda tokens: [*fixed, f"{kind}{tokens}"], sizes)


def peer(count, binaries, model, kind, sizes):
    fixed = [binaries / "llama-bench", "-m", model_file(model), "-t", 1, "-r", 1, "--no-warmup"]
    flags = {"pp": lambda tokens: ["-p", tokens, "-n", 0], "tg": lambda tokens: ["-p", 0, "-n", tokens]}
    return per_token(count, lambda tokens: [*fixed, *flags[kind](tokens)], sizes)
