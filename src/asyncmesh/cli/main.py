"""`asyncmesh`: the commands and how they end.

Owns exit codes: 0 done, 1 a run that diverged, 2 a user's mistake, 130 interrupted. Invariant: a
mistake is one line on stderr; a traceback is always a defect of ours.
"""

from __future__ import annotations

import sys

import typer

from asyncmesh.cli import compare, inspection, results, running
from asyncmesh.errors import AsyncMeshError

app = typer.Typer(
    name="asyncmesh",
    help="Train one language model on machines that share no fast interconnect.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
running.add_to(app)
compare.add_to(app)
app.add_typer(inspection.app, name="inspect")
results.add_to(app)


def main() -> None:
    """The console script."""
    try:
        app()
    except AsyncMeshError as error:
        print(f"asyncmesh: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("asyncmesh: interrupted", file=sys.stderr)
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) has seen enough
        sys.exit(0)


if __name__ == "__main__":
    main()
