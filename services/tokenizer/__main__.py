"""`python -m services.tokenizer --model DIR`: the tokenizer process."""

from __future__ import annotations

import sys

from services.runtime.process import main
from services.tokenizer.app import TokenizerApp
from services.tokenizer.config import Config

if __name__ == "__main__":
    sys.exit(main("tokenizer", Config, TokenizerApp))
