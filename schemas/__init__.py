"""The vocabulary: every msgspec Struct that crosses a process boundary, ids and packed token arrays.

Imports nothing of ours.
"""
