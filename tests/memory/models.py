"""Models of random weights that no one has to download, as files and folders that the engine reads."""

import json
import random
import struct

ROPE = 10000.0
F32, F16 = 0, 1


def byte_letters():
    """The letters that byte-level tokenizers write bytes as, in the order of bytes."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = iter(range(256, 512))
    return [chr(byte if byte in shown else next(hidden)) for byte in range(256)]


def vocabulary(size, seed=7):
    """Tokens and the merges that make them, of letters as those of languages are; the last token ends texts."""
    draw, tokens, merges = random.Random(seed), byte_letters(), []
    known, parts = set(tokens), list("etaoinshrdlu")
    while len(tokens) < size - 1:
        pair = draw.choice(parts), draw.choice(parts[:200])
        if (made := "".join(pair)) not in known and len(made) <= 8:
            known.add(made)
            parts += [made] if len(made) < 8 else []
            tokens.append(made)
            merges.append(" ".join(pair))
    return [*tokens, "<end>"], merges


def numbers(count, mask, base, seed):
    """So many floats of 2 bytes, near a hundredth, of either sign: bits of chance where `mask` has them."""
    repeat = lambda bits: int.from_bytes(bits.to_bytes(2, "little") * count, "little")
    bits = int.from_bytes(random.Random(seed).randbytes(2 * count), "little")
    return (bits & repeat(mask) | repeat(base)).to_bytes(2 * count, "little")


def matrices(shape):
    """Names, as GGUF and as a folder have them, rows and columns."""
    hidden, wide, kv = shape["hidden"], shape["ffn"], shape["kv_heads"] * shape["hidden"] // shape["heads"]
    yield "token_embd", "model.embed_tokens", shape["vocabulary"], hidden
    for layer in range(shape["layers"]):
        for ours, theirs, rows, columns in [
            ("attn_q", "self_attn.q_proj", hidden, hidden), ("attn_k", "self_attn.k_proj", kv, hidden),
            ("attn_v", "self_attn.v_proj", kv, hidden), ("attn_output", "self_attn.o_proj", hidden, hidden),
            ("ffn_gate", "mlp.gate_proj", wide, hidden), ("ffn_up", "mlp.up_proj", wide, hidden),
            ("ffn_down", "mlp.down_proj", hidden, wide),
        ]:
            yield f"blk.{layer}.{ours}", f"model.layers.{layer}.{theirs}", rows, columns


def norms(shape):
    yield "output_norm", "model.norm"
    for layer in range(shape["layers"]):
        yield f"blk.{layer}.attn_norm", f"model.layers.{layer}.input_layernorm"
        yield f"blk.{layer}.ffn_norm", f"model.layers.{layer}.post_attention_layernorm"


def gguf(path, shape):
    """A GGUF file of half-precision floats."""
    tensors = [(f"{name}.weight", [columns, rows], F16, numbers(rows * columns, 0x83FF, 0x2000, name))
               for name, _, rows, columns in matrices(shape)]
    tensors += [(f"{name}.weight", [shape["hidden"]], F32, struct.pack("<f", 1.0) * shape["hidden"])
                for name, _ in norms(shape)]
    tokens, merges = vocabulary(shape["vocabulary"])
    facts = {
        "general.architecture": "llama", "llama.context_length": shape["context"],
        "llama.embedding_length": shape["hidden"], "llama.block_count": shape["layers"],
        "llama.feed_forward_length": shape["ffn"], "llama.attention.head_count": shape["heads"],
        "llama.attention.head_count_kv": shape["kv_heads"], "llama.attention.layer_norm_rms_epsilon": 1e-5,
        "llama.rope.freq_base": ROPE, "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens, "tokenizer.ggml.merges": merges,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 1) + [3],
        "tokenizer.ggml.eos_token_id": len(tokens) - 1, "tokenizer.ggml.bos_token_id": len(tokens) - 1,
    }
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(facts))
    head += b"".join(text(name) + value(fact) for name, fact in facts.items())
    place = 0
    for name, dims, kind, data in tensors:
        head += text(name) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, kind, place)
        place += len(data) + -len(data) % 32
    with open(path, "wb") as file:
        file.write(head + bytes(-len(head) % 32))
        for _, _, _, data in tensors:
            file.write(data + bytes(-len(data) % 32))


def text(text):
    return struct.pack("<Q", len(text.encode())) + text.encode()


def value(fact):
    match fact:
        case str():
            return struct.pack("<I", 8) + text(fact)
        case float():
            return struct.pack("<If", 6, fact)
        case int():
            return struct.pack("<II", 4, fact)
        case [str(), *_]:
            return struct.pack("<IIQ", 9, 8, len(fact)) + b"".join(map(text, fact))
        case _:
            return struct.pack(f"<IIQ{len(fact)}i", 9, 5, len(fact), *fact)


def folder(path, shape):
    """A folder of safetensors in bf16 with a tokenizer of `tokenizers`."""
    path.mkdir()
    tensors = [(f"{name}.weight", [rows, columns], numbers(rows * columns, 0x807F, 0x3C00, name))
               for _, name, rows, columns in matrices(shape)]
    tensors += [(f"{name}.weight", [shape["hidden"]], b"\x80\x3f" * shape["hidden"]) for _, name in norms(shape)]
    head, place = {}, 0
    for name, dims, data in tensors:
        head[name] = {"dtype": "BF16", "shape": dims, "data_offsets": [place, place + len(data)]}
        place += len(data)
    head = json.dumps(head).encode()
    head += b" " * (-len(head) % 8)
    with open(path / "model.safetensors", "wb") as file:
        file.write(struct.pack("<Q", len(head)) + head + b"".join(data for _, _, data in tensors))
    tokens, merges = vocabulary(shape["vocabulary"])
    end = len(tokens) - 1
    write(path / "config.json", {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": shape["hidden"],
        "intermediate_size": shape["ffn"], "num_hidden_layers": shape["layers"], "num_attention_heads": shape["heads"],
        "num_key_value_heads": shape["kv_heads"], "vocab_size": len(tokens), "rms_norm_eps": 1e-5, "rope_theta": ROPE,
        "max_position_embeddings": shape["context"], "tie_word_embeddings": True, "hidden_act": "silu",
        "bos_token_id": end, "eos_token_id": end, "torch_dtype": "bfloat16",
    })
    added = {"id": end, "content": tokens[end], "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    write(path / "tokenizer.json", {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": [added], "normalizer": None,
        "pre_tokenizer": byte_level, "post_processor": None, "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: number for number, token in enumerate(tokens)}, "merges": merges},
    })
    write(path / "tokenizer_config.json", {"eos_token": tokens[end], "tokenizer_class": "PreTrainedTokenizerFast"})


def write(path, what):
    path.write_text(json.dumps(what))
