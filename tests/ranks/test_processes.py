"""Two ranks in two processes: they give what one process gives, agree before anything happens, and end together."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from graphpack.archive.piecewise import graphs_of
from graphpack.archive.ranks import Part, ranks_of
from graphpack.archive.store import Archive
from graphpack.graph import Bucket
from graphpack.models.presets import make_checkpoint
from graphpack.models.registry import resolve
from graphpack.proof import free_port
from tests.capture.saved import ROOT, environment
from tests.generate.tokenizers_for_tests import byte_level
from tests.ranks.conftest import BATCH, GRAPHPACK, KEPT, SEQ_LEN, SIZE, Ended, Ranks

PROMPTS = np.random.default_rng(4).integers(0, 512, (3, 9)).tolist()
TOKENS = 64
LIMIT = 30.0
"""Seconds within which all others end after one was killed."""

GENERATE = f"""
import json, sys
import numpy as np
import graphpack
from graphpack.generate import generate

with graphpack.load(sys.argv[1], verify=True) as model:
    first = model.prefill({PROMPTS}, [0, 1, 2]).numpy()
    step = model.step([5, 7], [9, 9], [0, 1]).numpy()
    model.reset()
    texts = generate(model, {PROMPTS}, max_tokens={TOKENS})
    print(json.dumps({{
        "tokens": [text.token_ids for text in texts],
        "first": first.tolist(), "step": step.tolist(),
        "notes": model.result.notes, "captures": model.result.captures,
        "rungs": [[rung.name, rung.state] for rung in model.result.ladder],
        "verified": [[row.token_count, row.steps] for row in model.result.verified],
        "tracer": any(name.startswith(("graphpack.capture", "graphpack.splitting")) for name in sys.modules),
        "runs": {{str(bucket): count for bucket, count in model.stats.replays.items()}},
    }}))
"""


@torch.no_grad()
def by_one_process() -> tuple[list[list[int]], np.ndarray, np.ndarray]:
    """Greedy tokens, the logits after each prompt, and those of one step more, by torch."""
    model = resolve("tiny-qwen3")
    step: Any = model.build(model.open_weights(), "float32")
    state = [torch.zeros(spec.shape) for spec in step.state(len(PROMPTS) + 1, SEQ_LEN)]
    decode = step.module_for(Bucket(1, SEQ_LEN))

    def stepped(token: int, position: int, slot: int) -> torch.Tensor:
        found: torch.Tensor = decode(*(torch.tensor([value]) for value in (token, position, slot)), *state)[0]
        return found

    count, tokens, first, second = len(PROMPTS[0]), [], [], []
    for slot, prompt in enumerate(PROMPTS):
        columns = torch.tensor(prompt), torch.arange(count), torch.full((count,), slot)
        first.append(step.prefill_module()(*columns, torch.tensor([count - 1]), *state)[0])
        if slot < 2:
            second.append(stepped((5, 7)[slot], count, slot))
        mine = [int(first[-1].argmax())]
        while len(mine) < TOKENS:
            mine.append(int(stepped(mine[-1], count + len(mine) - 1, slot).argmax()))
        tokens.append(mine)
    return tokens, torch.stack(first).numpy(), torch.stack(second).numpy()


def test_two_ranks_restore_without_capture_and_give_what_one_process_gives(fresh_ranks: Ranks) -> None:
    ended = fresh_ranks(GENERATE, KEPT)
    assert [one.code for one in ended] == [0, 0], ended[0].err + ended[1].err
    here, there = (one.document for one in ended)
    assert (here.pop("notes"), there.pop("notes")) == (["rank 0 of 2"], ["rank 1 of 2"])
    assert here == there, "all ranks get the same bits"
    tokens, first, step = by_one_process()
    assert here["tokens"] == tokens
    (graph,) = graphs_of(Archive.open(KEPT).find(None)[0].record)
    np.testing.assert_allclose(here["first"], first, rtol=0, atol=graph.tolerance)
    np.testing.assert_allclose(here["step"], step, rtol=0, atol=graph.tolerance)
    assert here["runs"] == {f"{BATCH}x{SEQ_LEN}": 1 + TOKENS - 1}
    assert (here["captures"], here["tracer"]) == (0, False)
    assert ["outputs", "passed"] in here["rungs"]
    assert here["verified"] == [[BATCH, graph.golden_steps]]


# --- Saving

SAVE = """
import json, sys
from pathlib import Path
from graphpack import capture
from graphpack.archive.ranks import part_of
from graphpack.archive.store import Archive
from graphpack.backends.cpu import capture as compiling
from graphpack.backends.cpu.policy import object_name
from graphpack.elf import parse
from graphpack.results.save import SaveRequest

