"""The model that a run ends with: the mean of its replicas, as safetensors.

Owns `checkpoints/step-N/`: one file of the whole model, or one a stage from a real mesh, where no
machine holds all of it. Invariant: a folder with that name is whole, because it is written under
another name and renamed when everything is on disk.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from asyncmesh.algorithm.correction import mean_in_order
from asyncmesh.errors import InputFileError

_FILE = "model.safetensors"


def mean_weights(replicas: Sequence[Sequence[Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """The mean over the replicas of every tensor of every stage, under its global name.

    Counters have no mean: they are the first replica's.
    """
    return {
        name: mean_in_order([row[stage][name] for row in replicas])
        if tensor.is_floating_point()
        else tensor
        for stage, tensors in enumerate(replicas[0])
        for name, tensor in tensors.items()
    }


def save(run: Path, update: int, weights: Mapping[str, Tensor]) -> Path:
    """Write checkpoints/step-UPDATE under a run's folder."""
    final = run / "checkpoints" / f"step-{update}"
    partial = final.with_name(f".step-{update}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {name: tensor.contiguous().cpu() for name, tensor in weights.items()}
    save_file(tensors, partial / _FILE)
    with (partial / _FILE).open("rb") as file:
        os.fsync(file.fileno())
    partial.rename(final)
    return final


def load_newest(run: Path) -> dict[str, Tensor]:
    """The tensors of a run's newest checkpoint."""
    found = sorted((run / "checkpoints").glob("step-*"), key=lambda p: int(p.name[5:]))
    if not found:
        raise InputFileError(
            f"{run}: holds no checkpoint; give the folder of a run that has completed updates"
        )
    weights: dict[str, Tensor] = {}
    for file in sorted(found[-1].glob("*.safetensors")):
        try:
            weights |= load_file(file)
        except (OSError, SafetensorError) as error:
            raise InputFileError(f"{file}: cannot be read ({error}); run again") from None
    return weights
