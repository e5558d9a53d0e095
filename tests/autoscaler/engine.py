"""One engine of the judge's world: a queue, a batch and a clock that goes from step to step."""
import bisect, heapq
from collections import deque

# About an 8B model on one A100: 6,000 prompt tokens a second, 16 ms a step, more with each sequence.
STEP, PROMPT_TOKEN, SEQUENCE = 0.016, 1 / 6000, 3e-4
BUDGET, SEQUENCES, KV_TOKENS = 4096, 128, 300_000
GIVE_UP = 60.0
EDGES = [0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1, 1.5, 2, 3, 5, 10, 30, 60]


class Request:
    __slots__ = ("at", "prompt", "output", "computed", "first", "last")

    def __init__(self, at, prompt, output):
        self.at, self.prompt, self.output = at, prompt, output
        self.computed, self.first, self.last = 0, None, None

    def attains(self, first_token, inter_token):
        """Whether it ended, with both targets held."""
        if self.last is None or self.first - self.at > first_token:
            return False
        return self.output == 1 or (self.last - self.first) / (self.output - 1) <= inter_token


class Histogram:
    def __init__(self):
        self.counts, self.sum = [0] * (len(EDGES) + 1), 0.0

    def add(self, value, times=1):
        self.counts[bisect.bisect_left(EDGES, value)] += times
        self.sum += value * times

    def said(self):
        total, cumulative = 0, []
        for count in self.counts:
            total += count
            cumulative.append(total)
        return {"cumulative": cumulative, "sum": self.sum}


class Engine:
    """Steps give every sequence a token and spend what is left of their budget on prompts, in order of arrival."""

    def __init__(self, now):
        self.clock, self.busy, self.told, self.steps, self.order = now, 0.0, 0.0, 0, 0
        # Sequences that decode, by the step that gives them their last token.
        self.waiting, self.prefilling, self.decoding = deque(), [], []
        self.reserved = self.held = self.prompts = self.generated = self.finished = 0
        self.ttft, self.inter_token, self.e2e = Histogram(), Histogram(), Histogram()

    def running(self):
        return len(self.prefilling) + len(self.decoding)

    def load(self):
        return len(self.waiting) + self.running()

    def run(self, until, done):
        """To `until`, or the end of the step under way then; `done` takes what ended or was given up."""
        while self.clock < until:
            while self.waiting and self.clock - self.waiting[0].at > GIVE_UP:
                done.append(self.waiting.popleft())
            while self.waiting and self.waiting[0].at <= self.clock and self.running() < SEQUENCES and self.fits():
                self.admit(self.waiting.popleft())
            if self.prefilling or self.decoding:
                self.step(until, done)
            else:
                self.clock = max(self.clock, self.waiting[0].at) if self.waiting else until

    def fits(self):
        length = self.waiting[0].prompt + self.waiting[0].output
        return not self.running() or self.reserved + length <= KV_TOKENS

    def admit(self, one):
        self.reserved += one.prompt + one.output
        self.prefilling.append(one)

    def step(self, until, done):
        decoding, budget, chunk = len(self.decoding), BUDGET - len(self.decoding), 0
        for one in self.prefilling:
            part = min(budget, one.prompt - one.computed)
            one.computed, budget, chunk = one.computed + part, budget - part, chunk + part
        took = STEP + chunk * PROMPT_TOKEN + decoding * SEQUENCE
        times = 1
        if not self.prefilling and not self.waiting:
            # Equal steps, up to the one that ends a sequence.
            times = max(1, min(self.decoding[0][0] - self.steps, -int((self.clock - until) // took)))
        self.steps += times
        self.clock += took * times
        self.busy += took * times
        self.prompts += chunk
        self.generated += decoding * times
        self.held += chunk + decoding * times
        if decoding:
            self.inter_token.add(took, decoding * times)
        self.begin([one for one in self.prefilling if one.computed == one.prompt])
        while self.decoding and self.decoding[0][0] <= self.steps:
            self.end(heapq.heappop(self.decoding)[2], done)

    def begin(self, computed):
        """Gives their first token to those whose prompt is computed."""
        if computed:
            self.prefilling = [one for one in self.prefilling if one.computed < one.prompt]
        for one in computed:
            one.first = self.clock
            self.ttft.add(self.clock - one.at)
            self.generated, self.held, self.order = self.generated + 1, self.held + 1, self.order + 1
            heapq.heappush(self.decoding, (self.steps + one.output - 1, self.order, one))

    def end(self, one, done):
        one.last = self.clock
        self.reserved -= one.prompt + one.output
        self.held -= one.prompt + one.output
        self.finished += 1
        self.e2e.add(self.clock - one.at)
        done.append(one)

    def evict(self):
        """Takes everything out: streams that break, and requests that have no token yet."""
        silent = [*self.prefilling, *self.waiting]
        for one in silent:
            one.computed = 0
        return len(self.decoding), silent

    def said(self, now, interval):
        busy, self.told = self.busy - self.told, self.busy
        return {
            "running": self.running(), "waiting": len(self.waiting),
            "oldestQueueAgeSeconds": max(0.0, now - self.waiting[0].at) if self.waiting else 0.0,
            "kvUsage": min(1.0, self.held / KV_TOKENS), "gpuUtilization": min(1.0, busy / interval),
            "promptTokensTotal": self.prompts, "generationTokensTotal": self.generated,
            "requestsFinishedTotal": self.finished, "ttft": self.ttft.said(), "interToken": self.inter_token.said(),
            "e2e": self.e2e.said(),
        }


def exposition(said):
    """The same as an engine would write it for Prometheus."""
    names = {
        "vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting",
        "vllm:kv_cache_usage_perc": "kvUsage", "windlass:oldest_queued_request_age_seconds": "oldestQueueAgeSeconds",
        "windlass:gpu_utilization_ratio": "gpuUtilization", "vllm:prompt_tokens_total": "promptTokensTotal",
        "vllm:generation_tokens_total": "generationTokensTotal", "vllm:request_success_total": "requestsFinishedTotal",
    }
    lines = [f'{name}{{model_name="m"}} {said[field]}' for name, field in names.items()]
    histograms = {"time_to_first_token": "ttft", "inter_token_latency": "interToken", "e2e_request_latency": "e2e"}
    for name, field in histograms.items():
        counts = zip([*EDGES, "+Inf"], said[field]["cumulative"])
        lines += [f'vllm:{name}_seconds_bucket{{model_name="m",le="{edge}"}} {count}' for edge, count in counts]
        lines.append(f'vllm:{name}_seconds_sum{{model_name="m"}} {said[field]["sum"]}')
    return "\n".join(lines) + "\n"
