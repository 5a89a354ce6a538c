"""Checkpoint files, read and written without the code under test."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"


def read_tensors(file: Path) -> dict[str, Any]:
    """Name to (dtype code, shape, bytes), in the order of the file."""
    header, data = _split(file.read_bytes())
    entries = {name: entry for name, entry in header.items() if name != "__metadata__"}
    return {
        name: (entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])]) for name, entry in entries.items()
    }


def places(file: Path) -> dict[str, tuple[int, int]]:
    """Name to the first byte of a tensor in the file, and the byte behind it."""
    raw = file.read_bytes()
    header, data = _split(raw)
    start = len(raw) - len(data)
    spans = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: (start + span[0], start + span[1]) for name, span in spans.items()}


def write_tensors(file: Path, tensors: dict[str, Any]) -> None:
    header, offset = {}, 0
    for name, (code, shape, data) in tensors.items():
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [offset, offset + len(data)]}
        offset += len(data)
    text = json.dumps(header).encode()
    file.write_bytes(len(text).to_bytes(8, "little") + text + b"".join(data for _, _, data in tensors.values()))


def split(directory: Path, names: Iterable[str]) -> None:
    """The one file of a checkpoint cut into files of these names, its tensors dealt out in turn, and their index."""
    names = list(names)
    tensors = read_tensors(directory / SINGLE)
    (directory / SINGLE).unlink()
    weight_map = {name: names[index % len(names)] for index, name in enumerate(tensors)}
    for file in names:
        write_tensors(directory / file, {name: tensors[name] for name in tensors if weight_map[name] == file})
    (directory / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def edit_json(file: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def _split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    start = 8 + int.from_bytes(raw[:8], "little")
    return json.loads(raw[8:start]), raw[start:]
