"""How a call is sampled: exactly, by the engine's token endpoints, or by plain Chat Completions.

May import what `gateway_app` may, and its `call`, `history`, `failures` and `dialects`.
"""
