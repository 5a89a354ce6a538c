"""The model itself, run by torch over the memory of a restored entry: what a step without a graph falls back to."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from graphpack.archive.record import Record
from graphpack.backends import Memory
from graphpack.errors import EnvironmentMismatchError, Problem, UsageError, WeightsMismatchError
from graphpack.graph import DECODE_INPUTS, Bucket
from graphpack.models.decoder import DecoderStep
from graphpack.models.locate import Located
from graphpack.models.registry import decoder_code
from graphpack.modes import check_precision
from graphpack.schema import shown
from graphpack.torch_arrays import to_array


class Eager:
    """A decoder over an entry's own weights and state, so that its steps and those of graphs continue each other.

    Raises UsageError for a factory's model, whose code a load does not run; WeightsMismatchError if graphpack's
    decoder is not the one that was captured; EnvironmentMismatchError for another torch than the entry's, or one
    without CUDA; LayoutMismatchError for another precision of float32 products.
    """

    def __init__(self, record: Record, located: Located, memory: Memory) -> None:
        if located.config is None:
            problem = Problem("model.reference", shown(record.model.reference), "", "save with the sizes you need")
            raise UsageError("the model is made by a factory, whose code a load does not run", [problem])
        _check_code(record)
        _check_torch(record)
        self._memory = memory
        self._step = DecoderStep(located.config, located.source, record.model.effective_dtype)
        regions = {region.name: region.dtype for region in record.layout.regions if region.kind == "weight"}
        aliases = {original: tied for tied, original in located.source.aliases.items() if tied in regions}
        module = self._step.module_for(record.graphs[0].bucket)
        for name, parameter in module.named_parameters():
            region = name if name in regions else aliases.get(name)
            if region is not None:
                parameter.data = self._shared(region, regions[region])
        # What is no parameter: the table of rotary frequencies.
        module.to(memory.device)
        self._state = [self._shared(spec.name, spec.dtype) for spec in record.graphs[0].state]

    def _shared(self, region: str, dtype: str) -> torch.Tensor:
        tensor: torch.Tensor = torch.as_tensor(self._memory.shared(region), device=self._memory.device)
        return tensor.view(getattr(torch, dtype))

    def run(self, inputs: Mapping[str, np.ndarray], seq_len: int) -> np.ndarray:
        """The logits `[rows, vocab]` of one step that sees `seq_len` positions, as graphs give them. `inputs` must
        already have been checked."""
        given = [torch.from_numpy(inputs[name]).to(self._memory.device) for name in DECODE_INPUTS]
        module = self._step.module_for(Bucket(len(given[0]), seq_len))
        with torch.no_grad(), torch.autocast(given[0].device.type, enabled=False):
            logits: Any = module(*given, *self._state)
        return to_array(logits)


def _check_code(record: Record) -> None:
    here = decoder_code()
    if record.model.code != here:
        problem = Problem("model.code", record.model.code[:12], here[:12], "save again with this graphpack")
        raise WeightsMismatchError("the decoder of this graphpack is not the one that was captured", [problem])


def _check_torch(record: Record) -> None:
    """What a graph on CUDA does not depend on, but an eager step beside it does."""
    problems = []
    if record.entry.backend == "cuda":
        archived, here = record.environment.torch.version, str(torch.__version__)
        if archived != here:
            problems.append(Problem("environment.torch.version", shown(archived), here, "install that torch build"))
        elif not torch.cuda.is_available():
            problems.append(Problem("torch.cuda", "", "not available", "install a torch build with CUDA"))
    if problems:
        raise EnvironmentMismatchError("torch here cannot run beside the entry's graphs", problems)
    check_precision(record)
