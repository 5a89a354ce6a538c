"""What a long command tells while it works."""

from __future__ import annotations

from typing import Protocol


class Observer(Protocol):
    """Told what a long command is doing. Calls are cheap and come from the command's own thread."""

    def stage(self, name: str) -> None:
        """A stage begins; the one before it has ended."""

    def bytes(self, what: str, done: int, total: int) -> None:
        """`done` of `total` bytes of `what` have been read or written."""

    def bucket(self, batch_size: int, seq_len: int, text: str) -> None:
        """Something happened to one bucket, such as `captured in 3.1 s`."""

    def pieces(self, token_count: int, text: str) -> None:
        """Something happened to the pieces for one token count."""

    def note(self, text: str) -> None:
        """Something worth knowing that is not an error."""


class SilentObserver:
    """Listens to nothing: what the library uses."""

    def stage(self, name: str) -> None: ...

    def bytes(self, what: str, done: int, total: int) -> None: ...

    def bucket(self, batch_size: int, seq_len: int, text: str) -> None: ...

    def pieces(self, token_count: int, text: str) -> None: ...

    def note(self, text: str) -> None: ...
