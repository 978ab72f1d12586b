"""Leases of nodes: a node that is not heard for a time is taken for lost. The caller tells the time, in seconds."""

from __future__ import annotations

from collections.abc import Iterable

Incarnation = tuple[str, str]
"""A node's id and the incarnation of its process."""


class Leases:
    """When each living incarnation was last heard. A lease starts anew when this process first knows of the node."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard: dict[Incarnation, float] = {}

    def watch(self, living: Iterable[Incarnation], now: float) -> None:
        """Starts the leases of nodes that are new among ``living``, and forgets those of nodes that are not there."""
        self._heard = {node: self._heard.get(node, now) for node in living}

    def heard(self, node: Incarnation, now: float) -> None:
        """Renews the lease of ``node``, if it is watched."""
        if node in self._heard:
            self._heard[node] = now

    def expired(self, now: float) -> list[Incarnation]:
        """Those that were not heard for longer than the lease."""
        return [node for node, heard in self._heard.items() if now - heard > self._lease_s]
