"""The policy as a Hugging Face folder: config, tokenizer, model.safetensors. Trained in float32, without dropout.

What is saved beside the weights (tokenizer, chat template) is copied byte for byte from the base model, so that an
engine renders and parses the same at every version.
"""

from __future__ import annotations

import hashlib
import os
import random
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch

from polar.grpo.errors import PolicyModelError
from schemas.packed import pack_ids, pack_logprobs
from schemas.weights import Probe

WEIGHTS = "model.safetensors"
TOKENIZERS = ("tokenizer.json", "tokenizer.model", "vocab.json")
PROBE_TOKENS = 32
HEAD_TOLERANCE = 1e-3


def prepare_torch(*, device: str, threads: int, seed: int) -> torch.device:
    """Makes the same batch give the same bits in every process, and returns the device to train on.

    ``device`` is ``auto`` (CUDA where there is one) or a name that torch knows. Raises PolicyModelError for another.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # without it cuBLAS is not deterministic
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(True)
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    try:
        chosen = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device)
        torch.empty(1, device=chosen)
    except (RuntimeError, AssertionError) as error:
        raise PolicyModelError(f"device {device!r} cannot be used ({str(error).splitlines()[0]}); try cpu") from None
    return chosen


def check_folder(folder: Path) -> None:
    """Raises PolicyModelError unless ``folder`` has a config, one model.safetensors and a tokenizer."""
    for name in ("config.json", WEIGHTS):
        if not (folder / name).is_file():
            raise PolicyModelError(
                f"model folder {folder} has no {name}; give a Hugging Face folder as POLAR_MODEL_DIR"
            )
    if not any((folder / name).is_file() for name in TOKENIZERS):
        raise PolicyModelError(f"model folder {folder} has no tokenizer ({' or '.join(TOKENIZERS)})")


def load_policy(folder: Path, device: torch.device) -> Any:
    """The causal LM of ``folder``, float32, on ``device``. Raises PolicyModelError when it cannot be used."""
    from safetensors import SafetensorError
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    check_folder(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise PolicyModelError(f"model folder {folder} cannot be loaded: {str(error).splitlines()[0]}") from None
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()  # away from the mapped file: sums must not depend on its alignment
    model.eval().to(device)
    _check_head(folder, model)
    return model


def save_policy(model: Any, base: Path, folder: Path) -> str:
    """Writes ``model`` with the tokenizer files of ``base`` to the existing ``folder``; the SHA-256 of its weights."""
    model.save_pretrained(folder, max_shard_size="1000TB")
    for source in sorted(base.iterdir()):
        written = source.name == "config.json" or source.name.endswith((".safetensors", ".bin", ".index.json"))
        if source.is_file() and not written:
            shutil.copyfile(source, folder / source.name)
    return sha256(folder / WEIGHTS)


def sha256(path: Path) -> str:
    """The hexadecimal SHA-256 of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def vocabulary(model: Any) -> int:
    """The number of token ids that the model can read."""
    return int(model.get_input_embeddings().weight.shape[0])


def probe_ids(size: int) -> list[int]:
    """PROBE_TOKENS ids below ``size``, spread over the vocabulary; the same for every model of that size."""
    return [(2_654_435_761 * (index + 1)) % size for index in range(PROBE_TOKENS)]


def probe(model: Any) -> Probe:
    """The policy's log-probs of a fixed prompt at temperature 1, for engines to compare theirs with.

    Raises PolicyModelError where one is no number: such weights must not be saved, nor published.
    """
    ids = torch.tensor([probe_ids(vocabulary(model))], device=next(model.parameters()).device)
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
    taken = logprobs.gather(1, ids[0, 1:, None])[:, 0]
    if not taken.isfinite().all():
        raise PolicyModelError("the policy's log-probs of the probe are no numbers; its weights are of no use")
    return Probe(prompt_ids=pack_ids(ids[0].tolist()), logprobs=pack_logprobs(taken.clamp(max=0).cpu().numpy()))


def _check_head(folder: Path, model: Any) -> None:
    """Training applies the output head itself, to chosen positions: that must be all the model does after its base."""
    ids = torch.tensor([probe_ids(vocabulary(model))], device=next(model.parameters()).device)
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        ours = model.get_output_embeddings()(model.base_model(input_ids=ids, use_cache=False).last_hidden_state)
    if whole.shape != ours.shape or not torch.allclose(whole, ours, atol=HEAD_TOLERANCE, rtol=HEAD_TOLERANCE):
        raise PolicyModelError(f"model folder {folder}: this architecture changes its logits after the output head")
