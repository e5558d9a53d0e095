"""What strangers send. Each attack yields what was seen of it."""

import asyncio
import contextlib
import json
import re
import time

from server import KEYS, Seen, request

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
CLOSED_WITHIN_SECONDS = 35


async def slow(server):
    async with server.watched() as watch:
        lives = await asyncio.gather(*(stuck(server, kind) for kind in ("header", "body", "read") for _ in range(167)))
    longest = max(life for kind, life in lives if kind != "read")
    yield Seen(f"a header or body that never ends is cut after {longest:.1f} s", f"{CLOSED_WITHIN_SECONDS} s",
               longest <= CLOSED_WITHIN_SECONDS)
    for seen in watch.seen(most_mib=64):
        yield seen


async def stuck(server, kind, seconds=60):
    """Seconds until the server cut a connection that is stuck."""
    reader, writer = await server.connect()
    began = time.perf_counter()
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 1000\r\n"
    writer.write({"header": head, "body": head + auth() + b"\r\n{", "read": request("/v1/chat/completions", CHAT)}[kind])
    while time.perf_counter() - began < seconds and not reader.at_eof():
        with contextlib.suppress(ConnectionError, TimeoutError):
            await asyncio.wait_for(reader.read(1 << 16), 1)
            continue
        with contextlib.suppress(ConnectionError):
            writer.write({"header": b"X-A: b\r\n", "body": b" ", "read": b""}[kind])
    life = time.perf_counter() - began
    writer.close()
    return kind, life


async def chunks(server, count=1_000_000):
    text = json.dumps(CHAT).encode()
    body = b" " * (count - len(text)) + text
    head = b"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Type: application/json\r\n"
    async with server.watched() as watch:
        pieces = b"".join(b"1\r\n%c\r\n" % byte for byte in body)
        answer = await server.send(head + auth() + b"Transfer-Encoding: chunked\r\n\r\n" + pieces + b"0\r\n\r\n")
    status = answer.split(b" ", 2)[1:2]
    yield Seen(f"{count:,} chunks: {b''.join(status).decode()}", "200 or 413", status in ([b"200"], [b"413"]))
    for seen in watch.seen(most_mib=32):
        yield seen


async def resets(server, count=20_000):
    async with server.watched() as watch:
        reader, writer = await server.connect()
        writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0))
        sent = 0
        with contextlib.suppress(ConnectionError):
            for stream in range(1, 2 * count, 2):
                if writer.transport.is_closing():
                    break
                # :method GET, :scheme http, :path /, all of HPACK's static table; then "I do not want it" (8, CANCEL).
                writer.write(frame(1, 5, stream, b"\x82\x86\x84") + frame(3, 0, stream, b"\0\0\0\x08"))
                sent += 1
                if sent % 100 == 0:
                    await writer.drain()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(reader.read(), 2)
        writer.close()
    yield Seen(f"{sent:,} resets sent before the connection ended", "ends that connection at most", True)
    for seen in watch.seen(most_mib=32):
        yield seen


def frame(kind, flags, stream, payload=b""):
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


SMUGGLED = [
    "Content-Length: 2\r\nContent-Length: 3", "Content-Length: 2, 3", "Content-Length: +2", "Content-Length: -1",
    "Content-Length: 99999999999999999999", "Content-Length: 0x2", "Content-Length: 2 2", "Content-Length:",
    "Transfer-Encoding: chunked\r\nContent-Length: 2", "Content-Length: 2\r\nTransfer-Encoding: chunked",
    "Transfer-Encoding: xchunked", "Transfer-Encoding: chunked, identity", "Transfer-Encoding: chunked, chunked",
    "Transfer-Encoding : chunked", "Transfer-Encoding: chunked\r\n X: folded", "X-Bare: a\nTransfer-Encoding: chunked",
    "X-Nul: a\0b", "Host: b\r\nContent-Length : 2", "Transfer-Encoding:\vchunked", "X: a\rTransfer-Encoding: chunked",
]


async def smuggling(server):
    hidden = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"
    two = []
    async with server.watched() as watch:
        for headers in SMUGGLED:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nConnection: close\r\n{headers}\r\n\r\n{{}}"
            answer = await server.send(head.encode() + hidden)
            refused = answer == b"" or answer.startswith(b"HTTP/1.1 4")
            if not refused or answer.count(b"HTTP/1.1 ") > 1 or b"/hidden" in answer:
                two.append(headers)
    yield Seen(f"{len(SMUGGLED)} ways tried, got through: {two or 'none'}", "none", not two)
    for seen in watch.seen(most_mib=32):
        yield seen


TELLS = re.compile(rb"\.rs\b|/src/|/root|/home|/tmp|0x[0-9a-f]{8}|panicked|backtrace|canary|secret-of-another", re.I)
WRONG = [-1, 2**63, 1e308, "", "x" * 10_000, [], {}, None, [[[]]], {"a": {"b": []}}, "\0", "../../etc/passwd"]
FIELDS = ["model", "messages", "max_tokens", "temperature", "top_p", "n", "stop", "seed", "tools", "tool_choice",
          "response_format", "logit_bias", "logprobs", "stream_options", "user", "chat_template", "metadata"]


async def leaks(server):
    told, statuses = [], set()
    async with server.watched() as watch:
        await server.ask("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": "secret-of-another"}]})
        for number in range(1000):
            field, value = FIELDS[number % len(FIELDS)], WRONG[number // len(FIELDS) % len(WRONG)]
            if (field, value) == ("max_tokens", None):
                continue  # No bound is no mistake, and this model would speak for minutes.
            path = "/v1/chat/completions" if number % 3 else f"/v1/%2e%2e/{number}"
            status, body = await server.ask(path, {**CHAT, field: value})
            statuses.add(status)
            if status >= 400 and TELLS.search(body):
                told.append((field, value, body[:200]))
    yield Seen(f"errors that tell: {told[:3] or 'none'}", "none", not told)
    yield Seen(f"statuses {sorted(statuses)}", "none of 5xx", max(statuses) < 500)
    for seen in watch.seen(most_mib=32):
        yield seen


async def addresses(server):
    visitors = []
    listener = await asyncio.start_server(lambda _, writer: (visitors.append(writer), writer.close()), "127.0.0.1", 0)
    port = listener.sockets[0].getsockname()[1]
    urls = [f"http://127.0.0.1:{port}/a", f"http://localhost:{port}\\@b/", f"//127.0.0.1:{port}/", f"http://[::1]:{port}/",
            f"http://0x7f000001:{port}/", f"file://127.0.0.1:{port}/"]
    async with listener, server.watched() as watch:
        for url in urls:
            image = {"type": "image_url", "image_url": {"url": url}}
            for content in (f"![a]({url})", f'<img src="{url}">', [image], [{"type": "text", "text": url}]):
                await server.ask("/v1/chat/completions", {**CHAT, "messages": [{"role": "user", "content": content}]})
            schema = {"type": "json_schema", "json_schema": {"name": "a", "schema": {"$ref": url}}}
            await server.ask("/v1/chat/completions", {**CHAT, "response_format": schema})
            await server.ask("/v1/completions", {"model": url, "prompt": url, "max_tokens": 1})
    yield Seen(f"{6 * len(urls)} requests with addresses: {len(visitors)} connections", "none", not visitors)
    for seen in watch.seen(most_mib=32):
        yield seen


def auth():
    return f"Authorization: Bearer {KEYS['right']}\r\n".encode()
