"""Records what transformers makes of rotary scaling by YaRN, for the decoder's tests.

    python -m venv V && V/bin/pip install torch transformers
    V/bin/python tests/api/yarn.py > engine/model/tests/model/data/yarn.json

The numbers are those of published files: Qwen2.5's cards, gpt-oss (whose ramp has no whole ends), DeepSeek-V3, and a ramp
that begins before the first pair.
"""

import json

import torch
import transformers
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

USUAL = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}
CASES = [
    (128, {"rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32768}),
    (64, {"rope_theta": 150000.0, "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}),
    (64, {"rope_theta": 10000.0, "factor": 40.0, "original_max_position_embeddings": 4096,
          "mscale": 1.0, "mscale_all_dim": 0.5}),
    (32, {"rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 64, "beta_fast": 16.0}),
    (32, {"rope_theta": 10000.0, "factor": 1.0, "original_max_position_embeddings": 4096, "attention_factor": 1.25}),
]


def case(head_dim, parameters):
    parameters = {**USUAL, **parameters}
    tokens = int(parameters["original_max_position_embeddings"] * parameters["factor"])
    config = LlamaConfig(
        head_dim=head_dim, max_position_embeddings=tokens, rope_parameters={"rope_type": "yarn", **parameters}
    )
    frequencies, magnitude = ROPE_INIT_FUNCTIONS["yarn"](config, "cpu")
    made = {"inv_freq": frequencies.tolist(), "magnitude": magnitude}
    return {"parameters": parameters, "max_position_embeddings": tokens, **made}


made_with = f"transformers {transformers.__version__}, torch {torch.__version__}"
print(json.dumps({"made_with": made_with, "cases": [case(*each) for each in CASES]}))
