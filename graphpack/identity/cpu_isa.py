"""The instruction sets a CPU object can be compiled for, and what each asks of the host."""

from __future__ import annotations

from graphpack.frozen import dataclass
from graphpack.identity.environment import Host


@dataclass(frozen=True, slots=True)
class CpuIsa:
    """`march` is the compiler's name for it, `simd_bits` the vector width, `features` the words of `/proc/cpuinfo`."""

    name: str
    march: str
    simd_bits: int
    features: frozenset[str]


_V2 = frozenset({"cx16", "lahf_lm", "popcnt", "sse4_1", "sse4_2", "ssse3"})
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}

CPU_ISA = {
    "avx2": CpuIsa("avx2", "x86-64-v3", 256, _V3),
    "avx512": CpuIsa("avx512", "x86-64-v4", 512, _V4),
}
"""From the narrowest to the widest."""


def best_isa(host: Host) -> str | None:
    """The widest instruction set the host has; None if it has not even the narrowest."""
    fitting = [isa.name for isa in CPU_ISA.values() if isa.features <= host.cpu_features]
    return fitting[-1] if fitting else None
