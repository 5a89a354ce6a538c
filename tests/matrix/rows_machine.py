"""Rows for where an entry fits: memory layout, environment, settings."""

from __future__ import annotations

from tests.matrix.row import CUDA, Row, appended, plus, swapped, without

ONES = "1" * 64
MIB2 = 2 << 20
_NORM = "layout.regions.1"  # model.layers.0.input_layernorm.weight
_STATE = "layout.regions.22"  # kv.0.key
_INPUT = "layout.regions.26"  # 1x64/token_ids

LAYOUT = (
    Row(field="layout.fingerprint", change="not that of the regions", edits=(("layout.fingerprint", ONES),)),
    Row(field="layout.capture_version", change="of another capture routine", edits=(("layout.capture_version", 2),)),
    Row(field="layout.base", change="2 MiB", edits=(("layout.base", MIB2),)),
    Row(field="layout.bytes", change="2 MiB", edits=(("layout.bytes", MIB2),)),
    Row(field="layout.granularity", change="2 MiB", edits=(("layout.granularity", MIB2),)),
    Row(field="layout.relocatable", change="false", edits=(("layout.relocatable", False),)),
    Row(
        field="layout.regions",
        change="the last one missing",
        edits=(("layout.regions", without(-1)),),
    ),
    Row(field="layout.regions", change="a weight missing", edits=(("layout.regions", without(1)),)),
    Row(
        field="layout.regions",
        change="a scratch region more",
        edits=(
            (
                "layout.regions",
                appended(
                    {
                        "name": "scratch",
                        "kind": "scratch",
                        "dtype": "uint8",
                        "shape": [64],
                        "strides": [1],
                        "offset": 0,
                        "bytes": 64,
                        "alignment": 64,
                    }
                ),
            ),
        ),
    ),
    Row(field="layout.regions", change="two in each other's place", edits=(("layout.regions", swapped(7, 8)),)),
    Row(field="layout.regions", change="one twice", edits=(("layout.regions", lambda old: [*old, old[1]]),)),
    Row(field="layout.regions[].name", change="a weight renamed", edits=((f"{_NORM}.name", "other.weight"),)),
    Row(field="layout.regions[].name", change="an input renamed", edits=((f"{_INPUT}.name", "1x64/ids"),)),
    Row(field="layout.regions[].kind", change="a weight called a constant", edits=((f"{_NORM}.kind", "constant"),)),
    Row(field="layout.regions[].kind", change="a state called scratch", edits=((f"{_STATE}.kind", "scratch"),)),
    Row(field="layout.regions[].dtype", change="int32, of the same size", edits=((f"{_NORM}.dtype", "int32"),)),
    Row(
        field="layout.regions[].dtype",
        change="float16, half the bytes",
        edits=((f"{_NORM}.dtype", "float16"), (f"{_NORM}.bytes", 128), (f"{_NORM}.alignment", 2)),
    ),
    Row(
        field="layout.regions[].shape",
        change="more memory",
        edits=((f"{_STATE}.shape", [4, 2, 64, 16]), (f"{_STATE}.bytes", 32768)),
    ),
    Row(
        field="layout.regions[].shape",
        change="less memory",
        edits=((f"{_STATE}.shape", [2, 2, 64, 16]), (f"{_STATE}.bytes", 16384)),
    ),
    Row(field="layout.regions[].strides", change="column-major", edits=(("layout.regions.2.strides", [1, 64]),)),
    Row(field="layout.regions[].offset", change="2 MiB further", edits=((f"{_STATE}.offset", plus(MIB2)),)),
    Row(field="layout.regions[].bytes", change="more than the shape has", edits=((f"{_NORM}.bytes", plus(4)),)),
    Row(field="layout.regions[].bytes", change="less than the shape has", edits=((f"{_NORM}.bytes", plus(-4)),)),
    Row(field="layout.regions[].alignment", change="larger", edits=((f"{_NORM}.alignment", 64),)),
    Row(field="layout.regions[].alignment", change="no power of two", edits=((f"{_NORM}.alignment", 12),)),
)

