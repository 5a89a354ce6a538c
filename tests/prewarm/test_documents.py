"""What `docs/prewarm` tells people to run is run: the same commands, with tiny models and other paths."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from graphpack.cli.answer import EXIT_CODES
from graphpack.configuration.config import read_config
from tests.capture.saved import environment
from tests.prewarm.fleet import SMALL

DOCS = Path(__file__).parents[2] / "docs" / "prewarm"
NAME = "qwen3"
"""The one model of all these files."""


def load(name: str) -> Any:
    return list(yaml.safe_load_all((DOCS / name).read_text()))


def kubernetes(kind: str) -> Any:
    (found,) = [document for document in load("kubernetes.yaml") if document["kind"] == kind]
    return found


def tiny(text: str) -> str:
    """A configuration of the documents, which has to be a good one, for a model that can be saved in seconds."""
    config = yaml.safe_load(text)
    assert list(config["models"]) == [NAME]
    path = config["models"][NAME]["path"]
    return json.dumps({**config, "models": {NAME: {**SMALL, "path": path}}})


@pytest.fixture
def archive(prewarmed: Path, tmp_path: Path) -> Path:
    """A folder as the documents want it, with the archive that `prewarm` has made of `tiny`."""
    folder = tmp_path / "prewarmed"
    shutil.copytree(prewarmed, folder)
    (folder / "graphpack.yaml").write_text(tiny((DOCS / "graphpack.yaml").read_text()))
    return folder


@pytest.fixture
def bin_folder(tmp_path: Path) -> Path:
    """A folder with the program `graphpack`, as an installation has it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    script = folder / "graphpack"
    script.write_text(f'#!/bin/sh\nexec {sys.executable} -m graphpack "$@"\n')
    script.chmod(0o755)
    return folder


def shell(line: str, folder: Path, bin_folder: Path, **variables: str) -> str:
    """Run a shell line as these files' shells do; it has to succeed. What it prints."""
    path = f"{bin_folder}:/usr/bin:/bin"
    done = subprocess.run(
        ["bash", "-e", "-o", "pipefail", "-c", line],
        cwd=folder,
        env=environment(**{"OMP_NUM_THREADS": "1", **variables, "PATH": path}),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def moved(text: str, places: dict[str, Path]) -> str:
    """The text with absolute paths moved below other folders."""
    for place, folder in places.items():
        text = re.sub(rf"(?<![\w/]){re.escape(place)}(?![\w-])", str(folder), text)
    return text


def graphpack_lines(script: str) -> str:
    """The lines of a step that run graphpack; installing and fetching is for the real place."""
    return "\n".join(line for line in script.splitlines() if line.startswith("graphpack "))


def test_the_sample_configuration_can_be_read() -> None:
    config = read_config(DOCS / "graphpack.yaml")
    assert config.models[NAME].cpu_isa == "avx2"
    text = kubernetes("ConfigMap")["data"]["graphpack.yaml"]
    assert list(yaml.safe_load(text)["models"]) == [NAME]


def test_the_configuration_in_the_config_map_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "c.yaml").write_text(kubernetes("ConfigMap")["data"]["graphpack.yaml"])
    model = read_config(tmp_path / "c.yaml").models[NAME]
    assert (model.device, model.compile) == ("cuda", True)


