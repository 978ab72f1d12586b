"""Checkpoints: ``v<k>`` holds all that the step after batch k needs, or it does not exist.

A checkpoint is a policy folder (``model.py``) with the trainer's own state in ``trainer/``: out of the reach of an
engine that loads every safetensors file beside config.json. It is written under a hidden name, each file and folder is
synced, and one rename makes it appear. So a crash or a full disk leaves a hidden folder, which the next start removes,
and never half a version. A version that exists is not written again.
"""

from __future__ import annotations

import os
import random
import re
import shutil
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from polar.grpo.errors import CheckpointError
from polar.grpo.model import WEIGHTS, save_policy, sha256

MAKING, REMOVING = ".making-", ".removing-"
STATE, OPTIMIZER = Path("trainer/state.json"), Path("trainer/optimizer.safetensors")
FEWEST_KEPT = 2
"""An engine may still be reading the version before the newest."""


class RandomState(msgspec.Struct, frozen=True, kw_only=True):
    """Of torch (and CUDA, one per device), numpy and python."""

    torch: bytes
    cuda: list[bytes]
    numpy_keys: list[int]
    numpy_rest: tuple[str, int, int, float]
    python: tuple[int, tuple[int, ...], float | None]


class TrainerState(msgspec.Struct, frozen=True, kw_only=True):
    """``version`` k; ``next_offset`` in ``polar.batches``, after the seal of batch k; the SHA-256 of the weights."""

    policy: str
    version: int
    next_offset: int
    sha256: str
    metrics: dict[str, float]
    random: RandomState


def folder_of(root: Path, version: int) -> Path:
    """Where version ``version`` lies, below the policy's checkpoint folder ``root``."""
    return root / f"v{version}"


def complete_versions(root: Path) -> list[int]:
    """The versions that have a checkpoint, ascending."""
    if not root.is_dir():
        return []
    return sorted(int(match[1]) for entry in root.iterdir() if (match := re.fullmatch(r"v(\d+)", entry.name)))


def clean(root: Path) -> None:
    """Makes ``root``, and removes what a crash left there. Only its one trainer may call this."""
    root.mkdir(parents=True, exist_ok=True)
    for entry in root.iterdir():
        if entry.name.startswith((MAKING, REMOVING)):
            shutil.rmtree(entry)


def prune(root: Path, kept: int) -> None:
    """Keeps the newest ``kept`` versions, at least FEWEST_KEPT."""
    for version in complete_versions(root)[: -max(kept, FEWEST_KEPT)]:
        condemned = root / f"{REMOVING}v{version}"
        folder_of(root, version).rename(condemned)  # first out of sight, for a crash may come while files go
        shutil.rmtree(condemned)


def save(
    root: Path,
    model: Any,
    optimizer: torch.optim.Optimizer,
    *,
    base: Path,
    policy: str,
    version: int,
    next_offset: int,
    metrics: dict[str, float],
) -> TrainerState:
    """Writes version ``version``. Raises CheckpointError, leaving nothing, when it exists or the disk refuses."""
    final, temporary = folder_of(root, version), root / f"{MAKING}v{version}"
    if final.exists():
        raise CheckpointError(f"{final} exists already; a version is never written twice")
    try:
        (temporary / STATE.parent).mkdir(parents=True)
        state = TrainerState(
            policy=policy,
            version=version,
            next_offset=next_offset,
            sha256=save_policy(model, base, temporary),
            metrics=metrics,
            random=_random_state(),
        )
        save_file(_optimizer_tensors(model, optimizer), temporary / OPTIMIZER)
        (temporary / STATE).write_bytes(msgspec.json.encode(state))
        _sync_tree(temporary)
        temporary.rename(final)
        _sync(root)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(temporary, ignore_errors=True)
        raise CheckpointError(
            f"cannot write checkpoint {final}: {error}; free some disk space and start again"
        ) from None
    return state


def read_state(folder: Path) -> TrainerState:
    """The state of one checkpoint, its weights compared with their SHA-256. Raises CheckpointError."""
    try:
        state = msgspec.json.decode((folder / STATE).read_bytes(), type=TrainerState)
        if sha256(folder / WEIGHTS) != state.sha256:
            raise CheckpointError(f"{folder / WEIGHTS} has changed since it was written; remove {folder}")
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"cannot read checkpoint {folder}: {error}; remove that folder") from None
    return state


def restore(folder: Path, model: Any, optimizer: torch.optim.Optimizer, state: TrainerState) -> None:
    """Puts the optimizer and the random generators where they were; ``model`` is the policy loaded from ``folder``."""
    try:
        tensors = load_file(folder / OPTIMIZER)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read checkpoint {folder}: {error}; remove that folder") from None
    for name, parameter in model.named_parameters():
        if f"step.{name}" in tensors:  # a parameter that never had a gradient has none
            optimizer.state[parameter] = {
                "step": tensors[f"step.{name}"].clone(),
                "exp_avg": tensors[f"exp_avg.{name}"].clone().to(parameter.device),
                "exp_avg_sq": tensors[f"exp_avg_sq.{name}"].clone().to(parameter.device),
            }
    _set_random_state(state.random)


def _optimizer_tensors(model: Any, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {
        f"{kind}.{name}": value.detach().cpu().contiguous()
        for name, parameter in model.named_parameters()
        for kind, value in optimizer.state[parameter].items()
    }


def _random_state() -> RandomState:
    kind, keys, *rest = np.random.get_state(legacy=True)
    return RandomState(
        torch=torch.get_rng_state().numpy().tobytes(),
        cuda=[state.cpu().numpy().tobytes() for state in torch.cuda.get_rng_state_all()],
        numpy_keys=[int(key) for key in np.asarray(keys)],
        numpy_rest=(str(kind), int(rest[0]), int(rest[1]), float(rest[2])),
        python=random.getstate(),
    )


def _set_random_state(state: RandomState) -> None:
    torch.set_rng_state(_byte_tensor(state.torch))
    for index, cuda in enumerate(state.cuda[: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(_byte_tensor(cuda), index)
    kind, position, has_gauss, gauss = state.numpy_rest
    np.random.set_state((kind, np.array(state.numpy_keys, np.uint32), position, has_gauss, gauss))
    random.setstate(state.python)


def _byte_tensor(data: bytes) -> torch.Tensor:
    return torch.from_numpy(np.frombuffer(data, np.uint8).copy())


def _sync_tree(folder: Path) -> None:
    for parent, _, names in os.walk(folder):
        for name in names:
            _sync(Path(parent) / name)
        _sync(Path(parent))


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