# Compilers give the same bytes for the same trace, and take most of a save. What they gave for the kept archive is
# taken from there; if that is another trace, they compile.
kept = Archive.open(sys.argv[1])
objects = {}
for entry in kept.find(None):
    for blob in entry.record.blobs:
        content = kept.read_blob(blob)
        if content.startswith(b"\\x7fELF"):
            objects[parse(content).soname] = content
generate, build, traced = compiling.generate, compiling.build, {}

def compiled(directory, name, stop):
    if name in objects:
        return objects[name]
    generate(*traced[directory])
    return build(directory, name, stop)

compiling.generate = lambda *given: traced.update({given[2]: given})
compiling.build = compiled

request = SaveRequest(
    model="tiny-qwen3", archive=Path(sys.argv[2]), cpu_isa="avx2", mode="piecewise",
    batch_sizes=(4,), seq_lens=(128,), token_counts=(4,),
)
saved = capture.save(request)
again = capture.save(request)
print(json.dumps([saved.action, saved.weights_root, list(saved.notes), again.action]))
"""


def test_ranks_save_an_entry_each_under_one_name(fresh_ranks: Ranks, tmp_path: Path) -> None:
    ended = fresh_ranks(SAVE, KEPT, tmp_path / "archive")
    assert [one.code for one in ended] == [0, 0], ended[0].err + ended[1].err
    entries = Archive.open(tmp_path / "archive").find(["tiny-qwen3"])
    assert [entry.part for entry in entries] == [Part(rank, SIZE) for rank in range(SIZE)]
    assert [entry.ref.tag for entry in entries] == ["tiny-qwen3.0-of-2", "tiny-qwen3.1-of-2"]
    roots = [entry.record.weights.root for entry in entries]
    for one, entry, root in zip(ended, entries, roots, strict=True):
        found = ranks_of(entry.record)
        assert found is not None
        assert list(found.roots) == roots
        note = str(entry.part)
        action, said, notes, again = one.document
        assert (action, said, again) == ("saved", root, "up to date")
        assert note in notes
    kept = Archive.open(KEPT).find(None)
    for new, old in zip(entries, kept, strict=True):
        assert graphs_of(new.record)[0].pieces == graphs_of(old.record)[0].pieces
        assert new.record.weights == old.record.weights
    assert list((tmp_path / "archive").rglob(".*")) == [], "nothing is left over"


# --- What goes wrong in one ends all


def error_of(ended: Ended) -> dict[str, Any]:
    error: dict[str, Any] = ended.document["error"]
    assert ended.code == error["code"], ended.err
    return error


def test_ranks_with_other_checkpoints_do_not_load(ranks: Ranks, kept: Path, tmp_path: Path) -> None:
    make_checkpoint("tiny-qwen3", tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    ended = ranks(GRAPHPACK, "load", kept, "--weights", [tmp_path / "one", tmp_path / "other"], "--format", "json")
    for one in ended:
        error = error_of(one)
        assert error["code"] == 7
        assert error["message"] == "the ranks do not agree: files of rank 1 is not that of rank 0"


def test_what_one_rank_cannot_do_all_are_told(ranks: Ranks, kept: Path, tmp_path: Path) -> None:
    make_checkpoint("tiny-qwen3", tmp_path / "one")
    ended = ranks(GRAPHPACK, "load", kept, "--weights", [tmp_path / "one", tmp_path / "none"], "--format", "json")
    for one in ended:
        error = error_of(one)
        assert error["code"] == 3
        assert error["message"].startswith("rank 1 of 2: no such directory: ")


def test_ranks_that_were_asked_for_other_things_do_not_save(ranks: Ranks, tmp_path: Path) -> None:
    options = ("--mode", "piecewise", "--token-counts", "1", "--format", "json")
    ended = ranks(GRAPHPACK, "save", "tiny-qwen3", tmp_path / "archive", *options, "--seq-lens", ["16", "32"])
    for one in ended:
        error = error_of(one)
        assert error["code"] == 8
        assert error["message"] == "the ranks do not agree: settings of rank 1 is not that of rank 0"
    assert not (tmp_path / "archive").exists()


def test_ranks_of_which_one_verifies_do_not_load(ranks: Ranks, kept: Path) -> None:
    """What a rank replays takes all of them."""
    ended = ranks(GRAPHPACK, "load", kept, "--format", "json", ["--verify", "--copy-weights"])
    for one in ended:
        error = error_of(one)
        assert error["code"] == 8
        assert error["message"] == "the ranks do not agree: --verify of rank 1 is not that of rank 0"


CONTINUES = """
import json, sys
import graphpack
from graphpack.generate import generate
from graphpack.sampling import Sampling