def test_the_workflow(archive: Path, tmp_path: Path, bin_folder: Path) -> None:
    folder = tmp_path / "checkout"
    shutil.copytree(archive, folder)
    (workflow,) = load("github-actions.yaml")
    (job,) = workflow["jobs"].values()
    scripts = [graphpack_lines(step["run"]) for step in job["steps"] if "run" in step]
    ran = [script for script in scripts if script]
    for script in ran:
        shell(script, folder, bin_folder, **job["env"])
    assert [line.split()[1] for script in ran for line in script.splitlines()] == ["config", "prewarm", "load", "gc"]
    (row,) = json.loads((folder / "prewarm.json").read_text())["models"]
    assert (row["name"], row["action"]) == (NAME, "up to date")
    uploaded = [step["with"]["path"] for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
    assert uploaded == ["prewarm.json", "archive.tar"]


@pytest.mark.parametrize("name", ["Job", "Deployment"])
def test_containers_mount_what_their_commands_name(name: str) -> None:
    for container in containers(name):
        mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
        assert mounts == {"/etc/graphpack", "/checkpoints", "/archive"}
        volumes = {volume["name"] for volume in pod(name)["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_the_job_and_the_init_container(archive: Path, tmp_path: Path, bin_folder: Path) -> None:
    """The init container fails without the archive, and passes with what the Job has made."""
    places = {place: tmp_path / place for place in ("checkpoints", "archive", "etc")}
    shutil.copytree(archive / "checkpoints", places["checkpoints"])
    moves = {f"/{place}": folder for place, folder in places.items()}
    (places["etc"] / "graphpack").mkdir(parents=True)
    text = moved(kubernetes("ConfigMap")["data"]["graphpack.yaml"], moves)
    (places["etc"] / "graphpack" / "graphpack.yaml").write_text(tiny(text))
    (prewarm,), (check, _) = containers("Job"), containers("Deployment")
    with pytest.raises(AssertionError, match="is not a graphpack archive"):
        shell(command(check, moves), tmp_path, bin_folder, **variables(check))
    shutil.copytree(archive / "archive", places["archive"])
    (row,) = json.loads(shell(command(prewarm, moves), tmp_path, bin_folder, **variables(prewarm)))["models"]
    assert (row["name"], row["action"]) == (NAME, "up to date")
    (entry,) = json.loads(shell(command(check, moves), tmp_path, bin_folder, **variables(check)))["entries"]
    assert entry["name"] == NAME


def pod(kind: str) -> Any:
    return kubernetes(kind)["spec"]["template"]["spec"]


def containers(kind: str) -> list[Any]:
    return [*pod(kind).get("initContainers", []), *pod(kind)["containers"]]


def command(container: Any, moves: dict[str, Path]) -> str:
    return moved(shlex.join(container["command"]), moves)


def variables(container: Any) -> dict[str, str]:
    return {variable["name"]: variable["value"] for variable in container["env"]}


def test_what_the_job_does_not_try_again_are_refusals() -> None:
    """All but a bug, what the system refused, and being stopped."""
    ignore, fail = kubernetes("Job")["spec"]["podFailurePolicy"]["rules"]
    assert ignore["action"] == "Ignore"
    assert fail["onExitCodes"]["values"] == [code for code in EXIT_CODES if code not in (0, 1, 12, 130, 143)]
    assert fail["onExitCodes"]["containerName"] == containers("Job")[0]["name"]


def test_the_dockerfile(archive: Path, tmp_path: Path, bin_folder: Path) -> None:
    folder = tmp_path / "srv"
    shutil.copytree(archive, folder)
    moves = {"/srv": folder}
    ran = []
    said: dict[str, str] = {}
    for instruction, text in instructions((DOCS / "Dockerfile").read_text()):
        if instruction == "ENV":
            said = {name: moved(value, moves) for name, _, value in (item.partition("=") for item in shlex.split(text))}
        line = shlex.join(json.loads(text)) if instruction == "CMD" else re.sub(r"--mount=\S+", "", text).strip()
        if instruction in ("RUN", "CMD") and line.startswith("graphpack "):
            shell(moved(line, moves), folder, bin_folder, **said)
            ran += [part.split()[1] for part in line.split("&&")]
    assert ran == ["prewarm", "load", "load"]
    assert said == {"GRAPHPACK_CONFIG": str(folder / "graphpack.yaml"), "GRAPHPACK_LOG_FORMAT": "json"}


def instructions(dockerfile: str) -> Iterator[tuple[str, str]]:
    """Each instruction and its arguments, continued lines joined."""
    for line in dockerfile.replace("\\\n", " ").splitlines():
        if line and not line.startswith("#"):
            instruction, _, text = line.partition(" ")
            yield instruction, " ".join(text.split())


def test_the_page_names_every_file_and_command(archive: Path, tmp_path: Path, bin_folder: Path) -> None:
    page = (DOCS / "README.md").read_text()
    assert set(re.findall(r"\(([\w.-]+)\) \|", page)) == {path.name for path in DOCS.iterdir()} - {"README.md"}
    (block,) = re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    shutil.copytree(archive, tmp_path / "here")
    shell(graphpack_lines(block), tmp_path / "here", bin_folder)
