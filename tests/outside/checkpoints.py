"""Checkpoints as other tools write them, one function each, and transformers' logits of them.

checkpoints.py NAME FOLDER TEXT makes SmolLM2-135M's checkpoint NAME in FOLDER/NAME, with `tokens.txt` and `logits.f32` of the
first tokens of TEXT; `checkpoints.py list` names them all, `checkpoints.py bounds NAME` what is demanded of one. The model that
is quantized lies in FOLDER/base (checkpoints.py base FOLDER GGUF). tiny.py makes those of a tiny model.
"""

import json
import pathlib
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from transformers import AutoModelForCausalLM, AutoRoundConfig, AutoTokenizer, BitsAndBytesConfig

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
    # SmolLM2's 576 is a multiple of 64.
    make(name, Model(folder / "base", pathlib.Path(text).read_text(encoding="utf-8"), group=64, tokens=256), folder / name)


@dataclass
class Model:
    """What is quantized in groups of so many inputs, and a text: its first tokens are compared, the others calibrate."""
    base: pathlib.Path
    text: str
    group: int
    tokens: int
    dtype: torch.dtype = torch.float32

    def tokenizer(self):
        return AutoTokenizer.from_pretrained(self.base)

    def weights(self):
        return AutoModelForCausalLM.from_pretrained(self.base, dtype=self.dtype)

    def compared(self):
        return self.tokenizer()(self.text).input_ids[:self.tokens]

    def rows(self):
        tokens = self.tokenizer()(self.text).input_ids[self.tokens:]
        starts = range(0, CALIBRATION_ROWS * CALIBRATION_TOKENS, CALIBRATION_TOKENS)
        return [tokens[start:start + CALIBRATION_TOKENS] for start in starts]


def make(name, model, made):
    shutil.rmtree(made, ignore_errors=True)
    CHECKPOINTS[name].make(model, made)
    write_reference(made, CHECKPOINTS[name].widened(made), model.compared())


def base(folder, gguf):
    """The model in bf16, out of the GGUF file that the tests have."""
    named = {"pretrained_model_name_or_path": gguf.parent, "gguf_file": gguf.name}
    AutoTokenizer.from_pretrained(**named).save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(**named, dtype=torch.bfloat16)
    # Its weights are widened; what says that they are not would keep it from being saved.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(folder)


def write_reference(folder, model, tokens):
    with torch.inference_mode():
        logits = model(torch.tensor([tokens])).logits[0].float()
    (folder / "tokens.txt").write_text(" ".join(map(str, tokens)))
    logits.numpy().astype("<f4").tofile(folder / "logits.f32")


def widened(folder):
    """In f32, on weights as the checkpoint's own library widens them; inputs are not rounded, as each program has its own way."""
    method = json.loads((folder / "config.json").read_text())["quantization_config"]["quant_method"]
    # Of GPTQ's and AWQ's layouts transformers leaves the reading to other libraries, of which auto-round is one.
    reader = {"quantization_config": AutoRoundConfig()} if method in ("gptq", "awq") else {}
    model, found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, **reader)
    assert not found["missing_keys"], f"transformers makes up {found['missing_keys']}"
    model.eval()
    if method == "bitsandbytes":
        model = model.dequantize(dtype=torch.float32)
    for module in model.modules():
        module.quantization_enabled = False
    return model


# llm-compressor, which writes compressed-tensors.

