"""The command line in processes of its own: what a user types, sees and gets as exit code."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

TINY = [
    "--train.updates=6",
    "--train.eval_every=3",
    "--train.eval_sequences=4",
    "--train.device=cpu",
    "--mesh.stages=2",
    "--pipeline.microbatch_size=2",
    "--model.layers=2",
    "--model.width=16",
    "--model.heads=2",
    "--model.context=16",
    "--averaging.delay=2",
]


def asyncmesh(
    *arguments: str, folder: Path, hash_seed: str = "0"
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "asyncmesh", *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run's folder."""
    folder = tmp_path_factory.mktemp("cli")
    done = asyncmesh("simulate", *TINY, "--output_dir=run", folder=folder)
    assert done.returncode == 0, done.stderr
    assert "validation loss" in done.stdout
    assert "\x1b" not in done.stdout  # plain lines where there is no terminal
    return folder / "run"


def test_a_run_leaves_everything_of_the_contract(run: Path) -> None:
    for name in ("config.toml", "metrics.jsonl", "report.html", "summary.json"):
        assert (run / name).stat().st_size > 0
    assert (run / "checkpoints" / "step-6" / "model.safetensors").is_file()
    assert len(list((run / "events").glob("stage-*-replica-*.jsonl"))) == 4
    summary = json.loads((run / "summary.json").read_text())
    needed = """status mesh method seed updates tokens final_val_loss best_val_loss val_curve
    wall_seconds tokens_per_second busy_fraction bytes_sent delays rounds consensus_distance
    environment"""
    assert set(needed.split()) <= summary.keys()
    assert summary["status"] == "completed"
    assert summary["tokens"] == 6 * 2 * 2 * 16  # updates, replicas, sequences, context
    assert [point["update"] for point in summary["val_curve"]] == [3, 6]
    assert set(summary["val_curve"][0]) == {"update", "tokens", "seconds", "loss"}
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert sum("training_loss" in line for line in lines) == 6


def test_a_run_can_be_reported_inspected_and_asked_to_write(run: Path) -> None:
    (run / "report.html").unlink()
    assert asyncmesh("report", str(run), folder=run).returncode == 0
    assert (run / "report.html").is_file()
    memory = asyncmesh("inspect", "memory", str(run), folder=run)
    assert "predicted / measured" in memory.stdout
    ambiguous = asyncmesh("inspect", "memory", str(run), "--mesh.stages=1", folder=run)
    assert ambiguous.returncode == 2
    assert "a finished run's settings are its own" in ambiguous.stderr
    written = asyncmesh("generate", str(run), "--tokens=5", "--prompt=ab", folder=run)
    assert written.returncode == 0, written.stderr
    assert written.stdout.startswith("ab")


def test_the_same_hash_under_two_hash_seeds(run: Path) -> None:
    for seed in ("1", "2"):
        done = asyncmesh(
            "simulate", *TINY, f"--output_dir=again-{seed}", folder=run.parent, hash_seed=seed
        )
        assert done.returncode == 0, done.stderr
    hashes = {
        json.loads((folder / "summary.json").read_text())["event_hash"]
        for folder in (run, run.parent / "again-1", run.parent / "again-2")
    }
    assert len(hashes) == 1


