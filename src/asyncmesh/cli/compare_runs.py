"""The runs of a comparison, on virtual meshes or on real ones.

Owns the running: as many virtual runs at a time as there are cores, real ones one after another,
because each wants the whole machine. Invariant: a finished run whose configuration is unchanged is
not run again, so a comparison that was interrupted goes on where it was.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from multiprocessing import active_children, get_context
from pathlib import Path
from typing import Any

from asyncmesh.cli.mesh import run_mesh
from asyncmesh.config import Config

# By (case, grid point, seed).
Summaries = dict[tuple[str, int, int], dict[str, Any]]


@dataclass(frozen=True)
class RunTask:
    """One run of a comparison."""

    case: str
    point: int
    seed: int
    config: Config
    folder: Path


def default_jobs(config: Config) -> int:
    """One run a core, or one at a time on a GPU."""
    from asyncmesh.device import choose_device

    return 1 if choose_device(config).type == "cuda" else os.cpu_count() or 1


def run_on_virtual_meshes(tasks: Sequence[RunTask], jobs: int) -> Summaries:
    """The summaries by (case, grid point, seed). Small models gain most from one core a run."""
    summaries = {}
    threads = max(1, (os.cpu_count() or 1) // jobs)
    # An executor notices when a process is killed (out of memory, say); a Pool would wait for ever.
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        pending = {pool.submit(run_task, task, threads): task for task in tasks}
        try:
            for done, future in enumerate(as_completed(pending), 1):
                task, summary = pending[future], future.result()
                summaries[task.case, task.point, task.seed] = summary
                _say_what_came_of(task, summary, done, len(tasks))
        except BaseException:  # Ctrl-C above all: nothing may go on after it
            pool.shutdown(wait=False, cancel_futures=True)
            for process in active_children():
                process.terminate()
            raise
    return summaries


def run_on_real_meshes(tasks: Sequence[RunTask]) -> Summaries:
    """The summaries by (case, grid point, seed). Each run has the whole machine."""
    from asyncmesh.observe.folder import read_summary

    summaries = {}
    real = [replace(task, config=task.config.on_a_real_mesh()) for task in tasks]
    for done, task in enumerate(real, 1):
        if not _is_up_to_date(task):
            shutil.rmtree(task.folder, ignore_errors=True)  # what an interrupted run left
            summary, _ = run_mesh(task.config, folder=task.folder)
            error = summary.pop("error")
            if summary["status"] == "interrupted":
                raise KeyboardInterrupt
            if error is not None and summary["status"] != "diverged":
                raise error
        summary = read_summary(task.folder)
        summaries[task.case, task.point, task.seed] = summary
        _say_what_came_of(task, summary, done, len(tasks))
    return summaries


def _say_what_came_of(task: RunTask, summary: dict[str, Any], done: int, count: int) -> None:
    loss = summary["final_val_loss"]
    shown = summary["status"] if loss is None else f"validation loss {loss:.4f}"
    print(f"{done}/{count} {task.folder}: {shown}", flush=True)


def run_task(task: RunTask, threads: int) -> dict[str, Any]:
    """One run, in a process of its own; a run that diverged is a result like any other."""
    import torch

    from asyncmesh.observe.folder import RunFolder, read_summary
    from asyncmesh.simulator.language_model import language_model_job
    from asyncmesh.simulator.run import run_job

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's business
    if _is_up_to_date(task):
        return read_summary(task.folder)
    torch.set_num_threads(task.config.train.threads or threads)
    job = language_model_job(task.config).job
    folder = RunFolder(task.folder, task.config, keep_events=False)
    result = run_job(job, folder)
    folder.finish(result.summary)
    return read_summary(task.folder)


def _is_up_to_date(task: RunTask) -> bool:
    """As `make` sees it: finished with this very configuration, after its data last changed."""
    from asyncmesh.configuration import to_toml
    from asyncmesh.data.sources import modified_s
    from asyncmesh.observe.folder import read_summary

    made, summary = task.folder / "config.toml", task.folder / "summary.json"
    if not summary.is_file() or made.read_text(encoding="utf-8") != to_toml(task.config):
        return False
    data, finished_s = task.config.data, summary.stat().st_mtime
    if max(modified_s(name) for name in (data.source, data.validation) if name) > finished_s:
        return False
    return bool(read_summary(task.folder)["status"] != "interrupted")
