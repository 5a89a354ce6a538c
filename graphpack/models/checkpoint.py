"""Checkpoint directories: `config.json`, and safetensors files with or without an index.

Everything that can be known from names and headers is checked before a weight is read.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphpack.archive.codec import parse_object
from graphpack.dtypes import COMPUTE_DTYPES
from graphpack.errors import NotFoundError, Problem, StorageError, WeightsMismatchError
from graphpack.models.architecture import DecoderConfig, Shape
from graphpack.models.safetensors import HeaderEntry, read_header
from graphpack.models.weights import StoredTensor, WeightFile, WeightSource
from graphpack.schema import shown

__all__ = [
    "StoredTensor",
    "WeightSource",
    "hub_revision",
    "open_checkpoint",
    "read_config",
    "read_json",
    "read_regular",
]

CONFIG_NAME = "config.json"
SINGLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"

_CONFIG_LIMIT = 1 << 20
_INDEX_LIMIT = 64 << 20
_COMPARE_BYTES = 1 << 20
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")


def read_config(directory: Path) -> DecoderConfig:
    """The decoder that a checkpoint directory's `config.json` describes.

    Raises NotFoundError when the directory or the file is not there, WeightsMismatchError when it cannot be run.
    """
    names = _listing(directory)
    path = directory / CONFIG_NAME
    if CONFIG_NAME not in names:
        if any(name.endswith((".safetensors", *_PICKLED)) for name in names):
            problem = Problem(CONFIG_NAME, here="missing", hint="put it beside the weights")
            raise WeightsMismatchError(f"{directory}: the checkpoint is incomplete", [problem])
        raise NotFoundError(f"{directory}: not a checkpoint directory (it holds no {CONFIG_NAME})")
    return DecoderConfig.from_config(read_json(path, _CONFIG_LIMIT), str(path))


def open_checkpoint(
    directory: Path, shapes: Mapping[str, Shape], ties: Mapping[str, str], *, compare_ties: bool = True
) -> WeightSource:
    """The weights of the model whose tensors are `shapes`, with `ties` mapping tied names to their originals.

    Raises NotFoundError without the directory, StorageError for a file that cannot be opened, and
    WeightsMismatchError with every missing or damaged file, missing or misshapen tensor, or tie whose two copies
    differ. Only that last check reads weights, and only when a tied tensor is stored twice and `compare_ties`.
    """
    located = _locate(directory)
    names = sorted(set(located.values())) if located is not None else [SINGLE_NAME]
    files = _open_files(directory, names)
    try:
        headers = _read_headers(directory, files)
        stored = _select(directory, headers, located, shapes, ties, names)
        duplicates = {tied: original for tied, original in ties.items() if tied in stored}
        kept = {name: tensor for name, tensor in stored.items() if name not in ties}
        source = WeightSource(kept, ties, files, [file.path for file in files])
        if compare_ties:
            _check_ties(directory, source, stored, duplicates)
    except BaseException:
        for file in files:
            file.close()
        raise
    return source


def hub_revision(directory: Path) -> str | None:
    """The commit of a hub cache's `snapshots/<40 hex>` directory."""
    for path in (directory.absolute(), directory.resolve()):
        if path.parent.name == "snapshots" and re.fullmatch("[0-9a-f]{40}", path.name):
            return path.name
    return None


def _listing(directory: Path) -> set[str]:
    try:
        return set(os.listdir(directory))
    except NotADirectoryError as error:
        raise NotFoundError(f"{directory} is not a directory") from error
    except (FileNotFoundError, ValueError) as error:  # ValueError: characters that no path has
        raise NotFoundError(f"no such directory: {directory}") from error
    except OSError as error:
        raise StorageError(f"{directory}: cannot list: {error.strerror}") from error


def _locate(directory: Path) -> dict[str, str] | None:
    """Tensor name -> file name from the index; None for a checkpoint of one file. The index decides if it is there."""
    names = _listing(directory)
    if INDEX_NAME not in names:
        if SINGLE_NAME not in names:
            raise WeightsMismatchError(f"{directory}: no weights graphpack can read", _other_weights(names))
        return None
    path = directory / INDEX_NAME
    weight_map = read_json(path, _INDEX_LIMIT).get("weight_map")
    if type(weight_map) is not dict or not weight_map:
        problem = Problem("weight_map", here=shown(weight_map), hint="must map tensor names to file names")
        raise WeightsMismatchError(f"{path}: not an index of safetensors files", [problem])
    problems = [
        Problem(shown(name), here=shown(file), hint="must be the name of a file beside the index")
        for name, file in weight_map.items()
        if type(file) is not str or not file or file in (".", "..") or any(char in file for char in "/\\\0")
    ]
    if problems:
        raise WeightsMismatchError(f"{path}: names files outside the checkpoint", problems)
    return weight_map


def _other_weights(names: set[str]) -> list[Problem]:
    pickled = sorted(name for name in names if name.endswith(_PICKLED))
    convert = "a pickle can run code when read; convert it with save_pretrained(..., safe_serialization=True)"
    problems = [Problem(shown(name), hint=convert) for name in pickled]
    hint = f"a checkpoint has {SINGLE_NAME}, or shards with {INDEX_NAME}"
    stray = sorted(name for name in names if name.endswith(".safetensors"))
    here = f"missing, found {shown(stray[0])}" if stray else "missing"
    return problems or [Problem(SINGLE_NAME, here=here, hint=hint)]


def read_json(path: Path, limit: int) -> dict[str, Any]:
    """The object in a JSON file. Raises as `read_regular`, and WeightsMismatchError if it is none."""
    content = read_regular(path, limit)
    try:
        return parse_object(content, limit)
    except ValueError as error:
        raise WeightsMismatchError(f"{path}: {error}") from error


