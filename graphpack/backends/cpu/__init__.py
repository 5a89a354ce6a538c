"""The cpu backend: AOTInductor objects, captured with torch, restored without it."""

from __future__ import annotations

from graphpack.backends.cpu.restore import CpuBackend

BACKEND = CpuBackend()
