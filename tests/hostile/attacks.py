"""What strangers send. Each attack yields what was seen of it."""

import asyncio
import contextlib
import json
import pathlib
import re
import socket
import sys
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


NO_CHUNK, TWO_BYTES = "0\r\n\r\n", "{}"
# Headers, and a body that a server which is taken in would read as one: what follows is then a request of its own.
SMUGGLED = [
    ("Content-Length: 2\r\nContent-Length: 3", TWO_BYTES), ("Content-Length: 2, 3", TWO_BYTES),
    ("Content-Length: +2", TWO_BYTES), ("Content-Length: -1", ""), ("Content-Length: 99999999999999999999", ""),
    ("Content-Length: 0x2", TWO_BYTES), ("Content-Length: 2 2", TWO_BYTES), ("Content-Length:", ""),
    ("Transfer-Encoding: chunked\r\nContent-Length: 5", NO_CHUNK),
    ("Content-Length: 5\r\nTransfer-Encoding: chunked", NO_CHUNK),
    ("Transfer-Encoding: xchunked", NO_CHUNK), ("Transfer-Encoding: gzip, chunked", NO_CHUNK),
    ("Transfer-Encoding: chunked, identity", NO_CHUNK), ("Transfer-Encoding: chunked, chunked", NO_CHUNK),
    ("Transfer-Encoding : chunked", NO_CHUNK), ("Transfer-Encoding: chunked\r\n X: folded", NO_CHUNK),
    ("X-Bare: a\nTransfer-Encoding: chunked", NO_CHUNK), ("X-Bare: a\nContent-Length: 2", TWO_BYTES),
    ("X-Nul: a\0b\r\nContent-Length: 2", TWO_BYTES), ("Host: b\r\nContent-Length: 2", TWO_BYTES),
    ("Content-Length : 2", TWO_BYTES), ("Transfer-Encoding:\vchunked", NO_CHUNK),
    ("X: a\rTransfer-Encoding: chunked", NO_CHUNK),
    ("Authorization: Bearer a\r\nAuthorization: Bearer b\r\nContent-Length: 2", TWO_BYTES),
]
FOUND = [("Content-Length: 2", TWO_BYTES), ("Transfer-Encoding: chunked", NO_CHUNK)]


async def smuggling(server):
    hidden = b"GET /hidden HTTP/1.1\r\nHost: a\r\n\r\n"

    async def answers(headers, body):
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n{auth().decode()}{headers}\r\n\r\n{body}"
        return await server.send(head.encode() + hidden, silence=1)

    async with server.watched() as watch:
        found = [(await answers(*case)).count(b"HTTP/1.1 ") for case in FOUND]
        two = []
        for case in SMUGGLED:
            answer = await answers(*case)
            refused = answer == b"" or answer.startswith(b"HTTP/1.1 4")
            if not refused or answer.count(b"HTTP/1.1 ") > 1 or b"/hidden" in answer:
                two.append(case[0])
    yield Seen(f"requests behind whole ones, answers: {found}", "2 each: what is not hidden is found", found == [2, 2])
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


BODY_BYTES = 30 << 20
# What a body of 30 MiB may hold: path, beginning, what is repeated, end.
LONG = [
    ("/v1/completions", '{"model":"m","prompt":[', "0,", "0]}"),
    ("/v1/completions", '{"model":"m","prompt":[', '"",', '""]}'),
    ("/v1/completions", '{"model":"m","prompt":"a","stop":[', '"",', '""]}'),
    ("/v1/completions", '{"model":"m","prompt":"a","guided_json":[', "0,", "0]}"),
    ("/v1/completions", '{"model":"m","prompt":"a","nobody_knows":[', "{},", "{}]}"),
    ("/v1/chat/completions", '{"model":"m","messages":[', '{"role":"user","content":""},', "0]}"),
    ("/v1/chat/completions", '{"model":"m","messages":[{"role":"user","content":"', "a ", '"}]}'),
    ("/v1/chat/completions", '{"model":"m","messages":[{"role":"user","content":"a"}],"tools":[', "0,", "0]}"),
    ("/v1/chat/completions", '{"model":"m","messages":[{"role":"user","content":"a"}],"documents":[', "{},", "{}]}"),
    ("/generate", '{"inputs":"a","parameters":{"stop":[', '"",', '""]}}'),
    ("/detokenize", '{"tokens":[', "0,", "0]}"),
    ("/v1/chat/completions", "", "[", ""),
]


