"""Steps of decodes through the buffers and buckets that graphs are recorded over; without a GPU they run anew."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from kernels.triton_ops import triton_ops
from services.scheduler.engine.api import SequenceKey, Slice
from services.scheduler.engine.decode_graphs import DecodeGraphs
from services.scheduler.engine.forward import EagerForward
from services.scheduler.model.decoder import Decoder
from services.scheduler.model.kv_cache import KvCache
from services.scheduler.model.loading import load_model
from tests.integration.model.small_models import save_small_model

pytestmark = pytest.mark.timeout(300)  # the interpreter is slow, and other tests may share its cores

BLOCK_SIZE, BLOCKS, CONTEXT = 4, 24, 32
LENGTHS = (5, 1, 8, 12, 3)


class Both:
    """The same small model twice over: operation by operation, and by graphs, each with a cache of its own."""

    def __init__(self, folder: Path, device: torch.device) -> None:
        save_small_model(folder, num_attention_heads=2, num_key_value_heads=1)
        ops = triton_ops()
        model = load_model(folder, ops, dtype=torch.float32, device=device)
        assert isinstance(model, Decoder)
        self.caches = [
            KvCache(model.config, blocks=BLOCKS, block_size=BLOCK_SIZE, dtype=torch.float32, device=device)
            for _ in range(2)
        ]
        self.eager = EagerForward(model, self.caches[0], ops)
        self.others: list[int] = []
        self.graphs = DecodeGraphs(self._counted, model, self.caches[1], context_length=CONTEXT, buckets=(4, 1))
        self._behind = EagerForward(model, self.caches[1], ops)

    def _counted(self, slices: Sequence[Slice]) -> torch.Tensor:
        self.others.append(len(slices))
        return self._behind(slices)

    @torch.inference_mode()
    def compare(self, slices: Sequence[Slice]) -> None:
        torch.testing.assert_close(self.graphs(slices), self.eager(slices), rtol=1e-5, atol=1e-5)
        theirs, mine = self.caches
        torch.testing.assert_close((mine.keys, mine.values), (theirs.keys, theirs.values), rtol=1e-5, atol=1e-5)


def piece(number: int, ids: Sequence[int], start: int) -> Slice:
    table = range(4 * number, 4 * number + 4)
    return Slice(SequenceKey(number), ids, start, table, True, 0, False)


@pytest.fixture
def both(tmp_path: Path, device: torch.device) -> Both:
    made = Both(tmp_path, device)
    made.compare([piece(number, list(range(3, 3 + length)), 0) for number, length in enumerate(LENGTHS)])
    assert made.others == [len(LENGTHS)]  # a prefill isn't replayed
    return made


def decodes(numbers: Sequence[int], after: int = 0) -> list[Slice]:
    return [piece(number, [40 + number], LENGTHS[number] + after) for number in numbers]


def test_a_step_between_two_buckets_is_filled_up_and_writes_only_its_own_rows(both: Both) -> None:
    both.compare(decodes([0, 3, 1]))
    both.compare(decodes([3]))
    both.compare(decodes([2, 0, 3, 1], after=1))  # other rows where others were, in blocks just begun
    assert both.others == [5]


def test_a_step_beyond_the_largest_bucket_or_of_other_work_runs_by_itself(both: Both) -> None:
    both.compare(decodes(range(5)))
    both.compare([*decodes([1], after=1), piece(0, [7, 8], LENGTHS[0] + 1)])
    assert both.others == [5, 5, 2]
