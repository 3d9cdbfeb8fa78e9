"""`python -m tests.simulation`: one seed with its story, or many with a table of what they reached."""

from __future__ import annotations

import sys

from tests.simulation.command import main

sys.exit(main(sys.argv[1:]))
