"""skopeo and a registry, which know nothing of graphpack."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.error import URLError

import pytest


def tool(name: str) -> str:
    found = shutil.which(name)
    if found is None:
        pytest.fail(f"{name} is not installed: apt-get install skopeo docker-registry (CI installs both)")
    return found


def skopeo(*arguments: str) -> bytes:
    done = subprocess.run([tool("skopeo"), *arguments], capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@contextmanager
def serving(folder: Path) -> Iterator[str]:
    """Address of a registry on this machine alone, with its store in `folder`."""
    server = tool("docker-registry")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    config = {
        "version": "0.1",
        "log": {"level": "error"},
        "storage": {"filesystem": {"rootdirectory": str(folder / "registry")}},
        "http": {"addr": address},
    }
    (folder / "registry.yml").write_text(json.dumps(config))
    process = subprocess.Popen(
        [server, "serve", str(folder / "registry.yml")], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        deadline = time.monotonic() + 30
        while not answers(address):
            assert process.poll() is None, "the registry ended"
            assert time.monotonic() < deadline, "the registry does not answer"
            time.sleep(0.05)
        yield address
    finally:
        process.terminate()
        process.wait(10)


def answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(f"http://{address}/v2/", timeout=1) as reply:
            return bool(reply.status == 200)
    except (URLError, OSError):
        return False
