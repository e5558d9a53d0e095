"""Writes small inputs of a fuzz target into a folder, for the fuzzer to begin with: seeds.py TARGET FOLDER."""

import json
import pathlib
import struct
import sys

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9  # the types of GGUF's metadata
F32 = 0  # the type of a GGUF tensor

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": 16,
    "tie_word_embeddings": True,
}

TOKENIZER = {
    "version": "1.0",
    "added_tokens": [
        {"id": 3, "content": "<|im_end|>", "special": True, "normalized": False,
         "lstrip": False, "rstrip": False, "single_word": False}
    ],
    "normalizer": {"type": "NFC"},
    "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True},
    "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    "model": {"type": "BPE", "vocab": {"H": 0, "e": 1, "He": 2}, "merges": [["H", "e"]]},
}


def main(target, folder):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in SEEDS[target]().items():
        (folder / name).write_bytes(content)


def safetensors():
    """A sound file; then ones that break one rule each, so that the code behind the others is reached at once."""
    def entry(kind, shape, start, end):
        return {"dtype": kind, "shape": shape, "data_offsets": [start, end]}

    pair = {"a": entry("F32", [2, 2], 0, 16), "b": entry("BF16", [4], 16, 24)}
    kinds = ["BOOL", "U8", "I8", "F8_E4M3", "F8_E5M2", "I16", "U16", "F16", "BF16", "I32", "U32", "F32", "I64", "U64", "F64"]
    headers = {
        "sound": pair | {"__metadata__": {"format": "pt"}},
        "empty": {},
        "kinds": {kind: entry(kind, [0], 0, 0) for kind in kinds},
        "scalar": {"a": entry("F32", [], 0, 4)},
        "overlap": pair | {"b": entry("BF16", [4], 8, 16)},
        "outside": {"a": entry("F32", [8], 0, 32)},
        "overflow": {"a": entry("F32", [1 << 63, 8], 0, 24)},
        "deep": {"a": entry("U8", [1] * 9, 0, 1)},
        "unknown": {"a": entry("F4", [1], 0, 1) | {"strides": [[1, {"x": [None]}]]}},
    }
    return {name: of_header(json.dumps(header)) for name, header in headers.items()} | {"no_object": of_header("[1]")}


def of_header(text):
    return struct.pack("<Q", len(text)) + text.encode() + bytes(24)


def sound(content):
    return {"sound": content}


def gguf():
    """A Llama of one layer, of which only the embedding is there."""
    metadata = [
        ("general.architecture", STRING, text("llama")),
        ("llama.block_count", UINT32, struct.pack("<I", 1)),
        ("llama.embedding_length", UINT32, struct.pack("<I", 8)),
        ("llama.feed_forward_length", UINT32, struct.pack("<I", 16)),
        ("llama.attention.head_count", UINT32, struct.pack("<I", 2)),
        ("llama.context_length", UINT32, struct.pack("<I", 64)),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)),
        ("tokenizer.ggml.model", STRING, text("gpt2")),
        ("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, 2) + text("a") + text("b")),
    ]
    tensor = text("token_embd.weight") + struct.pack("<IQQIQ", 2, 8, 2, F32, 0)
    entries = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in metadata)
    header = b"GGUF" + struct.pack("<IQQ", 3, 1, len(metadata)) + entries + tensor
    return sound(header + bytes(-len(header) % 32) + bytes(64))


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


SEEDS = {
    "safetensors": safetensors,
    "gguf": gguf,
    "gguf_config": gguf,
    "config": lambda: sound(json.dumps(CONFIG).encode()),
    "tokenizer": lambda: sound(json.dumps(TOKENIZER).encode()),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
