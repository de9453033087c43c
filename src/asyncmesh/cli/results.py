"""`report` and `generate`: what can be done with a finished run; and how a result is printed."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer


def add_to(app: typer.Typer) -> None:
    app.command()(report)
    app.command()(generate)


RunPath = Annotated[Path, typer.Argument(metavar="RUN", help="A run's folder.")]


def report(run: RunPath) -> None:
    """Write a run's report.html anew from its summary and events."""
    from asyncmesh.observe.folder import read_summary
    from asyncmesh.observe.report import write_report

    written = write_report(run)  # first, because it checks what the folder holds
    print_summary(read_summary(run))
    print(f"report: {written}")


def generate(
    run: RunPath,
    prompt: Annotated[str, typer.Option(help="Text to go on from.")] = "The ",
    tokens: Annotated[int, typer.Option(min=1, help="How many tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, help="0: always the likeliest.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=1, help="Choose among the k likeliest.")] = 50,
    seed: Annotated[int, typer.Option(min=0, max=2**63 - 1, help="Of the choices.")] = 0,
) -> None:
    """Let a trained model write."""
    print(_continue(run, prompt, tokens, temperature, top_k, seed))


def _continue(
    run: Path, prompt: str, tokens: int, temperature: float, top_k: int, seed: int
) -> str:
    import torch

    from asyncmesh.checkpoint.weights import load_newest
    from asyncmesh.data.sources import kind_of
    from asyncmesh.data.text import decode, encode
    from asyncmesh.errors import ConfigError
    from asyncmesh.model.generation import generate as go_on
    from asyncmesh.model.gpt import build_stages
    from asyncmesh.observe.folder import read_config, read_summary

    read_summary(run)  # tells plainly when the folder is no run
    config, weights = read_config(run), load_newest(run)
    kind = kind_of(config.data.source)
    vocab = weights["head.output.weight"].shape[0]
    (model,) = build_stages(config.model, vocab, 1, config.seed)
    model.load_state_dict(weights)
    ids = encode(kind, prompt)
    if not ids:
        raise ConfigError("--prompt", prompt, "needs at least one token", 'try --prompt="The "')
    text = go_on(
        [model.eval()],
        torch.tensor([ids]),
        tokens,
        config.model.context,
        temperature,
        top_k,
        torch.Generator().manual_seed(seed),
    )
    return _printable(decode(kind, text[0].tolist()))


def _printable(text: str) -> str:
    """A young model writes any bytes, and a terminal would obey some of them."""
    return "".join(
        c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
    )


def print_sample(run: Path) -> None:
    """A few lines by the model just trained."""
    from rich.markup import escape
    from rich.panel import Panel

    from asyncmesh.cli.console import console

    text = _continue(run, "The ", 240, 0.8, 50, 0)
    console.print(Panel(escape(text), title="what it writes", title_align="left"))


def print_summary(summary: dict[str, Any]) -> None:
    """The figures of a run as a table."""
    from rich.table import Table

    from asyncmesh.cli.console import console

    table = Table(show_header=False, box=None, padding=(0, 2))
    for name, value in _figures(summary):
        table.add_row(name, value)
    console.print(table)


def _figures(summary: dict[str, Any]) -> list[tuple[str, str]]:
    busy = list(summary["busy_fraction"].values())
    sent = summary["bytes_sent"].values()
    delays = [
        sum(int(d) * n for d, n in histogram.items()) / sum(histogram.values())
        for histogram in summary["delays"].values()
    ]
    rounds = summary["rounds"]
    figures = [("status", summary["status"]), ("updates", f"{summary['updates']:,}")]
    if summary.get("replicas_lost"):
        lost = ", ".join(map(str, summary["replicas_lost"]))
        figures.append(("replicas lost", f"{lost}; the model is the mean of the others"))
    if summary["final_val_loss"] is not None:
        best = summary["best_val_loss"]
        figures.append(("validation loss", f"{summary['final_val_loss']:.4f} (best {best:.4f})"))
    figures.append(("tokens", f"{summary['tokens']:,}"))
    if summary["tokens_per_second"]:
        rate = f"{summary['tokens_per_second']:,.0f}"
        if summary["clock"] == "virtual":
            rate += " in virtual time"
        figures.append(("tokens a second", rate))
    if busy:
        mean = sum(busy) / len(busy)
        figures.append(("busy fraction", f"{mean:.3f} (lowest worker {min(busy):.3f})"))
    if delays:
        shown = " ".join(f"{delay:.2f}" for delay in delays[:16])
        figures.append(
            ("mean delay by stage", f"{shown}{' …' if len(delays) > 16 else ''} updates")
        )
    if summary["mesh"]["replicas"] > 1 and summary["method"]["averaging"] != "none":
        shown = f"{rounds['completed']:,} ({rounds['skipped']:,} skipped)"
        if rounds["completed"]:
            shown += f", mean delay {rounds['mean_delay_updates']:.1f} updates"
        else:
            shown += ": the run was over before one could merge"
        figures.append(("rounds merged", shown))
    for axis in ("pipeline", "data"):
        figures.append((f"{axis} axis sent", f"{sum(s[axis] for s in sent) / 1e6:,.1f} MB"))
    if summary["consensus_distance"]:
        figures.append(("consensus distance", f"{summary['consensus_distance']:.2e}"))
    figures.append(("wall time", f"{summary['wall_seconds']:.1f} s"))
    return figures