def read_regular(path: Path, limit: int) -> bytes:
    """A file's content. Raises WeightsMismatchError for what is no regular file of at most `limit` bytes, StorageError
    for what cannot be read."""
    try:
        with open(path, "rb", opener=_open_regular) as file:
            content = file.read(limit + 1)
            if len(content) > limit:
                raise ValueError(f"larger than {limit} bytes")
            return content
    except ValueError as error:
        raise WeightsMismatchError(f"{path}: {error}") from error
    except OSError as error:
        raise StorageError(f"{path}: cannot read: {error.strerror}") from error


def _open_regular(path: str, flags: int) -> int:
    """Without waiting, as opening a named pipe would. Raises ValueError for what is no regular file, OSError."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ValueError("it is not a regular file")
    return descriptor


def _open_files(directory: Path, names: Sequence[str]) -> list[WeightFile]:
    """All files, or none and every problem."""
    files: list[WeightFile] = []
    problems: list[Problem] = []
    try:
        for name in names:
            try:
                files.append(WeightFile(directory / name))
            except FileNotFoundError:
                problems.append(Problem(shown(name), here="missing", hint="download the checkpoint again"))
            except ValueError as error:
                problems.append(Problem(shown(name), here=str(error)))
        if problems:
            raise WeightsMismatchError(f"{directory}: the checkpoint is incomplete", problems)
    except OSError as error:
        for file in files:
            file.close()
        raise StorageError(f"{error.filename}: cannot open: {error.strerror}") from error
    except BaseException:
        for file in files:
            file.close()
        raise
    return files


def _read_headers(directory: Path, files: Sequence[WeightFile]) -> list[dict[str, HeaderEntry]]:
    headers: list[dict[str, HeaderEntry]] = []
    problems: list[Problem] = []
    for file in files:
        try:
            headers.append(read_header(file))
        except ValueError as error:
            here = f"incomplete or not a safetensors file: {error}"
            problems.append(Problem(shown(file.path.name), here=here, hint="download this file again"))
    if problems:
        raise WeightsMismatchError(f"{directory}: the checkpoint is incomplete", problems)
    return headers


def _select(
    directory: Path,
    headers: Sequence[Mapping[str, HeaderEntry]],
    located: Mapping[str, str] | None,
    shapes: Mapping[str, Shape],
    ties: Mapping[str, str],
    names: Sequence[str],
) -> dict[str, StoredTensor]:
    """The model's tensors, tied ones included where they are stored. Raises with all that are missing or unfit."""
    order = {name: index for index, name in enumerate(names)}
    stored: dict[str, StoredTensor] = {}
    absent: dict[str, Problem] = {}
    problems: list[Problem] = []
    for name, shape in shapes.items():
        file_name = SINGLE_NAME if located is None else located.get(name)
        entry = headers[order[file_name]].get(name) if file_name is not None else None
        if file_name is None or entry is None:
            absent[name] = _missing(name, file_name, located is not None)
            continue
        if entry.shape != shape:
            hint = f"{CONFIG_NAME} asks for {list(shape)}"
            problems.append(Problem(name, here=f"shape {list(entry.shape)}", hint=hint))
        if entry.dtype not in COMPUTE_DTYPES:
            hint = "graphpack runs " + ", ".join(COMPUTE_DTYPES)
            problems.append(Problem(name, here=f"dtype {entry.dtype}", hint=hint))
        stored[name] = StoredTensor(name, entry.dtype, entry.shape, order[file_name], entry.offset, entry.bytes)
    for tied, original in ties.items():
        # Either name may be the stored one: some writers keep the last of two tensors that share memory.
        if original not in stored and tied in stored:
            stored[original] = stored.pop(tied)._replace(name=original)
        for name in (tied, original):
            if original in stored and (located is None or name not in located):
                absent.pop(name, None)
    problems = [*absent.values(), *problems]
    if problems:
        raise WeightsMismatchError(f"{directory}: the weights are not those of its {CONFIG_NAME}", problems)
    return stored


def _missing(name: str, file: str | None, indexed: bool) -> Problem:
    if file is None:
        return Problem(name, here=f"missing from {INDEX_NAME}")
    hint = f"{INDEX_NAME} says it is there" if indexed else ""
    return Problem(name, here=f"missing from {shown(file)}", hint=hint)


def _check_ties(
    directory: Path, source: WeightSource, stored: Mapping[str, StoredTensor], duplicates: Mapping[str, str]
) -> None:
    problems = []
    for tied, original in duplicates.items():
        if not _same_bytes(source, stored[tied], stored[original]):
            hint = "set tie_word_embeddings to false if that is meant"
            problems.append(Problem(tied, here=f"differs from {original}, to which {CONFIG_NAME} ties it", hint=hint))
    if problems:
        raise WeightsMismatchError(f"{directory}: tied weights differ", problems)


def _same_bytes(source: WeightSource, one: StoredTensor, other: StoredTensor) -> bool:
    if (one.dtype, one.bytes) != (other.dtype, other.bytes):
        return False
    left, right = bytearray(_COMPARE_BYTES), bytearray(_COMPARE_BYTES)
    for start in range(0, one.bytes, _COMPARE_BYTES):
        length = min(_COMPARE_BYTES, one.bytes - start)
        source.read_into(one.file, one.offset + start, memoryview(left)[:length])
        source.read_into(other.file, other.offset + start, memoryview(right)[:length])
        if left[:length] != right[:length]:
            return False
    return True
