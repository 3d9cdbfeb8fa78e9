from __future__ import annotations

from tailrace.v1 import common_pb2, generation_pb2
from tests.integration.tokenizer.conftest import System

Event = generation_pb2.GenerationEvent


async def collect(call: object) -> list[Event]:
    """Every event of a stream, to its end."""
    return [event async for event in call]  # type: ignore[attr-defined]  # a grpc.aio call


def text_of(events: list[Event], choice: int = 0) -> str:
    return "".join(
        event.delta.text for event in events if event.WhichOneof("event") == "delta" and event.delta.choice == choice
    )


async def test_a_direct_caller_gets_a_started_its_text_one_finish_and_one_completed(system: System) -> None:
    system.engine.on_submit = lambda request: system.engine.answer(request.attempt_id, "héllo 🙂")
    events = await collect(system.generation.Generate(generation_pb2.GenerateRequest(text="abc")))
    kinds = [event.WhichOneof("event") for event in events]
    assert kinds[0] == "started"
    assert kinds[-2:] == ["finish", "completed"]
    assert set(kinds[1:-2]) == {"delta"}
    assert text_of(events) == "héllo 🙂"
    assert events[-2].finish.reason == common_pb2.FINISH_REASON_STOP
    usage = events[-1].completed.usage
    assert (usage.prompt_tokens, usage.output_tokens) == (4, 7)
    await system.until_idle()
    assert system.engine.released == [system.engine.submits[0].attempt_id]
