"""The policy in training: what lies between two batches, on disk and in memory.

Whatever moment the process is killed at, a new ``GrpoTrainer`` on the same settings stands before the first batch that
has no checkpoint, with the bits of weights, optimizer and random generators that an undisturbed run would have there.
"""

from __future__ import annotations

import fcntl
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import torch

from polar.grpo import checkpoint
from polar.grpo.batch import TrainBatch
from polar.grpo.errors import CheckpointError, PublicationError
from polar.grpo.model import WEIGHTS, check_folder, load_policy, prepare_torch, probe, sha256
from polar.grpo.step import StepOptions, make_optimizer, train_step
from polar.settings import Settings
from schemas.weights import WeightsPublished


class GrpoTrainer:
    """A context manager: it locks the policy's checkpoint folder, ``run_dir/checkpoints/<policy>``, for its life.

    ``version`` is that of the weights in memory; ``next_offset`` is where ``polar.batches`` goes on after them, None
    before the first batch. Raises PolicyModelError or CheckpointError when it cannot start.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._root = settings.run_dir / "checkpoints" / settings.policy
        self._options = StepOptions(
            learning_rate=settings.learning_rate,
            weight_decay=settings.weight_decay,
            clip_low=settings.clip_low,
            clip_high=settings.clip_high,
            kl_coefficient=settings.kl_coefficient,
            max_grad_norm=settings.max_grad_norm,
        )
        self._open = ExitStack()
        self.version = 0
        self.next_offset: int | None = None

    def __enter__(self) -> Self:
        check_folder(self._settings.model_dir)
        with ExitStack() as opening:
            try:
                opening.enter_context(_locked(self._root))
                checkpoint.clean(self._root)
            except OSError as error:
                raise CheckpointError(f"the checkpoint folder {self._root} cannot be used: {error}") from None
            self._load()
            self._open = opening.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()

    def train(self, batch: TrainBatch, next_offset: int) -> WeightsPublished:
        """Trains on ``batch``, writes its checkpoint, and returns what is to be published.

        ``next_offset`` is that of the record after the batch's seal. Raises a TrainingError, after which this object is
        of no more use: what is in memory may be a step ahead of the disk.
        """
        assert batch.number == self.version + 1, "batches come in order"
        torch.set_num_threads(self._settings.trainer_threads)  # OpenMP counts for each calling thread
        metrics = train_step(self._model, self._optimizer, batch, self._options, self._reference)
        probed = probe(self._model)  # before the checkpoint, for it refuses weights that have become no numbers
        state = checkpoint.save(
            self._root,
            self._model,
            self._optimizer,
            base=self._settings.model_dir,
            policy=self._settings.policy,
            version=batch.number,
            next_offset=next_offset,
            metrics=metrics,
        )
        checkpoint.prune(self._root, self._settings.checkpoints_kept)
        self._adopt(state)
        self._probe = probed
        return self.announcement()

    def announcement(self) -> WeightsPublished:
        """The record that tells of the version in memory, with its folder and a probe of its log-probs."""
        folder = checkpoint.folder_of(self._root, self.version) if self.version else self._settings.model_dir
        return WeightsPublished(
            policy=self._settings.policy,
            version=self.version,
            path=str(folder),
            sha256=self._sha256,
            probe=self._probe,
            metrics=self._metrics,
        )

    def _load(self) -> None:
        settings = self._settings
        device = prepare_torch(device=settings.device, threads=settings.trainer_threads, seed=settings.seed)
        versions = checkpoint.complete_versions(self._root)
        folder = checkpoint.folder_of(self._root, versions[-1]) if versions else settings.model_dir
        state = checkpoint.read_state(folder) if versions else None
        self._model: Any = load_policy(folder, device)
        self._optimizer = make_optimizer(self._model, self._options)
        self._reference = load_policy(settings.model_dir, device) if settings.kl_coefficient > 0 else None
        self._sha256, self._metrics = sha256(folder / WEIGHTS), dict[str, float]()
        if state is not None:
            checkpoint.restore(folder, self._model, self._optimizer, state)
            self._adopt(state)
        self._probe = probe(self._model)

    def _adopt(self, state: checkpoint.TrainerState) -> None:
        self.version, self.next_offset = state.version, state.next_offset
        self._sha256, self._metrics = state.sha256, state.metrics


def must_publish(current: WeightsPublished, last: WeightsPublished | None) -> bool:
    """Whether ``current``, the trainer's version at its start, is missing on ``polar.weights``, which ends at ``last``.

    A checkpoint comes before its publication, so a crash between them leaves ``last`` behind. Raises PublicationError
    where no crash can have led: ``last`` is ahead, or is the same version with other weights.
    """
    if last is None or last.version < current.version:
        return True
    if last.version > current.version:
        raise PublicationError(
            f"polar.weights has version {last.version} of policy {current.policy!r}, but the newest checkpoint is "
            f"version {current.version} ({current.path}); restore the missing checkpoints, or begin a new run folder"
        )
    if last.sha256 != current.sha256:
        raise PublicationError(
            f"version {current.version} of policy {current.policy!r} was published with other weights ({last.path}) "
            f"than those in {current.path}; begin a new run folder"
        )
    return last.path != current.path


def _locked(root: Path) -> IO[str]:
    """The open lock file of ``root``: the kernel frees it when the process ends, in whatever way."""
    root.mkdir(parents=True, exist_ok=True)
    file: IO[str] = (root / ".lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise CheckpointError(f"another trainer is at work in {root}; stop it first") from None
    return file
