"""What MODEL on the command line means."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from graphpack.errors import GraphpackError, NotFoundError, UsageError, WeightsMismatchError
from graphpack.graph import Bucket
from graphpack.models.presets import make_checkpoint
from graphpack.models.registry import default_name, resolve
from tests.models.checkpoints import llama_tensors, write_config, write_sharded

KNOWN = "tiny-llama, tiny-qwen3, tiny-qwen3-moe, qwen3-0.6b, llama-3.2-1b, qwen3-8b"

FACTORY = """
import torch
from torch import nn
from graphpack.graph import TensorSpec

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4, dtype=torch.bfloat16))

    def forward(self, x):
        return self.second(self.first(x))

class Step:
    config = {"width": 4}
    def __init__(self):
        self.net = Net().eval()
    def module_for(self, bucket):
        return self.net
    def inputs(self, bucket, slots):
        return (TensorSpec(name="x", dtype="float32", shape=(bucket.batch_size, 4)),)
    def outputs(self, bucket):
        return (TensorSpec(name="y", dtype="float32", shape=(bucket.batch_size, 4)),)
    def state(self, slots, seq_len):
        return ()

class Directed(Step):
    def __init__(self):
        import pathlib
        super().__init__()
        self.weights_directory = pathlib.Path(__file__).parent / "weights"

def fails():
    raise RuntimeError("no luck")

def nothing():
    return object()