MISTAKES = [
    (["simulate", "--mesh.stages=9"], "mesh.stages = 9"),
    (["simulate", "--averaging.fracton=0.1"], "did you mean averaging.fraction?"),
    (["simulate", "--averaging.fraction=0"], "averaging.fraction = 0"),
    (["simulate", "--averaging.fraction=0.5"], "a coordinate may be in one round at a time"),
    (["simulate", "--model.vocab=100"], "model.vocab = 100"),
    (["simulate", "--data.source=absent.txt"], "absent.txt"),
    (["simulate", "absent.toml"], "absent.toml: there is no such file"),
    (["simulate", "--preset=none-such"], "choose from"),
    (["simulate", "--model.context=1000000"], "model.context = 1000000"),
    (["report", "absent"], "absent: "),
    (["generate", "absent"], "absent: holds no summary.json"),
    (["compare"], "leaves nothing to compare"),
    (["compare", "--over", "averaging.method"], "write --over section.key=A,B,C"),
    (["compare", "--case", "a: averaging.method=adamw"], 'averaging.method = "adamw"'),
    (["inspect", "schedule", "--schedule=zigzag"], 'pipeline.schedule = "zigzag"'),
    (["inspect", "schedule", "--stages=x"], "--stages"),
    (["no-such-command"], "no-such-command"),
    (["simulate", "--output_dir=/proc/none"], 'output_dir = "/proc/none"'),
    (["compare", "--over", "averaging.method=none,sparta", "--mesh.stages=9"], "mesh.stages = 9"),
    (["compare", "--case", "A: seed=1", "--case", "a: seed=2"], "would share a folder"),
    (["compare", "--preset=data-axis", "--seeds=0,0"], "has a seed twice"),
    (["train", "--train.updates=true"], "train.updates = True"),
    (["compare", "--case", "A: seed=1"], "case A: seed = 1: is the comparison's own business"),
    (["compare", "--output_dir=x", "--over", "seed=1"], "use --output for all of them"),
    (["compare", "--preset=data-axis", "--grid", "seed=1,2"], "grid: seed = [1, 2]"),
    (["simulate", "--data.source=~no-such-user/x"], "names a home folder that does not exist"),
    (["simulate", f"--output_dir={'x' * 300}"], "choose a folder that can be written to"),
    (["simulate", "--model.width=400000000"], "parameters does not fit into this machine's memory"),
    (["generate", "absent", "--seed=100000000000000000000"], "--seed"),
]


@pytest.mark.parametrize(("arguments", "told"), MISTAKES, ids=lambda a: " ".join(a)[:40])
def test_a_mistake_is_one_line_and_exit_code_2(
    arguments: list[str], told: str, tmp_path: Path
) -> None:
    done = asyncmesh(*arguments, folder=tmp_path)
    assert done.returncode == 2, done.stdout + done.stderr
    lines = done.stderr.strip().splitlines()
    assert len(lines) == 1, done.stderr
    assert lines[0].startswith("asyncmesh: ")
    assert told in lines[0]
    assert ";" in lines[0]  # …; and a fix
    assert not list(tmp_path.rglob("*.*"))  # nothing is left of a run that never began


