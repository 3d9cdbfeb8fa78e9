"""The scenarios of text again, through all four services: what a gRPC client, or one of SSE, has in its hands."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import aiohttp
import orjson
import pytest
import pytest_asyncio
from tokenizers import Tokenizer, processors

from services.text.vocabulary import parse_vocabulary
from tailrace.client import Answer, Choice, Delta, FinishReason, InvalidRequest
from tests.scenario.echo import Echo, running_echo, write_model
from tests.unit.detokenizer.small_tokenizers import WORDS, byte_level, sentence_piece

SPOKEN = (
    *("I like ", "Paris", "N", " O", " P", " Q", " R", "The", " jumps", "Why", "?\n", " Alice", "!", "\ufffd", "🙂🙂"),
    *("one, two, three, four, ", " six", "xx bbb aaa yy", "xx abcd yy"),
)
SEPARATORS = "\ufeffa\u2028b\u2029c\u0085d\re\x00f\r\n"
TEMPLATE = "{{ bos_token }}{% for message in messages %}{{ message['content'] }}{% endfor %}"
TOKENIZERS = {"byte_level": byte_level((*WORDS, *SPOKEN)), "sentence_piece": sentence_piece()}
TOKEN_BY_TOKEN, IN_DRAFTS = 0, 7


def through(*tokenizers: str) -> pytest.MarkDecorator:
    """With these tokenizers, and an engine that gives a token a step, or now and then several."""
    systems = [(name, drafts) for name in tokenizers for drafts in (TOKEN_BY_TOKEN, IN_DRAFTS)]
    names = [f"{name}{' in drafts' if drafts else ''}" for name, drafts in systems]
    return pytest.mark.parametrize("echo", systems, indirect=True, scope="module", ids=names)


BYTE_LEVEL, SENTENCE_PIECE, BOTH = through("byte_level"), through("sentence_piece"), through(*TOKENIZERS)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def echo(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Echo]:
    """The system with a small tokenizer that puts BOS before a text, and a chat template that has it, too."""
    name, draft_tokens = request.param
    tokenizer = Tokenizer.from_str(TOKENIZERS[name].to_str())
    bos, eos = (tokenizer.get_vocab()[token] for token in ("<s>", "</s>"))
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    vocabulary = parse_vocabulary(orjson.loads(tokenizer.to_str()), size=tokenizer.get_vocab_size() + 1)
    directory = tmp_path_factory.mktemp("models") / name
    model = write_model(directory, tokenizer.to_str().encode(), vocabulary, bos="<s>", eos=eos, template=TEMPLATE)
    async with running_echo(model, vocabulary, draft_tokens=draft_tokens) as running:
        yield running


def only(answer: Answer) -> Choice:
    """The one choice; its ids, its tokens' infos and the usage must tell the same number."""
    (choice,) = answer.choices
    assert len(choice.token_ids) == choice.finish.output_tokens == answer.usage.output_tokens
    assert len(choice.tokens) in (0, len(choice.token_ids))
    return choice


async def told(echo: Echo, *texts: str, stop: Sequence[str] = (), **options: Any) -> tuple[str, str | int | None, int]:
    """Text, matched stop and number of tokens of an answer of these tokens."""
    choice = only(await echo.say(echo.ids(*texts), **({"stop": stop} if stop else {}), **options))
    assert choice.finish.reason is (FinishReason.LENGTH if choice.finish.stop is None else FinishReason.STOP)
    return choice.text, choice.finish.stop, choice.finish.output_tokens


@BYTE_LEVEL
async def test_steps_bring_several_tokens_where_they_are_meant_to(echo: Echo, request: pytest.FixtureRequest) -> None:
    assert only(await echo.say(echo.byte_ids("ab" * 100))).text == "ab" * 100
    assert bool(echo.stack.metric("scheduler", "accepted_tokens_total")) == bool(
        request.node.callspec.params["echo"][1]
    )


@BYTE_LEVEL
async def test_01_a_character_split_over_tokens_comes_once(echo: Echo) -> None:
    assert only(await echo.say(echo.byte_ids("A 世ab"))).text == "A 世ab"


