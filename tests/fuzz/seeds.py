"""Writes small inputs of a fuzz target into a folder, for the fuzzer to begin with: seeds.py TARGET FOLDER."""

import json
import pathlib
import struct
import sys

UINT32, FLOAT32, STRING, ARRAY = 4, 6, 8, 9  # the types of GGUF's metadata
F32, Q8_0 = 0, 8  # types of GGUF tensors
BLOCK, BLOCK_BYTES = 32, 34  # of Q8_0

# The model: a Llama of one layer, all zeros but for its norms. Names of its matrices as GGUF and as the hub have them.
HIDDEN, WIDE, HEADS, KV_HEADS, VOCABULARY, CONTEXT = 32, 64, 2, 1, 16, 64
KV = HIDDEN // HEADS * KV_HEADS
MATRICES = [
    ("attn_q", "self_attn.q_proj", HIDDEN, HIDDEN),
    ("attn_k", "self_attn.k_proj", KV, HIDDEN),
    ("attn_v", "self_attn.v_proj", KV, HIDDEN),
    ("attn_output", "self_attn.o_proj", HIDDEN, HIDDEN),
    ("ffn_gate", "mlp.gate_proj", WIDE, HIDDEN),
    ("ffn_up", "mlp.up_proj", WIDE, HIDDEN),
    ("ffn_down", "mlp.down_proj", HIDDEN, WIDE),
]

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": CONTEXT,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "vocab_size": VOCABULARY,
    "tie_word_embeddings": True,
}

# What other families and tools say besides.
VARIANTS = {
    "llama3": {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                "original_max_position_embeddings": 64}},
    "mistral": {"model_type": "mistral", "sliding_window": 16, "head_dim": 16},
    "smollm3": {"model_type": "smollm3", "no_rope_layer_interval": 4},
    "qwen2": {"model_type": "qwen2", "sliding_window": 16, "max_window_layers": 4, "use_sliding_window": False},
    "qwen3": {"model_type": "qwen3", "head_dim": 16, "attention_bias": False},
    "mixtral": {"model_type": "mixtral", "num_local_experts": 2, "num_experts_per_tok": 1},
    "qwen3_moe": {"model_type": "qwen3_moe", "num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 32,
                  "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []},
    "phi3": {"model_type": "phi3", "original_max_position_embeddings": 64, "rope_scaling": {
        "type": "longrope", "short_factor": [1.0] * 8, "long_factor": [2.0] * 8}},
    "gemma2": {"model_type": "gemma2", "query_pre_attn_scalar": 16, "attn_logit_softcapping": 5.0,
               "final_logit_softcapping": 3.0, "hidden_activation": "gelu_pytorch_tanh"},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 16, "sliding_window_pattern": 6, "rope_local_base_freq": 1e4},
    "gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "sym": True}},
    "awq": {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}},
    "fp8": {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}},
    "bitsandbytes": {"quantization_config": {"quant_method": "bitsandbytes", "load_in_4bit": True,
                                             "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": True}},
    "compressed": {"quantization_config": {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "ignore": ["lm_head"], "config_groups": {"group_0": {
            "targets": ["Linear"], "weights": {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group",
                                               "group_size": 32}}}}},
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
        "pair": pair | {"__metadata__": {"format": "pt"}},
        "empty": {},
        "kinds": {kind: entry(kind, [0], 0, 0) for kind in kinds},
        "scalar": {"a": entry("F32", [], 0, 4)},
        "overlap": pair | {"b": entry("BF16", [4], 8, 16)},
        "outside": {"a": entry("F32", [8], 0, 32)},
        "overflow": {"a": entry("F32", [1 << 63, 8], 0, 24)},
        "deep": {"a": entry("U8", [1] * 9, 0, 1)},
        "unknown": {"a": entry("F4", [1], 0, 1) | {"strides": [[1, {"x": [None]}]]}},
    }
    broken = {name: of_header(json.dumps(header)) for name, header in headers.items()} | {"no_object": of_header("[1]")}
    return broken | {"sound": hub_model()}


def hub_model():
    """The whole model in bf16."""
    shapes = [("embed_tokens", [VOCABULARY, HIDDEN]), ("norm", [HIDDEN])]
    shapes += [(f"layers.0.{name}", [HIDDEN]) for name in ("input_layernorm", "post_attention_layernorm")]
    shapes += [(f"layers.0.{name}", [rows, cols]) for _, name, rows, cols in MATRICES]
    header, data = {}, b""
    for name, shape in shapes:
        start = len(data)
        data += struct.pack("<H", 0x3F80) * HIDDEN if len(shape) == 1 else bytes(2 * shape[0] * shape[1])
        header[f"model.{name}.weight"] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, len(data)]}
    return packed(json.dumps(header), data)


def of_header(text):
    return packed(text, bytes(24))


def packed(header, data):
    return struct.pack("<Q", len(header)) + header.encode() + data


def sound(content):
    return {"sound": content}


def gguf():
    """The whole model in Q8_0."""
    def size(key, value):
        return (f"llama.{key}", UINT32, struct.pack("<I", value))

    letters = [chr(ord("a") + letter) for letter in range(VOCABULARY)]
    metadata = [
        ("general.architecture", STRING, text("llama")),
        size("block_count", 1),
        size("embedding_length", HIDDEN),
        size("feed_forward_length", WIDE),
        size("attention.head_count", HEADS),
        size("attention.head_count_kv", KV_HEADS),
        size("context_length", CONTEXT),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)),
        ("tokenizer.ggml.model", STRING, text("gpt2")),
        ("tokenizer.ggml.pre", STRING, text("gpt-2")),
        ("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, VOCABULARY) + b"".join(map(text, letters))),
        ("tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", STRING, 0)),
    ]
    tensors = [("token_embd", matrix(VOCABULARY, HIDDEN))]
    tensors += [(f"blk.0.{name}", matrix(rows, cols)) for name, _, rows, cols in MATRICES]
    tensors += [(name, (F32, [HIDDEN], struct.pack("<f", 1.0) * HIDDEN)) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")]
    entries = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in metadata)
    infos, data = b"", b""
    for name, (kind, dims, values) in tensors:
        infos += text(f"{name}.weight") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += values + bytes(-len(values) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + entries + infos
    return sound(header + bytes(-len(header) % 32) + data)


def matrix(rows, cols):
    return Q8_0, [cols, rows], bytes(rows * cols // BLOCK * BLOCK_BYTES)


def config():
    return {name: json.dumps(CONFIG | more).encode() for name, more in ({"sound": {}} | VARIANTS).items()}


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


SEEDS = {
    "safetensors": safetensors,
    "gguf": gguf,
    "gguf_config": gguf,
    "config": config,
    "tokenizer": lambda: sound(json.dumps(TOKENIZER).encode()),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
