"""Where an agent runs: one small interface (``runtime.py``) and its kinds. ``local`` confines with bubblewrap.

May import `schemas` and `polar.settings` only.
"""
