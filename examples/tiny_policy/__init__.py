"""The tiny policy: how the model in ``model/`` is made, and a rehearsal of its training without services."""
