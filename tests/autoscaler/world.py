"""The judge's world: pods that start, serve, drain and end, spot nodes that come and go, a gateway and a bill."""
import heapq, math, random
from collections import deque

from engine import BUDGET, EDGES, GIVE_UP, KV_TOKENS, SEQUENCES, Engine, Request, exposition

TICK, WARM, WARM_START = 5.0, 120.0, 20.0
TTFT, INTER_TOKEN, SHARE, DRAIN = 2.0, 0.2, 0.99, 300.0
LOST_READINGS = 0.02
PRICES = {"on-demand": 1.0, "spot": 0.35}
# Spot nodes are taken back one at a time, after so long on average and with so long a notice; for a while there are none.
TAKEN_EVERY, NOTICE, ABSENT = 400.0, 120.0, (1500.0, 2100.0)


class Pod:
    def __init__(self, name, born, capacity):
        self.name, self.born, self.capacity, self.engine = name, born, capacity, None
        self.placed = self.draining_since = self.reclaimed_at = None
        self.ready_at = math.inf

    def place(self, now, takes):
        """Gives it a node, on which it serves after so long."""
        self.placed, self.ready_at = now, now + takes
        self.engine = Engine(self.ready_at)

    def load(self):
        return self.engine.load() if self.engine else 0

    def is_open(self, now):
        return self.ready_at <= now and self.draining_since is None

    def phase(self, now):
        if self.draining_since is not None:
            return "Draining"
        return "Pending" if self.placed is None else "Starting" if self.ready_at > now else "Ready"


