"""Puts models into a store, has the engine fetch them, and says what came of it.

    judge.py gs|az ENGINE SERVER
"""

import base64
import email.utils
import hashlib
import hmac
import json
import pathlib
import random
import shutil
import socket
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

PART = 8 << 20
UNAVAILABLE, CHECKSUM_MISMATCH = 10, 11


def files():
    """A model of 20 MB in two shards, and a file that is none of it."""
    random.seed(1)
    return {
        "config.json": b"{}",
        "tokenizer.json": b'{"a": 1}',
        "model-00001-of-00002.safetensors": random.randbytes(20_000_000),
        "model-00002-of-00002.safetensors": random.randbytes(300_000),
        "pytorch_model.bin": b"a pickle",
    }


def ask(method, url, body=b"", headers={}):
    request = urllib.request.Request(url, data=body, headers=headers, method=method)
    return urllib.request.urlopen(request).read()


class Google:
    def __init__(self, server, port, folder):
        self.url = f"http://127.0.0.1:{port}"
        self.command = [server, "-scheme", "http", "-host", "127.0.0.1", "-port", str(port), "-backend", "memory",
                        "-public-host", f"127.0.0.1:{port}"]
        key = {"gcs_base_url": self.url, "disable_oauth": True, "client_email": "", "private_key": "",
               "private_key_id": ""}
        self.settings = {"GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps(key)}

    def make(self, bucket):
        ask("POST", f"{self.url}/storage/v1/b", json.dumps({"name": bucket}).encode())

    def put(self, bucket, name, body):
        query = urllib.parse.urlencode({"uploadType": "media", "name": name})
        ask("POST", f"{self.url}/upload/storage/v1/b/{bucket}/o?{query}", body)


class Azure:
    ACCOUNT = "devstoreaccount1"
    # Azurite's own, which its documents name.
    KEY = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="

    def __init__(self, server, port, folder):
        self.url = f"http://127.0.0.1:{port}/{self.ACCOUNT}"
        self.command = [server, "--blobPort", str(port), "--location", str(folder), "--silent",
                        "--skipApiVersionCheck"]
        self.settings = {"AZURE_STORAGE_ACCOUNT_NAME": self.ACCOUNT, "AZURE_STORAGE_ACCOUNT_KEY": self.KEY,
                         "AZURE_STORAGE_ENDPOINT": self.url, "AZURE_ALLOW_HTTP": "true"}

    def signed(self, path, body, headers, query=""):
        headers = {"x-ms-date": email.utils.formatdate(usegmt=True), "x-ms-version": "2021-08-06", **headers}
        lines = [f"{name}:{value}" for name, value in sorted(headers.items())]
        length = str(len(body)) if body else ""
        parts = ["PUT", "", "", length, "", "application/octet-stream", "", "", "", "", "", "", *lines,
                 f"/{self.ACCOUNT}/{self.ACCOUNT}/{path}{query}"]
        digest = hmac.new(base64.b64decode(self.KEY), "\n".join(parts).encode(), hashlib.sha256).digest()
        headers["Authorization"] = f"SharedKey {self.ACCOUNT}:{base64.b64encode(digest).decode()}"
        return {**headers, "Content-Type": "application/octet-stream"}

    def make(self, container):
        headers = self.signed(container, b"", {}, "\nrestype:container")
        ask("PUT", f"{self.url}/{container}?restype=container", b"", headers)

    def put(self, container, name, body):
        headers = self.signed(f"{container}/{name}", body, {"x-ms-blob-type": "BlockBlob"})
        ask("PUT", f"{self.url}/{container}/{name}", body, headers)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def wait_for(port):
    for _ in range(600):
        try:
            return socket.create_connection(("127.0.0.1", port), 1).close()
        except OSError:
            time.sleep(0.1)
    sys.exit("the store does not answer")


class Engine:
    def __init__(self, program, folder, settings):
        self.program, self.settings = program, folder / "settings"
        self.settings.mkdir()
        for name, value in settings.items():
            (self.settings / name).write_text(value)

    def fetch(self, source, to):
        """The exit code, and what was said."""
        command = [self.program, "fetch", source, "--to", str(to), "--credentials-dir", str(self.settings)]
        done = subprocess.run(command, capture_output=True, text=True)
        return done.returncode, done.stdout + done.stderr


def check(what, is_so, said=""):
    if not is_so:
        sys.exit(f"not so: {what}\n{said}")
    print(f"  {what}")


def corrupt(model, file):
    """Leaves a file's content as a fetch would that had all of it, but for one byte."""
    content = next(path for path in (model.parent / "blobs").iterdir() if path.samefile(model / file))
    body = bytearray(content.read_bytes())
    body[1000] ^= 1
    content.unlink()
    shutil.rmtree(model)
    content.with_suffix(".part").write_bytes(body)
    content.with_suffix(".parts").write_text("".join(f"{start}\n" for start in range(0, len(body), PART)))


def judge(scheme, store, engine, folder):
    model, content = folder / "cache" / "llama", files()
    store.make("models")
    for name, body in content.items():
        store.put("models", f"team/llama/{name}", body)
    source = f"{scheme}://models/team/llama"
    code, said = engine.fetch(source, model)
    expected = {name: body for name, body in content.items() if not name.endswith(".bin")}
    found = {path.name: path.read_bytes() for path in model.iterdir()} if code == 0 else {}
    check("a model in two shards is fetched, and no pickle", found == expected, said)

    corrupt(model, "model-00001-of-00002.safetensors")
    code, said = engine.fetch(source, model)
    check("a content that is another one is refused by its MD5", code == CHECKSUM_MISMATCH and "MD5" in said, said)
    code, said = engine.fetch(source, model)
    check("and fetched anew by the next attempt", code == 0 and (model / "config.json").exists(), said)

    one = content["model-00002-of-00002.safetensors"]
    store.put("models", "one/m.gguf", one)
    file = folder / "cache" / "m.gguf"
    code, said = engine.fetch(f"{scheme}://models/one/m.gguf", file)
    check("a GGUF object is fetched by its name", code == 0 and file.read_bytes() == one, said)
    code, said = engine.fetch(f"{scheme}://models/one/n.gguf", file)
    check("one that is not there is said to be unavailable", code == UNAVAILABLE, said)


def main():
    scheme, program, server = sys.argv[1:]
    with tempfile.TemporaryDirectory() as folder:
        folder, port = pathlib.Path(folder), free_port()
        (folder / "store").mkdir()
        store = {"gs": Google, "az": Azure}[scheme](server, port, folder / "store")
        process = subprocess.Popen(store.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_for(port)
            judge(scheme, store, Engine(program, folder, store.settings), folder)
        finally:
            process.terminate()
            process.wait()


main()
