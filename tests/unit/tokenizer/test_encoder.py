from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from services.protocol.request import Message
from services.runtime.error_tree import InvalidRequest, PreconditionFailed
from services.tokenizer.chat_template import ChatTemplate
from services.tokenizer.encoder import LONG_TEXT_CHARS, Encoder
from tests.integration.tokenizer.tiny_model import write_tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def encoder(directory: Path) -> Encoder:
    return Encoder(directory, max_prompt_bytes=200_000)


async def test_a_text_is_neither_cut_nor_padded_though_its_file_asks_for_both(encoder: Encoder) -> None:
    assert len(await encoder.encode("abc", add_special_tokens=True, field="text")) == 4
    assert len(await encoder.encode("x" * 100, add_special_tokens=True, field="text")) == 101


async def test_a_long_text_gives_the_same_ids_as_its_parts(encoder: Encoder) -> None:
    part = "some text, "
    short = await encoder.encode(part, add_special_tokens=False, field="text")
    times = LONG_TEXT_CHARS // len(part) + 1
    assert await encoder.encode(part * times, add_special_tokens=False, field="text") == short * times


async def test_a_prompt_that_begins_with_bos_gets_no_second_one(encoder: Encoder) -> None:
    assert await encoder.encode("<s>ab", add_special_tokens=True, field="text") == await encoder.encode(
        "ab", add_special_tokens=True, field="text"
    )
    written_twice = await encoder.encode("<s><s>", add_special_tokens=False, field="text")
    assert written_twice == [0, 0]


async def test_what_is_too_long_to_encode_or_gives_nothing_is_refused_under_its_field(encoder: Encoder) -> None:
    with pytest.raises(InvalidRequest, match="text: must be at most 200000 bytes, not 200002"):
        await encoder.encode("é" * 100_001, add_special_tokens=True, field="text")
    with pytest.raises(InvalidRequest, match="text: gives no token"):
        await encoder.encode("", add_special_tokens=False, field="text")


async def test_a_long_text_does_not_stall_the_loop(model_directory: Path) -> None:
    encoder = Encoder(model_directory, max_prompt_bytes=10_000_000)
    encoding = asyncio.ensure_future(
        encoder.encode("The quick brown fox. " * 10_000, add_special_tokens=False, field="text")
    )
    turns, start = 0, time.monotonic()
    while not encoding.done():
        await asyncio.sleep(0.001)
        turns += 1
    # Held, the interpreter would have run a turn or two; a busy machine still leaves room for many.
    assert turns > 10 * (time.monotonic() - start)
    assert len(await encoding) > 40_000


def test_a_directory_without_a_tokenizer_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(PreconditionFailed, match=r"tokenizer\.json can't be read"):
        Encoder(tmp_path, max_prompt_bytes=1)


async def test_the_embedded_models_template_writes_what_its_authors_trained_on(model_directory: Path) -> None:
    messages = [Message("user", "Hi 🙂"), Message("assistant", "Yes?"), Message("user", "x")]
    assert await ChatTemplate(model_directory).render(messages, "messages") == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi 🙂<|im_end|>\n<|im_start|>assistant\nYes?<|im_end|>\n<|im_start|>user\nx<|im_end|>\n"
        "<|im_start|>assistant\n"
    )


async def test_a_template_error_names_the_field_and_says_what_the_template_said(directory: Path) -> None:
    with pytest.raises(InvalidRequest, match="messages: the chat template says: no such role: pirate"):
        await ChatTemplate(directory).render([Message("pirate", "arr")], "messages")


async def test_a_model_without_a_template_refuses_conversations_alone(tmp_path: Path) -> None:
    template = ChatTemplate(write_tiny_model(tmp_path, with_template=False))
    await template.load()
    with pytest.raises(InvalidRequest, match="no chat template"):
        await template.render([Message("user", "x")], "messages")


async def test_a_template_cannot_reach_out_of_its_sandbox(tmp_path: Path) -> None:
    write_tiny_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__[1].__subclasses__() }}")
    with pytest.raises(InvalidRequest, match="unsafe"):
        await ChatTemplate(tmp_path).render([Message("user", "x")], "messages")
