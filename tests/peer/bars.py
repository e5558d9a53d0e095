"""What is measured, and what it must reach: ratios to the peer in the same run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    floor: float
    goal: float


@dataclass(frozen=True)
class Model:
    name: str
    prefill: Bar
    decode: Bar

    def tests(self):
        return {"pp512": self.prefill, "tg128": self.decode, "tg64x16@128": BATCH}


# A token of the small models is bound by computing, of the large ones by reading the weights.
COMPUTING, READING = Bar(1.2, 2.0), Bar(1.0, 1.4)
PREFILL, BATCH = Bar(1.5, 3.0), Bar(2.0, 4.0)
# The peer has no fast path for this type.
PREFILL_Q4_1 = Bar(3.0, 3.0)

SMALL, LARGE = "SmolLM2-135M-Instruct", "random-1b"
MODELS = [
    Model(f"{SMALL}.Q4_1", PREFILL_Q4_1, COMPUTING),
    Model(f"{SMALL}.Q4_0", PREFILL, COMPUTING),
    Model(f"{SMALL}.Q8_0", PREFILL, COMPUTING),
    Model(f"{LARGE}.Q4_K_M", PREFILL, READING),
    Model(f"{LARGE}.Q4_0", PREFILL, READING),
    Model(f"{LARGE}.Q6_K", PREFILL, READING),
    Model(f"{LARGE}.Q5_K_M", PREFILL, READING),
    Model(f"{LARGE}.Q8_0", PREFILL, READING),
]

# Decode at a long context, as a share of the rate at none, by the cache's type; and the type's name for the peer.
DEPTH_MODEL, DEPTH = f"{LARGE}.Q4_K_M", 8000
DEPTH_SHARES = {"bf16": (0.6, "f16"), "int8": (0.7, "q8_0")}

# Start to first token with the file in the page cache, and resident memory after it.
START_MODEL = f"{SMALL}.Q4_1"
START_FLOOR_SECONDS, START_GOAL_SECONDS = 0.32, 0.25
