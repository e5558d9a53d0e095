"""Requests over time, as (seconds, prompt tokens, output tokens), and variants of them."""
import gzip, math, random

# Each copy of a request comes within this time of it.
SPREAD = 10.0
ROUNDS = {"as-it-is": 1, "bursty": 1, "diurnal": 4}


def read(path):
    """Lines of `milliseconds,prompt tokens,output tokens` below a heading."""
    with (gzip.open if path.suffix == ".gz" else open)(path, "rt") as file:
        next(file)
        lines = [line.split(",") for line in file if line.strip()]
    return sorted((float(at) / 1000, max(1, int(prompt)), max(1, int(output))) for at, prompt, output in lines)


def vary(originals, variant, scale, seed):
    """`scale` times as many; bursty: three times that in the first minute of every ten; diurnal: four times over, from a
    fifth of them at night to all of them at noon."""
    chance, length = random.Random(seed), originals[-1][0] + 1
    whole = length * ROUNDS[variant]
    copies = {
        "as-it-is": lambda at: scale,
        "bursty": lambda at: scale * (3 if at % 600 < 60 else 1),
        "diurnal": lambda at: scale * (0.6 - 0.4 * math.cos(math.tau * at / whole)),
    }[variant]
    varied = []
    for turn in range(ROUNDS[variant]):
        for at, prompt, output in originals:
            at += turn * length
            count = int(copies(at) + chance.random())
            varied += [(at + chance.uniform(0, SPREAD) * (copy > 0), prompt, output) for copy in range(count)]
    return sorted(varied)