ENVIRONMENT = (
    Row(field="environment.device_type", change="cuda", edits=(("environment.device_type", "cuda"),)),
    Row(field="environment.machine", change="aarch64", edits=(("environment.machine", "aarch64"),)),
    Row(
        field="environment.cpu_features",
        change="one that no machine has",
        edits=(("environment.cpu_features", appended("zeta9")),),
    ),
    Row(
        field="environment.cpu_features",
        change="one less than the instruction set needs",
        edits=(("environment.cpu_features", without(1)),),
    ),
    Row(
        field="environment.cpu_features",
        change="unchanged; the machine lacks two that it needs",
        host={"cpu_features_less": ("avx2", "fma")},
    ),
    Row(
        field="environment.cpu_features",
        change="unchanged; the machine has more",
        host={"cpu_features_more": ("zeta9",)},
    ),
    Row(
        field="environment.symbol_versions",
        change="one that no system has",
        edits=(("environment.symbol_versions", appended("GLIBC_2.99")),),
    ),
    Row(
        field="environment.symbol_versions",
        change="one less than the objects need",
        edits=(("environment.symbol_versions", lambda old: [name for name in old if name != "GLIBC_2.14"]),),
    ),
    Row(
        field="environment.symbol_versions",
        change="unchanged; the system lacks two",
        host={"symbol_versions_less": ("GLIBCXX_3.4.30", "GLIBC_2.34")},
    ),
    Row(
        field="environment.symbol_versions",
        change="unchanged; the system has more",
        host={"symbol_versions_more": ("GLIBC_2.99",)},
    ),
    Row(
        field="environment.torch.version",
        change="another version",
        edits=(("environment.torch.version", "2.12.0+cpu"),),
    ),
    Row(
        field="environment.torch.version",
        change="another build of the version",
        edits=(("environment.torch.version", "2.13.0+cu130"),),
    ),
    Row(
        field="environment.torch.version",
        change="another version, with --allow torch",
        edits=(("environment.torch.version", "2.12.0+cpu"),),
        allow=frozenset({"torch"}),
    ),
    Row(field="environment.torch.version", change="unchanged; no torch here", host={"torch": None}),
    Row(field="environment.cuda", change="a device, of a cpu entry", edits=(("environment.cuda", CUDA),)),
    Row(
        field="environment.torch.git_version",
        change="another commit",
        edits=(("environment.torch.git_version", "b" * 40),),
    ),
    Row(
        field="environment.torch.git_version",
        change="another commit, with --allow torch",
        edits=(("environment.torch.git_version", "b" * 40),),
        allow=frozenset({"torch"}),
    ),
    Row(
        field="environment.torch.version",
        change="all of the environment at once",
        edits=(
            ("environment.cpu_features", appended("zeta9")),
            ("environment.symbol_versions", appended("GLIBC_2.99")),
            ("environment.torch.version", "2.12.0+cpu"),
            ("environment.torch.git_version", "b" * 40),
        ),
    ),
)

SETTINGS = (
    Row(field="settings.batch_sizes", change="one more", edits=(("settings.batch_sizes", [1, 2, 4]),)),
    Row(field="settings.batch_sizes", change="one less", edits=(("settings.batch_sizes", [1]),)),
    Row(field="settings.batch_sizes", change="in another order", edits=(("settings.batch_sizes", [2, 1]),)),
    Row(field="settings.seq_lens", change="another one", edits=(("settings.seq_lens", [128]),)),
    Row(field="settings.seq_lens", change="one more", edits=(("settings.seq_lens", [64, 128]),)),
    Row(field="settings.slots", change="too few", edits=(("settings.slots", 2),)),
    Row(field="settings.slots", change="more", edits=(("settings.slots", 4),)),
    Row(field="settings.attention", change="custom", edits=(("settings.attention", "custom"),)),
    Row(field="settings.cpu_isa", change="avx512", edits=(("settings.cpu_isa", "avx512"),)),
    Row(field="settings.cpu_isa", change="none", edits=(("settings.cpu_isa", None),)),
    Row(field="settings.compile", change="true", edits=(("settings.compile", True),)),
    Row(
        field="settings.float32_matmul_precision",
        change="medium",
        edits=(("settings.float32_matmul_precision", "medium"),),
    ),
    Row(
        field="settings.deterministic_algorithms",
        change="true",
        edits=(("settings.deterministic_algorithms", True),),
    ),
)

ROWS = (*LAYOUT, *ENVIRONMENT, *SETTINGS)
