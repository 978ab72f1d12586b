"""What a task fixes for its calls, laid over what the agent program asks for. Pure.

The task's temperature, top_p, top_k and min_p replace the program's; ``max_tokens`` is an upper limit; the task's stop
strings are added to the program's, which reads its own protocol by them. A structured output replaces each other
constraint on the shape of the answer: ``response_format``, the program's own ``structured_outputs``, and a
``tool_choice`` that forces a call, which vLLM serves by such a constraint too and refuses beside one.
"""

from __future__ import annotations

from typing import Any

from schemas.tasks import SamplingSpec


def fix(options: dict[str, Any], sampling: SamplingSpec) -> dict[str, Any]:
    """New options for the engine; ``options`` (of a ModelRequest) stay as they are.

    >>> fix({"temperature": 0.2, "max_tokens": 900}, SamplingSpec(temperature=1.0, max_tokens=500))
    {'temperature': 1.0, 'max_tokens': 500}
    """
    fixed = dict(options)
    for name in ("temperature", "top_p", "top_k", "min_p"):
        if (value := getattr(sampling, name)) is not None:
            fixed[name] = value
    if sampling.max_tokens is not None:
        asked = fixed.get("max_tokens")
        fixed["max_tokens"] = sampling.max_tokens if asked is None else min(asked, sampling.max_tokens)
    if sampling.stop:
        fixed["stop"] = list(dict.fromkeys([*sampling.stop, *_listed(fixed.get("stop"))]))
    if sampling.structured_outputs is not None:
        fixed.pop("response_format", None)
        fixed["structured_outputs"] = sampling.structured_outputs
        if fixed.get("tool_choice") not in (None, "none", "auto"):
            fixed["tool_choice"] = "auto"
    return fixed


def _listed(stop: Any) -> list[str]:
    """OpenAI allows one stop string without a list around it."""
    if stop is None:
        return []
    return [stop] if isinstance(stop, str) else list(stop)
