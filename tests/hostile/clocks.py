"""What time tells."""

import json
import math
import random
import time

from server import KEYS, Seen, request


async def keys(server, count=20_000):
    """Whether a wrong key takes longer the more of its beginning is right."""
    right, random_order = KEYS["right"], random.Random(1)
    times = {shared: [] for shared in (0, 31)}
    reader, writer = await server.connect()
    for number in range(count):
        shared = random_order.choice(list(times)) if number % 4 == 0 else random_order.randrange(32)
        key = right[:shared] + "x" * (32 - shared)
        began = time.perf_counter_ns()
        writer.write(request("/v1/models", key=key).replace(b"Connection: close\r\n", b""))
        head = await reader.readuntil(b"\r\n\r\n")
        length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
        await reader.readexactly(length)
        if shared in times:
            times[shared].append(time.perf_counter_ns() - began)
        if not head.startswith(b"HTTP/1.1 401"):
            yield Seen(f"a wrong key is answered {head[:20]!r}", "401", False)
    writer.close()
    chance = kolmogorov_smirnov(times[0], times[31])
    yield Seen(f"nothing and all but a byte right: alike with p = {chance:.3f}", "p ≥ 0.01", chance >= 0.01)


async def sharing(server, samples=250):
    """Whether one tenant can tell what another asked; and, as a control, that one can tell what oneself asked."""
    for asker, bar in (("other", "p > 0.01"), ("right", "p < 1e-8")):
        fresh, known, cached = [], [], 0
        for number in range(2 * samples):
            prompt = f"{asker} {number} " + " ".join(random.Random(number).choices(WORDS, k=1500))
            if number % 2:
                await complete(server, prompt, "right")
            seconds, found = await complete(server, prompt, asker)
            (known if number % 2 else fresh).append(seconds)
            cached += found
        chance = kolmogorov_smirnov(fresh, known)
        apart = asker == "other"
        held = chance > 0.01 and cached == 0 if apart else chance < 1e-8 and cached > 0
        yield Seen(f"tenant asks what {'another' if apart else 'it'} asked: p = {chance:.1e}, {cached} cached tokens", bar, held)


WORDS = "time year people way day man thing woman life child world school state family student group country".split()


async def complete(server, prompt, key):
    began = time.perf_counter()
    status, body = await server.ask("/v1/completions", {"model": "m", "prompt": prompt, "max_tokens": 1}, key)
    seconds = time.perf_counter() - began
    assert status == 200, body
    return seconds, json.loads(body)["usage"].get("prompt_tokens_details", {}).get("cached_tokens", 0)


def kolmogorov_smirnov(one, other):
    """The chance of two samples as far apart as these from one distribution (two-sided, asymptotic)."""
    merged = sorted([(value, 1 / len(one)) for value in one] + [(value, -1 / len(other)) for value in other])
    distance = height = 0.0
    for index, (value, step) in enumerate(merged):
        height += step
        if index + 1 == len(merged) or merged[index + 1][0] != value:
            distance = max(distance, abs(height))
    effective = math.sqrt(len(one) * len(other) / (len(one) + len(other)))
    scaled = (effective + 0.12 + 0.11 / effective) * distance
    if scaled < 0.2:
        return 1.0
    return min(1.0, 2 * sum((-1) ** (k - 1) * math.exp(-2 * (k * scaled) ** 2) for k in range(1, 101)))
