"""Rows for entries of CUDA graphs: what differs there from entries of a cpu, and every field of the record once more.

Regions and tensors are changed by name, since these rows are for every kept archive of the same model.
"""

from __future__ import annotations

from typing import Any

from tests.matrix.row import Row, item, less, plus, swapped, without

ONES = "1" * 64
MIB2 = 2 << 20
_REGIONS = "layout.regions"
_DOWN, _GATE, _UP = (f"model.layers.0.mlp.{name}_proj.weight" for name in ("down", "gate", "up"))
_NORM, _OTHER_NORM = "model.layers.0.input_layernorm.weight", "model.layers.1.input_layernorm.weight"
_STATE, _TABLE = "kv.0.key", "model.rotary_emb.inv_freq"


def _region(name: str, /, **changes: Any) -> tuple[str, Any]:
    return _REGIONS, item(name, **changes)


def _tensor(name: str, /, **changes: Any) -> tuple[str, Any]:
    return "weights.tensors", item(name, **changes)


def _swapped_names(first: str, second: str) -> Any:
    """Two items of a list exchange their names."""
    names = {first: second, second: first}
    return lambda old: [{**entry, "name": names.get(entry["name"], entry["name"])} for entry in old]


def _twice(name: str) -> Any:
    return lambda old: [*old, next(entry for entry in old if entry["name"] == name)]


def _from(field: str, name: str, other: str) -> Any:
    """A list whose item `name` has the field of the item `other`."""

    def change(old: list[Any]) -> list[Any]:
        value = next(entry[field] for entry in old if entry["name"] == other)
        return item(name, **{field: value})(old)

    return change


def _last_of(kind: str) -> Any:
    """Without the last region of a kind."""

    def change(old: list[Any]) -> list[Any]:
        last = max(index for index, region in enumerate(old) if region["kind"] == kind)
        return without(last)(old)

    return change


def _none_of(kind: str) -> Any:
    return lambda old: [region for region in old if region["kind"] != kind]


def _renamed(kind: str) -> Any:
    """Regions of a kind called otherwise."""
    return lambda old: [
        {**region, "name": f"other.{region['name']}"} if region["kind"] == kind else region for region in old
    ]


def _first_of(wanted: str, /, **changes: Any) -> Any:
    return lambda old: item(next(region["name"] for region in old if region["kind"] == wanted), **changes)(old)


def _scratch(offset: int) -> dict[str, Any]:
    return {
        "name": "scratch.more",
        "kind": "scratch",
        "dtype": "uint8",
        "shape": [64],
        "strides": [1],
        "offset": offset,
        "bytes": 64,
        "alignment": 64,
    }


ENTRY = (
    Row(field="entry.name", change="another name than the tag", edits=(("entry.name", "renamed"),)),
    Row(field="entry.backend", change="cpu, the environment being cuda", edits=(("entry.backend", "cpu"),)),
    Row(
        field="entry.backend",
        change="cpu, as the environment",
        edits=(("entry.backend", "cpu"), ("environment.device_type", "cpu")),
    ),
    Row(field="entry.mode", change="piecewise", edits=(("entry.mode", "piecewise"),)),
)

MODEL = (
    Row(field="model.source", change="factory", edits=(("model.source", "factory"),)),
    Row(field="model.reference", change="another built-in model", edits=(("model.reference", "tiny-llama"),)),
    Row(field="model.architecture", change="another one", edits=(("model.architecture", "LlamaForCausalLM"),)),
    Row(field="model.config", change="qk_norm = False", edits=(("model.config.qk_norm", False),)),
    Row(field="model.config", change="rms_norm_eps = 1e-5", edits=(("model.config.rms_norm_eps", 1e-5),)),
    Row(field="model.config_digest", change="not that of the config", edits=(("model.config_digest", ONES),)),
    Row(field="model.revision", change="a commit", edits=(("model.revision", "a" * 40),)),
    Row(field="model.requested_dtype", change="bfloat16", edits=(("model.requested_dtype", "bfloat16"),)),
    Row(field="model.stored_dtype", change="bfloat16", edits=(("model.stored_dtype", "bfloat16"),)),
    Row(field="model.effective_dtype", change="bfloat16", edits=(("model.effective_dtype", "bfloat16"),)),
    Row(
        field="model.effective_dtype",
        change="bfloat16, as requested",
        edits=(("model.effective_dtype", "bfloat16"), ("model.requested_dtype", "bfloat16")),
    ),
    Row(field="model.code", change="another digest", edits=(("model.code", ONES),)),
)

