#!/usr/bin/env python3
"""What PyTorch and transformers reach on this machine's first GPU, told as the stages of `gpu prove` tell theirs: a line of
`finding` and JSON each (engine/model/examples/gpu/finding.rs). Says why it skips where they are not here.

    torch_peer.py kernels    PyTorch's copy, products and attention
    torch_peer.py model      an 8B by transformers

Its products are cuBLAS's: where they reach more than ours, they are the ceiling.
"""

import json
import sys
import time

SIDE = 8192
# Llama-3.1-8B's, as engine/model/examples/gpu/generated.rs has it.
SHAPE = dict(hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32, num_key_value_heads=8,
             vocab_size=128256, max_position_embeddings=8192, rope_theta=500000.0)
BATCHES, PROMPTS, DECODED = [1, 8, 32], [512, 2048], 32
LENGTHS = [2048, 8192]


def main():
    torch = importable("torch")
    if not torch.cuda.is_available():
        skip("PyTorch sees no GPU")
    print(f"PyTorch {torch.__version__}", flush=True)
    torch.manual_seed(0)
    with torch.inference_mode():
        if "kernels" in sys.argv[1:]:
            copy(torch)
            products(torch)
            attention(torch)
        if "model" in sys.argv[1:]:
            model(torch, importable("transformers"))


def importable(name):
    try:
        return __import__(name)
    except ImportError as error:
        return skip(str(error))


def skip(why):
    print(f"SKIPPED: {why}")
    sys.exit(0)


def tell(**finding):
    print("finding " + json.dumps(finding), flush=True)


def ceiling(of, rate, by):
    tell(kind="ceiling", of=of, rate=rate, by=by)


def figure(name, value, unit, reaches=None):
    tell(kind="figure", name=name, value=value, unit=unit, **({"reaches": reaches} if reaches else {}))


def seconds(torch, work, least=0.1):
    """Mean seconds of one call, as many as take `least` seconds together, behind a first one."""
    work()
    rounds = 1
    while True:
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(rounds):
            work()
        torch.cuda.synchronize()
        spent = time.perf_counter() - began
        if spent >= least:
            return spent / rounds
        rounds *= 2


def copy(torch):
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    ceiling("copy", 2 * source.numel() / seconds(torch, lambda: target.copy_(source)) / 1e9, "PyTorch's copy")


def products(torch):
    left, right = (torch.randn(SIDE, SIDE, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    operations = 2 * SIDE**3
    ceiling("bf16", operations / seconds(torch, lambda: left @ right.t()) / 1e12, f"PyTorch's product of {SIDE}³")
    if torch.cuda.get_device_capability() < (8, 9):
        return
    codes = [matrix.to(torch.float8_e4m3fn) for matrix in (left, right)]
    one = torch.ones((), device="cuda")
    work = lambda: torch._scaled_mm(codes[0], codes[1].t(), scale_a=one, scale_b=one, out_dtype=torch.bfloat16)
    ceiling("fp8", operations / seconds(torch, work) / 1e12, f"PyTorch's product of {SIDE}³")


def attention(torch):
    """Of prompts, by whichever kernel PyTorch takes, with as many key heads as query heads."""
    for tokens in LENGTHS:
        query, key, value = (torch.randn(1, 32, tokens, 128, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        attend = lambda: torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        rate = 4 * 32 * 128 * (tokens * (tokens + 1) // 2) / seconds(torch, attend) / 1e12
        figure(f"attention, prefill of {tokens}", rate, "TFLOP/s", ["bf16", rate])


def model(torch, transformers):
    """An 8B of random weights, eager as transformers runs it."""
    print(f"transformers {transformers.__version__}", flush=True)
    config = transformers.LlamaConfig(**SHAPE, tie_word_embeddings=False)
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        llama = transformers.LlamaForCausalLM(config).eval()
    for batch in BATCHES:
        ids = torch.randint(0, SHAPE["vocab_size"], (batch, 8), device="cuda")
        generate = lambda: llama.generate(ids, max_new_tokens=DECODED, min_new_tokens=DECODED, do_sample=False, pad_token_id=0)
        figure(f"8B bf16, decode, {batch} sequences", batch * DECODED / seconds(torch, generate), "tokens/s")
    for prompt in PROMPTS:
        ids = torch.randint(0, SHAPE["vocab_size"], (1, prompt), device="cuda")
        spent = seconds(torch, lambda: llama(ids, logits_to_keep=1).logits.argmax().item())
        figure(f"8B bf16, time to first token, a prompt of {prompt}", 1e3 * spent, "ms")
        figure(f"8B bf16, prefill of {prompt}", prompt / spent, "tokens/s")


main()
