"""Writes a small sound input of a fuzz target into a folder, for the fuzzer to begin with: seeds.py TARGET FOLDER."""

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
    (folder / "sound").write_bytes(SEEDS[target]())


def safetensors():
    header = {"a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
              "b": {"dtype": "BF16", "shape": [4], "data_offsets": [16, 24]}, "__metadata__": {"format": "pt"}}
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + bytes(24)


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
    return header + bytes(-len(header) % 32) + bytes(64)


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


SEEDS = {
    "safetensors": safetensors,
    "gguf": gguf,
    "gguf_config": gguf,
    "config": lambda: json.dumps(CONFIG).encode(),
    "tokenizer": lambda: json.dumps(TOKENIZER).encode(),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