with graphpack.load(sys.argv[1]) as model:
    asked = {"max_tokens": 2} | json.loads(sys.argv[3])
    sampling = Sampling(temperature=asked.pop("temperature", 0.0))
    try:
        texts = generate(model, json.loads(sys.argv[2]), sampling=sampling, **asked)
    except graphpack.GraphpackError as error:
        print(json.dumps({"error": error.as_dict()}))
        sys.exit(error.as_dict()["code"])
    print(json.dumps([text.token_ids for text in texts]))
"""


def test_ranks_that_were_asked_for_other_texts_continue_none(ranks: Ranks, kept: Path) -> None:
    for one in ranks(CONTINUES, kept, ["[[1, 2, 3]]", "[[1, 2, 4]]"], "{}"):
        error = error_of(one)
        assert error["code"] == 8
        assert error["message"] == "the ranks do not agree: prompts of rank 1 is not that of rank 0"


def test_ranks_that_were_asked_for_the_same_texts_give_the_same(fresh_ranks: Ranks, kept: Path) -> None:
    ended = fresh_ranks(CONTINUES, kept, "[[1, 2, 3], [4]]", '{"temperature": 0.5, "stop": [5]}')
    assert [one.code for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert ended[0].document == ended[1].document


def test_a_rank_that_has_no_tokenizer_is_told_to_all(ranks: Ranks, kept: Path, tmp_path: Path) -> None:
    make_checkpoint("tiny-qwen3", tmp_path / "here")
    byte_level().save(str(tmp_path / "here" / "tokenizer.json"))
    places = [tmp_path / "here", tmp_path / "none"]
    options = ("--prompt", "The", "--tokenizer", places, "--format", "json")
    for one in ranks(GRAPHPACK, "generate", kept, *options):
        error = error_of(one)
        assert error["code"] == 3
        assert error["message"].startswith("rank 1 of 2: ")


UNEVEN = """
import json, os, sys, time
import graphpack
import graphpack.trials as trials

tick, at = (0.004, 0.001)[int(os.environ["RANK"])], 0.0

def clock():
    global at
    at += tick
    return at

with graphpack.load(sys.argv[1]) as model:
    trials.time.perf_counter = clock
    rows = model.bench(0.102)
print(json.dumps([row.steps for row in rows]))
"""


def test_ranks_that_are_not_equally_fast_time_as_many_steps(ranks: Ranks, kept: Path) -> None:
    ended = ranks(UNEVEN, kept)
    assert [one.code for one in ended] == [0, 0], ended[0].err + ended[1].err
    assert [one.out.strip() for one in ended] == ["[25]", "[25]"]


ONCE = """
import sys, graphpack
graphpack.load(sys.argv[2]).close()
"""


def test_a_rank_that_has_ended_is_told_to_one_that_waits_for_it(ranks: Ranks, kept: Path) -> None:
    waits, ended = ranks([ONCE + GRAPHPACK, ONCE], "load", kept, "--format", "json")
    assert ended.code == 0, ended.err
    error = error_of(waits)
    assert (error["code"], error["message"]) == (12, "rank 1 of 2 has ended")
    assert waits.seconds - ended.seconds < LIMIT


WRITES = """
import os, sys
from types import SimpleNamespace
import graphpack.capture as c
from graphpack.__main__ import main
from graphpack.archive.oci import GOLDEN_TYPE
from graphpack.errors import OutputsDifferError

