"""Bring your own model: the protocol that `package.module:factory` has to return an object of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from graphpack.graph import Bucket, TensorSpec

if TYPE_CHECKING:
    import torch

METHODS = ("module_for", "inputs", "outputs", "state")
"""What an object must have to be a StepModel."""


class StepModel(Protocol):
    """One step of a model, at every shape it may be captured for.

    Point graphpack at a callable without arguments that returns such an object:

        graphpack save mypackage.mymodule:make ARCHIVE

    where `mypackage/mymodule.py`, importable from the current directory or the environment, holds

        class Doubler:
            def __init__(self):
                self.module = torch.nn.Linear(8, 8).eval()

            def module_for(self, bucket):
                return self.module

            def inputs(self, bucket, slots):
                return (TensorSpec(name="x", dtype="float32", shape=(bucket.batch_size, 8)),)

            def outputs(self, bucket):
                return (TensorSpec(name="y", dtype="float32", shape=(bucket.batch_size, 8)),)

            def state(self, slots, seq_len):
                return ()

        def make():
            return Doubler()

    A step must be a graph: shapes fixed by the bucket, no branch on tensor values, no random numbers, nothing that
    waits for the device. What it remembers between steps is state, passed in and changed in place; a module keeps
    nothing to itself. A bucket is (batch_size rows, seq_len positions); one set of state tensors, sized for the
    largest bucket, serves them all.

    Integer inputs that index memory must say their range (`minimum` and `maximum` of the TensorSpec, inclusive):
    a compiled graph does not check, and graphpack refuses values outside before each call.

    By convention the inputs of a decode step are `token_ids`, `positions` and `slots`, int64 `[batch]`: row i reads
    and writes the state at `slots[i]`, and puts its token at `positions[i]`. Slot `slots - 1` is scratch: rows that
    only fill up a batch use it, so the model must let several rows write there at once. The first output is
    `logits`, `[batch, vocab]`.

    The object may also have these attributes:

    - `weights_directory: Path | None`: a directory of safetensors files whose tensors have the names of the
      module's `state_dict`. graphpack then takes the weights from there, in place of those the factory made.
      Without it the parameters and persistent buffers are read from the module at save. A load never calls the
      factory: it takes the weights from this directory, or from the one given as `--weights`.
    - `architecture: str`: the model's name in the archive; the class's name by default.
    - `config: Mapping`: plain values (numbers, strings, lists, maps) that tell two models of one class apart.

    With methods `prefill_module`, `prefill_inputs` and `prefill_outputs` it can be saved in pieces; see docs/modes.md.
    """

    def module_for(self, bucket: Bucket) -> torch.nn.Module:
        """A module in eval mode with `forward(*inputs, *state)` -> an output, or a tuple of outputs.

        Parameters and buffers of every bucket's module are the same tensors under the same names.
        """

    def inputs(self, bucket: Bucket, slots: int) -> tuple[TensorSpec, ...]:
        """The tensors of one call, in order. `slots` counts the scratch slot."""

    def outputs(self, bucket: Bucket) -> tuple[TensorSpec, ...]:
        """What one call gives, in order."""

    def state(self, slots: int, seq_len: int) -> tuple[TensorSpec, ...]:
        """The tensors that live from step to step, all zero at the start, in order."""
