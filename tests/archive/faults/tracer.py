"""A child process stopped at its system calls, so that it can be killed there, or made to see a call fail.

Python's own, by ptrace and a seccomp filter, since a save has hundreds of calls and each needs a run: a stop costs ten
microseconds, and the child is forked from a process in which everything is imported. Linux on x86_64.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass

from tests.archive.faults import calls

_TRACEME, _CONT, _GETREGS, _SETREGS, _SYSCALL, _SETOPTIONS = 0, 7, 12, 13, 24, 0x4200
_SECCOMP_STOP = 7
_OPTIONS = 0x1 | 0x80 | 0x100000  # tell stops at calls from signals; stop where the filter says; die with the tracer
_NO_NEW_PRIVILEGES, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _TRACE = 0x7FFF0000, 0x7FF00000
_RESULT, _NUMBER, _COUNT = 10, 15, 12
_ARGUMENTS = (14, 13, 12, 7, 9, 8)

libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
libc.ptrace.restype = ctypes.c_long
_Registers = ctypes.c_ulong * 27


class _Instruction(ctypes.Structure):
    _fields_ = (
        ("code", ctypes.c_ushort),
        ("true", ctypes.c_ubyte),
        ("false", ctypes.c_ubyte),
        ("value", ctypes.c_uint),
    )


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.POINTER(_Instruction)))


def _program(numbers: Collection[int]) -> _Program:
    """Stop at these calls; at all if there are none."""
    tests = sorted(numbers)
    lines = [(_LOAD, 0, 0, 0)]
    lines += [(_EQUAL, len(tests) - position, 0, number) for position, number in enumerate(tests)]
    lines += [(_RETURN, 0, 0, _ALLOW if tests else _TRACE), (_RETURN, 0, 0, _TRACE)]
    array = (_Instruction * len(lines))(*(_Instruction(*line) for line in lines))
    return _Program(len(lines), array)


def _ptrace(request: int, pid: int, data: object = None) -> None:
    if libc.ptrace(request, pid, None, data) == -1:
        raise OSError(ctypes.get_errno(), f"ptrace request {request}")


def stay_on_one_processor() -> socket.socket:
    """Tracer and child take turns, and a turn is four times as fast where both are on one processor.

    Each tracer takes another, for as long as it keeps what this gives.
    """
    claim = socket.socket(socket.AF_UNIX)
    for processor in sorted(os.sched_getaffinity(0)):
        with suppress(OSError):  # another tracer is on it
            claim.bind(f"\0graphpack-tracer-{processor}")
            os.sched_setaffinity(0, {processor})
            break
    return claim


@dataclass(frozen=True)
class Call:
    name: str
    arguments: tuple[int, ...]


class Tracee:
    """`function` in a child, which exits with what it returns. It stands before its first call of `numbers`, or any."""

    def __init__(self, function: Callable[[], int], numbers: Collection[int] = ()) -> None:
        self.status: int | None = None
        """The exit status once it has ended; negative for the signal that ended it."""
        self.told = 0
        program = _program(numbers)
        self.pid = os.fork()
        if self.pid == 0:
            self._child(function, program)
        os.waitpid(self.pid, 0)
        _ptrace(_SETOPTIONS, self.pid, _OPTIONS)

    @staticmethod
    def _child(function: Callable[[], int], program: _Program) -> None:
        code = 99
        try:
            _ptrace(_TRACEME, 0)
            os.kill(os.getpid(), signal.SIGSTOP)
            if libc.prctl(_NO_NEW_PRIVILEGES, 1, 0, 0, 0) or libc.prctl(_SET_SECCOMP, _FILTER, ctypes.byref(program)):
                return
            code = function()
        finally:
            os._exit(code)

    @staticmethod
    def tell(number: int) -> None:
        """Called by the child: hand a number to the tracer, and wait to be advanced again."""
        os.kill(os.getpid(), signal.SIGRTMIN + number)

    def advance(self) -> bool:
        """Run to the next call. False if the child has ended, or tells something."""
        passed = 0
        while True:
            _ptrace(_CONT, self.pid, passed)
            _, status = os.waitpid(self.pid, 0)
            if not os.WIFSTOPPED(status):
                self.status = os.waitstatus_to_exitcode(status)
                return False
            if status >> 16 == _SECCOMP_STOP:
                return True
            passed = os.WSTOPSIG(status)
            if passed >= signal.SIGRTMIN:
                self.told = passed - signal.SIGRTMIN
                return False

    def call(self) -> Call:
        registers = self._registers()
        return Call(calls.NAMES.get(registers[_NUMBER], "?"), tuple(registers[place] for place in _ARGUMENTS))

    def finish(self) -> int:
        """Let the call be carried out, and give its result: negative for an error."""
        _ptrace(_SYSCALL, self.pid)
        _, status = os.waitpid(self.pid, 0)
        if not os.WIFSTOPPED(status):
            self.status = os.waitstatus_to_exitcode(status)
            return 0
        return ctypes.c_long(self._registers()[_RESULT]).value

    def fail(self, number: int) -> None:
        """Make the call fail with this error, before anything is done."""
        registers = self._registers()
        registers[_NUMBER] = ctypes.c_ulong(-1).value
        registers[_RESULT] = ctypes.c_ulong(-number).value
        _ptrace(_SETREGS, self.pid, ctypes.byref(registers))

    def fail_after(self, number: int) -> None:
        """Let the call be carried out, and tell the child that it failed with this error."""
        self.finish()
        if self.status is None:
            registers = self._registers()
            registers[_RESULT] = ctypes.c_ulong(-number).value
            _ptrace(_SETREGS, self.pid, ctypes.byref(registers))

    def shorten(self) -> None:
        """Make a read or write handle half of its bytes."""
        registers = self._registers()
        registers[_COUNT] //= 2
        _ptrace(_SETREGS, self.pid, ctypes.byref(registers))

    def kill(self) -> None:
        """SIGKILL; the call that the child stands before is not carried out."""
        os.kill(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        self.status = os.waitstatus_to_exitcode(status)

    def run(self) -> int:
        """Run to the end, whatever is called, and give the exit status."""
        while self.advance():
            pass
        assert self.status is not None
        return self.status

    def text(self, address: int) -> str:
        """The zero-ended text at an address of the child."""
        return self.memory(address, 4096).partition(b"\0")[0].decode()

    def memory(self, address: int, size: int) -> bytes:
        with open(f"/proc/{self.pid}/mem", "rb", buffering=0) as file:
            file.seek(address)
            return file.read(size)

    def _registers(self) -> ctypes.Array[ctypes.c_ulong]:
        registers = _Registers()
        _ptrace(_GETREGS, self.pid, ctypes.byref(registers))
        return registers