def compressor(recipe, calibrated=True):
    def make(model, made):
        from datasets import Dataset
        from llmcompressor import oneshot

        weights, rows = model.weights(), model.rows()
        data = Dataset.from_dict({"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]})
        given = {"dataset": data, "max_seq_length": CALIBRATION_TOKENS, "num_calibration_samples": len(rows)}
        oneshot(model=weights, recipe=recipe(model.group), **(given if calibrated else {}))
        weights.save_pretrained(made, save_compressed=True)
    return make


def integers(bits, **more):
    """A scheme of integers for weights alone."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    arguments = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", **more}
    return {"group_0": QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**arguments))}


def gptq_of_compressor(bits, **more):
    def recipe(group):
        from llmcompressor.modifiers.quantization import GPTQModifier

        return [GPTQModifier(config_groups=integers(bits, group_size=group, **more), ignore=["lm_head"])]
    return recipe


def awq_of_compressor(group):
    from llmcompressor.modifiers.transform.awq import AWQModifier
    from llmcompressor.modifiers.quantization import QuantizationModifier
    from llmcompressor.pipelines.cache import IntermediatesCache

    # It would pin memory for a GPU that is not there.
    IntermediatesCache.pin_memory = lambda self, batch_index, input_names=None: None
    scheme = integers(4, group_size=group, symmetric=False)
    # Four scales are tried for each input instead of twenty, which takes a fifth of the time.
    return [AWQModifier(n_grid=4), QuantizationModifier(config_groups=scheme, ignore=["lm_head"])]


def scheme(name, smooth=False):
    def recipe(_):
        from llmcompressor.modifiers.quantization import QuantizationModifier
        from llmcompressor.modifiers.transform.smoothquant import SmoothQuantModifier

        quantized = QuantizationModifier(targets="Linear", scheme=name, ignore=["lm_head"])
        return [SmoothQuantModifier(smoothing_strength=0.8), quantized] if smooth else [quantized]
    return recipe


# auto-round, in its own format and in others'.

def auto_round(format="auto_round", **more):
    def make(model, made):
        from auto_round import AutoRound

        tokenizer = model.tokenizer()
        data, work = made.with_suffix(".json"), made.with_suffix(".work")
        data.write_text(json.dumps([{"text": tokenizer.decode(row)} for row in model.rows()]))
        arguments = {"bits": 4, "group_size": model.group, "sym": True, "iters": 4, "seqlen": 128, "nsamples": CALIBRATION_ROWS}
        tool = AutoRound(model.weights(), tokenizer, dataset=str(data), device_map="cpu", **(arguments | more))
        tool.quantize_and_save(str(work), format=format)
        # It saves into a folder of its own choice within.
        next(work.rglob("config.json")).parent.rename(made)
        shutil.rmtree(work, ignore_errors=True)
    return make


# GPTQModel, in GPTQ's own layout.

def gptq_model(**arguments):
    def make(model, made):
        from gptqmodel import GPTQModel, QuantizeConfig

        config = QuantizeConfig(group_size=model.group, offload_to_disk=False, **arguments)
        quantized = GPTQModel.load(str(model.base), config, device="cpu")
        quantized.quantize([{"input_ids": row, "attention_mask": [1] * len(row)} for row in model.rows()], batch_size=1)
        quantized.save(str(made))
    return make


def widened_by_gptq_model(folder):
    """It multiplies in 16 bits alone: so each matrix as it widens it takes its place in transformers' model."""
    from gptqmodel import GPTQModel

    model = GPTQModel.load(str(folder), device="cpu", backend="torch", dtype=torch.float16).model
    packed = {name: module for name, module in model.named_modules() if hasattr(module, "dequantize_weight")}
    assert packed, "nothing is quantized"
    for name, module in packed.items():
        module.scales.data = module.scales.data.float()
        weight = module.dequantize_weight().T.float().contiguous()
        linear = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False)
        linear.weight.data = weight
        model.set_submodule(name, linear)
    return model.float().eval()


# bitsandbytes, through transformers.

def bitsandbytes(**arguments):
    def make(model, made):
        quantization = BitsAndBytesConfig(**arguments)
        weights = AutoModelForCausalLM.from_pretrained(model.base, dtype=model.dtype, quantization_config=quantization, device_map="cpu")
        weights.save_pretrained(made)
    return make


@dataclass
class Checkpoint:
    """How one is made, and how near the engine's logits must be: mean KL in nats, share of the same first choice. Then how it is
    read for transformers."""
    make: Callable
    most_kl: float = 1e-3
    least_top_1: float = 0.99
    widened: Callable = widened


def of_gptq_model(most_kl=1e-3, least_top_1=0.98, **arguments):
    return Checkpoint(gptq_model(**arguments), most_kl, least_top_1, widened_by_gptq_model)


CHECKPOINTS = {
    "w4a16": Checkpoint(compressor(gptq_of_compressor(4))),
    "w4a16-asymmetric": Checkpoint(compressor(gptq_of_compressor(4, symmetric=False))),
    "w4a16-awq": Checkpoint(compressor(awq_of_compressor)),
    "w8a16": Checkpoint(compressor(gptq_of_compressor(8))),
    "w8a8-int8": Checkpoint(compressor(scheme("W8A8"))),
    "w8a8-smoothed": Checkpoint(compressor(scheme("W8A8", smooth=True))),
    # Eight-bit floats become blocks of eight-bit integers here, which are other numbers.
    "w8a8-fp8": Checkpoint(compressor(scheme("FP8")), 2e-3, 0.97),
    "fp8-dynamic": Checkpoint(compressor(scheme("FP8_DYNAMIC"), calibrated=False), 2e-3, 0.97),
    # Of 256 tokens a few are followed by two that are as likely.
    "auto-round": Checkpoint(auto_round(), least_top_1=0.98),
    "auto-round-gptq": Checkpoint(auto_round("auto_gptq"), least_top_1=0.98),
    "auto-round-awq": Checkpoint(auto_round("auto_awq", sym=False), least_top_1=0.98),
    # Of this model such codes leave little: transformers' own logits with keys and values in f16 have a mean KL of 0.16 from those
    # with f32, and 73 % the same first choice.
    "gptqmodel-2-bits": of_gptq_model(0.3, 0.6, bits=2),
    "gptqmodel-3-bits": of_gptq_model(bits=3),
    "gptqmodel-4-bits-ordered": of_gptq_model(bits=4, desc_act=True),
    "gptqmodel-8-bits": of_gptq_model(bits=8),
    "bitsandbytes-int8": Checkpoint(bitsandbytes(load_in_8bit=True)),
    # Tables of sixteen become blocks of eight-bit integers here.
    "bitsandbytes-nf4": Checkpoint(bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True), 2e-3, 0.97),
    "bitsandbytes-fp4": Checkpoint(bitsandbytes(load_in_4bit=True, bnb_4bit_quant_type="fp4"), 2e-3, 0.97),
}

if __name__ == "__main__":
    main(*sys.argv[1:])
