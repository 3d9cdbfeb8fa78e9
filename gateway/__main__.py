"""Starts the gateway: `python -m gateway --tokenizers HOST:PORT,…`."""

from __future__ import annotations

import sys

from gateway.app import Gateway
from gateway.config import Config
from services.runtime.process import main

if __name__ == "__main__":
    sys.exit(main("gateway", Config, Gateway))
