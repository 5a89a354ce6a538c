"""What the cuda backend assumes of this machine, read from it: versions, struct sizes, attribute ids, addresses."""

from __future__ import annotations

import ctypes
import sys

from harness import Report, expect, main


def facts(report: Report) -> None:
    from graphpack.backends.cuda.device import read_device
    from graphpack.backends.cuda.driver import driver

    with report.check("driver"):
        cuda = driver()
        report.put("driver version", cuda.version())
        report.put("device", str(read_device(0)))
    with report.check("listener before torch"):
        from graphpack.backends.cuda.listener import listener

        report.put("listener", type(listener()).__name__)
    with report.check("torch"):
        import torch

        report.put("torch", [torch.__version__, torch.version.cuda, torch.backends.cudnn.version(), sys.version])
        torch.zeros(1, device="cuda")
        report.put("images after the first kernel", len(listener().table().others))
    with report.check("bases"):
        _bases(report)
    with report.check("tensor over mapped memory"):
        _tensor(report)
    with report.check("nodes"):
        _nodes(report)
    with report.check("images"):
        _images(report)
    with report.check("a second listener is refused"):
        _second(report)


def _bases(report: Report) -> None:
    from graphpack.backends.cuda.driver import driver
    from graphpack.backends.cuda.space import base_of

    cuda = driver()
    granted = {}
    for identity in ("a", "b", "c", "d"):
        base = base_of(identity)
        found = cuda.reserve(1 << 37, base)
        granted[f"{base:#x}"] = found == base
        cuda.free_addresses(found, 1 << 37)
    report.put("bases honoured", granted)
    expect(all(granted.values()), "a base was not honoured")


def _tensor(report: Report) -> None:
    import torch

    from graphpack.backends.cuda.driver import driver
    from graphpack.backends.cuda.memory import TorchMemory
    from graphpack.backends.cuda.space import Space, base_of
    from graphpack.graph import TensorSpec

    cuda = driver()
    space = Space(cuda, cuda.device(0), base_of("facts"), 1 << 33)
    memory = TorchMemory(space, torch.device("cuda", 0))
    for dtype in ("bfloat16", "float32", "int64", "bool"):
        tensor = memory.tensor(TensorSpec(name="t", dtype=dtype, shape=(3, 5)))
        tensor.fill_(1)
        expect(tensor.data_ptr() % 512 == 0 and bool((tensor == 1).all()), f"a {dtype} tensor is elsewhere")
    report.put("granularity", space.granularity)
    with memory.allocating():
        held = torch.ones(1000, device="cuda")
        torch.mm(torch.ones(64, 64, device="cuda"), torch.ones(64, 64, device="cuda"))
    expect(space.base <= held.data_ptr() < space.base + space.bytes, "the pool allocates elsewhere")
    report.put("live blocks", memory.live())
    torch._C._cuda_clearCublasWorkspaces()
    report.put("live blocks without workspaces", memory.live())
    report.put("segments", memory.segments)


def _nodes(report: Report) -> None:
    import torch

    from graphpack.backends.cuda import structs
    from graphpack.backends.cuda.attributes import KEPT
    from graphpack.backends.cuda.driver import driver

    cuda = driver()
    x, y = torch.randn(128, 128, device="cuda"), torch.empty(128, 128, device="cuda")
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph(keep_graph=True)
    with torch.cuda.stream(stream):
        torch.mm(x, x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
        z = torch.mm(x, x).relu()
        y.copy_(z)
        y.zero_()
    handle = graph.raw_cuda_graph()
    for node in cuda.graph_nodes(handle).tolist():
        kind = cuda.node_type(node)
        report.put(f"type of {node:x}", kind)
        if kind == structs.NODE_KERNEL:
            (row,) = cuda.kernel_node(node)
            function = int(row["func"]) or cuda.kernel_function(int(row["kern"]))
            described = {
                "name": cuda.function_name(function)[:60],
                "func": bool(row["func"]),
                "extra": bool(row["extra"]),
                "parameters": cuda.function_parameters(function),
                "attributes": {
                    KEPT[i].name: cuda.node_attribute(node, i)[:12].hex() if cuda.node_attribute(node, i) else None
                    for i in KEPT
                },
                "refused": {i: (cuda.node_attribute(node, i) or b"").hex() for i in (1, 13)},
            }
            report.put(f"kernel {node:x}", described)
        elif kind == structs.NODE_MEMCPY:
            (row,) = cuda.memcpy_node(node)
            report.put("memcpy", dict(zip(row.dtype.names, row.tolist(), strict=True)))
        elif kind == structs.NODE_MEMSET:
            report.put("memset", str(cuda.memset_node(node)[0]))
    sizes = {"AllocationProperties": ctypes.sizeof(structs.AllocationProperties)}
    tables = {n: getattr(structs, n).itemsize for n in ("KERNEL_NODE_PARAMS", "MEMCPY_NODE_PARAMS")}
    report.put("struct sizes", sizes | tables)


def _images(report: Report) -> None:
    from graphpack.backends.cuda.listener import listener

    table = listener().table()
    images = [*table.others, *(image for images in table.modules.values() for image in images)]
    report.put("images", {"others": len(table.others), "modules": len(table.modules)})
    for image in images[:8]:
        header = image.data[:64]
        flags, machine = int.from_bytes(header[48:52], "little"), int.from_bytes(header[18:20], "little")
        about = {"bytes": len(image.data), "e_flags": hex(flags), "machine": machine, "abi": header[7:9].hex()}
        kernels = {"kernels": len(image.kernels), "one": min(image.kernels, default="")[:50]}
        report.put(f"image {image.digest[:12]}", {**about, **kernels})


def _second(report: Report) -> None:
    from graphpack.backends.cuda.listener import listener
    from graphpack.errors import CaptureRefusedError

    try:
        listener.__wrapped__()
    except CaptureRefusedError as error:
        report.put("second listener", str(error))
    else:
        raise RuntimeError("a second listener was accepted")


if __name__ == "__main__":
    main(facts, "facts")
