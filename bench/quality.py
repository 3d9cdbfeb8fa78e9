"""What a weights format costs in quality: perplexity, and how often the likeliest token is the one that fp32 gives.

    python -m bench.quality [--tokens 4096] [--formats int8,int4,bf16]

The tokens are this repository's own texts, read in windows and teacher-forced; the judge is the exact format of the
same engine, which the tests hold to transformers. A format counts with the keys and values that go with it. Written to
build/bench/quality.json.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from bench.machine import machine
from bench.texts import own_texts
from cli.model_source import model_directory
from kernels.cpu import Batch, CpuModel, FloatArray
from services.scheduler.engine.cpu_engine import FORMATS
from services.scheduler.model.config_json import read_config
from services.scheduler.model.packed import pack_weights, shape_of

OUT = Path("build/bench/quality.json")
WINDOW, PIECE, BLOCK = 512, 64, 16
CLEAR_MARGIN = 0.5


@dataclass(slots=True)
class Score:
    """Sums over tokens: negative log-likelihood in nats, agreements with the judge, and those where it was sure."""

    tokens: int = 0
    loss: float = 0.0
    agreed: int = 0
    clear: int = 0
    clear_agreed: int = 0

    def add(self, logits: FloatArray, target: int, *, agrees: bool, margin: float) -> None:
        """One token: the logits before it, and whether their largest is the judge's, who leads by `margin`."""
        self.tokens += 1
        self.loss += _loss(logits, target)
        self.agreed += agrees
        if margin > CLEAR_MARGIN:
            self.clear += 1
            self.clear_agreed += agrees

    def summary(self) -> dict[str, float]:
        """What is reported."""
        return {
            "tokens": self.tokens,
            "perplexity": math.exp(self.loss / self.tokens),
            "agreement": self.agreed / self.tokens,
            "agreement_where_margin_above_half": self.clear_agreed / max(self.clear, 1),
        }


class Reader:
    """One model that reads windows and gives every position's logits."""

    def __init__(self, folder: Path, weights_format: str) -> None:
        config = read_config(folder)
        shape = shape_of(config, weights_format=FORMATS[weights_format], blocks=WINDOW // BLOCK, block_size=BLOCK)
        self._model = CpuModel(shape, threads=len(os.sched_getaffinity(0)))
        pack_weights(folder, config, self._model)

    def logits(self, window: Sequence[int]) -> Iterator[FloatArray]:
        """Those after each position of a window of ids, for pieces of it; overwritten by the next piece."""
        table = range(WINDOW // BLOCK)
        for start in range(0, len(window), PIECE):
            piece = window[start : start + PIECE]
            yield self._model.step(Batch([piece], [start], [table], [], scored=[len(piece)])).scored_logits


def score(readers: Sequence[Reader], judge: Reader, window: Sequence[int], scores: Sequence[Score]) -> None:
    """Adds one window to the score of each reader, and to the judge's own, which is the last."""
    pieces = zip(*(reader.logits(window) for reader in (*readers, judge)), strict=True)
    targets = iter(window[1:])
    for piece in pieces:
        for row, target in enumerate(islice(targets, len(piece[-1]))):
            exact = piece[-1][row]
            second, best = np.partition(exact, -2)[-2:]
            for logits, total in zip(piece, scores, strict=True):
                total.add(logits[row], target, agrees=logits[row].argmax() == exact.argmax(), margin=best - second)


def _loss(logits: FloatArray, target: int) -> float:
    above = logits - logits.max()
    return float(np.log(np.exp(above).sum(dtype=np.float64)) - above[target])


def windows(folder: Path, tokens: int) -> list[list[int]]:
    """The repository's texts, cut into windows that hold so many tokens together."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    ids = [token for text in own_texts() for token in tokenizer.encode(text).ids]
    return [ids[start : start + WINDOW] for start in range(0, min(tokens, len(ids) - 1), WINDOW)]


def line(name: str, figures: dict[str, float], exact: float) -> str:
    """As printed."""
    return (
        f"{name}: {figures['tokens']} tokens, perplexity {figures['perplexity']:.3f} "
        f"({figures['perplexity'] / exact - 1:+.2%}), agreement {figures['agreement']:.4f}, "
        f"where fp32 leads by over {CLEAR_MARGIN}: {figures['agreement_where_margin_above_half']:.4f}"
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Prints a line per format and writes them."""
    parser = argparse.ArgumentParser(prog="python -m bench.quality", description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096, help="how many to score (default: 4096)")
    parser.add_argument("--formats", default="int8,int4,bf16", help="by comma (default: int8,int4,bf16)")
    options = parser.parse_args(argv)
    folder, names = model_directory(None), options.formats.split(",")
    texts, judge, readers = windows(folder, options.tokens), Reader(folder, "fp32"), [Reader(folder, n) for n in names]
    scores = [Score() for _ in (*names, "fp32")]
    for number, window in enumerate(texts, 1):
        score(readers, judge, window, scores)
        print(f"\rwindow {number} of {len(texts)}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    found = {name: total.summary() for name, total in zip((*names, "fp32"), scores, strict=True)}
    for name, figures in found.items():
        print(line(name, figures, found["fp32"]["perplexity"]))
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps({"machine": machine(), "model": folder.name, "formats": found}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
