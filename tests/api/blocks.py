"""Records what llama.cpp's own Python package makes of blocks of quantized weights, for the kernels' tests.

    python -m venv V && V/bin/pip install gguf==0.19.0
    V/bin/python tests/api/blocks.py > kernels/src/weights/tests/blocks.txt

A line is a type, the bytes of some of its blocks and the values that they stand for. Bytes are drawn at random, but for
scales, which are numbers of ordinary size.
"""

import numpy
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

# Where a block has numbers in f16.
SCALES = {
    "Q4_0": [0], "Q4_1": [0, 2], "Q5_0": [0], "Q5_1": [0, 2], "Q8_0": [0],
    "Q2_K": [80, 82], "Q3_K": [108], "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208],
    "IQ4_NL": [0], "IQ4_XS": [0], "MXFP4": [],
}


def blocks(name, draw):
    cols, size = GGML_QUANT_SIZES[GGMLQuantizationType[name]]
    made = draw.integers(0, 256, (256 // cols if cols > 32 else 4, size), dtype=numpy.uint8)
    for at in SCALES[name]:
        scales = (draw.standard_normal(len(made)) / 16).astype(numpy.float16)
        made[:, at:at + 2] = scales.view(numpy.uint8).reshape(-1, 2)
    if name == "MXFP4":
        made[:, 0] = [0, 1, 120, 133]  # exponents, the least of which are subnormal numbers
    return made.reshape(-1)


def main():
    draw = numpy.random.default_rng(20261126)
    for name in SCALES:
        made = blocks(name, draw)
        values = dequantize(made, GGMLQuantizationType[name])
        print(name, made.tobytes().hex(), *(repr(float(value)) for value in values))


main()
