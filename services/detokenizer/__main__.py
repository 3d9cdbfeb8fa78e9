"""`python -m services.detokenizer --model DIR --schedulers host:port,…`"""

from __future__ import annotations

from services.detokenizer.app import make_app
from services.detokenizer.config import Config
from services.runtime.process import main

if __name__ == "__main__":
    raise SystemExit(main("detokenizer", Config, make_app))