WEIGHTS = (
    Row(field="weights.root", change="not that of the tensors", edits=(("weights.root", ONES),)),
    Row(field="weights.bytes", change="4 more", edits=(("weights.bytes", plus(4)),)),
    Row(
        field="weights.tensors",
        change="one missing",
        edits=(("weights.tensors", less(_NORM)), ("weights.bytes", plus(-256))),
    ),
    Row(field="weights.tensors[].name", change="renamed", edits=(_tensor(_NORM, name="model.other.weight"),)),
    Row(
        field="weights.tensors[].name",
        change="two of one shape exchange their names",
        edits=(("weights.tensors", _swapped_names(_GATE, _UP)),),
        found_by="load --verify",
    ),
    Row(
        field="weights.tensors[].dtype",
        change="float16",
        edits=(_tensor(_NORM, dtype="float16"), ("weights.bytes", plus(-128))),
    ),
    Row(field="weights.tensors[].shape", change="transposed", edits=(_tensor(_DOWN, shape=[128, 64]),)),
    Row(
        field="weights.tensors[].digest",
        change="of other bytes",
        edits=(_tensor(_NORM, digest=ONES),),
        found_by="load --verify",
    ),
    Row(
        field="weights.tensors[].alias_of",
        change="of the tied tensor, none",
        edits=(_tensor("lm_head.weight", alias_of=None), ("weights.bytes", plus(131072))),
    ),
)

LAYOUT = (
    Row(field="layout.fingerprint", change="not that of the regions", edits=(("layout.fingerprint", ONES),)),
    Row(field="layout.capture_version", change="of another capture routine", edits=(("layout.capture_version", 2),)),
    Row(field="layout.base", change="another one, which the device gives", edits=(("layout.base", plus(1 << 30)),)),
    Row(field="layout.base", change="another one, which the device does not give", edits=(("layout.base", MIB2),)),
    Row(
        field="layout.base",
        change="one that the device does not give, and relocatable false",
        edits=(("layout.base", plus(MIB2)), ("layout.relocatable", False)),
    ),
    Row(field="layout.base", change="0", edits=(("layout.base", 0),)),
    Row(field="layout.base", change="no multiple of the granularity", edits=(("layout.base", plus(4096)),)),
    Row(field="layout.base", change="beyond what a device has addresses for", edits=(("layout.base", 1 << 47),)),
    Row(field="layout.bytes", change="2 MiB more, which nothing uses", edits=(("layout.bytes", plus(MIB2)),)),
    Row(field="layout.bytes", change="2 MiB, less than the regions reach", edits=(("layout.bytes", MIB2),)),
    Row(field="layout.granularity", change="4 KiB", edits=(("layout.granularity", 4096),)),
    Row(field="layout.relocatable", change="false, at its own base", edits=(("layout.relocatable", False),)),
    Row(field="layout.regions", change="the last output missing", edits=((_REGIONS, _last_of("output")),)),
    Row(field="layout.regions", change="all scratch missing", edits=((_REGIONS, _none_of("scratch")),)),
    Row(field="layout.regions", change="a weight missing", edits=((_REGIONS, less(_NORM)),)),
    Row(
        field="layout.regions",
        change="a scratch region more, behind all others",
        edits=(("layout.bytes", plus(MIB2)), (_REGIONS, lambda old: [*old, _scratch(_end_of(old))])),
    ),
    Row(field="layout.regions", change="two in each other's place", edits=((_REGIONS, swapped(2, 3)),)),
    Row(field="layout.regions", change="one twice", edits=((_REGIONS, _twice(_NORM)),)),
    Row(field="layout.regions[].name", change="a weight renamed", edits=(_region(_NORM, name="other.weight"),)),
    Row(
        field="layout.regions[].name",
        change="all scratch renamed",
        edits=((_REGIONS, _renamed("scratch")),),
    ),
    Row(
        field="layout.regions[].name",
        change="two weights of one shape exchange their names",
        edits=((_REGIONS, _swapped_names(_GATE, _UP)),),
    ),
    Row(field="layout.regions[].kind", change="a weight called a constant", edits=(_region(_NORM, kind="constant"),)),
    Row(field="layout.regions[].kind", change="a constant called scratch", edits=(_region(_TABLE, kind="scratch"),)),
    Row(field="layout.regions[].kind", change="a state called scratch", edits=(_region(_STATE, kind="scratch"),)),
    Row(
        field="layout.regions[].kind",
        change="scratch called an output",
        edits=((_REGIONS, _first_of("scratch", kind="output")),),
    ),
    Row(field="layout.regions[].dtype", change="int32, of the same size", edits=(_region(_NORM, dtype="int32"),)),
    Row(
        field="layout.regions[].shape",
        change="more memory",
        edits=(_region(_STATE, shape=[4, 2, 64, 16], bytes=32768),),
    ),
    Row(
        field="layout.regions[].shape",
        change="less memory",
        edits=(_region(_STATE, shape=[2, 2, 64, 16], bytes=16384),),
    ),
    Row(field="layout.regions[].strides", change="column-major", edits=(_region(_DOWN, strides=[1, 64]),)),
    Row(
        field="layout.regions[].offset",
        change="behind all others, where memory is free",
        edits=(
            ("layout.bytes", plus(MIB2)),
            (_REGIONS, lambda old: item(_NORM, offset=_end_of(old))(old)),
        ),
    ),
    Row(field="layout.regions[].offset", change="onto another region", edits=(("layout.regions.1.offset", 0),)),
    Row(field="layout.regions[].offset", change="4 bytes further", edits=(_region(_NORM, offset=plus(4)),)),
    Row(field="layout.regions[].offset", change="beyond the arena", edits=(_region(_NORM, offset=1 << 40),)),
    Row(field="layout.regions[].bytes", change="less than the shape has", edits=(_region(_NORM, bytes=252),)),
    Row(field="layout.regions[].alignment", change="smaller", edits=(_region(_NORM, alignment=64),)),
    Row(field="layout.regions[].alignment", change="no power of two", edits=(_region(_NORM, alignment=12),)),
)


