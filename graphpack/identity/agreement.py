"""Whether a record agrees with itself: identities that can be computed again from the rest of it, and its memory."""

from __future__ import annotations

from graphpack.archive.piecewise import NAME, graphs_of
from graphpack.archive.record import Model, Record, Weights
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.identity.digests import config_digest, stitching_digest
from graphpack.identity.layout import check_fingerprint, check_regions
from graphpack.identity.weights import check_recorded


def refuse_contradictions(record: Record) -> None:
    """Raises CorruptArchiveError with all of them."""
    problems = check_agreement(record)
    if problems:
        raise CorruptArchiveError(f"the record of entry '{record.entry.name}' contradicts itself", problems)


def check_agreement(record: Record) -> list[Problem]:
    """What `archive.check` leaves: identities, dtypes and memory. Needs no weights and no device."""
    layout, weights = record.layout, record.weights
    problems = [*check_model(record.model, weights), *check_recorded(weights), *check_attention(record)]
    problems += check_stitching(record)
    arena = record.entry.backend == "cuda"
    return [*problems, *check_fingerprint(layout), *check_regions(layout, arena=arena)]


def check_model(model: Model, weights: Weights) -> list[Problem]:
    """A model whose fields contradict each other or the list of tensors."""
    problems = []
    digest = config_digest(model.config)
    if model.config_digest != digest:
        sides = model.config_digest[:12], f"computed {digest[:12]}"
        problems.append(Problem("model.config_digest", *sides, "save again"))
    if model.stored_dtype not in {tensor.dtype for tensor in weights.tensors} and weights.tensors:
        problems.append(Problem("model.stored_dtype", model.stored_dtype, "the dtype of no tensor", "save again"))
    effective = model.stored_dtype if model.requested_dtype == "auto" else model.requested_dtype
    if model.effective_dtype != effective:
        here = f"{effective}, as {model.requested_dtype} of {model.stored_dtype} weights"
        problems.append(Problem("model.effective_dtype", model.effective_dtype, here, "save again"))
    return problems


def check_stitching(record: Record) -> list[Problem]:
    """Piecewise graphs whose topology is not that of their pieces and calls."""
    return [
        Problem(
            f"extensions.{NAME}.graphs[{position}].topology",
            graph.topology[:12],
            f"computed {stitching_digest(graph)[:12]}",
            "save again",
        )
        for position, graph in enumerate(graphs_of(record))
        if graph.topology != stitching_digest(graph)
    ]


def check_attention(record: Record) -> list[Problem]:
    """Whether attention is graphpack's own: so it is in every model but a factory's."""
    attention = "custom" if record.model.source == "factory" else "sdpa"
    if record.settings.attention == attention:
        return []
    here = f"{attention} in a model of source {record.model.source}"
    return [Problem("settings.attention", record.settings.attention, here, "save again")]