@BYTE_LEVEL
async def test_02_a_thousand_bytes_that_form_no_character_come_out(echo: Echo) -> None:
    assert only(await echo.say(echo.byte_ids(b"\x80" * 1000))).text == "\ufffd" * 1000


@BOTH
async def test_03_a_prompt_that_ends_inside_a_character_does_not_leak(echo: Echo) -> None:
    """The prompt ends with two bytes of ก; the output begins with the third, as the prompt happened to."""
    prompt = echo.byte_ids(b"\x81a\xe0\xb8")
    answer = await echo.say(prompt, max_tokens=2)
    assert only(answer).text == "\ufffda"
    assert answer.usage.prompt_tokens == 4


@BOTH
async def test_04_two_emoji_in_eight_bytes_are_two_emoji(echo: Echo) -> None:
    events = [event async for event in echo.client.generate(echo.byte_ids("🙂🙂"), max_tokens=8, ignore_eos=True)]
    texts = [event.text for event in events if isinstance(event, Delta)]
    assert "".join(texts) == "🙂🙂"
    assert not any("\ufffd" in text for text in texts)


@SENTENCE_PIECE
async def test_05_a_continuation_keeps_its_first_space_and_an_answer_loses_it(echo: Echo) -> None:
    ids = echo.ids(" ", " the", " quick")
    assert only(await echo.say(ids)).text == "  the quick"
    assert await echo.client.detokenize(ids) == " the quick"
    code = (await echo.client.tokenize("    if x:\n", add_special_tokens=False)).token_ids
    assert await echo.client.detokenize(code) == "    if x:\n"
    assert only(await echo.say(code)).text == "     if x:\n"


@BOTH
async def test_06_a_limit_inside_a_character_gives_one_replacement_streamed_or_not(echo: Echo) -> None:
    ids = echo.byte_ids(b"a\xf0\x9f\x98")
    for whole in (False, True):
        choice = only(await echo.say(ids, whole=whole))
        assert (choice.text, choice.finish.reason) == ("a\ufffd", FinishReason.LENGTH)


@BOTH
async def test_07_a_character_broken_off_costs_one_replacement_and_not_the_rest(echo: Echo) -> None:
    assert only(await echo.say(echo.byte_ids(b"\xe6\x80= 1"))).text == "\ufffd= 1"


@BYTE_LEVEL
async def test_08_a_genuine_replacement_character_is_delivered_at_the_end(echo: Echo) -> None:
    assert await told(echo, "a", "\ufffd") == ("a\ufffd", None, 2)


@BOTH
@pytest.mark.parametrize("text", ["e\u0301x", "ห้าม", "🏳️‍🌈"])
async def test_09_nothing_is_repeated_or_lost(echo: Echo, text: str) -> None:
    assert only(await echo.say(echo.byte_ids(text))).text == text


@BOTH
async def test_11_added_tokens_stay_and_special_ones_vanish(echo: Echo) -> None:
    ids = echo.ids("<think>", "<|im_end|>", "</think>")
    assert only(await echo.say(ids)).text == "<think></think>"
    spaced = {"skip_special_tokens": False, "spaces_between_special_tokens": True}
    assert only(await echo.say(ids, skip_special_tokens=False)).text == "<think><|im_end|></think>"
    assert only(await echo.say(echo.ids("<|im_start|>", "<|im_end|>"), **spaced)).text == "<|im_start|> <|im_end|>"


@BOTH
async def test_12_a_split_emojis_bytes_and_probabilities_come_token_by_token(echo: Echo) -> None:
    ids = echo.byte_ids("🙂")
    choice = only(await echo.say(ids, logprobs=2))
    assert b"".join(token.bytes for token in choice.tokens) == "🙂".encode() == choice.text.encode()
    assert [token.token_id for token in choice.tokens] == ids
    for token in choice.tokens:
        assert token.logprob == token.top[0].logprob == -0.5
        assert [top.bytes for top in token.top] == [echo.vocabulary.pieces[top.token_id] for top in token.top]
        assert [top.token_id for top in token.top] == [token.token_id, token.token_id + 1]