class World:
    """One run. `options` tell cold start, most replicas, seed, whether there are spot nodes, and how pods speak."""

    def __init__(self, trace, options, initial):
        self.trace, self.options, self.initial = trace, options, initial
        self.random, self.market = random.Random(options.seed), random.Random(options.seed)
        self.pods, self.names, self.gateway = [], 0, deque()
        self.warm = {capacity: [] for capacity in PRICES}
        self.paid, self.broken, self.done = 0.0, 0, []
        self.taken_next = self.market.expovariate(1 / TAKEN_EVERY) if options.spot else math.inf

    def judge(self, decide):
        """Attainment, GPU-hours as paid on demand, and broken streams, where `decide` answers ticks."""
        for _ in range(self.initial):
            self.add("on-demand", 0.0, at_once=True)
        arriving, now = deque(Request(*one) for one in self.trace), 0.0
        requests = len(arriving)
        while arriving or self.gateway or any(pod.load() for pod in self.pods):
            self.resize(decide(self.tick(now)), now)
            self.step(now, arriving)
            now += TICK
            self.interrupt(now)
            while self.gateway and now - self.gateway[0].at > GIVE_UP:
                self.done.append(self.gateway.popleft())
        for pod in list(self.pods):
            self.end(pod, now)
        attained = sum(one.attains(TTFT, INTER_TOKEN) for one in self.done)
        return attained / requests, self.paid / 3600, self.broken

    def add(self, capacity, now, at_once=False):
        self.names += 1
        pod = Pod(f"pod-{self.names}", now, capacity)
        self.pods.append(pod)
        if capacity == "on-demand" or self.has_spot(now):
            self.place(pod, now, at_once)

    def has_spot(self, now):
        return self.options.spot and not ABSENT[0] <= now < ABSENT[1]

    def place(self, pod, now, at_once=False):
        """On a node that is warm, or a new one."""
        warm = self.warm[pod.capacity]
        while warm and warm[0] < now:
            heapq.heappop(warm)
        start = WARM_START if warm else self.options.cold_start
        if warm:
            heapq.heappop(warm)
        pod.place(now, 0.0 if at_once else start * self.random.uniform(0.8, 1.2))

    def end(self, pod, now):
        self.pods.remove(pod)
        if pod.placed is None:
            return
        # Of a node that was taken away, nothing is left to be warm.
        warm = WARM if pod.reclaimed_at is None else 0.0
        self.paid += (now - pod.placed + warm) * PRICES[pod.capacity]
        if warm:
            heapq.heappush(self.warm[pod.capacity], now + warm)

    def drain(self, pod, now):
        if pod.ready_at > now:
            self.end(pod, now)
        elif pod.draining_since is None:
            pod.draining_since = now

    def resize(self, reply, now):
        wanted = max(1, min(self.options.max_replicas, reply["desiredReplicas"]))
        for pod in [pod for pod in self.pods if pod.name in (reply.get("victims") or [])]:
            self.drain(pod, now)
        for pod in [pod for pod in self.pods if pod.placed is None and self.has_spot(now)]:
            self.place(pod, now)
        on_demand = reply.get("onDemand")
        if self.options.spot and on_demand is not None:
            self.resize_kind("on-demand", min(on_demand, wanted), wanted, now)
            self.resize_kind("spot", max(0, wanted - on_demand), wanted, now)
            return
        kept = self.standing(now)
        for pod in kept[: max(0, len(kept) - wanted)]:
            self.drain(pod, now)
        for _ in range(wanted - len(kept)):
            self.add("spot" if self.has_spot(now) else "on-demand", now)

    def resize_kind(self, capacity, wanted, in_all, now):
        """A pod that serves goes once enough serve in all."""
        kept = [pod for pod in self.standing(now) if pod.capacity == capacity]
        for _ in range(wanted - len(kept)):
            self.add(capacity, now)
        for pod in kept[: max(0, len(kept) - wanted)]:
            if pod.ready_at > now or sum(other.is_open(now) for other in self.pods) > in_all:
                self.drain(pod, now)

    def standing(self, now):
        """Pods that do not drain, those first that go first: what does not serve, then the youngest."""
        kept = [pod for pod in self.pods if pod.draining_since is None]
        return sorted(kept, key=lambda pod: (pod.ready_at > now, pod.born), reverse=True)

    def interrupt(self, now):
        """Gives notice to the spot node that has been there for longest, and ends those whose time is up."""
        while self.taken_next <= now:
            self.taken_next += self.market.expovariate(1 / TAKEN_EVERY)
            on_spot = [pod for pod in self.pods if pod.capacity == "spot" and pod.placed is not None]
            for pod in [pod for pod in on_spot if pod.reclaimed_at is None][:1]:
                pod.reclaimed_at = now + NOTICE
        for pod in [pod for pod in self.pods if pod.reclaimed_at is not None and pod.reclaimed_at <= now]:
            self.cut(pod, now)

    def cut(self, pod, now):
        """Ends a pod whatever it does: its streams break, and what has no token yet goes back to the gateway."""
        broken, silent = pod.engine.evict()
        self.broken += broken
        self.gateway.extend(silent)
        self.end(pod, now)

    def route(self, request, now):
        open_ = [pod for pod in self.pods if pod.is_open(now)]
        if not open_:
            self.gateway.append(request)
            return
        pair = self.random.sample(open_, min(2, len(open_)))
        min(pair, key=Pod.load).engine.waiting.append(request)

    def step(self, now, arriving):
        """From `now` to the next tick, in parts so short that routing sees what has been done."""
        for part in range(20):
            upto = now + TICK * (part + 1) / 20
            while self.gateway and any(pod.is_open(upto) for pod in self.pods):
                self.route(self.gateway.popleft(), upto)
            while arriving and arriving[0].at < upto:
                request = arriving.popleft()
                self.route(request, request.at)
            for pod in list(self.pods):
                if pod.ready_at < upto:
                    pod.engine.run(upto, self.done)
                if pod.draining_since is None:
                    continue
                if not pod.load():
                    self.end(pod, upto)
                elif upto - pod.draining_since > DRAIN:
                    self.cut(pod, upto)

    def tick(self, now):
        oldest = now - self.gateway[0].at if self.gateway else 0.0
        return {
            "type": "tick", "t": now, "gateway": {"queued": len(self.gateway), "oldestAgeSeconds": oldest},
            "pods": [self.told(pod, now) for pod in self.pods],
        }

    def told(self, pod, now):
        is_ready = pod.ready_at <= now
        said = None
        if is_ready and self.random.random() >= LOST_READINGS:
            said = pod.engine.said(now, TICK)
        if self.options.prometheus:
            speaks = {"prometheus": said and exposition(said)}
        else:
            speaks = {"metrics": said}
        return {
            "name": pod.name, "phase": pod.phase(now), "capacityType": pod.capacity, "ageSeconds": now - pod.born,
            "readySeconds": now - pod.ready_at if is_ready else None,
            "reclaimInSeconds": None if pod.reclaimed_at is None else pod.reclaimed_at - now, **speaks,
        }

    def hello(self, scenario):
        return {
            "type": "hello", "protocol": 1, "scenario": scenario, "scrapeIntervalSeconds": TICK,
            "spec": {
                "minReplicas": 1, "maxReplicas": self.options.max_replicas, "initialReplicas": self.initial,
                "targets": {"ttftSeconds": TTFT, "interTokenSeconds": INTER_TOKEN, "share": SHARE},
                "drainTimeoutSeconds": DRAIN,
                "spot": {"available": self.options.spot, "interruptionHandler": "none"},
            },
            "engine": {"kvCacheTokens": KV_TOKENS, "maxNumSeqs": SEQUENCES, "maxNumBatchedTokens": BUDGET},
            "histogramEdges": {"ttft": EDGES, "interToken": EDGES, "e2e": EDGES},
        }