def test_a_run_that_diverges_ends_with_1_and_keeps_what_it_has(tmp_path: Path) -> None:
    wild = ["--optimizer.name=sgd", "--optimizer.learning_rate=1e12", "--optimizer.max_grad_norm=0"]
    done = asyncmesh("simulate", *TINY, *wild, "--output_dir=run", folder=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("asyncmesh: optimizer.learning_rate = 1e+12: the training loss")
    assert len(done.stderr.strip().splitlines()) == 1
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "diverged"
    assert list((tmp_path / "run" / "events").iterdir())
    assert (tmp_path / "run" / "report.html").is_file()


def test_a_comparison_of_broken_tables(tmp_path: Path) -> None:
    for table, told in (
        ("seeds = 0", "compare.seeds = 0"),
        ('basline = "x"', "a [compare] table has title, baseline"),
        ("cases.a = 3", "compare.cases.a = 3"),
        (None, "compare = 3: must be a table"),
    ):
        (tmp_path / "c.toml").write_text(f"[compare]\n{table}\n" if table else "compare = 3\n")
        done = asyncmesh("compare", "c.toml", folder=tmp_path)
        assert done.returncode == 2
        assert told in done.stderr
        assert len(done.stderr.strip().splitlines()) == 1


def test_another_method_over_a_preset_does_not_inherit_its_delay(tmp_path: Path) -> None:
    done = asyncmesh("train", "--averaging.method=sparta", "--print-config", folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert any(line.startswith("delay = 0") for line in done.stdout.splitlines())


def test_ctrl_c_keeps_what_there_is(tmp_path: Path) -> None:
    long = ["--train.updates=100000", "--train.eval_every=10", "--output_dir=run"]
    process = subprocess.Popen(
        [sys.executable, "-m", "asyncmesh", "simulate", *TINY, *long],
        cwd=tmp_path,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    metrics = tmp_path / "run" / "events" / "mesh.jsonl"
    while not (metrics.exists() and metrics.stat().st_size) and process.poll() is None:
        os.sched_yield()
    process.send_signal(signal.SIGINT)
    _, told = process.communicate(timeout=60)
    assert process.returncode == 130
    assert told.strip() == "asyncmesh: interrupted"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    assert 0 < summary["updates"] < 100000


def test_a_folder_with_something_in_it_is_not_overwritten(run: Path) -> None:
    done = asyncmesh("simulate", *TINY, "--output_dir=run", folder=run.parent)
    assert done.returncode == 2
    assert "already exists" in done.stderr


def test_print_config_says_where_every_value_is_from(tmp_path: Path) -> None:
    (tmp_path / "a.toml").write_text("[mesh]\nstages = 3\n")
    done = asyncmesh("simulate", "a.toml", "--seed=5", "--print-config", folder=tmp_path)
    lines = done.stdout.splitlines()
    assert any(line.startswith("seed = 5") and line.endswith("# command line") for line in lines)
    assert any(line.startswith("stages = 3") and line.endswith("# a.toml") for line in lines)
    assert any(line.startswith("replicas = 2") and line.endswith("# default") for line in lines)


def test_a_schedule_as_a_grid(tmp_path: Path) -> None:
    done = asyncmesh(
        "inspect", "schedule", "--stages=3", "--accumulation=1", "--updates=3", folder=tmp_path
    )
    rows = [line.split("|")[1].split() for line in done.stdout.splitlines()[1:4]]
    assert rows[0] == ["F0", "F1", "F2", "·", "·", "B0*", "·", "B1*", "·", "B2*"]
    assert rows[2] == ["·", "·", "F0", "B0*", "F1", "B1*", "F2", "B2*", "·", "·"]
    assert [line.split("|")[2].strip() for line in done.stdout.splitlines()[1:4]] == ["2", "1", "0"]


def test_hollow_runs_need_no_numbers(tmp_path: Path) -> None:
    done = asyncmesh(
        "simulate",
        "--hollow",
        "--mesh.stages=16",
        "--mesh.replicas=4",
        "--model.layers=16",
        "--train.updates=20",
        folder=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "protocol events" in done.stdout


def test_compare_writes_table_figures_and_plot(tmp_path: Path) -> None:
    arguments = (
        "compare",
        *TINY,
        "--over",
        "averaging.method=none,async-ema",
        "--seeds=0,1",
        "--grid",
        "optimizer.learning_rate=1e-3,2e-3",
        "--baseline=none",
        "--output=out",
    )
    done = asyncmesh(*arguments, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    out = tmp_path / "out"
    assert {"table.md", "comparison.json", "comparison.png", "comparison.svg"} <= {
        path.name for path in out.iterdir()
    }
    assert "async-ema" in (out / "table.md").read_text()
    made = {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")}
    assert len(made) == 8
    assert asyncmesh(*arguments, folder=tmp_path).returncode == 0
    assert {path: path.stat().st_mtime_ns for path in out.rglob("summary.json")} == made


def test_a_comparison_follows_the_seed_and_the_data(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("all work and no play makes a dull text\n" * 100)
    arguments = ("compare", *TINY, "--over", "averaging.method=none", "--output=out")
    arguments += ("--seed=3", "--data.source=text.txt", "--jobs=1")
    assert asyncmesh(*arguments, folder=tmp_path).returncode == 0
    (made,) = (tmp_path / "out").rglob("summary.json")
    assert json.loads(made.read_text())["seed"] == 3
    before = made.stat().st_mtime_ns
    text.write_text("another text, just as dull, that was written later\n" * 100)
    os.utime(text, ns=(before + 10**9, before + 10**9))
    assert asyncmesh(*arguments, folder=tmp_path).returncode == 0
    after = made.stat().st_mtime_ns
    assert after > before
    text.unlink()  # what was measured stays measured
    assert asyncmesh(*arguments, folder=tmp_path).returncode == 0
    assert made.stat().st_mtime_ns == after


def test_nothing_loads_the_compiler_that_does_not_compile(tmp_path: Path) -> None:
    """It takes seconds, which every command would wait for."""
    code = (
        "import sys; from asyncmesh.cli.main import app;"
        f"app({['simulate', *TINY]!r}, standalone_mode=False);"
        "assert 'torch._dynamo' not in sys.modules"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