def _end_of(regions: list[Any]) -> int:
    end = max(region["offset"] + region["bytes"] for region in regions)
    return int(-(-end // MIB2) * MIB2)


def _cuda(**changes: Any) -> tuple[tuple[str, Any], ...]:
    return tuple((f"environment.cuda.{name}", value) for name, value in changes.items())


ENVIRONMENT = (
    Row(field="environment.device_type", change="cpu", edits=(("environment.device_type", "cpu"),)),
    Row(field="environment.machine", change="aarch64", edits=(("environment.machine", "aarch64"),)),
    Row(
        field="environment.cpu_features",
        change="one that no machine has",
        edits=(("environment.cpu_features", ["zeta9"]),),
    ),
    Row(
        field="environment.symbol_versions",
        change="one that no system has",
        edits=(("environment.symbol_versions", ["GLIBC_2.99"]),),
    ),
    Row(field="environment.torch.version", change="another version", edits=(("environment.torch.version", "1.0"),)),
    Row(
        field="environment.torch.git_version",
        change="another commit",
        edits=(("environment.torch.git_version", "b" * 40),),
    ),
    Row(field="environment.cuda", change="none", edits=(("environment.cuda", None),)),
    Row(field="environment.cuda", change="capability = 8.9", edits=_cuda(capability="8.9")),
    Row(
        field="environment.cuda",
        change="capability = 10.0, on a device of 10.0",
        edits=_cuda(capability="10.0"),
        host={"capability": (10, 0)},
    ),
    Row(field="environment.cuda", change="sm_count = 114", edits=_cuda(sm_count=114)),
    Row(
        field="environment.cuda",
        change="sm_count = 114, with --allow sm_count",
        edits=_cuda(sm_count=114),
        allow=frozenset({"sm_count"}),
    ),
    Row(field="environment.cuda", change="driver_cuda = 13.1", edits=_cuda(driver_cuda="13.1")),
    Row(
        field="environment.cuda",
        change="others for runtime, cublas, cudnn and triton",
        edits=_cuda(runtime="12.0", cublas="12", cudnn="8", triton=""),
    ),
    Row(field="environment.cuda", change="unchanged; a device of capability 10.0 here", host={"capability": (10, 0)}),
    Row(field="environment.cuda", change="unchanged; 114 multiprocessors here", host={"sm_count": 114}),
    Row(
        field="environment.cuda",
        change="unchanged; 114 multiprocessors here, with --allow sm_count",
        host={"sm_count": 114},
        allow=frozenset({"sm_count"}),
    ),
    Row(field="environment.cuda", change="unchanged; a driver for CUDA 12.8 here", host={"driver": 12080}),
    Row(field="environment.cuda", change="unchanged; a driver for CUDA 13.3 here", host={"driver": 13030}),
    Row(field="environment.cuda", change="unchanged; no device here", host={"devices": 0}),
    Row(
        field="environment.cuda",
        change="unchanged; all of it differs here",
        host={"capability": (8, 9), "sm_count": 114, "driver": 12080},
    ),
)

SETTINGS = (
    Row(field="settings.batch_sizes", change="one more", edits=(("settings.batch_sizes", [1, 2, 4]),)),
    Row(field="settings.batch_sizes", change="one less", edits=(("settings.batch_sizes", [1]),)),
    Row(field="settings.batch_sizes", change="in another order", edits=(("settings.batch_sizes", [2, 1]),)),
    Row(field="settings.seq_lens", change="another one", edits=(("settings.seq_lens", [128]),)),
    Row(field="settings.slots", change="too few", edits=(("settings.slots", 2),)),
    Row(field="settings.slots", change="more", edits=(("settings.slots", 4),)),
    Row(field="settings.attention", change="custom", edits=(("settings.attention", "custom"),)),
    Row(field="settings.cpu_isa", change="avx2", edits=(("settings.cpu_isa", "avx2"),)),
    Row(field="settings.compile", change="the other", edits=(("settings.compile", lambda old: not old),)),
    Row(
        field="settings.float32_matmul_precision",
        change="medium",
        edits=(("settings.float32_matmul_precision", "medium"),),
    ),
    Row(
        field="settings.deterministic_algorithms",
        change="the other",
        edits=(("settings.deterministic_algorithms", lambda old: not old),),
    ),
)

ROWS = (*ENTRY, *MODEL, *WEIGHTS, *LAYOUT, *ENVIRONMENT, *SETTINGS)
