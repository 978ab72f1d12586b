"""The command line and environment that start vLLM on a model folder, and the checks that come first."""

from __future__ import annotations

import json
import os
import sys
from importlib import metadata
from pathlib import Path
from urllib.parse import urlsplit

from polar.settings import Settings

EXTENSION = "polar.engine.vllm_extension.WorkerExtension"
PROJECT_ROOT = Path(__file__).resolve().parents[2]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")
CPU_OPTIONS = (
    "--enforce-eager",
    *("--max-num-seqs", "16"),
    *("--distributed-executor-backend", "vllm.v1.executor.uniproc_executor.UniProcExecutor"),
)
"""The model runs in the engine's own process: vLLM's worker process spins on a core for a second after each step."""

CPU_ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) - 1)),
    "TORCH_COMPILE_DISABLE": "1",
}
"""GiB for the KV cache, one core left to others, and nothing compiled: that would need a C++ compiler and Python.h."""


class LaunchError(Exception):
    """The engine cannot be started. One line: what, where, what to do."""


def check_model_folder(folder: Path) -> None:
    """Raises LaunchError unless ``folder`` has a config, a tokenizer and weights."""
    if not folder.is_dir():
        raise LaunchError(f"model folder {folder}: no such folder; set POLAR_MODEL_DIR to a model")
    missing = []
    if not (folder / "config.json").is_file():
        missing.append("config.json")
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        missing.append("a tokenizer (tokenizer.json)")
    if not any(folder.glob("*.safetensors")):
        missing.append("weights (model.safetensors)")
    if missing:
        raise LaunchError(f"model folder {folder}: {' and '.join(missing)} missing; save the whole model there")
    try:
        json.loads((folder / "config.json").read_text())
    except ValueError as error:
        raise LaunchError(f"{folder / 'config.json'}: not JSON ({error}); save the model again") from None


def program() -> list[str]:
    """How the installed vLLM is started: ``vllm serve`` of the GPU build, or the module of the CPU build."""
    if _installed("vllm-cpu"):
        return [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    if _installed("vllm"):
        return [str(Path(sys.executable).with_name("vllm")), "serve"]
    raise LaunchError("vLLM is not installed; run: make setup")


def command(settings: Settings) -> list[str]:
    """The whole command line. Raises LaunchError when the address has no port or vLLM is missing."""
    address = urlsplit(settings.engine_url)
    if address.hostname is None or address.port is None:
        raise LaunchError(f"POLAR_ENGINE_URL={settings.engine_url}: expected http://HOST:PORT")
    start = program()
    folder = str(settings.model_dir)
    return [
        *start,
        *([folder] if start[-1] == "serve" else ["--model", folder, *CPU_OPTIONS]),
        *("--served-model-name", settings.policy),
        *("--host", address.hostname, "--port", str(address.port)),
        *("--dtype", "float32"),
        *("--max-model-len", "auto"),
        *("--enable-auto-tool-choice", "--tool-call-parser", "hermes"),
        "--enable-scale-out",
        *("--logprobs-mode", "processed_logprobs"),
        *("--generation-config", "vllm"),
        *("--worker-extension-cls", EXTENSION),
        *("--weight-transfer-config", json.dumps({"backend": "disk"})),
        "--disable-uvicorn-access-log",
    ]


def environment() -> dict[str, str]:
    """The engine's environment: offline, without telemetry, with the endpoints for weights."""
    path = os.pathsep.join(filter(None, [str(PROJECT_ROOT), os.environ.get("PYTHONPATH")]))
    return {
        **(CPU_ENVIRONMENT if _installed("vllm-cpu") else {}),
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_SERVER_DEV_MODE": "1",
        "PYTHONPATH": path,
    }


def _installed(distribution: str) -> bool:
    try:
        metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return False
    return True
