"""Whether a record agrees with itself: identities that can be computed again from the rest of it."""

from __future__ import annotations

from graphpack.archive.check import check_record_layout, check_record_weights
from graphpack.archive.record import Model, Record, Weights
from graphpack.errors import Problem
from graphpack.identity.digests import config_digest
from graphpack.identity.layout import check_layout, check_regions
from graphpack.identity.weights import check_recorded


def check_recorded_weights(record: Record) -> list[Problem]:
    """The model and its weights (exit 7)."""
    weights = record.weights
    return [*check_record_weights(record), *check_model(record.model, weights), *check_recorded(weights)]


def check_recorded_layout(record: Record) -> list[Problem]:
    """The memory and the settings (exit 8)."""
    layout = record.layout
    problems = [*check_record_layout(record), *check_regions(layout), *check_attention(record)]
    return problems + check_layout(layout, layout.regions, layout.capture_version)


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


def check_attention(record: Record) -> list[Problem]:
    """Whether attention is graphpack's own: so it is in every model but a factory's."""
    attention = "custom" if record.model.source == "factory" else "sdpa"
    if record.settings.attention == attention:
        return []
    here = f"{attention} in a model of source {record.model.source}"
    return [Problem("settings.attention", record.settings.attention, here, "save again")]
