"""Checkpoints from which a run goes on bit for bit: model folder, optimiser, counters, data cursor, random states.

A checkpoint is written into a hidden folder beside its place and renamed when it is complete and on disk, so a kill at
any moment leaves the previous one intact. What was measured at start (threads, pool size, device, dtype) is part of the
state: chosen anew it could change the order of a sum, and with it every later bit.
"""

import os
import pickle
import random
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from rhotrain.model.load import LoadedModel, save_model

STATE_FILE = "trainer.pt"
STATE_FORMAT = 3
"""Of what `trainer.pt` holds; 2 has the rollouts that were drawn ahead, 3 the loss scale of float16."""
MODEL_FOLDER = "model"


class CheckpointError(ValueError):
    """A checkpoint that cannot be used; the message names the folder, the reason and the fix."""


def random_states() -> dict[str, Any]:
    """The states of every global generator that user code (rewards, tasks) may draw from."""
    version, internal, gauss = random.getstate()
    name, keys, position, has_gauss, cached = np.random.get_state()
    states: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [name, torch.from_numpy(np.asarray(keys).astype(np.int64)), position, has_gauss, cached],
        "torch": torch.get_rng_state(),
    }
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state_all()
    return states


def restore_random_states(states: dict[str, Any]) -> None:
    """Put the generators back to what `random_states` returned."""
    version, internal, gauss = states["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, position, has_gauss, cached = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), position, has_gauss, cached))
    torch.set_rng_state(states["torch"])
    if "cuda" in states and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(states["cuda"])


def checkpoints(run_folder: Path) -> list[Path]:
    """Complete checkpoints of a run, oldest first."""
    folder = run_folder / "checkpoints"
    found = [p for p in folder.glob("step-*") if re.fullmatch(r"step-\d+", p.name) and (p / STATE_FILE).is_file()]
    return sorted(found, key=lambda p: int(p.name.removeprefix("step-")))


def save_checkpoint(run_folder: Path, step: int, loaded: LoadedModel, state: dict[str, Any], *, keep_last: int) -> Path:
    """Write the checkpoint of `step`, then remove all but the `keep_last` newest. Returns its folder."""
    folder = run_folder / "checkpoints"
    folder.mkdir(parents=True, exist_ok=True)
    for leftover in folder.glob(".step-*"):
        shutil.rmtree(leftover)
    temporary, final = folder / f".step-{step:06d}", folder / f"step-{step:06d}"
    temporary.mkdir()
    save_model(loaded, temporary / MODEL_FOLDER)
    torch.save({**state, "format": STATE_FORMAT, "random": random_states()}, temporary / STATE_FILE)
    for path in sorted(temporary.rglob("*")):
        _sync(path)
    if final.exists():
        shutil.rmtree(final)
    os.rename(temporary, final)
    _sync(folder)
    for old in checkpoints(run_folder)[:-keep_last]:
        shutil.rmtree(old)
    return final


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def latest_checkpoint(run_folder: Path) -> Path:
    """The newest complete checkpoint; CheckpointError when there is none."""
    found = checkpoints(run_folder)
    if not found:
        raise CheckpointError(
            f"resume: {run_folder} holds no complete checkpoint, so nothing of it can go on; start anew in another "
            "folder, and set save_every"
        )
    return found[-1]


def load_state(checkpoint: Path) -> dict[str, Any]:
    """The trainer's state of a checkpoint. Only tensors and plain values are unpickled."""
    try:
        state = torch.load(checkpoint / STATE_FILE, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        older = [path.name for path in checkpoints(checkpoint.parent.parent) if path != checkpoint]
        fix = f"remove {checkpoint.name}, and {older[-1]} is taken" if older else "no other is there; start a new run"
        raise CheckpointError(
            f"resume: {checkpoint / STATE_FILE} is damaged ({type(error).__name__}); {fix}"
        ) from error
    assert isinstance(state, dict)
    if state.get("format") != STATE_FORMAT:
        raise CheckpointError(
            f"resume: {checkpoint} has format {state.get('format', 1)}, this version reads {STATE_FORMAT}; go on with "
            f"the version that wrote it, or start a new run from its weights: --model {checkpoint / MODEL_FOLDER}"
        )
    return state
