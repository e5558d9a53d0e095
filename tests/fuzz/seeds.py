"""Writes small inputs of a fuzz target into a folder, for the fuzzer to begin with: seeds.py TARGET FOLDER."""

import json
import math
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
    "yarn": {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 32.0,
                              "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.5, "truncate": False}},
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

# Layouts of quantized matrices: what `quantization_config` says, and the parts that a function below writes.
def tool(layout, method, **more):
    return layout, {"quant_method": method, **more}


def group(targets, layout, **weights):
    weights = {"type": "int", "symmetric": True, **weights}
    return {"targets": targets, "format": layout, "weights": weights, "input_activations": None}


FOUR_BITS = group(["Linear"], "pack-quantized", num_bits=4, strategy="group", group_size=32)
EIGHT_BITS = group(["re:.*mlp.*"], "int-quantized", num_bits=8, strategy="channel")
FLOATS = group(["re:.*self_attn.*", "lm_head"], "float-quantized", num_bits=8, type="float", strategy="channel")
GPTQ = {"bits": 4, "group_size": 32, "desc_act": True, "sym": False, "checkpoint_format": "gptq"}
QUANTIZED = {
    "gptq": tool("gptq4", "gptq", **GPTQ),
    "gptq8": tool("gptq8", "gptq", **GPTQ | {"bits": 8, "checkpoint_format": "gptq_v2"}),
    "gptq2": tool("gptq2", "gptq", **GPTQ | {"bits": 2, "sym": True}),
    "dynamic": tool("gptq_mixed", "gptq", **GPTQ, dynamic={
        "-:.*q_proj": {}, "+:.*mlp.*": {"bits": 8, "group_size": 32}, "lm_head|.*v_proj": {"sym": True}}),
    "awq": tool("awq", "awq", bits=4, group_size=32, zero_point=True, version="gemm"),
    "auto_round": tool("gptq4", "auto-round", bits=4, group_size=32, sym=False, data_type="int",
                       packing_format="auto_round:auto_gptq", extra_config={"lm_head": {"bits": 16}}),
    "packed": tool("packed4", "compressed-tensors", format="pack-quantized", config_groups={"group_0": FOUR_BITS}),
    "bytes": tool("bytes", "compressed-tensors", format="int-quantized", config_groups={"group_0": EIGHT_BITS}),
    "floats": tool("floats", "compressed-tensors", format="float-quantized", config_groups={"group_0": FLOATS}),
    "groups": tool("mixed", "compressed-tensors", format="mixed-precision", ignore=["lm_head", "re:.*k_proj"],
                   config_groups={"group_0": FLOATS, "group_1": FOUR_BITS, "group_2": EIGHT_BITS}),
    "fp8": tool("blocks", "fp8", weight_block_size=[128, 128], activation_scheme="dynamic"),
    "nf4": tool("nf4", "bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=False),
    "nested": tool("nf4_nested", "bitsandbytes", load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "int8": tool("int8", "bitsandbytes", load_in_8bit=True),
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
    header, data = laid_out(outer_tensors() + [bf16(name, rows, cols) for _, name, rows, cols in MATRICES])
    return packed(header, data)


def outer_tensors():
    """What is around matrices: norms of one and an embedding of zeros."""
    norms = ["norm", "layers.0.input_layernorm", "layers.0.post_attention_layernorm"]
    ones = [(f"model.{name}.weight", "BF16", [HIDDEN], struct.pack("<H", 0x3F80) * HIDDEN) for name in norms]
    return [("model.embed_tokens.weight", "BF16", [VOCABULARY, HIDDEN], bytes(2 * VOCABULARY * HIDDEN)), *ones]


def bf16(name, rows, cols):
    return f"model.layers.0.{name}.weight", "BF16", [rows, cols], bytes(2 * rows * cols)


def laid_out(tensors):
    """A header's text and its data."""
    header, data = {}, b""
    for name, kind, shape, values in tensors:
        header[name] = {"dtype": kind, "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    return json.dumps(header), data


def quantized():
    """Lines of a configuration and of a header, and data: all codes are the same, all scales one."""
    return {name: quantized_model(*each) for name, each in QUANTIZED.items()}


def quantized_model(layout, quantization):
    matrices = [part for _, name, rows, cols in MATRICES for part in quantized_matrix(layout, name, rows, cols)]
    header, data = laid_out(outer_tensors() + matrices)
    return json.dumps(CONFIG | {"quantization_config": quantization}).encode() + f"\n{header}\n".encode() + data


def quantized_matrix(layout, name, rows, cols):
    """A matrix's tensors, as tools lay them out."""
    if layout == "gptq_mixed":
        layout = None if name.endswith("q_proj") else "gptq8" if name.startswith("mlp") else "gptq4"
    elif layout == "mixed":
        layout = None if name.endswith("k_proj") else "floats" if name.startswith("self_attn") else "bytes"
    if layout is None:
        return [bf16(name, rows, cols)]
    return [(f"model.layers.0.{name}.{part}", *tensor) for part, tensor in LAYOUTS[layout](rows, cols).items()]


def ones(kind, *shape):
    one = {"F32": struct.pack("<f", 1.0), "F16": struct.pack("<H", 0x3C00)}[kind]
    return kind, list(shape), one * math.prod(shape)


def codes(kind, *shape):
    size = {"I32": 4, "U8": 1, "I8": 1, "F8_E4M3": 1}[kind]
    return kind, list(shape), b"\x5a" * (size * math.prod(shape))


def gptq(bits):
    def parts(rows, cols):
        order = struct.pack(f"<{cols}i", *(col * 7 % cols // 32 for col in range(cols)))
        return {"qweight": codes("I32", cols * bits // 32, rows), "qzeros": codes("I32", cols // 32, rows * bits // 32),
                "scales": ones("F16", cols // 32, rows), "g_idx": ("I32", [cols], order)}
    return parts


def awq(rows, cols):
    return {"qweight": codes("I32", cols, rows // 8), "qzeros": codes("I32", cols // 32, rows // 8),
            "scales": ones("F16", cols // 32, rows)}


def packed_words(rows, cols):
    return {"weight_packed": codes("I32", rows, cols // 8), "weight_scale": ones("F16", rows, cols // 32),
            "weight_shape": ("I64", [2], struct.pack("<2q", rows, cols))}


def nf4(nested):
    def parts(rows, cols):
        blocks, state = rows * cols // 64, {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [rows, cols]}
        largest = {"weight.absmax": ones("F32", blocks)}
        if nested:
            state |= {"nested_blocksize": 256, "nested_offset": 0.5}
            largest = {"weight.absmax": codes("U8", blocks), "weight.nested_absmax": ones("F32", 1),
                       "weight.nested_quant_map": ones("F32", 256)}
        text = json.dumps(state).encode()
        return {"weight": codes("U8", rows * cols // 2, 1), "weight.quant_map": ones("F32", 16), **largest,
                "weight.quant_state.bitsandbytes__nf4": ("U8", [len(text)], text)}
    return parts


LAYOUTS = {
    "gptq4": gptq(4),
    "gptq8": gptq(8),
    "gptq2": gptq(2),
    "awq": awq,
    "packed4": packed_words,
    "bytes": lambda rows, cols: {"weight": codes("I8", rows, cols), "weight_scale": ones("F32", rows, 1)},
    "floats": lambda rows, cols: {"weight": codes("F8_E4M3", rows, cols), "weight_scale": ones("F32", rows, 1)},
    "blocks": lambda rows, cols: {"weight": codes("F8_E4M3", rows, cols), "weight_scale_inv": ones("F32", 1, 1)},
    "nf4": nf4(False),
    "nf4_nested": nf4(True),
    "int8": lambda rows, cols: {"weight": codes("I8", rows, cols), "SCB": ones("F32", rows),
                                "weight_format": ("U8", [], b"\0")},
}


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


def bodies():
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    texts = {
        "chat": {"model": "m", "messages": messages, "stream": True, "stream_options": {"include_usage": True}},
        "tools": {"model": "m", "messages": [{"role": "assistant", "tool_calls": [call]}], "tools": [tool],
                  "tool_choice": {"type": "function", "function": {"name": "f"}}},
        "completion": {"model": "m", "prompt": [[1, 2]], "stop": ["a"], "logit_bias": {"1": 2.5}, "n": 2},
        "structure": {"model": "m", "prompt": "a", "response_format": {
            "type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "object"}}}},
        "guided": {"prompt": "a", "guided_json": "{}", "structured_outputs": {"choice": ["a"]}},
        "tgi": {"inputs": "a", "parameters": {"truncate": 3, "grammar": {"type": "regex", "value": "a"}, "stop": ["a"]}},
        "embeddings": {"model": "m", "input": ["a"], "encoding_format": "base64", "truncate_prompt_tokens": -1},
        "score": {"model": "m", "text_1": "a", "text_2": ["b"]},
        "rerank": {"model": "m", "query": "a", "documents": ["a", {"text": "b"}], "top_n": 1},
        "detokenize": {"tokens": [1, 2]},
    }
    return {name: json.dumps(body).encode() for name, body in texts.items()}


def forms():
    """The first letter says what the rest is; a schema begins with its own."""
    schema = {"type": "object", "properties": {"a": {"$ref": "#/$defs/b"}}, "required": ["a"], "additionalProperties": False,
              "$defs": {"b": {"type": ["array", "null"], "prefixItems": [{"type": "integer", "minimum": 3}], "maxItems": 4}}}
    texts = {"type": "string", "pattern": "^[a-z]{2,9}$", "maxLength": 20}
    return {
        "object": json.dumps(schema).encode(),
        "text": json.dumps(texts).encode(),
        "choice": json.dumps({"anyOf": [texts, {"enum": ["a", 1, None]}, {"$ref": "#/anyOf/0"}]}).encode(),
        "rules": b'-start: x ("," x)*\nx: x "a" | T\nT: /[a-z ]+/ | "b" "c"?\n%ignore /[ \\n]+/\n',
        "nested": b'-start: "[" a{0,3} "]"\na: %json {"type": "object"}\n',
    }


DATA, HEADERS, PRIORITY, RESET, SETTINGS, PUSH, PING, GOAWAY, WINDOW, CONTINUATION = range(10)  # HTTP/2's types of frames
END_STREAM, END_HEADERS, PADDED, PRIORITIZED, ACKNOWLEDGED = 1, 4, 8, 32, 1


def frames():
    """Frames as the target reads them: type, flags, stream, bytes of payload, payload."""
    def frame(kind, flags, stream, payload=b""):
        return bytes([kind, flags, stream, len(payload)]) + payload

    def literal(name, value):
        return bytes([0, len(name)]) + name + bytes([len(value)]) + value

    def head(method, path, *more):
        named = {b"GET": b"\x82", b"POST": b"\x83"}[method]
        return named + b"\x86\x04" + bytes([len(path)]) + path + b"\x01\x01a" + b"".join(literal(*each) for each in more)

    body = b'{"model":"m","input":"a"}'
    embed = head(b"POST", b"/v1/embeddings", (b"content-type", b"application/json"))
    get = frame(HEADERS, END_STREAM | END_HEADERS, 1, head(b"GET", b"/v1/models"))
    return {
        "get": get,
        "post": frame(HEADERS, END_HEADERS, 1, embed) + frame(DATA, END_STREAM, 1, body),
        "padded": frame(HEADERS, END_HEADERS | PADDED | PRIORITIZED, 1, b"\2\0\0\0\0\x10" + embed + b"\0\0")
        + frame(DATA, END_STREAM | PADDED, 1, b"\1" + body + b"\0"),
        "continued": frame(HEADERS, END_STREAM, 3, embed[:9]) + frame(CONTINUATION, END_HEADERS, 3, embed[9:]),
        "reset": b"".join(frame(HEADERS, END_HEADERS, n, embed) + frame(RESET, 0, n, b"\0\0\0\x08") for n in range(1, 40, 2)),
        "settings": frame(SETTINGS, 0, 0, struct.pack(">HIHIHI", 1, 0, 4, 0x7FFFFFFF, 5, 16384)) + frame(SETTINGS, ACKNOWLEDGED, 0) + get,
        "windows": frame(WINDOW, 0, 0, b"\x7f\xff\xff\xff") + get + frame(WINDOW, 0, 1, b"\0\0\0\1"),
        "others": frame(PING, 0, 0, bytes(8)) + frame(PRIORITY, 0, 5, b"\x80\0\0\3\xff") + frame(PUSH, END_HEADERS, 1, b"\0\0\0\2\x82")
        + frame(GOAWAY, 0, 0, bytes(8)) + frame(0xEE, 1, 1, b"?") + get,
        "trailers": frame(HEADERS, END_HEADERS, 1, embed) + frame(DATA, 0, 1, body)
        + frame(HEADERS, END_STREAM | END_HEADERS, 1, literal(b"x", b"y")),
        "table": frame(HEADERS, END_STREAM | END_HEADERS, 1, b"\x3f\xe1\x1f\x40\1x\1y\xbe" + head(b"GET", b"/")),
        "raw": frame(0xF0, 0, 0, b"\xff\xff\xff\0\x8f\0\0\0\1abc"),
    }


def variants(sound, others):
    return {name: json.dumps(sound | more).encode() for name, more in ({"sound": {}} | others).items()}


def text(value):
    return struct.pack("<Q", len(value)) + value.encode()


SEEDS = {
    "safetensors": safetensors,
    "gguf": gguf,
    "gguf_config": gguf,
    "config": config,
    "quantized": quantized,
    "tokenizer": tokenizers,
    "gguf_tokenizer": gguf_tokenizers,
    "bodies": bodies,
    "form": forms,
    "frames": frames,
}

if __name__ == "__main__":
    main(*sys.argv[1:])
