"""Every string of the corpus through every tokenizer family and all four services, as a gRPC client receives it."""

from __future__ import annotations

import asyncio
import json
import unicodedata
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from services.text.vocabulary import load_vocabulary
from tailrace.client import FinishReason
from tests.scenario.echo import Echo, running_echo, write_model
from tests.tokenizer_files import FAMILIES, needed_tokenizer_file

STRINGS: dict[str, str] = json.loads((Path(__file__).parent / "strings.json").read_text("utf-8"))
TEXTS = [*STRINGS.values(), "literal <0xEA> and <|im_end|>, also </s>", "    if x:\n", "a\ufffd", "\ufffdb"]
BOS = {"llama2": "<s>", "llama3": "<|begin_of_text|>", "gemma3": "<bos>", "deepseek_v3": "<｜begin▁of▁sentence｜>"}
"""What conversations begin with in these families, and texts where the tokenizer says so."""
TEMPLATE = "{{ bos_token }}{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }}\n{% endfor %}"
ALL = pytest.mark.parametrize("echo", ["smollm2", *FAMILIES], indirect=True, scope="module")
WITH_BOS = pytest.mark.parametrize("echo", list(BOS), indirect=True, scope="module")

AT_ONCE = 8
"""Texts. All services share one event loop here, and all texts at once held it up for seconds on a busy machine."""

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def echo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Echo]:
    """The system with the tokenizer of one family."""
    family = request.param
    if family == "smollm2":
        path = request.getfixturevalue("model_directory") / "tokenizer.json"
    else:
        path = needed_tokenizer_file(family)
    vocabulary = load_vocabulary(path)
    model = write_model(
        tmp_path_factory.mktemp("models") / family,
        path.read_bytes(),
        vocabulary,
        bos=BOS.get(family, ""),
        template=TEMPLATE if family in BOS else "",
    )
    async with running_echo(model, vocabulary) as running:
        yield running


def written(family: str, text: str) -> str:
    """What comes back of a text as the continuation of a prompt, by what its tokenizer does to a text."""
    match family:
        case "qwen3":
            return unicodedata.normalize("NFC", text)
        case "llama2":
            return " " + text
        case _:
            return text


@ALL
async def test_every_string_comes_back_token_by_token(echo: Echo) -> None:
    turns = asyncio.Semaphore(AT_ONCE)

    async def comes_back(text: str) -> None:
        async with turns:
            await check(text)

    async def check(text: str) -> None:
        tokens = await echo.client.tokenize(text, add_special_tokens=False)
        answer = await echo.say(tokens.token_ids, skip_special_tokens=False, token_info=True)
        (choice,) = answer.choices
        assert choice.text == b"".join(tokens.token_bytes).decode() == written(echo.stack.model, text)
        alone = await echo.client.detokenize(tokens.token_ids, skip_special_tokens=False)
        assert alone == (text if echo.stack.model == "llama2" else choice.text), "as a text of its own"
        assert choice.token_ids == list(tokens.token_ids)
        assert [token.bytes for token in choice.tokens] == list(tokens.token_bytes)
        assert (choice.finish.reason, answer.usage.output_tokens) == (FinishReason.LENGTH, len(tokens.token_ids))

    await asyncio.gather(*map(comes_back, TEXTS))


@ALL
async def test_every_string_comes_back_byte_by_byte_and_cut_inside_its_last_character(echo: Echo) -> None:
    """The worst that a model can do with a text that it may write: no token longer than a byte."""
    spelled = [text for text in TEXTS if echo.can_spell(text.encode())]
    assert len(spelled) > len(TEXTS) - 5, "nearly every byte has a token of its own"
    for end in (None, -1):
        data = [piece for text in spelled if (piece := text.encode()[:end])]
        answers = await asyncio.gather(*(echo.say(echo.byte_ids(piece)) for piece in data))
        assert [answer.choices[0].text for answer in answers] == [piece.decode("utf-8", "replace") for piece in data]


@ALL
async def test_invalid_bytes_are_one_replacement_for_each_maximal_subpart(echo: Echo) -> None:
    invalid = [
        b"\xe6\x80=",
        b"\xf0\x9f\x98=",
        b"a\xf0\x9f\x98",
        b"\xe4\xb8\x96\x80",
        b"\x80" * 5 + b"a",
        b"\xed\xa0\x80=",
    ]
    for data in invalid:
        if echo.can_spell(data):
            (choice,) = (await echo.say(echo.byte_ids(data))).choices
            assert choice.text == data.decode("utf-8", "replace")


@WITH_BOS
async def test_25_bos_stands_once_where_the_template_or_the_text_already_has_it(echo: Echo) -> None:
    """The prompt's own ids come back as the output, so that the client sees how the prompt began."""
    bos = BOS[echo.stack.model]
    (bos_id,) = (await echo.client.tokenize(bos, add_special_tokens=False)).token_ids
    conversation = [{"role": "user", "content": "hi"}]
    written_down = (await echo.client.tokenize(conversation)).token_ids
    chat, marked, plain = await asyncio.gather(
        echo.client.chat(conversation, max_tokens=len(written_down), ignore_eos=True).whole(),
        echo.client.generate(bos + "hi", max_tokens=2, ignore_eos=True).whole(),
        echo.client.generate("hi", max_tokens=1, ignore_eos=True).whole(),
    )
    assert chat.choices[0].token_ids == list(written_down)
    assert [token_id == bos_id for token_id in written_down] == [True] + [False] * (len(written_down) - 1)
    assert [token_id == bos_id for token_id in marked.choices[0].token_ids] == [True, False]
    if echo.stack.model in ("llama2", "gemma3"):
        assert plain.choices[0].token_ids == [bos_id], "where the tokenizer puts BOS before a text"
