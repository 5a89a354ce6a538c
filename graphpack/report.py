"""Everything printed but progress. Results go to stdout, notes and errors to stderr.

Results are plain aligned lines: nothing is wrapped, cut or interpreted, and
control characters, which an archive could use to rewrite the screen, are shown as escapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from graphpack.documents import Document
from graphpack.errors import GraphpackError

if TYPE_CHECKING:
    from graphpack.results.load import LoadedEntry, Rung
    from graphpack.results.maintain import Collected, CollectedFile, Removed
    from graphpack.results.replay import BenchRow
    from graphpack.results.save import SaveResult
    from graphpack.results.sign import SignedEntry
    from graphpack.results.verify import VerifiedEntry

WIDEST_PADDING = 60


def printable(text: object) -> str:
    """The whole text on one line, everything that is not a visible character or a blank escaped."""
    return "".join(char if char.isprintable() else _escape(char) for char in str(text))


def printable_text(text: str) -> str:
    """Text of several lines, all but line feeds, tabs and blanks escaped that is not visible."""
    return "".join(char if char.isprintable() or char in "\n\t\u00a0\u3000" else _escape(char) for char in text)


def _escape(char: str) -> str:
    code = ord(char)
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def columns(rows: Sequence[Sequence[object]], indent: str = "  ") -> list[str]:
    """Left-aligned columns. A cell wider than the padding pushes its own line out and no other."""
    cells = [[printable(cell) for cell in row] for row in rows]
    count = max((len(row) for row in cells), default=0)
    widths = [min(max((len(row[i]) for row in cells if i < len(row)), default=0), WIDEST_PADDING) for i in range(count)]
    return [
        (indent + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False))).rstrip()
        for row in cells
    ]


def of_error(error: GraphpackError) -> list[str]:
    """Where, what the archive has, what is here; then what to do, each advice once."""
    shown = [p for p in error.problems if p.archived or p.here or (p.where and p.where not in error.message)]
    count = f" ({len(shown)} problem{'s' if len(shown) > 1 else ''})" if shown else ""
    archived = [f"archived {problem.archived}" if problem.archived else "" for problem in shown]
    here = [f"here {problem.here}" if problem.here else "" for problem in shown]
    where = [problem.where for problem in shown]
    rows = list(zip(where, archived, here, strict=True)) if any(archived) else list(zip(where, here, strict=True))
    hints = dict.fromkeys(printable(problem.hint) for problem in error.problems if problem.hint)
    return [f"error: {printable(error.message)}{count}", *columns(rows), *(f"  -> {hint}" for hint in hints)]


def of_save(result: SaveResult) -> list[str]:
    graphs = [
        (f"{row.batch_size}x{row.seq_len}", row.nodes, size(row.object_bytes), _seconds(row.seconds_capture), topology)
        for row, topology in zip(result.graphs, result.topology, strict=True)
    ]
    pieces = [
        (f"{row.token_count} tokens", row.pieces, row.nodes, size(row.object_bytes), _seconds(row.seconds_capture))
        for row in result.piecewise
    ]
    facts = [
        ("weights", result.weights_root),
        ("layout", result.layout_fingerprint),
        ("settings", result.settings_digest),
        ("written", size(result.bytes_written)),
        ("seconds", _stages(result.stages)),
        *(("note", note) for note in result.notes),
    ]
    return [
        f"{result.action}: {printable(result.name)} in {printable(result.archive)}",
        *(columns([("graph", "nodes", "object", "capture", "topology"), *graphs]) if graphs else []),
        *(columns([("prefill", "pieces", "nodes", "objects", "capture"), *pieces]) if pieces else []),
        *columns(facts),
    ]


def of_load(entries: Sequence[tuple[LoadedEntry, Sequence[BenchRow]]]) -> list[str]:
    lines: list[str] = []
    for entry, bench in entries:
        lines += [*_loaded(entry), *_benched(bench)]
    return lines


def _loaded(entry: LoadedEntry) -> list[str]:
    graphs = "1 graph" if entry.graphs == 1 else f"{entry.graphs} graphs"
    graphs += f", {entry.pieces} pieces" if entry.pieces else ""
    captures = "1 capture" if entry.captures == 1 else f"{entry.captures} captures"
    facts: list[tuple[object, ...]] = [
        ("seconds", _stages(entry.stages)),
        ("weights", f"{size(entry.weights_bytes)}, {entry.weights_mode}"),
        *_proof(entry),
    ]
    verified = [
        (
            f"{row.batch_size}x{row.seq_len}" if row.token_count is None else f"{row.token_count} tokens",
            row.steps,
            f"{row.max_difference:.3g}",
            f"{row.tolerance:.3g}",
            "yes" if row.bit_identical else "no",
            row.argmax_compared,
        )
        for row in entry.verified
    ]
    titles = ("verified", "steps", "largest difference", "tolerance", "bit-identical", "argmax compared")
    return [
        f"restored {printable(entry.name)} on {printable(entry.device)}: {graphs}, {captures}",
        *columns(facts),
        *(columns([titles, *verified]) if verified else []),
    ]


def _proof(entry: LoadedEntry | VerifiedEntry) -> list[tuple[object, ...]]:
    return [
        *((("" if i else "ladder"), _rung(rung)) for i, rung in enumerate(entry.ladder)),
        ("proven", "; ".join(entry.proven) or "nothing"),
        ("not proven", "; ".join(entry.not_proven) or "nothing left out"),
        *(("note", note) for note in entry.notes),
    ]


def _rung(rung: Rung) -> str:
    return f"{rung.state:<8} {rung.name}{f' ({rung.note})' if rung.note else ''}"


def of_text(number: int, prompt: str, text: str) -> list[str]:
    return [f"[{number}] {printable(prompt)}", printable_text(text), ""]


def of_verify(entries: Sequence[VerifiedEntry]) -> list[str]:
    lines: list[str] = []
    for entry in entries:
        lines += [f"verified {printable(entry.name)}", *columns(_proof(entry))]
    return lines


def of_sign(archive: Path, entries: Sequence[SignedEntry]) -> list[str]:
    lines: list[str] = []
    for entry in entries:
        signature = entry.signature
        facts = [
            ("digest", entry.digest),
            ("key", signature.key),
            ("serial", signature.serial),
            ("created", signature.created),
            ("expires", signature.expires or "never"),
        ]
        lines += [f"signed: {printable(entry.name)} in {printable(archive)}", *columns(facts)]
    return lines


def of_rm(archive: Path, removed: Removed) -> list[str]:
    lines = [f"removed {printable(name)} from {printable(archive)}" for name in removed.entries.values()]
    return lines if removed.collected is None else lines + of_gc(archive, removed.collected)


def of_gc(archive: Path, collected: Collected) -> list[str]:
    """What went; in a dry run every file, since that is what it is for."""
    gone = [*collected.blobs, *collected.temporary]
    done = "would be collected" if collected.dry_run else "collected"
    what = f"{_count(collected.blobs, 'blob')} and {_count(collected.temporary, 'temporary file')}"
    lines = [f"{done} from {printable(archive)}: {what}, {_total(gone)}"]
    if collected.dry_run:
        lines += columns([(file.name, size(file.bytes)) for file in gone])
    if collected.kept:
        kept = f"{_count(collected.kept, 'unused blob')}, {_total(collected.kept)}"
        lines += columns([("kept", f"{kept}: used not long ago, or perhaps by a save in progress")])
    return lines


def _count(files: Sequence[CollectedFile], what: str) -> str:
    return f"{len(files)} {what}{'' if len(files) == 1 else 's'}"


def _total(files: Sequence[CollectedFile]) -> str:
    return size(sum(file.bytes for file in files))


def _benched(rows: Sequence[BenchRow]) -> list[str]:
    if not rows:
        return []
    table = [(f"{r.batch_size}x{r.seq_len}", r.steps, f"{r.median_ms:.3f} ms", f"{r.min_ms:.3f} ms") for r in rows]
    return columns([("bench", "steps", "median", "fastest"), *table])


def of_inspect(content: Document) -> list[str]:
    lines = [f"archive {printable(content['archive'])}"]
    for entry in content["entries"]:
        lines += ["", *_inspected(entry)]
    return lines


def _inspected(entry: Document) -> list[str]:
    lines = [f"entry {printable(entry.get('name') or entry['tag'] or entry['digest'])}"]
    lines += [f"  note       {printable(note)}" for note in entry.get("notes", ())]
    for title in ("tag", "digest", "magic", "format", "producer", "features", "backend", "mode"):
        if title in entry:
            lines += _fields(title, _short(title, entry[title]))
    for title in ("trust", "model", "weights", "layout", "settings"):
        if title in entry:
            lines += _section(title, entry[title])
    for kind, fields in entry.get("environment", {}).items():
        lines += _section(f"environment, {kind}", fields)
    if entry.get("graphs"):
        lines += _graphs(entry["graphs"])
    if "ranks" in entry:
        lines += _section("ranks", {**entry["ranks"], "shards": f"{len(entry['ranks']['shards'])} tensors are split"})
    if "piecewise" in entry:
        lines += _piecewise(entry["piecewise"])
    if "kernels" in entry:
        table = [(k["digest"], size(k["bytes"]), k["isa"], " ".join(k["buckets"])) for k in entry["kernels"]]
        lines += columns([("kernels", "size", "isa", "graphs"), *table])
    return lines


def _short(title: str, value: Any) -> Any:
    if title == "format":
        return f"{value['major']}.{value['minor']}"
    if title == "producer":
        if value is None:
            return "cannot be read"
        return f"{value['name']} {value['version']}"
    if title == "features":
        return "; ".join(f"{operation}: {', '.join(names)}" for operation, names in value.items() if names) or "none"
    return value


def _fields(title: str, value: Any) -> list[str]:
    return [f"  {title:<10} {printable(value)}"]


def _section(title: str, fields: Document) -> list[str]:
    return [f"  {title}", *columns(list(_flat(fields)), "    ")]


def _flat(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Dotted key and value of every leaf."""
    if isinstance(value, dict):
        for name, item in value.items():
            yield from _flat(item, f"{key}.{name}" if key else str(name))
    elif isinstance(value, list) and not any(isinstance(item, (dict, list)) for item in value):
        yield key, ", ".join(_leaf(item) for item in value) or "-"
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _flat(item, f"{key}[{index}]")
    else:
        yield key, _leaf(value)


