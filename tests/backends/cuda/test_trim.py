"""Images trimmed to the kernels that are needed: what stays, that it still means the same, and what is left alone."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from struct import pack
from typing import Any

import pytest
from elftools.elf.elffile import ELFFile

from graphpack.backends.cuda.cubin import Image
from graphpack.backends.cuda.encode import trimmed
from graphpack.backends.cuda.images import processor_of
from graphpack.backends.cuda.trim import trim
from graphpack.backends.cuda.walk import Empty, Function, Launch, WalkedGraph
from tests.backends.cuda.cubin_reader import kernels_of
from tests.backends.cuda.image_meaning import check_meaning, code_of, meaning_of
from tests.backends.cuda.kept import ARCHIVES, contents_of, graphs_of, record_of
from tests.backends.cuda.linked import (
    BITS,
    CALLS_HELPER,
    CODE,
    HELPER,
    KERNELS,
    RELA,
    Linked,
    Piece,
    attribute,
    linked,
    relocation,
)

_EXTERNALS = 0x0F


def short(image: Linked, kernels: list[str]) -> bytes:
    result = trim(image.bytes(), kernels)
    assert not result.whole
    return result.data


# --- what stays


@pytest.mark.parametrize("kernels", [["add"], ["mul"], ["sum", "mul"], list(KERNELS)])
def test_kernels_and_what_they_call_stay(kernels: list[str]) -> None:
    image = linked()
    called = {HELPER} if set(kernels) & set(CALLS_HELPER) else set()
    result = short(image, kernels)
    assert code_of(result) == {name: CODE[name] for name in {*kernels, *called}}
    assert Image(result).kernels == {*kernels, *called}
    check_meaning(image.bytes(), result, kernels)


def test_the_same_kernels_give_the_same_bytes() -> None:
    data = linked().bytes()
    results = [trim(data, kernels).data for kernels in (["add", "mul"], ("mul", "add"), {"mul", "add"})]
    assert len(set(results)) == 1
    assert results[0] not in (trim(data, ["add"]).data, trim(data, ["mul"]).data)


def test_a_trimmed_image_stays_as_it_is() -> None:
    once = short(linked(), ["add"])
    assert trim(once, ["add"]).data == once


def test_code_reached_by_a_relocation_stays() -> None:
    image = linked()
    at = [piece.name for piece in image.pieces].index(".nv.constant4")
    moved = Piece(".rela.text.mul", RELA, 0x40, relocation(16, image.number("sum")), ".symtab", ".text.mul", 8, 24)
    image.pieces.insert(at, moved)
    assert code_of(short(image, ["mul"])).keys() == {"mul", "sum", HELPER}
    assert code_of(short(image, ["add"])).keys() == {"add", HELPER}
    check_meaning(image.bytes(), short(image, ["mul"]), ["mul"])


def test_code_whose_address_is_in_shared_constants_stays() -> None:
    image = linked()
    table = image.at(".rela.nv.constant4")
    table.data += relocation(0, image.number("mul"))
    assert code_of(short(image, ["add"])).keys() == {"add", "mul", HELPER}
    check_meaning(image.bytes(), short(image, ["add"]), ["add"])


def test_code_named_as_external_stays() -> None:
    image = linked()
    image.at(".nv.info.mul").data += attribute(_EXTERNALS, pack("<I", image.number("sum")))
    assert code_of(short(image, ["mul"])).keys() == {"mul", "sum", HELPER}


def test_what_belongs_to_no_kernel_stays_and_what_only_a_debugger_reads_goes() -> None:
    names = meaning_of(short(linked(), ["mul"])).keys()
    assert {".nv.constant4", ".rela.nv.constant4", ".nv.global.init", ".nv.global", ".nv.shared.mul"} <= names
    assert not [name for name in names if "debug" in name or name.endswith((".add", ".sum"))]


def test_memory_of_a_segment_counts_what_is_left() -> None:
    def loaded(data: bytes) -> list[tuple[int, int, int]]:
        segments = ELFFile(io.BytesIO(data)).iter_segments("PT_LOAD")
        return [(one["p_flags"], one["p_filesz"], one["p_memsz"]) for one in segments if one["p_offset"] < tail(data)]

    def tail(data: bytes) -> int:
        return int(ELFFile(io.BytesIO(data))["e_shoff"])

    without_shared = loaded(short(linked(), ["add"]))
    assert without_shared == [(4, 16, 16), (5, 640, 640), (6, 12, 12 + 28), (4, 532, 532)]
    assert loaded(short(linked(), ["mul"]))[2] == (6, 16, 16 + 1024 + 28)


def test_the_bound_of_local_symbols_stays_between_the_same() -> None:
    image = linked()
    image.at(".symtab").info = image.number("__assertfail")
    check_meaning(image.bytes(), short(image, ["mul"]), ["mul"])


def test_a_segment_goes_with_its_last_section() -> None:
    image = linked()
    image.pieces.remove(image.at(".rela.nv.constant4"))
    at = image.pieces.index(image.at(".nv.constant4"))
    image.pieces[at] = Piece(".nv.constant2.mul", BITS, 0x42, b"constant", "", ".text.mul", 8)
    segments = {name: ELFFile(io.BytesIO(short(image, [name]))).num_segments() for name in ("add", "mul")}
    assert segments == {"add": 5, "mul": 6}
    check_meaning(image.bytes(), short(image, ["mul"]), ["mul"])


# --- what is not known


def _section(image: Linked) -> None:
    image.pieces.append(Piece(".nv.novelty", BITS, data=b"?"))


def _empty(image: Linked) -> None:
    image.pieces.append(Piece("", 0))


def _cut_attribute(image: Linked) -> None:
    image.at(".nv.info.add").data += b"\x04\x1c\x08\x00"


def _relocation_beyond(image: Linked) -> None:
    image.at(".rela.nv.constant4").data += relocation(8, 4000)


def _call_beyond(image: Linked) -> None:
    image.at(".nv.callgraph").data += pack("<II", 1, 4000)


def _moved_symbol(image: Linked) -> None:
    image.at(".text.mul").info = "add"


def _two_of_one_name(image: Linked) -> None:
    image.pieces.insert(image.pieces.index(image.at(".text.mul")), Piece(".text.mul", BITS, 6, b"?", "", "mul", 128))


def _set(section: str, **changes: Any) -> Callable[[Linked], None]:
    def change(image: Linked) -> None:
        piece = image.at(section)
        for key, value in changes.items():
            setattr(piece, key, value)

    return change


def _file(**changes: Any) -> Callable[[Linked], None]:
    def change(image: Linked) -> None:
        for key, value in changes.items():
            setattr(image, key, value)

    return change


def _info(data: bytes) -> Callable[[Linked], None]:
    def change(image: Linked) -> None:
        image.at(".nv.info.add").data += data

    return change


ODD: dict[str, tuple[Callable[[Linked], None], str]] = {
    "another kind of section": (_section, "section .nv.novelty"),
    "another type": (_set(".nv.callgraph", type=BITS), "section .nv.callgraph"),
    "a section of another kernel": (_set(".nv.info.add", info=".text.mul"), ".nv.info.add without its kernel"),
    "a section of no kernel": (_set(".nv.shared.mul", name=".nv.shared.gone"), ".nv.shared.gone without its kernel"),
    "relocations of another section": (_set(".rela.nv.constant4", info=".nv.compat"), "without its section"),
    "code of another symbol": (_moved_symbol, ".text.mul without its symbol"),
    "two kernels of one name": (_two_of_one_name, "two kernels of one name"),
    "a number without a meaning": (_set(".nv.compat", info=3), ".nv.compat with a number"),
    "an attribute that is not known": (_info(attribute(0x7E, b"1234")), "attribute 0x7e"),
    "a format that is not known": (_info(b"\x05\x1b\0\0"), "format 5"),
    "an attribute cut short": (_cut_attribute, "8 bytes at"),
    "an attribute without its symbol": (_info(attribute(0x0A, b"12")), "4 bytes at"),
    "externals cut short": (_info(attribute(0x0F, b"12345")), "a table of 5 bytes"),
    "a relocation of no symbol": (_relocation_beyond, "symbol 4000"),
    "a call of no symbol": (_call_beyond, "symbol 4000"),
    "relocations cut short": (_set(".rela.nv.constant4", data=b"1234"), "a table of 4 bytes"),
    "something between sections": (_file(gap=b"x" * 32), "sections in another order"),
    "something behind the last section": (_file(room=b"x" * 8), "something behind the last section"),
    "an empty section between others": (_empty, "sections in another order"),
    "something behind the file": (_file(tail=b"x"), "headers elsewhere"),
    "flags of another section": (_file(flags=0x7005A04), "flags 0x7005a04"),
    "another processor's file": (_file(machine=62), "no executable CUDA image"),
    "a segment more": (_file(segments=lambda found: [*found, found[-1]]), "a section in no segment, or in several"),
    "a segment less": (_file(segments=lambda found: found[:-1]), "a section in no segment, or in several"),
    "a segment of another type": (_file(segments=lambda found: [*found[:-1], (7, *found[-1][1:])]), "type 7"),
    "a segment that ends inside": (
        _file(segments=lambda found: [*found[:-1], (*found[-1][:5], found[-1][5] - 1, *found[-1][6:])]),
        "not a run of sections",
    ),
}


@pytest.mark.parametrize("name", ODD)
def test_an_image_that_is_not_understood_stays_whole(name: str) -> None:
    """Its twin without the change is trimmed in the tests above."""
    change, reason = ODD[name]
    image = linked()
    change(image)
    data = image.bytes()
    result = trim(data, ["add"])
    assert reason in result.whole
    assert result.data == data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "64 bytes at 0"),
        (linked().bytes()[:1000], "headers elsewhere"),
        (b"not an image".ljust(200, b"\0"), "no executable CUDA image"),
    ],
)
def test_what_is_no_image_stays_whole(data: bytes, reason: str) -> None:
    assert reason in trim(data, ["add"]).whole


def test_an_image_without_the_kernel_stays_whole() -> None:
    assert trim(linked().bytes(), ["add", "div"]).whole == "no kernel div"


def test_what_a_kernel_that_goes_holds_does_not_matter() -> None:
    image = linked()
    image.at(".nv.info.mul").data += attribute(0x7E, b"1234")
    assert code_of(short(image, ["add"])).keys() == {"add", HELPER}
    assert "attribute 0x7e" in trim(image.bytes(), ["mul"]).whole


def test_no_damaged_byte_does_more_than_that() -> None:
    data = bytearray(linked().bytes())
    whole = 0
    for at in [*range(0, 0x600, 3), *range(len(data) - 27 * 64 - 6 * 56, len(data))]:
        before, data[at] = data[at], data[at] ^ 0xFF
        whole += bool(trim(bytes(data), ["add"]).whole)
        data[at] = before
    assert whole > 1000


# --- real images


@pytest.mark.parametrize("archive", ARCHIVES, ids=lambda path: path.name)
def test_images_of_a_real_entry(archive: Path) -> None:
    contents, wanted = contents_of(archive), dict[str, set[str]]()
    for graph, columns in zip(record_of(archive).graphs, graphs_of(archive), strict=True):
        blobs = dict(zip(columns.names.images, graph.images, strict=True))
        for kernel in columns.names.kernels:
            wanted.setdefault(blobs[columns.names.images[kernel.image]], set()).add(kernel.name)
    total = 0
    for blob, names in wanted.items():
        data, kernels = contents[blob], sorted(names)
        result = trim(data, kernels)
        assert not result.whole
        total += len(result.data)
        assert processor_of(result.data) == 90
        assert {name: kernels_of(result.data)[name] for name in kernels} == {
            name: kernels_of(data)[name] for name in kernels
        }
        before, after = code_of(data), code_of(result.data)
        assert all(after[name] == before[name] for name in kernels)
        check_meaning(data, result.data, kernels)
        assert trim(result.data, kernels).data == result.data, "there is nothing left to remove"
    assert total < 1_100_000


# --- at save


def _graph(*launches: tuple[Image, str]) -> WalkedGraph:
    nodes = [
        Launch(Function(name, image, (), 0, -1, False, {}), (1, 1, 1), (1, 1, 1), 0, (), ()) for image, name in launches
    ]
    return WalkedGraph((*nodes, Empty()), ())


def _images(graph: WalkedGraph) -> dict[str, bytes]:
    return dict(graph.images())


def test_buckets_share_an_image_of_the_kernels_of_both() -> None:
    image = Image(linked().bytes())
    graphs = {"1": _graph((image, "add")), "2": _graph((image, "mul"), (image, "add"))}
    found, notes = trimmed(graphs)
    expected = Image(short(linked(), ["add", "mul"]))
    assert _images(found["1"]) == _images(found["2"]) == {expected.digest: expected.data}
    assert notes == ()
    assert [type(node) for node in found["2"].nodes] == [Launch, Launch, Empty]


def test_images_of_one_kernel_name_stay_apart() -> None:
    one, two = linked(), linked()
    two.at(".text.add").data = b"\xee" * 384
    graphs = {"1": _graph((Image(one.bytes()), "add")), "2": _graph((Image(two.bytes()), "add"))}
    found, _ = trimmed(graphs)
    assert _images(found["1"]).keys().isdisjoint(_images(found["2"]))


def test_images_that_differed_in_what_is_gone_become_one() -> None:
    one, two = linked(), linked()
    two.at(".text.mul").data = b"\xee" * 256
    whole = _graph((Image(one.bytes()), "add"), (Image(two.bytes()), "add"))
    assert len(_images(whole)) == 2
    found, _ = trimmed({"1": whole})
    expected = short(linked(), ["add"])
    assert list(_images(found["1"]).values()) == [expected]


def test_an_image_kept_whole_is_told() -> None:
    odd = linked()
    _section(odd)
    image = Image(odd.bytes())
    found, notes = trimmed({"1": _graph((image, "add"))})
    assert _images(found["1"]) == {image.digest: image.data}
    assert notes == (f"image {image.digest[:12]} is kept whole: section .nv.novelty of type 0x1",)