@BOTH
async def test_12_the_openai_form_has_the_same_bytes_in_its_two_ways(echo: Echo) -> None:
    body = {"prompt": echo.byte_ids("🙂é"), "max_tokens": 6, "ignore_eos": True, "logprobs": 1}
    (choice,) = (await post(echo, "completions", body))["choices"]
    assert choice["text"] == "🙂é"
    assert choice["logprobs"]["tokens"] == [f"\\x{byte:02x}" for byte in "🙂é".encode()]
    assert choice["logprobs"]["text_offset"] == [0, 0, 0, 0, 1, 1]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 6
    question = {"messages": [{"role": "user", "content": "🙂"}], "max_tokens": 9, "ignore_eos": True}
    (choice,) = (await post(echo, "chat/completions", {**question, "logprobs": True, "top_logprobs": 2}))["choices"]
    content = choice["logprobs"]["content"]
    assert (
        bytes(byte for token in content for byte in token["bytes"]).decode("utf-8", "replace")
        == choice["message"]["content"]
    )
    assert all(len(token["top_logprobs"]) == 2 for token in content)


@BYTE_LEVEL
async def test_13_neighbours_keep_their_own_options(echo: Echo) -> None:
    ids = echo.ids("a", "<|im_end|>", "b")
    answers = await asyncio.gather(*(echo.say(ids, skip_special_tokens=bool(number % 2)) for number in range(32)))
    assert [only(answer).text for answer in answers] == ["a<|im_end|>b", "ab"] * 16


@BYTE_LEVEL
async def test_14_to_18_stops_are_found_wherever_they_stand_and_hold_back_no_more_than_they_must(echo: Echo) -> None:
    assert await told(echo, "I like ", "Paris", "!", stop=["Pari"]) == ("I like ", "Pari", 2)
    assert await told(echo, "N", " O", " P", " Q", " R", stop=["O P Q"]) == ("N ", "O P Q", 4)
    assert await told(echo, "The", " quick", " br", "own", " fox", " jumps", stop=["own fox"]) == (
        "The quick br",
        "own fox",
        5,
    )
    assert await told(echo, "Why", "?\n", "a", stop=["\n"]) == ("Why?", "\n", 2)
    assert await told(echo, " Alice", "!", stop=["\n", "Alice:"]) == (" Alice!", None, 2)


@BYTE_LEVEL
async def test_19_a_stop_cuts_text_ids_logprobs_and_usage_at_the_same_place(echo: Echo) -> None:
    for whole in (False, True):
        choice = only(await echo.say(echo.ids(*"abcd"), stop=["b"], logprobs=1, whole=whole))
        assert (choice.text, choice.finish.stop) == ("a", "b")
        assert choice.token_ids == [token.token_id for token in choice.tokens] == echo.ids("a", "b")


@BOTH
async def test_20_a_special_tokens_text_stops_shown_or_hidden(echo: Echo) -> None:
    ids = [*echo.byte_ids("hi"), *echo.ids("<|im_end|>"), *echo.byte_ids("more")]
    for skip in (True, False):
        choice = only(await echo.say(ids, stop=["<|im_end|>"], skip_special_tokens=skip))
        assert (choice.text, choice.finish.stop, choice.finish.output_tokens) == ("hi", "<|im_end|>", 3)


@BYTE_LEVEL
async def test_21_an_empty_stop_is_refused_and_one_of_spaces_is_a_stop(echo: Echo) -> None:
    with pytest.raises(InvalidRequest, match="1 to") as refused:
        await told(echo, "a", stop=[""])
    assert refused.value.field == "options.stopping.stop[0]"
    assert await told(echo, "a", " ", " ", "b", stop=["  "]) == ("a", "  ", 3)


@BYTE_LEVEL
async def test_22_no_stop_takes_effect_before_min_tokens(echo: Echo) -> None:
    assert await told(echo, *["\n"] * 30, stop=["\n"], min_tokens=20) == ("\n" * 19, "\n", 20)


@BYTE_LEVEL
async def test_23_and_24_the_match_that_begins_first_then_the_longest_and_nothing_after_it(echo: Echo) -> None:
    assert await told(echo, "one, two, three, four, ", "five", " six", stop=["five"]) == (
        "one, two, three, four, ",
        "five",
        2,
    )
    assert await told(echo, "xx bbb aaa yy", stop=["aaa", "bbb"]) == ("xx ", "bbb", 1)
    assert await told(echo, "xx abcd yy", stop=["abc", "abcd"]) == ("xx ", "abcd", 1)
    included = await told(echo, "xx abcd yy", stop=["abc"], include_stop_in_output=True)
    assert included == ("xx abc", "abc", 1)


