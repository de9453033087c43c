"""The documents and the source keep their word."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def commands() -> list[str]:
    """Every `asyncmesh …` line of a code block, less the prompt."""
    found = []
    for document in DOCUMENTS:
        for block in re.findall(r"```\w*\n(.*?)```", document.read_text(), re.DOTALL):
            found += [
                line.removeprefix("$ ")
                for line in block.splitlines()
                if line.removeprefix("$ ").startswith("asyncmesh ")
            ]
    return found


def run(arguments: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *arguments], cwd=folder, capture_output=True, text=True, check=False
    )


@pytest.mark.parametrize("command", sorted(set(commands())))
def test_every_command_in_the_documents_is_one(command: str, tmp_path: Path) -> None:
    """Long ones are only parsed: --print-config reads all settings and stops."""
    arguments = shlex.split(command)[1:]
    if arguments[0] in ("simulate", "train"):
        arguments.append("--print-config")
    elif arguments[0] == "compare":
        settings = [a for a in arguments[1:] if re.match(r"--\w+\.\w+=", a)]
        preset = arguments[arguments.index("--preset") + 1]
        arguments = ["simulate", "--preset", preset, *settings, "--print-config"]
    done = run(["-m", "asyncmesh", *arguments], tmp_path)
    assert done.returncode == 0, done.stderr


def test_the_schedule_in_the_readme_is_what_is_printed(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    shown = re.search(r"```\n\$ asyncmesh (inspect schedule.*?)\n(.*?)```", readme, re.DOTALL)
    assert shown is not None
    done = run(["-m", "asyncmesh", *shlex.split(shown[1])], tmp_path)
    assert done.stdout == shown[2]


def test_the_python_example_in_the_readme_runs(tmp_path: Path) -> None:
    readme = (ROOT / "README.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    (tmp_path / "example.py").write_text(example)
    done = run(["example.py"], tmp_path)
    assert done.returncode == 0, done.stderr
    assert "torch.Size([8, 32])" in done.stdout


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_files_that_a_document_names_exist(document: Path) -> None:
    text = document.read_text()
    named = re.findall(r"`((?:src|tests|docs|benchmarks|examples)/[\w./-]+)", text)
    named += [
        f"src/asyncmesh/{name}" for name in re.findall(r"`((?:algorithm|protocol)/\w+\.py)", text)
    ]
    links = [document.parent / link for link in re.findall(r"\]\(([\w./-]+)\)", text)]
    assert [name for name in named if not (ROOT / name).exists()] == []
    assert [link for link in links if not link.exists()] == []


@pytest.mark.parametrize("source", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_pickle_and_no_room_for_anything(source: Path) -> None:
    text = source.read_text()
    assert not re.search(r"\bimport pickle\b|\btorch\.load\(|\bfrom pickle\b", text)
    assert source.stem not in ("utils", "common", "helpers", "misc")
    assert len(text.splitlines()) <= 450
    assert text.strip() == "" or '"""' in text  # says what it owns


def test_the_pins_cover_every_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[<>=]", line)[0].lower().replace("_", "-") for line in wanted}
    pinned = {
        line.split("==")[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if "==" in line
    }
    assert names <= pinned
    assert "torch==2.13.0" in (ROOT / "constraints.txt").read_text()
    assert "torch==2.13.0" in (ROOT / "Makefile").read_text()
