"""Kernel images on the device: checked, loaded in parallel, and the functions in them with their attributes."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from struct import Struct

from graphpack.backends.cuda import structs
from graphpack.backends.cuda.columns import GraphColumns
from graphpack.backends.cuda.driver import Driver
from graphpack.backends.cuda.libcuda import CudaError
from graphpack.errors import CorruptArchiveError, Problem
from graphpack.frozen import dataclass
from graphpack.schema import shown

_THREADS = 8
_HEADER = Struct("<4sBBBBB7xHHIQQQI")
_ELF64, _LITTLE_ENDIAN, _MACHINE_CUDA = 2, 1, 190
_NEW_FLAGS = 8
"""From this ABI version on, which CUDA 13's compilers write, the processor is in bits 8 to 15 of the flags; before, in
bits 0 to 7."""

_REFUSED_BY_DRIVER = (200, 209, 300)
"""CUDA_ERROR_INVALID_IMAGE, NO_BINARY_FOR_GPU, INVALID_SOURCE."""

Identity = tuple[str, str]
"""The digest of an image's content and a kernel's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelNeed:
    """What all graphs of an entry together ask of one kernel: a function has one limit for them all."""

    max_dynamic_shared: int
    carveout: int
    non_portable_cluster: bool
    parameters: tuple[int, ...]


def processor_of(data: bytes) -> int | None:
    """The processor an image was built for, 90 for sm_90; None for anything but a 64-bit CUDA ELF."""
    if len(data) < _HEADER.size:
        return None
    magic, bits, order, _, _, abi, _, machine, _, _, _, _, flags = _HEADER.unpack_from(data)
    if (magic, bits, order, machine) != (b"\x7fELF", _ELF64, _LITTLE_ENDIAN, _MACHINE_CUDA):
        return None
    return int(flags >> 8 if abi >= _NEW_FLAGS else flags) & 0xFF


def check_image(data: bytes, digest: str, capability: str, where: str) -> list[Problem]:
    """Every way the content of the file `where` is not the image `digest` for devices of this capability."""
    problems = []
    if hashlib.sha256(data).hexdigest() != digest:
        problems.append(Problem(where, f"image {digest[:12]} in the graph", "another content"))
    processor = processor_of(data)
    wanted = int(capability.replace(".", ""))
    if processor is None:
        problems.append(Problem(where, "", "not a CUDA kernel image"))
    elif processor != wanted:
        problems.append(Problem(where, f"sm_{processor}", f"environment.cuda.capability is {capability}"))
    return problems


def needs_of(graphs: Iterable[GraphColumns]) -> dict[Identity, KernelNeed]:
    """What the graphs need of each kernel. Raises CorruptArchiveError where they contradict each other."""
    needs: dict[Identity, KernelNeed] = {}
    problems = []
    for columns in graphs:
        for kernel in columns.names.kernels:
            key = (columns.names.images[kernel.image], kernel.name)
            known = needs.get(key)
            if known and (known.parameters, known.carveout, known.non_portable_cluster) != (
                kernel.parameters,
                kernel.carveout,
                kernel.non_portable_cluster,
            ):
                problems.append(Problem(shown(kernel.name), "", "two graphs describe it differently"))
            needs[key] = KernelNeed(
                max_dynamic_shared=max(known.max_dynamic_shared if known else 0, kernel.max_dynamic_shared),
                carveout=kernel.carveout,
                non_portable_cluster=kernel.non_portable_cluster,
                parameters=kernel.parameters,
            )
    if problems:
        raise CorruptArchiveError("the graphs of an entry contradict each other", problems)
    return needs


