"""Why the trainer stops. Each message is one line: what, where, and what to do."""

from __future__ import annotations


class TrainingError(Exception):
    """Any of the errors below. Nothing is published after one."""


class PolicyModelError(TrainingError):
    """A model folder, or a device, that cannot be used."""


class BatchError(TrainingError):
    """``polar.batches`` holds something that must not be trained."""


class NonFiniteStep(TrainingError):
    """A loss or gradient that is no number: the weights were left as they are."""


class CheckpointError(TrainingError):
    """A checkpoint that cannot be written or read."""


class PublicationError(TrainingError):
    """``polar.weights`` and the checkpoints tell different stories."""
