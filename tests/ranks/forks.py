"""Programs as forks of a process that knows torch: importing it takes longer than most of what ranks are asked here."""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

SERVER = "import sys; from tests.ranks.forks import program; exec(program(int(sys.argv[1])))"
LARGEST = 1 << 17


class Fork:
    """What a test needs of `subprocess.Popen`."""

    def __init__(
        self, server: socket.socket, program: str, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]
    ) -> None:
        self.returncode: int | None = None
        self._outputs: list[str] = []
        self._files = [os.memfd_create(name) for name in ("out", "err")]
        self._told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            request = json.dumps([program, arguments, str(cwd), dict(env)]).encode()
            socket.send_fds(server, [request], [theirs.fileno(), *self._files])
        self._pid = int(self._told.recv(LARGEST))

    def communicate(self, timeout: float) -> list[str]:
        self._told.settimeout(timeout)
        self.wait()
        return self._outputs

    def wait(self) -> None:
        if self.returncode is None:
            self.returncode = int(self._told.recv(LARGEST))
            self._told.close()
            self._outputs = [Path(f"/proc/self/fd/{file}").read_text() for file in self._files]
            for file in self._files:
                os.close(file)

    def kill(self) -> None:
        if self.returncode is None:
            with suppress(ProcessLookupError):
                os.kill(self._pid, signal.SIGKILL)


class Forks:
    """The process that is forked."""

    def __init__(self, env: Mapping[str, str]) -> None:
        self._server, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-c", SERVER, str(theirs.fileno())]
            self._process = subprocess.Popen(command, env=env, pass_fds=[theirs.fileno()])

    def start(self, program: str, arguments: Sequence[str], cwd: Path, env: Mapping[str, str]) -> Fork:
        return Fork(self._server, program, arguments, cwd, env)

    def close(self) -> None:
        self._server.close()
        self._process.wait()


def program(requests: int) -> str:
    """Returns in forks only: the text that each is to run, as Python runs that of `-c`."""
    import torch  # noqa: F401 - what forks need not import

    gc.freeze()
    server = socket.socket(fileno=requests)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        message, descriptors, _, _ = socket.recv_fds(server, LARGEST, 3)
        if not message:
            sys.exit()
        if os.fork() == 0:
            break
        for descriptor in descriptors:
            os.close(descriptor)
    server.close()
    told, *outputs = descriptors
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    child = os.fork()
    if child:
        with socket.socket(fileno=told) as telling:
            telling.send(str(child).encode())
            _, status = os.waitpid(child, 0)
            telling.send(str(os.waitstatus_to_exitcode(status)).encode())
        os._exit(0)
    for number, descriptor in enumerate(outputs, 1):
        os.dup2(descriptor, number)
    for descriptor in descriptors:
        os.close(descriptor)
    text, arguments, folder, environ = json.loads(message)
    os.environ.clear()
    os.environ.update(environ)
    os.chdir(folder)
    sys.argv[1:] = arguments
    return str(text)
