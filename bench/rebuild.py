"""How long a detokenizer takes to have everything again that another one had, from the ids that the scheduler keeps.

    python -m bench.rebuild [--requests 256] [--tokens 1000] [--runs 5]

The scheduler holds so many finished attempts of a tokenizer that this is; each run opens the tokenizer's route anew, in
a call of which the detokenizer knows nothing, and takes the time until the whole text of all has come and is the same
as at first. The aim is a second for 256 requests of 1,000 ids.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from statistics import median

from bench.meter import cpu_s
from bench.services_under_test import Stack, running
from cli.model_source import model_directory
from services.runtime.client import connect
from tailrace.v1 import detokenizer_pb2, detokenizer_pb2_grpc, scheduler_pb2, scheduler_pb2_grpc

AIM_S = 1.0
TIMEOUT_S = 120.0
TOKENIZER, EPOCH = "bench", 1

Texts = dict[int, str]


def main() -> int:
    """Prints the times; exit code 1 when the median is above the aim."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.rebuild", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=256, help="how many (256)")
    parser.add_argument("--tokens", type=int, default=1000, help="output tokens of each (1000)")
    parser.add_argument("--runs", type=int, default=5, help="how often they are rebuilt (5)")
    options = parser.parse_args()
    return asyncio.run(_measure(options.requests, options.tokens, options.runs))


async def _measure(requests: int, tokens: int, runs: int) -> int:
    flags = ("--kv-tokens", str(requests * (tokens + 32)))
    async with running(model_directory(None), *flags) as stack, connect(stack.addresses["scheduler"]) as channel:
        scheduler = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        for number in range(1, requests + 1):
            await scheduler.Submit(_submission(number, tokens), timeout=TIMEOUT_S)
        first = await _texts(stack, requests, generation=1)
        print(f"{requests} requests, {sum(map(len, first.values())):,} characters of {requests * tokens:,} ids")
        taken_s: list[float] = []
        for run in range(runs):
            began, before = time.perf_counter(), cpu_s(stack.pids["detokenizer"])
            again = await _texts(stack, requests, generation=2 + run)
            taken_s.append(time.perf_counter() - began)
            if again != first:
                raise SystemExit("what was rebuilt is not the same")
            print(f"rebuilt in {taken_s[-1]:.3f} s, {cpu_s(stack.pids['detokenizer']) - before:.2f} s of CPU")
    print(f"median {median(taken_s):.3f} s (aim: below {AIM_S:g} s)")
    return 0 if median(taken_s) < AIM_S else 1


def _submission(number: int, tokens: int) -> scheduler_pb2.SubmitRequest:
    request = scheduler_pb2.SubmitRequest(
        attempt_id=number, attempt_number=number, tokenizer=TOKENIZER, tokenizer_epoch=EPOCH, fence=1,
        prompt_ids=range(17, 33), choices=[scheduler_pb2.SubmitChoice()],
    )  # fmt: skip
    request.sampling.seed = number
    request.stopping.max_tokens, request.stopping.ignore_eos = tokens, True
    return request


async def _texts(stack: Stack, requests: int, *, generation: int) -> Texts:
    """By attempt, the text of all of them, once each has its finish."""
    route = scheduler_pb2.RouteKey(tokenizer=TOKENIZER, tokenizer_epoch=EPOCH, generation=generation)
    request = detokenizer_pb2.StreamTextRequest(route=route, scheduler=stack.addresses["scheduler"])
    pieces: defaultdict[int, list[str]] = defaultdict(list)
    attempts: dict[int, int] = {}
    finished = 0
    async with connect(stack.addresses["detokenizer"]) as channel:
        call = detokenizer_pb2_grpc.DetokenizerServiceStub(channel).StreamText(request, timeout=TIMEOUT_S)
        while finished < requests:
            response = await call.read()
            if not isinstance(response, detokenizer_pb2.StreamTextResponse):
                raise SystemExit("the route ended")
            batch = response.batch
            attempts.update({start.sequence: start.attempt_id for start in batch.starts})
            for sequence, text in zip(batch.sequences, batch.texts, strict=True):
                pieces[sequence].append(text)
            finished += len(batch.finishes)
        call.cancel()
    return {attempts[sequence]: "".join(parts) for sequence, parts in pieces.items()}


if __name__ == "__main__":
    sys.exit(main())
