from __future__ import annotations

from pathlib import Path

import grpc
import pytest

from services.runtime.errors import InvalidRequest, from_rpc_error
from tailrace.v1 import admin_pb2, common_pb2, generation_pb2
from tests.integration.tokenizer.conftest import System, started

Message = generation_pb2.ChatMessage


async def tokens_of(system: System, text: str, **fields: bool) -> list[int]:
    response = await system.generation.Tokenize(generation_pb2.TokenizeRequest(text=text, **fields))
    return list(response.token_ids)


async def test_tokenize_gives_each_ids_own_bytes(system: System) -> None:
    response = await system.generation.Tokenize(generation_pb2.TokenizeRequest(text="é🙂", add_special_tokens=False))
    assert b"".join(response.token_bytes) == "é🙂".encode()
    assert [len(piece) for piece in response.token_bytes] == [1] * 6


async def test_detokenize_gives_back_what_tokenize_took(system: System) -> None:
    ids = await tokens_of(system, "naïve 🙂\n")
    assert ids[0] == 0
    response = await system.generation.Detokenize(generation_pb2.DetokenizeRequest(token_ids=ids))
    assert response.text == "naïve 🙂\n"
    shown = common_pb2.TextOptions(skip_special_tokens=False)
    response = await system.generation.Detokenize(generation_pb2.DetokenizeRequest(token_ids=ids, options=shown))
    assert response.text == "<s>naïve 🙂\n"


async def test_an_id_that_does_not_exist_is_refused_by_its_place(system: System) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await system.generation.Detokenize(generation_pb2.DetokenizeRequest(token_ids=[5, 258]))
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == "token_ids[1]"


async def test_a_conversation_is_written_with_the_models_template_and_bos_once(system: System) -> None:
    conversation = generation_pb2.Conversation(messages=[Message(role="user", content="hi")])
    response = await system.generation.Tokenize(generation_pb2.TokenizeRequest(conversation=conversation))
    assert b"".join(response.token_bytes) == b"<s>[user]hi[assistant]"
    assert list(response.token_ids).count(0) == 1


async def test_chat_submits_the_rendered_conversation_and_begins_a_text(system: System) -> None:
    system.engine.on_submit = lambda request: system.engine.answer(request.attempt_id, "yes")
    call = system.generation.Chat(generation_pb2.ChatRequest(messages=[Message(role="user", content="hi")]))
    assert [event.WhichOneof("event") async for event in call][-1] == "completed"
    submit = system.engine.submits[0]
    assert list(submit.prompt_ids) == await tokens_of(system, "[user]hi[assistant]")
    assert submit.text.begins_text


async def test_what_a_template_says_is_passed_on_with_the_field(system: System) -> None:
    call = system.generation.Chat(generation_pb2.ChatRequest(messages=[Message(role="tool", content="x")]))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call.read()  # type: ignore[attr-defined]  # the stub's type is the synchronous one
    error = from_rpc_error(caught.value)
    assert isinstance(error, InvalidRequest)
    assert error.field == "messages"
    assert "no such role: tool" in error.message
    assert system.engine.submits == []


async def test_the_served_model_is_listed(system: System) -> None:
    response = await system.generation.ListModels(generation_pb2.ListModelsRequest())
    assert [(model.model_id, model.context_length, model.vocab_size) for model in response.models] == [
        ("tiny", 512, 258)
    ]


async def test_inspection_shows_an_open_request_and_never_its_text(system: System) -> None:
    call = system.generation.Generate(generation_pb2.GenerateRequest(request_id="r-1", text="secret"))
    assert (await call.read()).started.request_id == "r-1"  # type: ignore[attr-defined]
    system.engine.tokens(system.engine.submits[0].attempt_id, [(5, "é"), (6, "b")])
    assert (await call.read()).HasField("delta")  # type: ignore[attr-defined]
    response = await system.inspection.ListRequests(admin_pb2.ListRequestsRequest())
    [view] = response.requests
    assert (view.request_id, view.caller_phase, view.engine_phase) == ("r-1", "OPEN", "RUNNING")
    assert view.choices[0].log_token_offset == 2
    assert view.choices[0].log_text_offset == 2
    assert [moment.what for moment in view.moments] == ["opened", "accepted", "first token", "last token"]
    assert (view.attempts, view.prompt_tokens) == (1, 7)
    assert [list(reader.token_offsets) for reader in view.readers] == [[2]]
    assert {(hop.what, hop.up) for hop in response.process.hops} == {("text", True), ("load", True)}
    assert "secret" not in str(response)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await system.inspection.GetRequest(admin_pb2.GetRequestRequest(request_id="r-1", show_content=True))
    assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED
    call.cancel()
    await system.until_idle()
    everything = await system.inspection.ListRequests(admin_pb2.ListRequestsRequest(include_ended=True))
    assert everything.total == 0
    [ended] = everything.requests
    assert (ended.request_id, ended.caller_phase, ended.engine_phase, ended.ended) == ("r-1", "GONE", "RELEASED", True)


async def test_an_operator_sees_prompt_and_output_only_where_that_is_allowed(tiny_model: Path) -> None:
    async with started(tiny_model, show_content=True) as system:
        call = system.generation.Generate(generation_pb2.GenerateRequest(request_id="r-1", text="secret"))
        await call.read()
        system.engine.tokens(system.engine.submits[0].attempt_id, [(5, "é"), (6, "b")])
        await call.read()
        asked = admin_pb2.GetRequestRequest(request_id="r-1", show_content=True)
        content = (await system.inspection.GetRequest(asked)).content
        assert (content.prompt, list(content.outputs)) == ("secret", ["éb"])
        call.cancel()
        await system.until_idle()
