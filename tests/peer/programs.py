"""Where engine and peer are, and how each is asked for one measurement."""

import json
import os
import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).resolve().parents[2]
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", pathlib.Path.home() / ".cache")) / "windlass"
PEER = pathlib.Path(os.environ.get("WINDLASS_PEER", CACHE / "peer"))


def build(example="throughput"):
    """Builds the engine and an example of its crates, by default the benchmark; returns the folder that they are in."""
    # With the features of the whole workspace, as tests/run builds.
    cargo = ["cargo", "build", "--release", "--quiet", "--workspace"]
    subprocess.run([*cargo, "--bin", "windlass-engine", "--example", example], cwd=ROOT, check=True)
    metadata = subprocess.run(["cargo", "metadata", "--format-version=1", "--no-deps"], cwd=ROOT, check=True, capture_output=True)
    return pathlib.Path(json.loads(metadata.stdout)["target_directory"]) / "release"


def model_file(name):
    return PEER / "models" / f"{name}.gguf"


class Refused(Exception):
    """A program ended with an error, whose last line this is."""


def output_of(command):
    """What a program prints."""
    done = subprocess.run([str(word) for word in command], capture_output=True, text=True)
    if done.returncode:
        raise Refused(done.stderr.strip().splitlines()[-1] if done.stderr.strip() else f"exit status {done.returncode}")
    return done.stdout


class Engine:
    """Our benchmark, which prints `NAME FIGURE UNIT` lines."""

    def __init__(self, binaries, threads, options=()):
        self.program, self.threads, self.options = binaries / "examples" / "throughput", threads, options

    def measure(self, model, *tests, options=()):
        """Figures by name; of each speed the better of two, the first of which also warms up."""
        command = [self.program, model_file(model), f"threads={self.threads}", "repeats=2", *self.options, *options, *tests]
        lines = (re.fullmatch(r"(\S+) ([\d.]+) .*", line) for line in output_of(command).splitlines())
        return {line[1]: float(line[2]) for line in lines if line}


class Peer:
    """llama-bench and llama-batched-bench, asked for the engine's tests: the better of two, too."""

    def __init__(self, threads, binaries=PEER / "bin"):
        self.binaries, self.threads = binaries, threads

    def speed(self, model, test, cache="f16"):
        kind, tokens, sequences, depth = re.fullmatch(r"(pp|tg)(\d+)(?:x(\d+))?(?:@(\d+))?", test).groups()
        if sequences:
            return self.batched(model, sequences, depth, tokens)
        prompt, generated = (tokens, 0) if kind == "pp" else (0, tokens)
        return self.single(model, prompt, generated, depth or 0, cache)

    def single(self, model, prompt, generated, depth, cache):
        flags = ["-t", self.threads, "-p", prompt, "-n", generated, "-d", depth, "-ctk", cache, "-ctv", cache]
        printed = output_of([self.binaries / "llama-bench", "-m", model_file(model), *flags, "-r", 2, "-o", "jsonl"])
        return max(json.loads(printed.splitlines()[-1])["samples_ts"])

    def batched(self, model, sequences, depth, tokens):
        context = int(sequences) * (int(depth) + int(tokens)) + 256
        flags = ["-t", self.threads, "-tb", self.threads, "-c", context, "-b", 2048, "-ub", 512]
        size = ["-npp", depth, "-ntg", tokens, "-npl", sequences, "--output-format", "jsonl"]
        command = [self.binaries / "llama-batched-bench", "-m", model_file(model), *flags, *size]
        printed = [line for _ in range(2) for line in output_of(command).splitlines()]
        return max(json.loads(line)["speed_tg"] for line in printed if line.startswith("{"))
