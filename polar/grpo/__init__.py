"""GRPO on torch: advantages, the clipped token-mean loss, one optimizer step, policy folders and checkpoints.

May import `schemas` and `polar.settings` only.
"""
