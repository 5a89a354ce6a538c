"""Runs one command line of graphpack in this process, from its first import on, and prints each audit event of it.

`python watched.py COMMAND...`: lines of JSON on standard error, `[event, [argument...], [file...]]`, where the files
are those of the Python code that led to it, innermost first.
"""

from __future__ import annotations

import json
import sys
from types import CodeType, FrameType
from typing import Any

QUIET = (
    "object.__getattr__", "object.__setattr__", "object.__delattr__", "sys._getframe", "os.listdir", "os.scandir",
    "builtins.id", "ctypes.dlsym", "ctypes.call_function", "ctypes.cdata", "ctypes.addressof", "ctypes.get_errno",
    "ctypes.string_at", "ctypes.create_string_buffer", "cpython.", "mmap.", "fcntl.", "time.sleep", "gc.",
    "ctypes.set_errno", "glob.glob", "os.walk", "_thread.start", "sys.excepthook", "signal.",
)  # fmt: skip


def described(argument: Any) -> Any:
    if isinstance(argument, CodeType):
        return argument.co_filename
    return argument if isinstance(argument, (int, str)) else repr(argument)[:200]


def files(frame: FrameType | None) -> list[str]:
    found: list[str] = []
    while frame is not None and len(found) < 12:
        found.append(frame.f_code.co_filename)
        frame = frame.f_back
    return found


def main() -> int:
    stream = open(3, "w")  # noqa: SIM115 - for as long as the process
    busy = False

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal busy
        if busy or event.startswith(QUIET):
            return
        busy = True
        try:
            line = [event, [described(argument) for argument in arguments], files(sys._getframe(1))]
            stream.write(json.dumps(line) + "\n")
            stream.flush()
        finally:
            busy = False

    sys.addaudithook(hook)
    from graphpack.__main__ import run

    return run(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(main())
