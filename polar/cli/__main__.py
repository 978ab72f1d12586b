"""``python -m polar.cli`` is the ``polar`` command."""

from polar.cli import main

main()