def write(archive, *_):
    archive.put_blob(b"what a rank has written" + os.environ["RANK"].encode(), GOLDEN_TYPE)
    return SimpleNamespace(ref=None, record=None, bytes=0)

def prove(self, *_):
    if os.environ["RANK"] == "1":
        raise OutputsDifferError("they differ")

c._Save._capture, c.write_entry, c._Save._prove = lambda *_: None, write, prove
c._Save._commit = lambda *_: sys.exit("committed")
sys.exit(main())
"""


def test_a_rank_whose_proof_fails_keeps_all_from_committing_and_nothing_is_left(ranks: Ranks, tmp_path: Path) -> None:
    options = ("--mode", "piecewise", "--token-counts", "1", "--format", "json")
    for one in ranks(WRITES, "save", "tiny-qwen3", tmp_path / "archive", *options):
        error = error_of(one)
        assert (error["code"], error["message"]) == (10, "rank 1 of 2: they differ")
    assert not (tmp_path / "archive").exists()


KILLED = """
import os, signal, sys
import graphpack.group
from graphpack.__main__ import main
graphpack.group.LOST_SECONDS = 4
{setup}
sys.exit(main())
"""
DIES = "lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)"
WAITS = "lambda *_, **__: __import__('time').sleep(100)"
IN_LOAD = "import graphpack.backends.cpu.memory as m; m.CpuMemory._fill = {act}"
IN_PROOF = "import graphpack.trials as t; t.verify_graphs = {act}"
IN_CAPTURE = "import graphpack.capture as c; c._Save._capture = {act}"
IN_SAVE = "import graphpack.backends.cpu.pieces as p; p.capture_pieces = {act}"


# A device ends waiting for a sum that is broken off, and what it gives is no sum.
TAKES_IT_FOR_A_SUM = """
def compare(*_):
    from graphpack.errors import OutputsDifferError
    from graphpack.models.operations import BROKEN
    try:
        BROKEN.wait(60)
    except BaseException:
        pass
    raise OutputsDifferError("they differ")
import graphpack.trials
graphpack.trials.verify_graphs = compare
"""


@pytest.mark.parametrize(
    ("killed", "other"), [(0, ""), (1, ""), (1, TAKES_IT_FOR_A_SUM)], ids=["first", "second", "second, in a sum"]
)
def test_a_rank_killed_in_a_load_ends_the_others(killed: int, other: str, ranks: Ranks, kept: Path) -> None:
    where, options = (IN_PROOF, ("--verify",)) if other else (IN_LOAD, ())
    dies = where.format(act=DIES)
    programs = [KILLED.format(setup=dies if rank == killed else other) for rank in range(SIZE)]
    ended = ranks(programs, "load", kept, *options, "--format", "json")
    assert_ends_with(ended, killed)


# A device cannot be interrupted while it waits, and neither can what blocks signals.
WAITS_FOR_EVER = """
import graphpack.collectives, graphpack.group
graphpack.collectives.wait_for_ever = lambda: True
graphpack.group.STUCK_SECONDS, graphpack.group.CLEANING_SECONDS = 0.5, 1.5
graphpack.group.BEAT_SECONDS, graphpack.group.LOST_SECONDS = 0.25, 3
"""
STUCK = """
def wait(*_):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGURG})
    __import__("time").sleep(100)
import graphpack.trials
graphpack.trials.verify_graphs = wait
"""
CLEANS_UP_FOR_LONG = """
from graphpack.backends.cpu.memory import CpuMemory
CpuMemory.close = lambda _: __import__("time").sleep(100)
def wait(*_):
    __import__("time").sleep(100)
