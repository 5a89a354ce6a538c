"""A YAML file as plain values. What costs much or means two things is refused."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterator
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpack.errors import NotFoundError, Problem, StorageError, UsageError
from graphpack.schema import shown

if TYPE_CHECKING:
    import yaml

LARGEST_FILE = 64 * 1024
DEEPEST = 8
_PLAIN_NUMBER = re.compile("[-+]?(0|[1-9][0-9]{0,999})")


def read(file: Path) -> Any:
    """The plain value of a file. Raises NotFoundError, StorageError and as `parse`."""
    try:
        with file.open("rb") as stream:
            content = stream.read(LARGEST_FILE + 1)
    except IsADirectoryError as error:
        raise NotFoundError(f"{file} is a directory, not a configuration file") from error
    except (FileNotFoundError, NotADirectoryError, ValueError) as error:
        # A ValueError is about characters that no path has.
        raise NotFoundError(f"no such configuration file: {file}") from error
    except OSError as error:
        raise StorageError(f"cannot read {file}: {error.strerror}") from error
    if len(content) > LARGEST_FILE:
        raise UsageError(f"{file} is larger than {LARGEST_FILE} bytes, the most a configuration file may have")
    return parse(content, file)


def parse(content: bytes, file: Path) -> Any:
    """The plain value of the content of `file`. Raises UsageError for what is no YAML or not to be used."""
    import yaml  # takes 10 ms, which a load without a configuration file does not have to spend

    value = None
    try:
        text = content.decode()
        problems = list(_unusable(yaml.parse(text, Loader=yaml.SafeLoader)))
        if not problems:
            loader = yaml.SafeLoader(text)
            node = loader.get_single_node()
            problems = [problem for part in _nodes(node) for problem in (*_doubled(part), *_misread(part))]
            value = None if node is None or problems else loader.construct_document(node)
    except yaml.YAMLError as error:
        raise UsageError(f"{file} is not YAML: {' '.join(str(error).split())}") from error
    except ValueError as error:  # text that is not UTF-8
        raise UsageError(f"{file} is not YAML: {error}") from error
    if problems:
        raise UsageError(f"{file} cannot be used", problems)
    return value


def _unusable(events: Iterator[yaml.Event]) -> Iterator[Problem]:
    """What makes a small file cost much: deep nesting, and aliases that stand for documents of any size. And tags, with
    which a file says what its text is to be taken for."""
    import yaml

    depth = 0
    for event in events:
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > DEEPEST:
            yield Problem(_position(event.start_mark), here="nested too deeply")
            return
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None) is not None:
            advice = "write the value out; quote text that begins with & or *"
            yield Problem(_position(event.start_mark), here="an anchor or alias", hint=advice)
        if getattr(event, "tag", None) is not None:
            advice = "write the value without it; quote text that begins with !"
            yield Problem(_position(event.start_mark), here="a tag", hint=advice)


def _nodes(node: yaml.Node | None) -> Iterator[yaml.Node]:
    """A node and all below it, in the order of the file."""
    import yaml

    if node is not None:
        yield node
    if isinstance(node, yaml.CollectionNode):
        pairs = isinstance(node, yaml.MappingNode)
        for below in chain.from_iterable(node.value) if pairs else node.value:
            yield from _nodes(below)


def _doubled(node: yaml.Node) -> Iterator[Problem]:
    """Keys given twice, of which YAML would silently keep one."""
    import yaml

    if not isinstance(node, yaml.MappingNode):
        return
    seen: set[Hashable] = set()
    for key, _ in node.value:
        if isinstance(key.value, str) and key.value in seen:
            yield Problem(_position(key.start_mark), here=f"{shown(key.value)} is given twice")
        elif key.tag == "tag:yaml.org,2002:merge":
            yield Problem(_position(key.start_mark), here="a merge key", hint="write its keys out")
        elif isinstance(key.value, str):
            seen.add(key.value)


def _misread(node: yaml.Node) -> Iterator[Problem]:
    """Numbers that other versions of YAML take for others, or for text, as 010 for 8 or 10; and what looks like a date
    and is none."""
    import yaml

    if not isinstance(node, yaml.ScalarNode):
        return
    advice = ""
    if node.tag == "tag:yaml.org,2002:int" and _PLAIN_NUMBER.fullmatch(node.value) is None:
        advice = "write a number in plain digits, such as 16; put text in quotes"
    if node.tag == "tag:yaml.org,2002:timestamp":
        try:
            yaml.constructor.SafeConstructor().construct_yaml_timestamp(node)
        except ValueError:
            advice = "no such date; put text in quotes"
    if advice:
        yield Problem(_position(node.start_mark), here=shown(node.value), hint=advice)


def _position(mark: Any) -> str:
    return f"line {mark.line + 1}, column {mark.column + 1}"
