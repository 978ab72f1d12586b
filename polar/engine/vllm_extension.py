"""Runs inside vLLM's worker processes: the ``disk`` weight transfer backend, chosen by ``--weight-transfer-config``.

vLLM's own reload leaves a tied lm_head stale on CPU, where it is packed into a oneDNN handle at load. So after each
update the head is packed again; the weight loader proves it by comparing log-probs with the trainer's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

BACKEND = "disk"


@dataclass
class DiskInit(WeightTransferInitInfo):
    """Nothing to set up."""


@dataclass
class DiskUpdate(WeightTransferUpdateInfo):
    """``path`` is a folder with ``*.safetensors`` in the Hugging Face layout."""

    path: str


def repack_lm_head(model: Any) -> None:
    """Packs each lm_head again from the weights it shares with the embedding."""
    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


def read_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - safe_open has no iterator
                yield name, tensors.get_tensor(name)


class DiskWeightTransferEngine(WeightTransferEngine[DiskInit, DiskUpdate]):
    """start → update (from a folder) → finish, as vLLM's RL endpoints call it."""

    init_info_cls = DiskInit
    update_info_cls = DiskUpdate

    def init_transfer_engine(self, init_info: DiskInit) -> None:
        """Nothing to connect to."""

    def start_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import initialize_layerwise_reload

        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Replaces the base's version, which synchronises an accelerator that a CPU machine lacks."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, info: DiskUpdate) -> None:
        self.model.load_weights(read_tensors(Path(info.path)))  # type: ignore[operator]

    def finish_weight_update(self) -> None:
        from vllm.model_executor.model_loader.reload.layerwise import finalize_layerwise_reload

        finalize_layerwise_reload(self.model, self.model_config)
        repack_lm_head(self.model)

    def shutdown(self) -> None:
        """Nothing to close."""


class WorkerExtension:
    """Named by ``--worker-extension-cls``: each worker imports this module, and takes these calls by collective_rpc."""

    _weight_update_active: bool
    finish_weight_update: Callable[[], None]

    def abandon_weight_update(self) -> bool:
        """Ends an update that a killed loader left open, if there is one: starting a second would kill the engine."""
        open_update = self._weight_update_active
        if open_update:
            self.finish_weight_update()
        return open_update


if BACKEND not in WeightTransferEngineFactory._registry:
    WeightTransferEngineFactory.register_engine(BACKEND, DiskWeightTransferEngine)