import graphpack.trials
graphpack.trials.verify_graphs = wait
"""


@pytest.mark.parametrize("other", [STUCK, CLEANS_UP_FOR_LONG], ids=["waits", "cleans up"])
@pytest.mark.parametrize("killed", [0, 1])
def test_a_command_whose_main_thread_is_stuck_ends_without_it(
    killed: int, other: str, ranks: Ranks, kept: Path
) -> None:
    dies = IN_PROOF.format(act=DIES)
    programs = [KILLED.format(setup=WAITS_FOR_EVER + (dies if rank == killed else other)) for rank in range(SIZE)]
    assert_ends_with(ranks(programs, "load", kept, "--verify", "--format", "json"), killed)


def test_a_command_that_is_stuck_says_why_another_failed(ranks: Ranks, kept: Path) -> None:
    programs = [KILLED.format(setup=WAITS_FOR_EVER + setup) for setup in (STUCK, FAILS)]
    stuck, failed = ranks(programs, "load", kept, "--verify", "--format", "json")
    assert [one.code for one in (stuck, failed)] == [1, 1]
    assert error_of(stuck)["message"] == "rank 1 of 2: IndexError in verify: list index out of range"
    assert stuck.seconds - failed.seconds < LIMIT


FAILS = "import graphpack.trials as t; t.verify_graphs = lambda *_: [][0]"
CLEANS_UP_LONGER = """
from graphpack.backends.cpu.memory import CpuMemory
CpuMemory.close = lambda _: __import__("time").sleep(100)
graphpack.group.CLEANING_SECONDS = 4
"""


SLOW_TO_LEAVE = """
import threading, time
import graphpack.trials
graphpack.trials.verify_graphs = lambda *_: ()
leave = graphpack.group.Group._leave
def slow(group):
    leave(group)
    if threading.current_thread() is threading.main_thread():
        time.sleep(2)
