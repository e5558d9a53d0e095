"""Writes a model of Llama-3.2-1B's shape with random weights in F16, and the tokenizer of another GGUF file.

Usage: random_llama.py TOKENIZER.gguf OUT.gguf

The vocabulary is cut to 32768 tokens: the tied output matrix is 67 million weights instead of Llama's 263 million.
Speed depends on the shape alone; the weights have the spread that Llama's initialization gives them.
"""

import sys

import numpy as np
from gguf import GGUFReader, GGUFWriter

LAYERS, HIDDEN, HEADS, KV_HEADS, FEED_FORWARD, VOCABULARY, CONTEXT = 16, 2048, 32, 8, 8192, 32768, 8192
SPREAD = 0.02
# What adds to the residual stream is smaller, so that its size does not grow with the layers.
RESIDUAL_SPREAD = SPREAD / np.sqrt(2 * LAYERS)

# Rows, columns and spread of a layer's matrices.
MATRICES = {
    "attn_q": (HIDDEN, HIDDEN, SPREAD),
    "attn_k": (HIDDEN // HEADS * KV_HEADS, HIDDEN, SPREAD),
    "attn_v": (HIDDEN // HEADS * KV_HEADS, HIDDEN, SPREAD),
    "attn_output": (HIDDEN, HIDDEN, RESIDUAL_SPREAD),
    "ffn_gate": (FEED_FORWARD, HIDDEN, SPREAD),
    "ffn_up": (FEED_FORWARD, HIDDEN, SPREAD),
    "ffn_down": (HIDDEN, FEED_FORWARD, RESIDUAL_SPREAD),
}


def main(tokenizer, out):
    writer = GGUFWriter(out, "llama")
    shape(writer)
    vocabulary(writer, GGUFReader(tokenizer).fields)
    weights(writer, np.random.default_rng(seed=1))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def shape(writer):
    writer.add_name("random of Llama-3.2-1B's shape")
    writer.add_file_type(1)
    writer.add_quantization_version(2)
    writer.add_block_count(LAYERS)
    writer.add_context_length(CONTEXT)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(500_000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(VOCABULARY)


def vocabulary(writer, fields):
    def read(key):
        return fields[f"tokenizer.{key}"].contents()

    tokens = read("ggml.tokens")[:VOCABULARY]
    known = set(tokens)
    writer.add_tokenizer_model(read("ggml.model"))
    writer.add_tokenizer_pre(read("ggml.pre"))
    writer.add_token_list(tokens)
    writer.add_token_types(read("ggml.token_type")[:VOCABULARY])
    writer.add_token_merges([merge for merge in read("ggml.merges") if merge.replace(" ", "") in known])
    writer.add_bos_token_id(read("ggml.bos_token_id"))
    writer.add_eos_token_id(read("ggml.eos_token_id"))
    writer.add_add_bos_token(False)
    writer.add_chat_template(read("chat_template"))


def weights(writer, random):
    def matrix(name, rows, cols, spread):
        values = random.standard_normal((rows, cols), dtype=np.float32) * np.float32(spread)
        writer.add_tensor(f"{name}.weight", values.astype(np.float16))

    def norm(name):
        writer.add_tensor(f"{name}.weight", np.ones(HIDDEN, dtype=np.float32))

    matrix("token_embd", VOCABULARY, HIDDEN, SPREAD)
    for layer in range(LAYERS):
        norm(f"blk.{layer}.attn_norm")
        norm(f"blk.{layer}.ffn_norm")
        for name, size in MATRICES.items():
            matrix(f"blk.{layer}.{name}", *size)
    norm("output_norm")


main(*sys.argv[1:])