@BOTH
async def test_25_bos_is_never_doubled(echo: Echo) -> None:
    """The template has BOS, and the tokenizer puts one before a text: the prompt, echoed, has it once."""
    (bos,) = echo.ids("<s>")
    conversation = [{"role": "user", "content": "hi"}]
    chat, text, marked = await asyncio.gather(
        echo.client.chat(conversation, max_tokens=3, ignore_eos=True).whole(),
        echo.client.generate("hi", max_tokens=3, ignore_eos=True).whole(),
        echo.client.generate("<s>hi", max_tokens=3, ignore_eos=True).whole(),
    )
    for answer in (chat, text, marked):
        assert [token_id == bos for token_id in only(answer).token_ids] == [True, False, False]


@BYTE_LEVEL
async def test_26_the_same_seed_gives_the_same_text_streamed_and_whole(echo: Echo) -> None:
    ids = echo.byte_ids("Die Straße 世界 🙂 ends STOP here")
    answers = [await echo.say(ids, stop=["STOP"], seed=7, whole=whole) for whole in (False, True)]
    assert [only(answer).text for answer in answers] == ["Die Straße 世界 🙂 ends "] * 2


@BYTE_LEVEL
async def test_27_two_hundred_emoji_after_a_stops_beginning_all_arrive(echo: Echo) -> None:
    assert await told(echo, *["🙂🙂"] * 101, stop=["🙂x"]) == ("🙂" * 202, None, 101)


@BOTH
async def test_28_separators_controls_and_a_byte_order_mark_are_text_on_grpc_and_sse(echo: Echo) -> None:
    ids = echo.byte_ids(SEPARATORS)
    assert only(await echo.say(ids)).text == SEPARATORS
    body = {"model": echo.stack.model, "prompt": ids, "max_tokens": len(ids), "ignore_eos": True}
    assert (await post(echo, "completions", body))["choices"][0]["text"] == SEPARATORS
    async with (
        aiohttp.ClientSession(echo.stack.url) as session,
        session.post("/v1/completions", json={**body, "stream": True}) as response,
    ):
        raw = (await response.read()).decode()
    # Clients split lines at more than line feeds.
    lines = [line for line in raw.splitlines() if line and not line.startswith("id: ")]
    chunks = [line.removeprefix("data: ") for line in lines]
    assert chunks.pop() == "[DONE]"
    assert "".join(choice["text"] for chunk in chunks for choice in orjson.loads(chunk)["choices"]) == SEPARATORS


@BYTE_LEVEL
async def test_the_matched_stop_is_typed_text_stop_token_or_end_of_text(echo: Echo) -> None:
    ids = echo.ids("a", "!", "</s>", "b")
    (bang, end) = echo.ids("!", "</s>")
    by_token = only(await echo.say(ids, stop_token_ids=[bang]))
    by_end = only(await echo.say(ids, ignore_eos=False))
    by_text = only(await echo.say(ids, stop=["!"]))
    assert (by_token.text, by_token.finish.stop, by_token.finish.output_tokens) == ("a", bang, 2)
    assert (by_end.text, by_end.finish.stop, by_end.finish.output_tokens) == ("a!", end, 3)
    assert (by_text.text, by_text.finish.stop, by_text.finish.output_tokens) == ("a", "!", 2)
    shown = only(await echo.say(ids, stop_token_ids=[bang], include_stop_in_output=True))
    assert (shown.text, shown.finish.stop) == ("a!", bang)


async def post(echo: Echo, path: str, body: dict[str, Any]) -> Any:
    """The JSON of an answer of the HTTP API."""
    async with (
        aiohttp.ClientSession(echo.stack.url) as session,
        session.post(f"/v1/{path}", json={"model": echo.stack.model, **body}) as response,
    ):
        assert response.status == 200, await response.text()
        return orjson.loads(await response.read())
