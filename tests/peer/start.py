"""Start of a server to its first streamed token, and the memory that it holds then."""

import http.client
import json
import pathlib
import re
import socket
import subprocess
import time

from programs import PEER, model_file

REQUEST = json.dumps({
    "model": "model", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 1, "temperature": 0, "stream": True,
})
PATIENCE_SECONDS, POLL_SECONDS = 30, 0.002


def engine_command(binaries, model, threads, port):
    ports = ["--host", "127.0.0.1", "--port", port, "--admin-port", free_port()]
    return [binaries / "windlass-engine", "serve", model_file(model), *ports, "--threads", threads, "--served-model-name", "model"]


def peer_command(model, threads, port):
    return [PEER / "bin" / "llama-server", "-m", model_file(model), "-t", threads, "--port", port]


def measure(command_for):
    """Seconds to the first token, resident MiB, and the most that was resident."""
    port = free_port()
    command = [str(word) for word in command_for(port)]
    started = time.monotonic()
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        while not answers(port):
            if server.poll() is not None or time.monotonic() - started > PATIENCE_SECONDS:
                raise SystemExit(f"{' '.join(command)} did not answer")
            time.sleep(POLL_SECONDS)
        return (time.monotonic() - started, *resident_mib(server.pid))
    finally:
        server.terminate()
        server.wait()


def answers(port):
    """Whether a chat completion streamed its first content."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_SECONDS)
    try:
        connection.request("POST", "/v1/chat/completions", REQUEST, {"content-type": "application/json"})
        response = connection.getresponse()
        return response.status == 200 and any(has_content(line) for line in response)
    except OSError:
        return False
    finally:
        connection.close()


def has_content(line):
    event = line.removeprefix(b"data: ")
    return event.startswith(b"{") and any(choice["delta"].get("content") for choice in json.loads(event)["choices"])


def resident_mib(pid):
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return [int(re.search(rf"{field}:\s+(\d+)", status)[1]) / 1024 for field in ("VmRSS", "VmHWM")]


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
