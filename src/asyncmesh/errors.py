"""What can go wrong, told in one line.

Owns every exception a user may meet. Invariant: a user's mistake is an `AsyncMeshError` whose text
names the setting, its value, the rule and a fix; the command line prints that one line and ends
with `exit_code`. A traceback on the console therefore always means a defect of ours.
"""

from __future__ import annotations

from typing import Any


class AsyncMeshError(Exception):
    """Base of all errors that are told to the user in one line."""

    exit_code = 2


class ConfigError(AsyncMeshError):
    """A setting breaks a rule: `setting = value: rule; fix`."""

    def __init__(self, setting: str, value: object, rule: str, fix: str) -> None:
        self.setting, self.value, self.rule, self.fix = setting, value, rule, fix
        shown = f'"{value}"' if isinstance(value, str) else value
        super().__init__(f"{setting} = {shown}: {rule}; {fix}")

    def __reduce__(self) -> tuple[Any, ...]:
        """An error made in a process of a comparison travels to its parent."""
        return type(self), (self.setting, self.value, self.rule, self.fix)


class UnknownSettingError(AsyncMeshError):
    """A key that no setting has, with the nearest one that exists."""


class InputFileError(AsyncMeshError):
    """A file that the user named is missing, unreadable or not what it should be."""


class StageError(AsyncMeshError):
    """A stage handed to `simulate_modules` cannot be trained as it is."""


class MeshError(AsyncMeshError):
    """The mesh cannot be formed or kept: an address, a claim, a version, a peer."""


class WireError(AsyncMeshError):
    """What arrived over the network is not what it should be."""

    exit_code = 1


class ReplayError(AsyncMeshError):
    """A run's record and what its replay does are not the same run."""

    exit_code = 1


class DivergedError(AsyncMeshError):
    """The loss became NaN or infinite. `result` is all that was recorded (a simulator.Result)."""

    exit_code = 1
    result: Any = None

    @classmethod
    def at(cls, learning_rate: float, what: str) -> DivergedError:
        """The error of a run with that rate in which `what` happened."""
        return cls(
            f"optimizer.learning_rate = {learning_rate:g}: {what}, and it must be finite; try"
            f" optimizer.learning_rate={learning_rate / 10:g} or a longer optimizer.warmup_updates"
        )


class ProtocolError(RuntimeError):
    """A defect: a state machine was told something that cannot happen."""