number = 3
"""


def _message(reference: str) -> tuple[int, str]:
    with pytest.raises(GraphpackError) as caught:
        resolve(reference)
    return caught.value.code, str(caught.value)


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def module(here: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """The name of an importable module with factories, in the current directory."""
    name = f"factories_{request.node.name.removeprefix('test_')}"
    (here / f"{name}.py").write_text(FACTORY)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


@pytest.mark.parametrize("reference", ["./nope", "/abs/nope", "~/nope", "org/nope", "nope/", ".", "../nope"])
def test_a_path_that_is_not_there_is_never_a_name(reference: str, here: Path) -> None:
    if reference == ".":
        assert _message(reference) == (3, ".: not a checkpoint directory (it holds no config.json)")
    else:
        assert _message(reference) == (3, f"no such directory: {reference}")


def test_a_file_is_not_a_checkpoint(here: Path) -> None:
    (here / "model.gguf").write_text("x")
    expected = "not a directory: model.gguf; a checkpoint is named by its directory"
    assert _message("model.gguf") == (3, expected)


def test_an_unknown_name_lists_the_known_ones_and_the_closest(here: Path) -> None:
    code, text = _message("tiny-lama")
    assert code == 3
    assert text == f"no model 'tiny-lama'\n  known models: here {KNOWN}\n    -> did you mean tiny-llama?"
    code, text = _message("zzz")
    hint = "a checkpoint directory or package.module:factory will do as well"
    assert text == f"no model 'zzz'\n  known models: here {KNOWN}\n    -> {hint}"


def test_a_directory_wins_over_a_name_and_says_so(here: Path) -> None:
    make_checkpoint("tiny-qwen3", here / "tiny-llama")
    resolved = resolve("tiny-llama")
    assert (resolved.source, resolved.architecture, resolved.name) == ("checkpoint", "Qwen3ForCausalLM", "tiny-llama")
    assert resolved.note == f"'tiny-llama' is the directory {here / 'tiny-llama'}, not the built-in model of that name"
    make_checkpoint("tiny-llama", here / "org" / "name")
    assert resolve("org/name").note == f"'org/name' is the directory {here / 'org/name'}"
    assert resolve("./org/name").note == ""
    configured = {"tiny-llama": here / "org" / "name"}
    note = f"'tiny-llama' is the directory {here / 'tiny-llama'}, not the configured model of that name"
    assert resolve("tiny-llama", configured).note == note


def test_a_configured_name(here: Path) -> None:
    make_checkpoint("tiny-qwen3", here / "somewhere")
    resolved = resolve("mine", {"mine": here / "somewhere"})
    assert (resolved.source, resolved.name, resolved.path) == ("checkpoint", "mine", here / "somewhere")


def test_built_in(here: Path) -> None:
    resolved = resolve("tiny-llama")
    assert (resolved.source, resolved.reference, resolved.path) == ("builtin", "tiny-llama", None)
    assert (resolved.stored_dtype, resolved.revision, resolved.note) == ("float32", None, "")


def test_names_of_directories_become_entry_names(tmp_path: Path) -> None:
    assert default_name(tmp_path / "my model é 模型") == "my-model"
    assert default_name(tmp_path / "..." / "模型") == "model"
    assert default_name(tmp_path / "Qwen3-0.6B_v1") == "Qwen3-0.6B_v1"


def test_a_directory_with_blanks_and_letters_of_all_sorts(tmp_path: Path) -> None:
    directory = tmp_path / "my model é 模型"
    make_checkpoint("tiny-llama", directory)
    with resolve(str(directory)).open_weights() as weights:
        assert len(weights.tensors) == 21


def test_code_in_a_checkpoint_is_never_run(here: Path) -> None:
    marker = here / "ran"
    write_config(here / "evil", {"auto_map": {"AutoModelForCausalLM": "modeling_x.X"}})
    (here / "evil" / "modeling_x.py").write_text(f"open({str(marker)!r}, 'w')")
    with pytest.raises(WeightsMismatchError) as caught:
        resolve("./evil")
    assert caught.value.code == 7
    assert "runs no code from a checkpoint" in str(caught.value)
    assert not marker.exists()


def test_resolving_does_not_import_torch(here: Path) -> None:
    make_checkpoint("tiny-llama", here / "model")
    code = (
        "import sys; from graphpack.models.registry import resolve; r = resolve('model'); r.code_digest();"
        "r.open_weights().close(); resolve('tiny-llama').open_weights(); print('torch' in sys.modules)"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=here, env={"PYTHONPATH": str(root)}, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (0, "False\n"), done.stderr


def test_factory(module: str) -> None:
    resolved = resolve(f"{module}:Step")
    assert (resolved.source, resolved.architecture, resolved.config) == ("factory", "Step", {"width": 4})
    assert (resolved.reference, resolved.stored_dtype) == (f"{module}:Step", "float32")
    assert resolved.note == (
        "the factory names no weights_directory, so load needs its weights: --weights DIR with model.safetensors"
    )
    with resolved.open_weights() as weights:
        assert weights.aliases == {"second.weight": "first.weight"}
        assert {n: (t.dtype, t.shape) for n, t in weights.tensors.items()} == {
            "first.weight": ("float32", (4, 4)),
            "scale": ("bfloat16", (4,)),
        }
        assert bytes(weights.view("scale")) == b"\x80\x3f" * 4
        net = resolved.build(weights, "float32").module_for(Bucket(1, 8))
        assert net.get_parameter("first.weight").data_ptr() == weights.address("second.weight")


def test_factory_digest_covers_its_source(module: str, here: Path) -> None:
    resolved = resolve(f"{module}:Step")
    before = resolved.code_digest()
    assert resolve(f"{module}:Step").code_digest() == before
    with open(here / f"{module}.py", "a") as file:
        file.write("# edited\n")
    assert resolved.code_digest() != before


def test_factory_with_a_directory_of_weights(module: str, here: Path) -> None:
    import numpy as np
    import torch
    from safetensors.torch import save_file

    (here / "weights").mkdir()
    values = torch.arange(16, dtype=torch.float32).reshape(4, 4)
    save_file(
        {"first.weight": values, "scale": torch.ones(4, dtype=torch.bfloat16), "stray": torch.ones(1)},
        here / "weights" / "model.safetensors",
    )
    resolved = resolve(f"{module}:Directed")
    assert (resolved.path, resolved.note) == (here / "weights", "")
    with resolved.open_weights() as weights:
        assert set(weights.tensors) == {"first.weight", "scale"}
        net = resolved.build(weights, "float32").module_for(Bucket(1, 8))
        assert net.get_parameter("second.weight").data_ptr() == weights.address("first.weight")
        np.testing.assert_array_equal(net.get_parameter("first.weight").detach().numpy(), values.numpy())


def test_factory_refuses_another_dtype(module: str) -> None:
    resolved = resolve(f"{module}:Step")
    with resolved.open_weights() as weights, pytest.raises(UsageError) as caught:
        resolved.build(weights, "bfloat16")
    text = f"cannot run a factory's model in bfloat16: {module}:Step makes float32; let the factory make it so"
    assert str(caught.value) == text


def test_factories_that_cannot_be_used(module: str) -> None:
    assert _message("") == (3, "no such directory: (empty)")
    assert _message("no_such_module:make") == (
        3,
        "cannot import module 'no_such_module' of 'no_such_module:make': No module named 'no_such_module'",
    )
    assert _message(f"{module}:absent") == (3, f"module '{module}' has no attribute 'absent'")
    assert _message(f"{module}:fails") == (2, f"factory '{module}:fails' failed: RuntimeError: no luck")
    assert _message(f"{module}:number") == (
        2,
        f"'{module}:number' is not callable: a factory takes no arguments and returns a step model",
    )
    missing = "".join(f"\n  object.{name}: here missing" for name in ("module_for", "inputs", "outputs", "state"))
    assert _message(f"{module}:nothing") == (
        2,
        f"factory '{module}:nothing' returned no step model (see graphpack.models.step){missing}",
    )


def test_a_hub_snapshot_has_its_commit_as_revision(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    commit, digest = "0123456789abcdef" * 2 + "01234567", "ab" * 32
    repository = tmp_path / "models--org--name"
    snapshot = repository / "snapshots" / commit
    write_config(snapshot)
    (repository / "blobs").mkdir()
    save_file(llama_tensors(), repository / "blobs" / digest)
    (snapshot / "model.safetensors").symlink_to(Path("../../blobs") / digest)
    resolved = resolve(str(snapshot))
    assert resolved.revision == commit
    with resolved.open_weights() as weights:
        assert weights.claimed_digests == {snapshot / "model.safetensors": digest}


def test_a_plain_directory_has_no_revision(tmp_path: Path) -> None:
    write_sharded(tmp_path / "x", llama_tensors(), ("a.safetensors", "b.safetensors"))
    assert resolve(str(tmp_path / "x")).revision is None


def test_not_found_is_not_a_usage_error(here: Path) -> None:
    with pytest.raises(NotFoundError):
        resolve("")
