"""`simulate`: one run on the virtual mesh, from settings to a folder with a report.

Owns the order of a run as a user sees it: settings, data and model, progress, result, where it all
lies.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from asyncmesh.cli.settings import (
    PASS_SETTINGS_ON,
    Preset,
    PrintConfig,
    Settings,
    print_config,
    read,
)
from asyncmesh.config import Config


def add_to(app: typer.Typer) -> None:
    app.command(context_settings=PASS_SETTINGS_ON)(simulate)
    app.command()(replay)


def simulate(
    settings: Settings = None,
    preset: Preset = None,
    print_config: PrintConfig = False,
    hollow: Annotated[
        bool, typer.Option("--hollow", help="Protocol only, no numbers: for meshes of any size.")
    ] = False,
) -> None:
    """Run the virtual mesh: the numbers of a real one, in virtual time."""
    layers = read(settings, preset)
    config = layers.config()
    if print_config:
        return _show(layers, config)
    return _run_hollow(config) if hollow else _run(config)


_show = print_config


def replay(run: Annotated[Path, typer.Argument(help="The folder of a real run.")]) -> None:
    """Compute a real run once more from its events, and compare the weights' digests."""
    from asyncmesh.errors import InputFileError, ReplayError
    from asyncmesh.observe.events import read_events
    from asyncmesh.observe.folder import read_config, read_summary
    from asyncmesh.simulator.language_model import language_model_job
    from asyncmesh.simulator.replay import Replay
    from asyncmesh.simulator.run import build_engines, build_programs

    if read_summary(run).get("clock") != "real":
        raise InputFileError(f"{run}: is not a real run; give the folder of an asyncmesh train")
    config = read_config(run).replace(train={"device": "cpu"})
    if config.compute.emulated:
        raise InputFileError(f"{run}: its compute was emulated, so there is nothing to replay")
    job = language_model_job(config).job
    engines = build_engines(config, build_programs(job))
    compared = Replay(config, read_events(run / "events"), engines, job.batches).run()
    workers = {(one.stage, one.replica) for one in compared}
    different = [one for one in compared if not one.is_equal]
    if different:
        first = min(different, key=lambda one: one.update)
        raise ReplayError(
            f"{len(different)} of {len(compared)} digests differ, first that of stage"
            f" {first.stage} of replica {first.replica} after update {first.update}: recorded"
            f" {first.recorded}, replayed {first.replayed}"
        )
    print(f"bit-identical: {len(compared)} digests of {len(workers)} workers, the final ones too")


def _run(config: Config) -> None:
    import torch

    from asyncmesh.checkpoint.weights import mean_weights, save
    from asyncmesh.cli.console import print_job, progress
    from asyncmesh.cli.results import print_summary
    from asyncmesh.errors import ConfigError
    from asyncmesh.observe.folder import RunFolder
    from asyncmesh.observe.report import write_report
    from asyncmesh.simulator.language_model import language_model_job
    from asyncmesh.simulator.run import run_job

    if config.train.threads is not None:
        torch.set_num_threads(config.train.threads)
    built = language_model_job(config)
    folder = RunFolder.new(config)
    parameters = sum(p.numel() for stage in built.job.stages for p in stage.parameters())
    print_job(config, parameters, built.data)
    try:
        with progress("training", config.train.updates) as show:
            result = run_job(built.job, folder, show)
    except BaseException as error:
        folder.close()
        if isinstance(error, torch.OutOfMemoryError):
            raise ConfigError(
                "pipeline.microbatch_size",
                config.pipeline.microbatch_size,
                "the GPU's memory does not suffice for the microbatches in flight",
                "lower it, model.context or model.width, or use train.device=cpu",
            ) from None
        raise
    folder.finish(result.summary)
    if result.summary["updates"] and result.error is None:
        save(folder.path, result.summary["updates"], mean_weights(result.weights))
    print_summary(result.summary)
    print(f"report: {write_report(folder.path)}")
    if result.error is not None:
        raise result.error
    if result.summary["status"] == "interrupted":
        raise KeyboardInterrupt


def _run_hollow(config: Config) -> None:
    import time
    from functools import partial

    from asyncmesh.cli.results import print_summary
    from asyncmesh.data.sources import load_source
    from asyncmesh.observe.events import Event
    from asyncmesh.observe.folder import RunFolder
    from asyncmesh.observe.report import write_report
    from asyncmesh.observe.summary import SummaryBuilder
    from asyncmesh.simulator.language_model import hollow_mesh, tokens_of

    vocab = config.model.vocab or load_source(config.data.source).needed_vocab
    builder = SummaryBuilder(config)
    # Large meshes make millions of events, so they are only written where that was asked for.
    folder = RunFolder.new(config) if config.output_dir is not None else None

    def emit(event: Event) -> None:
        builder(event)
        if folder is not None:
            folder(event)

    mesh = hollow_mesh(config, vocab, emit)
    began_s = time.perf_counter()
    try:
        mesh.run()
    except BaseException:
        if folder is not None:
            folder.close()
        raise
    wall_s = time.perf_counter() - began_s
    summary: dict[str, Any] = builder.build("completed", wall_s, partial(tokens_of, config))
    if folder is not None:
        folder.finish(summary)
        print(f"report: {write_report(folder.path)}")
    print_summary(summary)
    print(
        f"hollow: {mesh.inputs:,} protocol events in {wall_s:.1f} s"
        f" ({mesh.inputs / wall_s:,.0f} a second); {summary['events']:,} records"
    )
