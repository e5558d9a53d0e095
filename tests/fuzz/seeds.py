"""Writes small inputs of a fuzz target into a folder, for the fuzzer to begin with: seeds.py TARGET FOLDER."""

import json
import pathlib
import struct
import sys

UINT32, INT32, FLOAT32, STRING, ARRAY = 4, 5, 6, 8, 9  # the types of GGUF's metadata
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

# Its other models, what cuts and changes text before them, and what comes after.
TOKENIZERS = {
    "pieces": {
        "normalizer": {"type": "Sequence", "normalizers": [
            {"type": "Prepend", "prepend": "\u2581"}, {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
            {"type": "Strip", "strip_left": True, "strip_right": True}, {"type": "Lowercase"}]},
        "pre_tokenizer": None,
        "decoder": {"type": "Sequence", "decoders": [
            {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "}, {"type": "ByteFallback"}, {"type": "Fuse"},
            {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": True, "byte_fallback": True, "ignore_merges": True,
                  "vocab": {"<unk>": 0, "<0x0A>": 1, "\u2581": 2, "h": 4, "\u2581h": 5}, "merges": ["\u2581 h"]},
    },
    "unigram": {
        "normalizer": {"type": "NFKC"},
        "pre_tokenizer": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "decoder": {"type": "Metaspace", "replacement": "\u2581", "prepend_scheme": "always", "split": True},
        "model": {"type": "Unigram", "unk_id": 0, "vocab": [["<unk>", 0.0], ["\u2581H", -1.5], ["el", -2.0]], "byte_fallback": False},
    },
    "charsmap": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "BAAAAAAAAAA="}},
    "words": {
        "normalizer": {"type": "BertNormalizer", "clean_text": True, "handle_chinese_chars": True, "strip_accents": None, "lowercase": True},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "BertPreTokenizer"}, {"type": "Digits", "individual_digits": True}, {"type": "Punctuation", "behavior": "Isolated"},
            {"type": "Split", "pattern": {"Regex": "\\s+(?!\\S)|\\s+"}, "behavior": "MergedWithPrevious", "invert": False},
            {"type": "WhitespaceSplit"}, {"type": "UnicodeScripts"}, {"type": "FixedLength", "length": 5}]},
        "post_processor": {"type": "TemplateProcessing", "single": [
            {"SpecialToken": {"id": "[CLS]", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"[CLS]": {"id": "[CLS]", "ids": [1], "tokens": ["[CLS]"]}}},
        "model": {"type": "WordPiece", "unk_token": "[UNK]", "continuing_subword_prefix": "##", "max_input_chars_per_word": 100,
                  "vocab": {"[UNK]": 0, "[CLS]": 1, "hello": 2, "##o": 4}},
    },
    "cut": {
        "truncation": {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 8}, "direction": "Left", "pad_to_multiple_of": 2, "pad_id": 0, "pad_type_id": 0,
                    "pad_token": "H"},
        "model": {"type": "WordLevel", "vocab": {"Hello": 0, "123": 1}, "unk_token": "Hello"},
    },
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

    metadata = [
        ("general.architecture", STRING, text("llama")),
        size("block_count", 1),
        size("embedding_length", HIDDEN),
        size("feed_forward_length", WIDE),
        size("attention.head_count", HEADS),
        size("attention.head_count_kv", KV_HEADS),
        size("context_length", CONTEXT),
        ("llama.attention.layer_norm_rms_epsilon", FLOAT32, struct.pack("<f", 1e-5)),
        *vocabulary("gpt2", [chr(ord("a") + letter) for letter in range(VOCABULARY)]),
    ]
    tensors = [("token_embd", matrix(VOCABULARY, HIDDEN))]
    tensors += [(f"blk.0.{name}", matrix(rows, cols)) for name, _, rows, cols in MATRICES]
    tensors += [(name, (F32, [HIDDEN], struct.pack("<f", 1.0) * HIDDEN)) for name in ("blk.0.attn_norm", "blk.0.ffn_norm", "output_norm")]
    return sound(gguf_file(metadata, tensors))


def gguf_tokenizers():
    """Files of a vocabulary and nothing else, one for each kind."""
    spaced = ["<unk>", "\u2581H", "e", "l", "o", "He", "<0x0A>", "<|im_end|>"]
    vocabularies = {
        "gpt2": vocabulary("gpt2", ["H", "e", "He", "<|im_end|>"], ["H e"]),
        "llama": vocabulary("llama", spaced),
        "t5": vocabulary("t5", spaced),
        "bert": vocabulary("bert", ["[UNK]", "\u2581hello", "o"]),
    }
    return {name: gguf_file([("general.architecture", STRING, text("llama")), *keys], []) for name, keys in vocabularies.items()}


def vocabulary(model, tokens, merges=()):
    """Metadata of a tokenizer: tokens are normal ones but for those in brackets, and the later the likelier."""
    types = [3 if token[0] in "<[" else 1 for token in tokens]
    scores = [float(score) for score in range(len(tokens))]
    return [
        ("tokenizer.ggml.model", STRING, text(model)),
        ("tokenizer.ggml.pre", STRING, text("gpt-2")),
        ("tokenizer.ggml.tokens", ARRAY, struct.pack("<IQ", STRING, len(tokens)) + b"".join(map(text, tokens))),
        ("tokenizer.ggml.merges", ARRAY, struct.pack("<IQ", STRING, len(merges)) + b"".join(map(text, merges))),
        ("tokenizer.ggml.token_type", ARRAY, struct.pack(f"<IQ{len(types)}i", INT32, len(types), *types)),
        ("tokenizer.ggml.scores", ARRAY, struct.pack(f"<IQ{len(scores)}f", FLOAT32, len(scores), *scores)),
        ("tokenizer.ggml.unknown_token_id", UINT32, struct.pack("<I", 0)),
        ("tokenizer.ggml.eos_token_id", UINT32, struct.pack("<I", len(tokens) - 1)),
    ]


def gguf_file(metadata, tensors):
    entries = b"".join(text(key) + struct.pack("<I", kind) + value for key, kind, value in metadata)
    infos, data = b"", b""
    for name, (kind, dims, values) in tensors:
        infos += text(f"{name}.weight") + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, len(data))
        data += values + bytes(-len(values) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + entries + infos
    return header + bytes(-len(header) % 32) + data


def matrix(rows, cols):
    return Q8_0, [cols, rows], bytes(rows * cols // BLOCK * BLOCK_BYTES)


def config():
    return variants(CONFIG, VARIANTS)


def tokenizers():
    return variants(TOKENIZER, TOKENIZERS)


def variants(sound, others):
    return {name: json.dumps(sound | more).encode() for name, more in ({"sound": {}} | others).items()}


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


SEEDS = {
    "safetensors": safetensors,
    "gguf": gguf,
    "gguf_config": gguf,
    "config": config,
    "tokenizer": tokenizers,
    "gguf_tokenizer": gguf_tokenizers,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