async def bodies(server):
    def long(path, begin, part, end):
        return request(path, (begin + part * (BODY_BYTES // len(part)) + end).encode())

    # Made before anything is watched, which making them would hold up.
    all_kinds = [long(*kind) for kind in LONG]
    async with server.watched() as watch:
        statuses = [await asyncio.to_thread(status_of, server, data) for data in all_kinds]
    yield Seen(f"{len(LONG)} kinds of 30 MiB, one by one: {sorted(set(statuses))}", "4xx", all(400 <= s < 500 for s in statuses))
    for seen in watch.seen(most_mib=4 * 30 + 16):
        yield seen
    async with server.watched() as watch:
        statuses = await asyncio.gather(*(asyncio.to_thread(status_of, server, all_kinds[0]) for _ in range(40)))
    yield Seen(f"40 connections of 30 MiB at once: {sorted(set(statuses))}", "400, 429 or cut", set(statuses) <= {0, 400, 429})
    for seen in watch.seen(most_mib=256 + 64):
        yield seen


def status_of(server, data):
    """On a thread of its own: so much would keep what is watched from being looked at."""
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection((server.host, server.port), 60) as connection:
        connection.sendall(data)
        while part := connection.recv(1 << 16):
            answer += part
    return int(answer.split(b" ", 2)[1]) if answer else 0


async def crowd(server, count=12_000):
    """More connections than a server has places for, none of which asks for anything."""
    pipes = {"stdin": asyncio.subprocess.PIPE, "stdout": asyncio.subprocess.PIPE}
    script = str(pathlib.Path(__file__).with_name("silent.py"))
    async with server.watched() as watch:
        # A process of its own: so many would keep what is watched from being looked at.
        crowd = await asyncio.create_subprocess_exec(sys.executable, script, server.host, str(server.port), str(count), **pipes)
        held = int(await crowd.stdout.readline())
        probes = [await server.send(b"GET /readyz HTTP/1.0\r\n\r\n", admin=True) for _ in range(20)]
        status, _ = await server.ask("/v1/models")
        crowd.stdin.close()
        await crowd.wait()
    ready = sum(answer.startswith(b"HTTP/1.0 200") for answer in probes)
    yield Seen(f"beside {held:,} connections that say nothing: {ready} of 20 probes, a client gets {status}",
               "all, 200", ready == 20 and status == 200)
    for seen in watch.seen(most_mib=128):
        yield seen


async def admin(server):
    """Pages in a browser, by their own name and by one that leads here."""
    pages = ["Host: evil.example", f"Host: {server.host}:{server.admin_port}\r\nOrigin: http://evil.example",
             f"Host: {server.host}:{server.admin_port}\r\nOrigin: null",
             "Host: evil.example\r\nOrigin: http://evil.example", "Host: localhost.evil.example"]
    passed = []
    async with server.watched() as watch:
        for page in pages:
            for path in ("/drain", "/sleep?level=1", "/wake_up"):
                head = f"POST {path} HTTP/1.1\r\n{page}\r\nConnection: close\r\nContent-Length: 0\r\n\r\n"
                answer = await server.send(head.encode(), admin=True)
                passed += [] if answer.startswith(b"HTTP/1.1 403") else [(path, page)]
    yield Seen(f"{3 * len(pages)} requests of pages to the admin port, acted on: {passed or 'none'}", "none", not passed)
    for seen in watch.seen(most_mib=32):
        yield seen


def chain(count, target):
    """A schema of definitions that refer to each other, one after the other."""
    definitions = {f"d{number}": target(f"#/$defs/d{number + 1}") for number in range(count)}
    return {"$ref": "#/$defs/d0", "$defs": {**definitions, f"d{count}": {"type": "null"}}}


def rules(count, name, body="{}"):
    """A grammar of rules, or terminals, each of which is the next one."""
    lines = [f"{name}{number}: " + body.format(f"{name}{number + 1}") for number in range(count)]
    return "\n".join([f"start: {name}0", *lines, f'{name}{count}: "x"'])


def twice(target):
    part = {"type": ["array", "null"], "$ref": target}
    return {"type": ["array", "null"], "prefixItems": [part, part]}


# What compiles by recursion or by copying, by the field that it comes in.
BOTTOMLESS = [
    ("guided_json", chain(210, lambda target: {"type": "object", "properties": {"a": {"$ref": target}}})),
    ("guided_json", chain(531, lambda target: {"$ref": target})),
    ("guided_json", chain(3000, lambda target: {"type": "object", "properties": {"a": {"$ref": target}}})),
    ("guided_json", chain(30, twice)),
    ("guided_grammar", rules(667, "r")),
    ("guided_grammar", rules(925, "T")),
    ("guided_grammar", rules(9000, "r")),
    ("guided_grammar", rules(500, "r", "(" * 27 + "{}" + ' "a")' * 27)),
]


async def forms(server):
    statuses = []
    async with server.watched() as watch:
        for field, form in BOTTOMLESS:
            schema = form if field == "guided_json" else {"type": "string"}
            tool = {"type": "function", "function": {"name": "f", "parameters": schema}}
            for extra in ({field: form}, {"tools": [tool], "tool_choice": "required"}):
                status, _ = await server.ask("/v1/chat/completions", {**CHAT, **extra})
                statuses.append(status)
    yield Seen(f"statuses {sorted(set(statuses))} of {len(statuses)} forms", "200 and 400", set(statuses) <= {200, 400})
    for seen in watch.seen(most_mib=96):
        yield seen


# Ever more ways to read the same text: slow from the first token, and from a few tokens on.
SLOW_AT_ONCE = "start: x\nx: x x x x | x x x | x x | /[a-z ]/"
SLOW_LATER = "start: y{12} x\ny: / [a-z]+/\nx: x x | /[a-z ]/"


async def masks(server):
    codes = []
    async with server.watched() as watch:
        for grammar in (SLOW_AT_ONCE, SLOW_LATER):
            bodies = [{**CHAT, "guided_grammar": grammar, "max_tokens": 60, "n": n} for n in (1, 64)]
            answers = await asyncio.gather(*(server.ask("/v1/chat/completions", body) for body in bodies))
            codes += [(status, json.loads(body).get("error", {}).get("code")) for status, body in answers]
    known = {(200, None)} | {(400, code) for code in ("invalid_structure", "structure_too_slow", "unsatisfiable")}
    yield Seen(f"answers {sorted(set(codes), key=str)}", "answers, and refusals with a reason", set(codes) <= known)
    for seen in watch.seen(most_mib=64):
        yield seen


def auth():
    return f"Authorization: Bearer {KEYS['right']}\r\n".encode()