def _leaf(value: Any) -> str:
    return "-" if value is None or value == "" else str(value)


def _graphs(graphs: Iterable[Document]) -> list[str]:
    rows = [
        (
            f"{graph['batch_size']}x{graph['seq_len']}",
            graph["nodes"],
            size(graph["object_bytes"]),
            graph["golden_steps"],
            f"{graph['tolerance']:.3g}" if isinstance(graph["tolerance"], float) else graph["tolerance"],
            graph["topology"],
        )
        for graph in graphs
    ]
    lines = columns([("graph", "nodes", "object", "golden steps", "tolerance", "topology"), *rows])
    for graph in graphs:
        if "inputs" in graph:
            lines += [f"  graph {graph['batch_size']}x{graph['seq_len']}", *columns(list(_tensors(graph)), "    ")]
            blobs = [("object", graph["object"]), ("golden", graph["golden"])]
            lines += columns([*blobs, ("bindings", f"{len(graph['bindings'])} weights and constants")], "    ")
    return lines


def _piecewise(piecewise: Document) -> list[str]:
    """What runs for each token count: pieces and split operations, and how often."""
    lines = _section("piecewise", piecewise["settings"])
    for graph in piecewise["graphs"]:
        total = sum(piece["calls"] for piece in graph["pieces"]) + sum(graph["split_operations"].values())
        pieces = [
            (
                f"piece {number}",
                f"{piece['calls']} of {total} calls",
                f"{piece['nodes']} nodes",
                size(piece["object_bytes"]),
            )
            for number, piece in enumerate(graph["pieces"])
        ]
        operations = [(name, f"{count} of {total} calls") for name, count in graph["split_operations"].items()]
        tolerance = f"tolerance {graph['tolerance']:.3g}, {graph['golden_steps']} golden steps"
        lines += [f"  prefill {graph['token_count']} tokens, {tolerance}", *columns([*pieces, *operations], "    ")]
        if "calls" in graph:
            lines += columns([_called(call) for call in graph["calls"]], "      ")
    return lines


