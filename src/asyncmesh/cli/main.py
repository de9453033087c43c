"""`asyncmesh`: the commands and how they end.

Owns exit codes: 0 done, 1 a run that diverged, 2 a user's mistake, 130 interrupted. Invariant: a
mistake is one line on stderr; a traceback is always a defect of ours.
"""

from __future__ import annotations

import os
import sys

import typer

from asyncmesh.cli import compare, inspection, mesh, results, running, wireguard
from asyncmesh.errors import AsyncMeshError

# PyTorch is loaded later and reads it then: its warnings are for the logs, not for the console of a
# person who cannot do anything about them.
os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

app = typer.Typer(
    name="asyncmesh",
    help="Train one language model on machines that share no fast interconnect.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
mesh.add_to(app)
running.add_to(app)
compare.add_to(app)
wireguard.add_to(app)
app.add_typer(inspection.app, name="inspect")
results.add_to(app)


# What the parser raises for a wrong option or argument; typer exports only this child of it.
_UsageError: type[Exception] = typer.BadParameter.__base__ or typer.BadParameter
_INTERRUPTED = 130


def main() -> None:
    """The console script."""
    sys.exit(_run(sys.argv[1:]))


def _run(arguments: list[str]) -> int:
    """Run a command; every way it can end, as an exit code."""
    try:
        ended = app(arguments, standalone_mode=False)
    except AsyncMeshError as error:
        return _told(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        ended = _INTERRUPTED
    except _UsageError as error:
        message = getattr(error, "format_message", error.__str__)()
        return _told(f"{message.rstrip('.')}; asyncmesh COMMAND --help shows what there is", 2)
    except BrokenPipeError:
        sys.stderr.close()  # the reader (head, less) has seen enough
        return 0
    if ended == _INTERRUPTED:
        return _told("interrupted", _INTERRUPTED)
    return ended if isinstance(ended, int) else 0


def _told(message: str, exit_code: int) -> int:
    print(f"asyncmesh: {' '.join(message.split())}", file=sys.stderr)
    return exit_code


if __name__ == "__main__":
    main()
