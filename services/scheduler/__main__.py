"""Starts a scheduler: `python -m services.scheduler --model DIR`."""

from __future__ import annotations

import sys

from services.runtime.process import main
from services.scheduler.app import SchedulerApp
from services.scheduler.config import SchedulerConfig

if __name__ == "__main__":
    sys.exit(main("scheduler", SchedulerConfig, SchedulerApp))