def _called(call: Document) -> tuple[str, ...]:
    name = call["operation"] or f"piece {call['piece']}"
    options = ", ".join(f"{key} {value}" for key, value in call["options"].items())
    given = ", ".join((*call["inputs"], *call["state"]))
    return name, f"{given} -> {', '.join(call['outputs'])}", f"{len(call['bindings'])} weights and constants", options


def _tensors(graph: Document) -> Iterator[tuple[str, ...]]:
    for kind, specs in (("input", graph["inputs"]), ("state", graph["state"]), ("output", graph["outputs"])):
        for spec in specs:
            shape = "x".join(str(extent) for extent in spec["shape"]) or "scalar"
            bounds = f"{spec['minimum']} to {spec['maximum']}" if spec["minimum"] is not None else ""
            yield kind, spec["name"], spec["dtype"], shape, bounds


def of_models(models: Iterable[Document]) -> list[str]:
    rows = [(model["name"], model["dtype"], size(model["weight_bytes"]), model["description"]) for model in models]
    return columns([("name", "dtype", "weights", "what it is"), *rows], "")


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f} s"


def _stages(stages: Any) -> str:
    parts = [f"{name} {seconds:.2f}" for name, seconds in stages.items()]
    return ", ".join([*parts, f"total {sum(stages.values()):.2f}"])
