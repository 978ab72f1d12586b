"""The inference engine (vLLM): how it is launched, the client that speaks to it, and its worker extension.

May import ``schemas`` and ``polar.settings``. Only ``vllm_extension`` imports vLLM, inside the engine's own processes.
"""
