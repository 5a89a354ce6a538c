# ruff: noqa: T201
"""An engine that captures its own graphs, archives them, and restores them onto memory it holds itself.

python scripts/gpu/engine_example.py save ARCHIVE       capture with torch, record with graphpack
python scripts/gpu/engine_example.py serve ARCHIVE      another process: restore onto plain torch tensors
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import graphpack

HIDDEN, LAYERS, ROWS, BATCHES = 256, 4, 64, (1, 4)


def build() -> Any:
    """A small recurrent block: what it remembers of each row is the state."""
    import torch
    from torch import nn

    class Engine(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(512, HIDDEN)
            self.layers = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(LAYERS))
            self.head = nn.Linear(HIDDEN, 512)
            self.register_buffer("scale", torch.full((HIDDEN,), 0.5), persistent=False)

        def forward(self, tokens: torch.Tensor, rows: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
            x = self.embed(tokens) + memory.index_select(0, rows) * self.scale
            for layer in self.layers:
                x = x + torch.tanh(layer(x))
            memory.index_copy_(0, rows, x)
            logits: torch.Tensor = self.head(x)
            return logits

    torch.manual_seed(0)
    return Engine().eval()


def save(archive: str) -> None:
    # Before the first CUDA kernel of the process: what was loaded earlier is not known.
    with graphpack.Recorder(device="cuda", identity="engine example") as recorder:
        import torch

        with recorder.memory(), torch.no_grad():
            engine = build().to("cuda", torch.bfloat16)
            memory = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device="cuda")
        stream = torch.cuda.Stream()
        for batch in sorted(BATCHES, reverse=True):
            with recorder.memory():
                tokens = torch.zeros(batch, dtype=torch.int64, device="cuda")
                rows = torch.arange(batch, device="cuda")
            torch.cuda.synchronize()
            with recorder.memory(), torch.cuda.stream(stream), torch.no_grad():
                for _ in range(2):
                    engine(tokens, rows, memory)
                stream.synchronize()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            with torch.no_grad(), torch.cuda.graph(graph, pool=recorder.pool, stream=stream):
                logits = engine(tokens, rows, memory)
            recorder.add(
                f"decode/{batch}",
                graph,
                inputs={"tokens": tokens, "rows": rows},
                outputs={"logits": logits},
                state={"memory": memory},
                weights=engine,
                bounds={"tokens": (0, 511), "rows": (0, ROWS - 1)},
            )
    record = recorder.save(archive, name="engine")
    expected = replayed(lambda batch, given: recorder_step(recorder, batch, given))
    weights = Path(archive).with_suffix(".weights")
    weights.mkdir(exist_ok=True)
    from safetensors.torch import save_file

    save_file({name: value.cpu().clone() for name, value in engine.state_dict().items()}, weights / "model.safetensors")
    Path(archive).with_suffix(".json").write_text(json.dumps(expected))
    print(json.dumps({"graphs": len(record.graphs), "nodes": [graph.nodes for graph in record.graphs]}))


def recorder_step(recorder: Any, batch: int, given: dict[str, Any]) -> list[list[float]]:
    captured = next(one for bucket, one in recorder._added.items() if bucket.batch_size == batch)
    values: list[list[float]] = captured.step(given).float().cpu()[:, :8].tolist()
    return values


def replayed(step: Any) -> list[Any]:
    """The outputs of a few steps of every graph, on the same inputs in every process."""
    import numpy as np

    found = []
    for batch in BATCHES:
        for turn in range(4):
            given = {"tokens": np.arange(batch) * 7 + turn, "rows": np.arange(batch)}
            found.append(step(batch, given))
    return found


def serve(archive: str) -> None:
    import torch

    from graphpack import opening
    from graphpack.graph import Bucket
    from graphpack.results.load import LoadRequest

    engine = build().to("cuda", torch.bfloat16)
    memory = torch.zeros(ROWS, HIDDEN, dtype=torch.bfloat16, device="cuda")
    # The graphs run on these tensors: nothing is uploaded for them and nothing of theirs is copied.
    bound = {name: tensor.data_ptr() for name, tensor in engine.state_dict().items()}
    bound["memory"] = memory.data_ptr()
    torch.cuda.synchronize()
    request = LoadRequest(archive=Path(archive), weights={None: Path(archive).with_suffix(".weights")}, bind=bound)
    (model,) = opening.load(request)
    with model:
        memory.zero_()
        torch.cuda.synchronize()

        def step(batch: int, given: dict[str, Any]) -> list[list[float]]:
            values: list[list[float]] = model.replay(Bucket(batch, 1), given)["logits"].numpy()[:, :8].tolist()
            return values

        found = replayed(step)
    expected = json.loads(Path(archive).with_suffix(".json").read_text())
    print(json.dumps({"identical": found == expected, "memory changed": bool(memory.any())}))


if __name__ == "__main__":
    {"save": save, "serve": serve}[sys.argv[1]](sys.argv[2])
