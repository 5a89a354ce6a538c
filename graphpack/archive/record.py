"""The record: an entry's description and the authority on everything else in it.

`docs/format.md` defines each field; a test compares its tables with these classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Annotated, Any

from graphpack.dtypes import COMPUTE_DTYPES, ComputeDtype, DtypeName
from graphpack.frozen import dataclass
from graphpack.graph import Bucket, Region, TensorSpec
from graphpack.schema import Count, Digest, Extents, Positive, Rule, matching, one_of

FORMAT_MAJOR = 1
FORMAT_MINOR = 1

_TAG = "[A-Za-z0-9_][A-Za-z0-9._-]{0,127}"
EntryName = Annotated[str, matching(f"a registry tag: `{_TAG}`", _TAG)]
Revision = Annotated[str, matching("40 lower-case hexadecimal digits", "[0-9a-f]{40}")]
Capability = Annotated[str, matching("`MAJOR.MINOR`", "[0-9]{1,2}\\.[0-9]")]
CudaVersion = Annotated[str, matching("`MAJOR.MINOR`", "[0-9]{1,2}\\.[0-9]{1,2}")]
Distance = Annotated[float, Rule("finite, at least 0", lambda value: math.isfinite(value) and value >= 0)]


def _without_bytes(value: Any) -> bool:
    if type(value) is dict:
        return all(_without_bytes(item) for item in value.values())
    if type(value) is list:
        return all(_without_bytes(item) for item in value)
    return type(value) is not bytes


PlainMap = Annotated[Mapping[str, Any], Rule("without byte strings at any depth", _without_bytes)]
"""Any values that JSON can hold too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormatVersion:
    """The version of the format that the record has."""

    major: Count
    minor: Count

    def __str__(self) -> str:
        return f"{self.major}.{self.minor}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Features:
    """Named features a reader must know to do each operation; `optional` ones may be ignored."""

    inspect: tuple[str, ...] = ()
    verify: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Producer:
    """The program that wrote the entry."""

    name: str
    version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EntryIdentity:
    """What the entry is called, what runs it, and how its model was captured."""

    name: EntryName
    backend: Annotated[str, one_of("cpu", "cuda")]
    mode: Annotated[str, one_of("full", "piecewise")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """`code` is the SHA-256 of the source files that define the module: an edited model is stale."""

    source: Annotated[str, one_of("builtin", "checkpoint", "factory")]
    reference: str
    architecture: str
    config: PlainMap
    config_digest: Digest
    revision: Revision | None
    requested_dtype: Annotated[str, one_of("auto", *COMPUTE_DTYPES)]
    stored_dtype: DtypeName
    effective_dtype: ComputeDtype
    code: Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightTensor:
    """`alias_of` names the tensor whose bytes this one shares (tied embeddings); its digest is then the same."""

    name: str
    dtype: DtypeName
    shape: Extents
    digest: Digest
    alias_of: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """`root` is the digest over all tensors, `bytes` the size of those that are no alias."""

    root: Digest
    bytes: Count
    tensors: tuple[WeightTensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """On CPU there is no arena: base, bytes and granularity are 0 and regions stand in binding order."""

    fingerprint: Digest
    capture_version: Positive
    base: Count
    bytes: Count
    granularity: Count
    relocatable: bool
    regions: tuple[Region, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchBuild:
    """`version` with its local part (`2.13.0+cpu`), and the git commit torch says it was built from."""

    version: str
    git_version: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CudaEnvironment:
    """What CUDA graphs need of a device and its driver. The versions below `driver_cuda` are those of the libraries
    that the kernels were taken from; none of these is needed to run them."""

    capability: Capability
    sm_count: Positive
    driver_cuda: CudaVersion
    runtime: str
    cublas: str
    cudnn: str
    triton: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """What the entry needs of the machine. All but `informational` fields of section 'Environment' are checked.
    `cuda` is None on CPU; on CUDA the features and symbol versions are empty."""

    device_type: Annotated[str, one_of("cpu", "cuda")]
    machine: str
    cpu_features: tuple[str, ...]
    symbol_versions: tuple[str, ...]
    torch: TorchBuild
    cuda: CudaEnvironment | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the caller chose that changes a graph."""

    batch_sizes: tuple[Positive, ...]
    seq_lens: tuple[Positive, ...]
    slots: Positive
    attention: Annotated[str, one_of("sdpa", "custom")]
    cpu_isa: Annotated[str, one_of("avx2", "avx512")] | None
    compile: bool = False
    float32_matmul_precision: Annotated[str, one_of("highest", "high", "medium")]
    deterministic_algorithms: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Graph:
    """One captured graph. `bindings` are the names of weight and constant regions in the object's own order;
    `state` are the regions it updates in place, each of which must be in the layout just so. `images` are the blobs
    of the kernel images it runs, in the order in which its object counts them; a CPU's object has its code in itself.

    `tolerance` is the largest absolute difference from a golden value that a replay may show; it and
    `deviation`, the difference from eager measured at save, are in units of the logits.
    """

    bucket: Bucket
    topology: Digest
    nodes: Count
    object: Digest
    images: tuple[Digest, ...] = ()
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    state: tuple[TensorSpec, ...]
    bindings: tuple[str, ...]
    golden: Digest
    golden_steps: Positive
    tolerance: Distance
    deviation: Distance


@dataclass(frozen=True, slots=True, kw_only=True)
class Blob:
    """`size` is that of the file, `content_size` that of the decompressed bytes."""

    digest: Digest
    size: Positive
    content_size: Positive
    media_type: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """One entry. `constants` is the blob of the constant regions, None without any."""

    format: FormatVersion
    features: Features
    producer: Producer
    entry: EntryIdentity
    model: Model
    weights: Weights
    layout: Layout
    environment: Environment
    settings: Settings
    graphs: tuple[Graph, ...]
    constants: Digest | None
    blobs: tuple[Blob, ...]
    extensions: PlainMap
    informational: PlainMap