class Images:
    """The loaded images of one entry; `functions` has the handle of each kernel."""

    def __init__(self, driver: Driver, device: int, context: int) -> None:
        self.functions: dict[Identity, int] = {}
        self._driver, self._device = driver, device
        self._context = context
        self._needs: dict[Identity, KernelNeed] = {}
        # The driver reads images where they are, for as long as they are loaded.
        self._loaded: dict[str, tuple[int, bytes]] = {}

    def load(
        self, contents: Mapping[str, bytes], needs: Mapping[Identity, KernelNeed], files: Mapping[str, str]
    ) -> None:
        """Load images, by digest, and set up the kernels that are needed of them. `files` are their names in errors.
        Kernels may be needed more of later: what is loaded already is not loaded again.

        Raises CorruptArchiveError for an image that the driver refuses, and for kernels that are missing or not as the
        graphs need them.
        """
        wanted: dict[str, dict[str, KernelNeed]] = {}
        for (digest, name), need in needs.items():
            if self._needs.get((digest, name)) != need:
                wanted.setdefault(digest, {})[name] = need
        # The largest first: one image has most of the bytes.
        order = sorted(wanted, key=lambda digest: -len(contents[digest]))
        with ThreadPoolExecutor(_THREADS, "graphpack-images") as pool:
            jobs = [
                pool.submit(self._load, contents[digest], digest, wanted[digest], files[digest]) for digest in order
            ]
        problems = [problem for job in jobs for problem in job.result()]
        if problems:
            raise CorruptArchiveError("kernel images are not those that the graphs describe", problems)

    def _load(self, data: bytes, digest: str, needs: Mapping[str, KernelNeed], where: str) -> list[Problem]:
        driver = self._driver
        driver.set_context(self._context)
        if digest not in self._loaded:
            try:
                self._loaded[digest] = (driver.load_library(_address(data)), data)
            except CudaError as error:
                if error.status not in _REFUSED_BY_DRIVER:
                    raise
                return [Problem(where, "", f"the driver refuses it: {error.name}")]
        library, _ = self._loaded[digest]
        problems = []
        for name, need in needs.items():
            try:
                function = driver.kernel_function(driver.kernel_of_library(library, name))
            except CudaError as error:
                if error.status != structs.NOT_FOUND:
                    raise
                problems.append(Problem(where, f"kernel {shown(name)}", "not in the image"))
                continue
            wrong = self._set_up(function, need)
            problems += [Problem(where, shown(name), here) for here in wrong]
            if not wrong:
                self.functions[digest, name], self._needs[digest, name] = function, need
        return problems

    def _set_up(self, function: int, need: KernelNeed) -> list[str]:
        """Set the function's attributes. What is wrong with it, if anything."""
        driver = self._driver
        flat = tuple(number for pair in driver.function_parameters(function) for number in pair)
        if flat != need.parameters:
            return [f"has parameters at {flat}, not {need.parameters}"]
        if need.max_dynamic_shared not in (0, driver.function_attribute(function, structs.FUNC_MAX_DYNAMIC_SHARED)):
            try:
                driver.set_function_attribute(function, structs.FUNC_MAX_DYNAMIC_SHARED, need.max_dynamic_shared)
            except CudaError as error:
                if error.status != structs.INVALID_VALUE:
                    raise
                return [self._too_much_shared(function, need.max_dynamic_shared)]
        if need.carveout >= 0:
            driver.set_function_attribute(function, structs.FUNC_CARVEOUT, need.carveout)
        if need.non_portable_cluster:
            driver.set_function_attribute(function, structs.FUNC_NON_PORTABLE_CLUSTER, 1)
        return []

    def _too_much_shared(self, function: int, asked: int) -> str:
        """A block's static and dynamic shared memory together are limited."""
        limit = self._driver.device_attribute(self._device, structs.MAX_SHARED_OPTIN)
        allowed = limit - self._driver.function_attribute(function, structs.FUNC_STATIC_SHARED)
        return f"asks for {asked} bytes of dynamic shared memory, and the device allows it {allowed}"

    def close(self) -> None:
        """Unload everything; no graph may use it any more. Closing twice is fine."""
        while self._loaded:
            _, (library, _) = self._loaded.popitem()
            self._driver.unload_library(library)
        self.functions.clear()


def _address(data: bytes) -> int:
    return ctypes.cast(ctypes.c_char_p(data), ctypes.c_void_p).value or 0
