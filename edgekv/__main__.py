"""``python -m edgekv`` is the ``edgekv`` command."""

from edgekv.cli import main

main()
