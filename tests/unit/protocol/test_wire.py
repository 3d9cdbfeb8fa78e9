import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.protocol.events import (
    Completed,
    Delta,
    EndOfText,
    ErrorCode,
    Event,
    Failure,
    Finish,
    FinishReason,
    Started,
    StopText,
    StopToken,
    TokenInfo,
    TopLogprob,
    Usage,
)
from services.protocol.hello import Hello, from_wire, mismatch, to_wire
from services.protocol.wire import event_from_wire, event_to_wire
from tailrace.v1.common_pb2 import ErrorCode as ErrorCodePb
from tailrace.v1.common_pb2 import FinishReason as FinishReasonPb
from tailrace.v1.generation_pb2 import Finish as FinishPb
from tailrace.v1.generation_pb2 import GenerationEvent

u32 = st.integers(0, 2**32 - 1)
logprob = st.floats(-100, 0, width=32)
token = st.builds(
    TokenInfo,
    u32,
    st.binary(max_size=4),
    st.none() | logprob,
    st.lists(st.builds(TopLogprob, u32, logprob, st.binary(max_size=4)), max_size=2).map(tuple),
)
events = st.one_of(
    st.builds(
        Started,
        request_id=st.text(max_size=8),
        resume_token=st.binary(max_size=16),
        model=st.text(max_size=8),
        created_unix_ms=st.integers(0, 2**62),
        prompt_tokens=u32,
        seed=st.integers(0, 2**64 - 1),
    ),
    st.builds(Delta, u32, st.text(), st.lists(u32), u32, u32, st.lists(token, max_size=3)),
    st.builds(
        Finish,
        u32,
        st.sampled_from(FinishReason),
        u32,
        st.none() | st.builds(StopText, st.text(min_size=1)) | st.builds(StopToken, u32) | st.builds(EndOfText, u32),
        st.none() | st.builds(Failure, st.sampled_from(ErrorCode), st.text()),
    ),
    st.builds(Completed, st.builds(Usage, u32, u32, u32)),
)


@given(events)
def test_every_event_survives_the_wire(event: Event) -> None:
    assert event_from_wire(GenerationEvent.FromString(event_to_wire(event).SerializeToString())) == event


def test_our_enums_are_the_contracts() -> None:
    assert {r.name: r.value for r in FinishReason} == {
        name.removeprefix("FINISH_REASON_"): value for name, value in FinishReasonPb.items() if value
    }
    assert {c.name: c.value for c in ErrorCode} == {
        name.removeprefix("ERROR_CODE_"): value for name, value in ErrorCodePb.items() if value
    }


def test_a_finish_reason_of_a_newer_server_is_never_a_clean_stop() -> None:
    pb = GenerationEvent(finish=FinishPb())
    event = event_from_wire(pb)
    assert isinstance(event, Finish)
    assert event.reason is FinishReason.ERROR


OURS = Hello(epoch=1, model_id="small", tokenizer_digest=b"\1" * 32, vocab_size=9, context_length=8)


def test_hello_survives_the_wire() -> None:
    assert from_wire(to_wire(OURS)) == OURS


@pytest.mark.parametrize(
    ("theirs", "named"),
    [
        (Hello(epoch=2), None),
        (Hello(epoch=2, protocol_version=2), None),
        (Hello(epoch=2, protocol_version=3), "protocol version 3"),
        (Hello(epoch=2, model_id="large"), "'large'"),
        (Hello(epoch=2, model_id="small", tokenizer_digest=b"\2" * 32), "020202020202"),
    ],
)
def test_a_mismatch_is_named(theirs: Hello, named: str | None) -> None:
    found = mismatch(OURS, theirs)
    assert (found is None) if named is None else (found is not None and named in found)
