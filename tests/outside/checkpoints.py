"""Checkpoints of SmolLM2-135M as other tools write them, one function each, and transformers' logits of them.

checkpoints.py NAME FOLDER TEXT makes checkpoint NAME in FOLDER/NAME, with `tokens.txt` and `logits.f32` of the first tokens of
TEXT; `checkpoints.py list` names them all, `checkpoints.py bounds NAME` what is demanded of one. The model that is quantized
lies in FOLDER/base (checkpoints.py base FOLDER GGUF).
"""

import json
import pathlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

TOKENS = 256
GROUP = 64  # what SmolLM2's 576 is a multiple of
CALIBRATION_ROWS, CALIBRATION_TOKENS = 16, 256


def main(name, folder=None, text=None):
    if name == "list":
        return print(*CHECKPOINTS)
    if name == "bounds":
        return print(CHECKPOINTS[folder].most_kl, CHECKPOINTS[folder].least_top_1)
    torch.manual_seed(1)
    folder = pathlib.Path(folder)
    if name == "base":
        return base(folder / "base", pathlib.Path(text))
    made = folder / name
    shutil.rmtree(made, ignore_errors=True)
    text = pathlib.Path(text).read_text(encoding="utf-8")
    CHECKPOINTS[name].make(folder / "base", made, text)
    write_reference(made, text)


def base(folder, gguf):
    """The model in bf16, out of the GGUF file that the tests have."""
    named = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**named).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.bfloat16)
    # Its weights are widened; what says that they are not would keep it from being saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)


def write_reference(folder, text):
    """In f32, on weights as the checkpoint's own library widens them; inputs are not rounded, as each program has its own way."""
    tokens = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :TOKENS]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    for module in model.modules():
        module.quantization_enabled = False
    with torch.inference_mode():
        logits = model(tokens).logits[0].float()
    (folder / "tokens.txt").write_text(" ".join(map(str, tokens[0].tolist())))
    logits.numpy().astype("<f4").tofile(folder / "logits.f32")


def rows(tokenizer, text):
    """Texts to calibrate on, behind those that are compared."""
    tokens = tokenizer(text).input_ids[TOKENS:]
    starts = range(0, CALIBRATION_ROWS * CALIBRATION_TOKENS, CALIBRATION_TOKENS)
    return [tokens[start:start + CALIBRATION_TOKENS] for start in starts]


# llm-compressor, which writes compressed-tensors.

def compressor(recipe, calibrated=True):
    def make(base, made, text):
        from datasets import Dataset
        from llmcompressor import oneshot

        model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(base)
        texts = rows(tokenizer, text)
        data = Dataset.from_dict({"input_ids": texts, "attention_mask": [[1] * len(row) for row in texts]})
        given = {"dataset": data, "max_seq_length": CALIBRATION_TOKENS, "num_calibration_samples": len(texts)}
        oneshot(model=model, recipe=recipe(), **(given if calibrated else {}))
        model.save_pretrained(made, save_compressed=True)
        tokenizer.save_pretrained(made)
    return make


def weights(bits, **more):
    """A scheme of integers for weights alone."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": GROUP, **more}
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))}


def gptq_of_compressor(bits, **more):
    def recipe():
        from llmcompressor.modifiers.quantization import GPTQModifier

        return [GPTQModifier(config_groups=weights(bits, **more), ignore=["lm_head"])]
    return recipe


def scheme(name, smooth=False):
    def recipe():
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

        quantized = QuantizationModifier(targets="Linear", scheme=name, ignore=["lm_head"])
        return [SmoothQuantModifier(smoothing_strength=0.8), quantized] if smooth else [quantized]
    return recipe


# auto-round, in its own format.

def auto_round(base, made, text):
    from auto_round import AutoRound

    tokenizer = AutoTokenizer.from_pretrained(base)
    data, work = made.with_suffix(".json"), made.with_suffix(".work")
    data.write_text(json.dumps([{"text": tokenizer.decode(row)} for row in rows(tokenizer, text)]))
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    arguments = {"bits": 4, "group_size": GROUP, "iters": 4, "seqlen": 128, "nsamples": CALIBRATION_ROWS}
    AutoRound(model, tokenizer, dataset=str(data), device_map="cpu", **arguments).quantize_and_save(str(work), format="auto_round")
    # It saves into a folder of its own choice within.
    next(work.glob("*/config.json")).parent.rename(made)
    shutil.rmtree(work)


@dataclass
class Checkpoint:
    """How one is made, and how near the engine's logits must be: mean KL in nats, share of the same first choice."""
    make: Callable
    most_kl: float = 1e-3
    least_top_1: float = 0.99


CHECKPOINTS = {
    "w4a16": Checkpoint(compressor(gptq_of_compressor(4))),
    "w4a16-asymmetric": Checkpoint(compressor(gptq_of_compressor(4, symmetric=False))),
    "w8a16": Checkpoint(compressor(gptq_of_compressor(8))),
    "w8a8-int8": Checkpoint(compressor(scheme("W8A8"))),
    "w8a8-smoothed": Checkpoint(compressor(scheme("W8A8", smooth=True))),
    # Eight-bit floats become blocks of eight-bit integers here, which are other numbers.
    "w8a8-fp8": Checkpoint(compressor(scheme("FP8")), 2e-3, 0.97),
    "fp8-dynamic": Checkpoint(compressor(scheme("FP8_DYNAMIC"), calibrated=False), 2e-3, 0.97),
    # Of 256 tokens a few are followed by two that are as likely.
    "auto-round": Checkpoint(auto_round, least_top_1=0.98),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
