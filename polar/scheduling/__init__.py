"""The scheduler's decider, and the leases of nodes: pure, without a clock of their own, a task or a socket.

Imports ``schemas`` only. ``state`` folds the log (``evolve``), ``decider`` says what to write next (``decide``).
"""
