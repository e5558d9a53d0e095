"""Checkpoints of a tiny random model as other tools write them, recorded with transformers' logits for the engine's tests.

tiny.py base FOLDER makes the model in FOLDER/base, and a wider one in FOLDER/wide; tiny.py NAME FOLDER TEXT DATA makes its
checkpoint NAME in FOLDER/NAME, and keeps in DATA/NAME what the engine reads.
"""

import pathlib
import shutil
import sys

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from checkpoints import Model, make

VOCABULARY = 64
# No matrix is square but those of attention; rows of more than one group; what every tool takes.
CONFIG = LlamaConfig(
    vocab_size=VOCABULARY, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
    num_key_value_heads=1, max_position_embeddings=512, tie_word_embeddings=True, initializer_range=0.2,
)
# bitsandbytes' blocks of 64 are rows' own in this one, as those of models that are used: elsewhere it widens them wrongly.
WIDE = LlamaConfig(**(CONFIG.to_diff_dict() | {"intermediate_size": 128}))
OF_WIDE = ("bitsandbytes-nf4", "bitsandbytes-fp4")
KEPT = ["config.json", "model.safetensors", "tokens.txt", "logits.f32"]


def main(name, folder, text=None, data=None):
    torch.manual_seed(1)
    folder = pathlib.Path(folder)
    if name == "base":
        return base(folder / "base", CONFIG), base(folder / "wide", WIDE)
    text = pathlib.Path(text).read_text(encoding="utf-8")
    model = Model(folder / ("wide" if name in OF_WIDE else "base"), text, group=32, tokens=24, dtype=torch.bfloat16)
    make(name, model, folder / name)
    kept = pathlib.Path(data) / name
    shutil.rmtree(kept, ignore_errors=True)
    kept.mkdir(parents=True)
    for file in KEPT:
        shutil.copy(folder / name / file, kept)


def base(folder, config):
    tokenizer().save_pretrained(folder)
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    model.to(torch.bfloat16).save_pretrained(folder)


def tokenizer():
    """A token for each character, which is all that tools that calibrate on text need."""
    letters = {chr(code): code - 64 for code in range(64, 64 + VOCABULARY)}
    tokenizer = Tokenizer(models.WordLevel(letters, unk_token="@"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="@")


if __name__ == "__main__":
    main(*sys.argv[1:])