graphpack.group.Group._leave = slow
"""


def test_a_command_that_waits_for_others_to_leave_answers_once(ranks: Ranks, kept: Path) -> None:
    """It may wait for longer than others may clean up."""
    programs = [KILLED.format(setup=WAITS_FOR_EVER + setup) for setup in (SLOW_TO_LEAVE, FAILS + CLEANS_UP_LONGER)]
    for one in ranks(programs, "load", kept, "--verify", "--format", "json"):
        assert error_of(one)["message"] == "rank 1 of 2: IndexError in verify: list index out of range"


STOPPED_AT_ITS_END = """
leave = graphpack.group.Group._leave
def stopped(group):
    __import__("threading").Timer(1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    leave(group)
graphpack.group.Group._leave = stopped
"""
LEAVES_LATE = 'graphpack.group.Group._leave = lambda _: __import__("time").sleep(3)'


def test_a_command_that_is_stopped_while_it_waits_for_others_to_leave_keeps_its_status(
    ranks: Ranks, kept: Path
) -> None:
    """As by `torchrun`, once another has ended."""
    programs = [KILLED.format(setup=WAITS_FOR_EVER + setup) for setup in (STOPPED_AT_ITS_END, LEAVES_LATE)]
    stopped, late = ranks(programs, "load", kept, "--format", "json")
    assert (stopped.code, late.code) == (0, 0), stopped.err
    assert stopped.document["command"] == "load"
    assert "Traceback" not in stopped.err


# No command, but a program of somebody's own.
PROGRAM = """
import json, os, signal, sys, time
import graphpack, graphpack.group
graphpack.group.LOST_SECONDS = 4
{setup}
"""
LOADS = """
graphpack.load(sys.argv[1], verify=True)
print("went on")
"""
# The group has ended for both, and what this one is at is its own affair.
GOES_ON = """
try:
    graphpack.load(sys.argv[1], verify=True)
except graphpack.GraphpackError as error:
    print(json.dumps(error.as_dict()), flush=True)
time.sleep(1 + 2 * graphpack.group.CLEANING_SECONDS)
print("went on")
"""


def test_a_program_that_is_stuck_in_a_load_is_ended_with_the_reason(ranks: Ranks, kept: Path) -> None:
    programs = [PROGRAM.format(setup=WAITS_FOR_EVER + setup) + LOADS for setup in (STUCK, IN_PROOF.format(act=DIES))]
    stuck, killed = ranks(programs, kept)
    assert killed.code == -signal.SIGKILL
    assert (stuck.code, stuck.out) == (12, "")
    assert "rank 1 of 2 is gone, or does not answer" in stuck.err
    assert stuck.seconds - killed.seconds < LIMIT


ALONE_IN_A_STEP = """
with graphpack.load(sys.argv[1]):
    if os.environ["RANK"] == "0":
        with graphpack.group.JOINED[0].taken():
            time.sleep(60)
"""


def test_a_program_that_steps_alone_is_ended_when_the_others_have(ranks: Ranks, kept: Path) -> None:
    alone, ended = ranks(PROGRAM.format(setup=WAITS_FOR_EVER) + ALONE_IN_A_STEP, kept)
    assert (alone.code, ended.code) == (12, 0)
    assert "rank 1 of 2 has ended" in alone.err
    assert alone.seconds - ended.seconds < LIMIT


# What comes before ranks tell each other anything takes longer than one may be stuck.
LOADS_AGAIN = """
import graphpack.restore
def load():
    try:
        graphpack.load(sys.argv[1], verify=True)
    except Exception as error:
        print(error, flush=True)
load()
climb = graphpack.restore._Restore._climb
graphpack.restore._Restore._climb = lambda *given: (time.sleep(3), climb(*given))[1]
load()
"""


def test_a_program_that_loads_again_after_ranks_failed_is_told_at_once(ranks: Ranks, kept: Path) -> None:
    programs = [PROGRAM.format(setup=WAITS_FOR_EVER + setup) + LOADS_AGAIN for setup in ("", FAILS)]
    for one in ranks(programs, kept):
        assert one.code == 0, one.err
        assert one.out.splitlines()[1] == "rank 1 of 2: IndexError in verify: list index out of range"


FULL = 'sys.stderr = open("/dev/full", "w", buffering=1)'


@pytest.mark.parametrize("stderr", ["sys.stderr = None", FULL], ids=["none", "full"])
def test_a_program_that_cannot_say_why_is_ended_all_the_same(stderr: str, ranks: Ranks, kept: Path) -> None:
    setups = WAITS_FOR_EVER + STUCK + stderr, WAITS_FOR_EVER + FAILS
    stuck, failed = ranks([PROGRAM.format(setup=setup) + LOADS for setup in setups], kept)
    assert (stuck.code, failed.code) == (1, 1)
    assert stuck.seconds - failed.seconds < LIMIT


def test_a_command_that_cannot_say_why_is_ended_all_the_same(ranks: Ranks, kept: Path) -> None:
    setups = WAITS_FOR_EVER + STUCK + FULL, WAITS_FOR_EVER + FAILS
    program = KILLED.replace("sys.exit(main())", "from graphpack import process\n{late}\nsys.exit(main())")
    late = "process._text_stream = lambda stream, _: stream"
    stuck, failed = ranks([program.format(setup=setup, late=late) for setup in setups], "load", kept, "--verify")
    assert (stuck.code, failed.code) == (1, 1)
    assert stuck.seconds - failed.seconds < LIMIT


def test_a_program_that_is_at_something_else_is_not_ended(ranks: Ranks, kept: Path) -> None:
    programs = [PROGRAM.format(setup=WAITS_FOR_EVER + setup) + GOES_ON for setup in ("", FAILS)]
    told, failed = ranks(programs, kept)
    assert (told.code, failed.code) == (0, 1), told.err
    first, last = told.out.splitlines()
    assert json.loads(first)["message"] == "rank 1 of 2: IndexError in verify: list index out of range"
    assert last == "went on"


def test_a_command_on_devices_ends_before_torch_tears_anything_down(fresh_ranks: Ranks, kept: Path) -> None:
    late = 'import atexit; atexit.register(print, "torn down")\n'
    for here, torn_down in ((WAITS_FOR_EVER, False), ("", True)):
        for one in fresh_ranks(late + here + GRAPHPACK, "load", kept, "--format", "json"):
            assert one.code == 0, one.err
            assert ("torn down" in one.out) is torn_down
            assert json.loads(one.out.partition("torn down")[0])["command"] == "load"


def test_a_rank_killed_in_a_save_ends_the_others_at_once_and_leaves_no_entry(ranks: Ranks, tmp_path: Path) -> None:
    """The other one waits for something that takes much longer."""
    programs = [KILLED.format(setup=IN_SAVE.format(act=act)) for act in (WAITS, DIES)]
    options = ("--mode", "piecewise", "--batch-sizes", "1", "--token-counts", "1", "--format", "json")
    ended = ranks(programs, "save", "tiny-qwen3", tmp_path / "archive", *options)
    assert_ends_with(ended, 1)
    assert not (tmp_path / "archive" / "index.json").exists()


def test_a_rank_that_is_asked_to_stop_stops_the_others_and_nothing_is_left(ranks: Ranks, tmp_path: Path) -> None:
    acts = WAITS, DIES.replace("SIGKILL", "SIGTERM")
    programs = [KILLED.format(setup=IN_CAPTURE.format(act=act)) for act in acts]
    options = ("--mode", "piecewise", "--batch-sizes", "1", "--token-counts", "1", "--format", "json")
    other, stopped = ranks(programs, "save", "tiny-qwen3", tmp_path / "archive", *options)
    assert error_of(stopped)["code"] == 143
    error = error_of(other)
    assert (error["code"], error["message"]) == (12, "rank 1 of 2: stopped in capture: SIGTERM")
    assert other.seconds - stopped.seconds < LIMIT
    assert not (tmp_path / "archive").exists()


def assert_ends_with(ended: list[Ended], killed: int) -> None:
    other = ended[1 - killed]
    error = error_of(other)
    assert ended[killed].code == -signal.SIGKILL
    assert error["code"] == 12
    assert error["message"].startswith(f"rank {killed} of 2 ")
    assert other.seconds - ended[killed].seconds < LIMIT
    assert json.dumps(error["problems"]).count(f"rank {killed}") == 1


# The first time, rank 1 ends before it meets rank 0, which was there. Then there are two commands, one after the other.
AGAIN = """
import os, subprocess, sys, time
from pathlib import Path
met = Path(sys.argv[0]).parent / "met"
sys.argv[1:1] = ["load"]
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "1":
    for _ in range(2):
        subprocess.run([sys.executable, "-m", "graphpack", *sys.argv[1:]], check=True)
elif os.environ["RANK"] == "1":
    while not met.exists(): time.sleep(0.05)
    sys.exit(1)
else:
    import graphpack.meeting as meeting
    from graphpack.__main__ import main
    store = meeting.PrefixStore
    def told(*given):
        met.touch()
        return store(*given)
    meeting.PrefixStore = told
    sys.exit(main())
"""


def test_what_processes_told_is_not_for_later_ones(kept: Path, tmp_path: Path) -> None:
    """The store of `torchrun` still has it."""
    (tmp_path / "script.py").write_text(AGAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(SIZE), "--max-restarts", "1"]
    command = [*torchrun, "--master-port", str(free_port()), str(tmp_path / "script.py"), str(kept)]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("restored") == 2 * SIZE


ALONE = (
    """
import graphpack.group as group
group.JOIN_SECONDS = 1
"""
    + GRAPHPACK
)


def test_a_rank_that_never_comes_is_told(ranks: Ranks, kept: Path) -> None:
    ended = ranks([ALONE, ""], "load", kept, "--format", "json")
    error = error_of(ended[0])
    assert (error["code"], error["message"]) == (12, "rank 1 of 2 did not come within 1 s")


def test_a_rank_that_nobody_waits_for_ends_soon_and_says_what_to_do(ranks: Ranks, kept: Path) -> None:
    """Rank 0 holds the store where they meet."""
    began = time.monotonic()
    error = error_of(ranks(["", ALONE], "load", kept, "--format", "json")[1])
    assert (error["code"], error["message"]) == (12, "rank 1 of 2 cannot meet the others")
    assert error["problems"][0]["hint"] == "start rank 0 as well, at this address"
    assert time.monotonic() - began < LIMIT
