"""The server under attack, and what is watched beside the attack."""

import asyncio
import contextlib
import json
import os
import pathlib
import re
import statistics
import tempfile
import time
from dataclasses import dataclass

from container import Container

CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "windlass"
MODEL = os.environ.get("WINDLASS_MODEL") or str(CACHE / "models/SmolLM2-135M-Instruct.Q4_1.gguf")
PROGRAM = os.environ.get("WINDLASS_ENGINE") or pathlib.Path(__file__).resolve().parents[2] / "target/release/windlass-engine"
# So that a step lasts about as long as on a device, and a token every 10 ms is what the canary should see.
STEPS = ["--sim-step-us=10000", "--sim-prefill-token-us=1", "--sim-decode-sequence-us=1", "--sim-context-token-us=0"]
KEYS = {"right": "k" * 32, "other": "o" * 32}
MIB = 1 << 20
LEAST_GAPS = 300


@dataclass
class Seen:
    what: str
    bar: str
    held: bool
    is_of_memory: bool = False


class Server:
    """`windlass-engine serve` with two tenants, in a container of so many MiB if told so; `async with` starts and ends it."""

    def __init__(self, memory=None):
        self.container = Container(memory) if memory else None
        # As many as a small container's pool of keys and values holds.
        self.canary_tokens = 2000 if memory is None else LEAST_GAPS

    async def __aenter__(self):
        self.keys = tempfile.NamedTemporaryFile("w", suffix=".keys")
        self.keys.write("".join(f"{tenant} {key}\n" for tenant, key in KEYS.items()))
        self.keys.flush()
        flags = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--log-format", "json"]
        flags += ["--api-key-file", self.keys.name, "--served-model-name", "m"]
        flags += [] if self.container else ["--executor", "sim", "--sim-mean-answer-tokens=0", *STEPS]
        enter = self.container.__enter__().enter if self.container else None
        self.process = await asyncio.create_subprocess_exec(
            PROGRAM, "serve", MODEL, *flags, stderr=asyncio.subprocess.PIPE, preexec_fn=enter
        )
        async for line in self.process.stderr:
            if found := re.search(rb'"message":"serving","api":"([^":]*):(\d+)","admin":"[^":]*:(\d+)"', line):
                self.host, self.port, self.admin_port = found[1].decode(), int(found[2]), int(found[3])
                self.log = asyncio.create_task(self.read_log())
                return self
        raise SystemExit("the server ended before it served")

    async def __aexit__(self, *_):
        if self.process.returncode is None:
            self.process.kill()
        await self.process.wait()
        self.log.cancel()
        if self.container:
            await self.container_is_empty()
            self.container.__exit__()

    async def container_is_empty(self):
        """Its other processes end when they are not spoken to any more."""
        while (self.container.folder / "cgroup.procs").read_text():
            await asyncio.sleep(0.1)

    async def read_log(self):
        async for _ in self.process.stderr:
            pass

    async def connect(self, admin=False):
        return await asyncio.open_connection(self.host, self.admin_port if admin else self.port)

    async def send(self, data, silence=60, admin=False):
        """All that the server says to `data` until it closes the connection, or says nothing for so many seconds."""
        reader, writer = await self.connect(admin)
        with contextlib.suppress(ConnectionError):
            writer.write(data)
            await writer.drain()
        said = b""
        with contextlib.suppress(ConnectionError, TimeoutError):
            while part := await asyncio.wait_for(reader.read(1 << 16), silence):
                said += part
        writer.close()
        return said

    async def ask(self, path, body=None, key="right"):
        """Status and body of an answer."""
        answer = await self.send(request(path, body, KEYS.get(key, key)))
        head, _, rest = answer.partition(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1] if head else 0), rest

    def resident_bytes(self):
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+) kB", status)[1]) * 1024

    @contextlib.asynccontextmanager
    async def watched(self):
        """Watches beside the block; what was seen is complete after it."""
        watch = Watch(self)
        await watch.quiet()
        async with watch:
            yield watch


def request(path, body=None, key=KEYS["right"]):
    """A request with a body of JSON, which may be written already."""
    method = "GET" if body is None else "POST"
    body = body if isinstance(body, bytes) else b"" if body is None else json.dumps(body).encode()
    head = f"{method} {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nAuthorization: Bearer {key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class Watch:
    """A stream's time between tokens, /health's time, and the server's memory."""

    def __init__(self, server):
        self.server, self.gaps, self.health, self.most_bytes, self.most_together = server, [], [], 0, 0

    async def quiet(self):
        """How it is without an attack."""
        await self.canary(LEAST_GAPS)
        self.quiet_gap, self.gaps = percentile(self.gaps, 99), []
        self.first_bytes = self.server.resident_bytes()

    async def __aenter__(self):
        self.tasks = [asyncio.create_task(task()) for task in (self.canaries, self.look)]

    async def __aexit__(self, *_):
        # An attack that is over at once has aftermaths, too; and too few looks would say nothing.
        while len(self.gaps) < LEAST_GAPS and self.server.process.returncode is None:
            if any(task.done() for task in self.tasks):
                break
            await asyncio.sleep(0.1)
        for task in self.tasks:
            if task.done():
                task.result()  # Nobody watched any more: why.
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)

    async def canaries(self):
        while True:
            await self.canary(self.server.canary_tokens)

    async def canary(self, tokens):
        reader, writer = await self.server.connect()
        body = {"model": "m", "prompt": "canary", "max_tokens": tokens, "ignore_eos": True, "stream": True}
        writer.write(request("/v1/completions", body))
        last = None
        async for line in reader:
            if line.startswith(b"data: {"):
                now = time.perf_counter()
                self.gaps += [now - last] if last else []
                last = now
        writer.close()

    async def look(self):
        while True:
            began = time.perf_counter()
            await self.server.ask("/health")
            self.health.append(time.perf_counter() - began)
            self.most_bytes = max(self.most_bytes, self.server.resident_bytes())
            if container := self.server.container:
                self.most_together = max(self.most_together, container.anonymous_bytes())
            await asyncio.sleep(0.05)

    def seen(self, most_mib):
        """What every attack must leave as it was."""
        gap, health = (1e3 * percentile(values, 99) for values in (self.gaps, self.health))
        quiet, growth = 1e3 * self.quiet_gap, (self.most_bytes - self.first_bytes) / MIB
        yield Seen(f"stream beside it: {gap:.1f} ms between tokens at p99, {quiet:.1f} before", "2×", gap <= 2 * quiet)
        yield Seen(f"/health: {health:.1f} ms at p99", "50 ms", health <= 50)
        yield Seen(f"memory: {growth:+.0f} MiB", f"+{most_mib} MiB", growth <= most_mib)
        lives = self.server.process.returncode is None
        yield Seen(f"process {self.server.process.pid}", "lives", lives, is_of_memory=True)
        if container := self.server.container:
            held, killed = self.most_together / MIB, container.killed()
            yield Seen(f"held at most {held:.0f} MiB of {container.mib}, {killed} processes were killed", "none", not killed,
                       is_of_memory=True)


def percentile(values, percent):
    return statistics.quantiles(values, n=100)[percent - 1] if len(values) > 1 else 0.0
