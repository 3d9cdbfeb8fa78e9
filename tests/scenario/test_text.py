"""Text that broke well-known servers and libraries, each as it must come out here: ids in, deltas out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from services.detokenizer.batch import SequenceEnd, SequenceStart
from services.detokenizer.core import Core
from services.detokenizer.plan import TextPlan
from services.detokenizer.sequence import Logprobs
from services.protocol.events import EndOfText, ErrorCode, FinishReason, StopText
from services.text.vocabulary import Vocabulary
from tests.unit.detokenizer.oracle import End
from tests.unit.detokenizer.route import Received, Route, run, split
from tests.unit.detokenizer.small_tokenizers import byte_ids, byte_level, sentence_piece, vocabulary_of

LENGTH = End(FinishReason.LENGTH)
STRINGS: dict[str, str] = json.loads((Path(__file__).parent / "strings.json").read_text("utf-8"))
BOTH = pytest.mark.parametrize("tokenizer", [byte_level(), sentence_piece()], ids=["byte level", "SentencePiece"])


def data_ids(data: bytes | str, tokenizer: Tokenizer | None = None) -> list[int]:
    """One token per byte."""
    return byte_ids(tokenizer or byte_level(), data.encode() if isinstance(data, str) else data)


def pieces(*texts: str, tokenizer: Tokenizer | None = None) -> list[int]:
    """One token per text, whole."""
    vocabulary = vocabulary_of(tokenizer or byte_level())
    return [len(vocabulary.pieces) - 1 - vocabulary.pieces[::-1].index(text.encode()) for text in texts]


def whole(ids: Sequence[int], plan: TextPlan | None = None, tokenizer: Tokenizer | None = None) -> Received:
    """The answer, one token at a time."""
    return run(vocabulary_of(tokenizer or byte_level()), plan or TextPlan(), [[token_id] for token_id in ids], LENGTH)


def words(*texts: str) -> tuple[Vocabulary, list[list[int]]]:
    """A vocabulary with exactly these texts, and a delta for each."""
    distinct = tuple(dict.fromkeys(text.encode() for text in texts))
    plain = {token_id: piece.decode() for token_id, piece in enumerate(distinct)}
    vocabulary = Vocabulary(distinct, plain, frozenset(), frozenset(), strips_first_space=False)
    return vocabulary, [[distinct.index(text.encode())] for text in texts]


def answer(texts: Sequence[str], *stop: str, **plan: bool | int) -> Received:
    """An answer of these tokens, each a delta, under these stops."""
    vocabulary, deltas = words(*texts)
    return run(vocabulary, TextPlan(stop=stop, **plan), deltas, LENGTH)  # type: ignore[arg-type]  # names are checked


def test_01_a_character_whose_window_decodes_badly_comes_once_and_offsets_never_fall() -> None:
    ids = [*data_ids("A "), *data_ids("世"), *data_ids("ab")]
    received = whole(ids)
    assert received.text == "A 世ab"
    assert received.deltas == ["A", " ", "世", "a", "b"]


def test_02_a_thousand_bytes_that_form_no_character_come_out_as_they_go() -> None:
    route = Route(vocabulary_of(byte_level()), TextPlan())
    for count, token_id in enumerate(data_ids(b"\x80" * 1000), 1):
        route.give([token_id])
        assert route.received.text == "\ufffd" * count


def test_03_a_prompt_that_ends_inside_a_character_never_leaks_into_the_output() -> None:
    """The detokenizer is given output only: the last byte of ก, whose first two were the prompt's, is no character."""
    assert whole(data_ids(b"\x81a")).text == "\ufffda"


@pytest.mark.parametrize("cuts", [[], [8], [3], range(9)])
def test_04_two_emoji_in_eight_bytes_are_two_emoji_however_they_are_cut(cuts: Sequence[int]) -> None:
    deltas = split(data_ids("🙂🙂"), cuts)
    assert run(vocabulary_of(byte_level()), TextPlan(), deltas, LENGTH).text == "🙂🙂"


def test_05_the_first_space_of_a_text_is_stripped_and_that_of_a_continuation_kept() -> None:
    ids = pieces(" ", "the", " quick", tokenizer=sentence_piece())
    assert whole(ids, TextPlan(begins_text=True), sentence_piece()).text == "the quick"
    assert whole(ids, TextPlan(begins_text=False), sentence_piece()).text == " the quick"
    code = data_ids("    if x:\n", sentence_piece())
    assert whole(code, TextPlan(begins_text=False), sentence_piece()).text == "    if x:\n"
    encoded = sentence_piece().encode("    if x:\n", add_special_tokens=False).ids
    assert whole(encoded, TextPlan(begins_text=True), sentence_piece()).text == "    if x:\n"


def test_05_a_token_without_any_bytes_does_not_begin_the_text() -> None:
    """A padded id, or a hidden special one, comes first; the space after it is still the text's first."""
    tokenizer = sentence_piece()
    padded, special = len(vocabulary_of(tokenizer).pieces) - 1, tokenizer.get_vocab()["<s>"]
    for first in (padded, special):
        ids = [first, *pieces(" the", tokenizer=tokenizer)]
        assert whole(ids, TextPlan(begins_text=True), tokenizer).text == "the"


@BOTH
def test_06_a_limit_inside_a_character_gives_one_replacement_streamed_or_not(tokenizer: Tokenizer) -> None:
    ids = data_ids(b"a\xf0\x9f\x98", tokenizer)
    streamed = whole(ids, tokenizer=tokenizer)
    at_once = run(vocabulary_of(tokenizer), TextPlan(), [ids], LENGTH)
    assert streamed.text == at_once.text == "a\ufffd"
    assert streamed.finish is not None
    assert (streamed.finish.token_offset, streamed.finish.text_offset) == (4, 2)


@BOTH
def test_07_a_character_broken_off_costs_one_replacement_and_not_the_rest(tokenizer: Tokenizer) -> None:
    ids = [*data_ids(b"\xe6\x80", tokenizer), *data_ids("= 1", tokenizer)]
    assert whole(ids, tokenizer=tokenizer).text == "\ufffd= 1"


def test_08_a_genuine_replacement_character_is_delivered_at_the_end_too() -> None:
    received = answer(["a", "\ufffd"])
    assert received.text == "a\ufffd"
    assert len(received.ids) == 2


@pytest.mark.parametrize("text", ["e\u0301x", "ห้าม", "🏳️‍🌈"])
def test_09_text_is_cut_by_code_point_and_nothing_is_repeated_or_lost(text: str) -> None:
    assert answer(list(text)).deltas == list(text)


@pytest.mark.parametrize("bad", [-1, len(vocabulary_of(byte_level()).pieces), 2**32, 2**63])
def test_10_an_id_that_does_not_exist_ends_its_sequence_and_no_neighbour(bad: int) -> None:
    core = Core(vocabulary_of(byte_level()))
    a, b = data_ids("ab")
    for number in (1, 2):
        core.start(SequenceStart(sequence=number, attempt_id=number, choice=0, plan=TextPlan()))
    core.column([1, 2], [0, 0], [a, a])
    core.column([1, 2], [1, 1], [bad, b])
    core.column([1, 2], [2, 2], [b, b])
    for number in (1, 2):
        core.end(SequenceEnd(sequence=number, token_offset=3, reason=FinishReason.LENGTH))
    batch = core.take()
    assert batch is not None
    faulty, sound = Received(), Received()
    faulty.take(1, batch)
    sound.take(2, batch)
    assert faulty.finish is not None
    assert faulty.finish.error is not None
    assert (faulty.text, faulty.ids, faulty.finish.error.code) == ("a", [a], ErrorCode.BAD_MODEL_OUTPUT)
    assert sound.text == "abb"
    assert [end.sequence for end in batch.engine_ends] == [1, 2]


@BOTH
def test_11_added_tokens_are_what_was_encoded_and_only_special_ones_vanish(tokenizer: Tokenizer) -> None:
    text = "<think>ok</think>1"
    added = [token for token in tokenizer.encode(text, add_special_tokens=False).ids if token]
    expected = text if tokenizer is byte_level() else tokenizer.decode(added)
    assert whole(added, TextPlan(), tokenizer).text == expected
    special = [tokenizer.get_vocab()["<|im_end|>"], tokenizer.get_vocab()["<think>"]]
    assert whole(special, TextPlan(skip_special_tokens=True), tokenizer).text == "<think>"
    assert whole(special, TextPlan(skip_special_tokens=False), tokenizer).text == "<|im_end|><think>"


def test_11_spaces_stand_between_neighbouring_special_tokens_only_when_asked_for() -> None:
    ids = [*pieces("<s>", "<|im_end|>"), *data_ids("a"), *pieces("</s>")]
    shown = TextPlan(skip_special_tokens=False)
    spaced = TextPlan(skip_special_tokens=False, spaces_between_special_tokens=True)
    assert whole(ids, shown).text == "<s><|im_end|>a</s>"
    assert whole(ids, spaced).text == "<s> <|im_end|>a</s>"
    assert whole(ids, TextPlan(spaces_between_special_tokens=True)).text == "a"


@BOTH
def test_12_the_bytes_of_a_split_emojis_tokens_join_to_the_emoji(tokenizer: Tokenizer) -> None:
    route = Route(vocabulary_of(tokenizer), TextPlan(token_info=True))
    ids = data_ids("🙂", tokenizer)
    for token_id in ids:
        route.give([token_id], [Logprobs(-0.25, [token_id, ids[0]], [-0.25, -2.0])])
    assert route.received.deltas == ["🙂"]
    assert [token.bytes for token in route.received.tokens] == [bytes([byte]) for byte in "🙂".encode()]
    assert [token.logprob for token in route.received.tokens] == [-0.25] * 4
    assert [token.top[1].bytes for token in route.received.tokens] == ["🙂".encode()[:1]] * 4


def test_13_neighbours_in_one_batch_keep_their_own_options() -> None:
    core = Core(vocabulary_of(byte_level()))
    (special,) = pieces("<|im_end|>")
    for number, skip in ((1, True), (2, False)):
        plan = TextPlan(skip_special_tokens=skip)
        core.start(SequenceStart(sequence=number, attempt_id=number, choice=0, plan=plan))
    core.column([1, 2], [0, 0], [special, special])
    batch = core.take()
    assert batch is not None
    assert batch.texts == ["", "<|im_end|>"]
    assert batch.token_ids == [special, special]


def test_14_a_stop_inside_one_token_ends_before_it_and_is_reported() -> None:
    received = answer(["I like ", "Paris", "!"], "Pari")
    assert received.text == "I like "
    assert received.finish is not None
    assert (received.finish.reason, received.finish.stop) == (FinishReason.STOP, StopText("Pari"))
    assert received.finish.token_offset == 2


def test_15_a_stop_over_three_tokens_is_found() -> None:
    assert answer(["N", " O", " P", " Q", " R"], "O P Q").text == "N "


def test_16_never_a_letter_more_than_is_safe_and_never_one_less() -> None:
    received = answer(["The", " quick", " br", "own", " fox", " jumps"], "own fox")
    assert received.deltas == ["The", " quick", " br"]


def test_17_what_stands_before_a_stop_in_its_token_is_delivered() -> None:
    assert answer(["Why", "?\n"], "\n").text == "Why?"


def test_18_text_that_only_began_like_a_stop_comes_exactly_once() -> None:
    assert answer([" Alice", "!"], "\n", "Alice:").text == " Alice!"


def test_19_a_stop_in_the_second_of_four_tokens_cuts_text_ids_logprobs_and_usage_there() -> None:
    route = Route(vocabulary_of(byte_level()), TextPlan(stop=("b",), token_info=True))
    ids = data_ids("abcd")
    route.give(ids, [Logprobs(-1.0)] * 4)
    received = route.received
    assert received.finish is not None
    assert (received.text, received.ids, received.finish.token_offset) == ("a", ids[:2], 2)
    assert [token.token_id for token in received.tokens] == ids[:2]


@pytest.mark.parametrize("skip", [True, False])
def test_20_a_stop_that_is_a_special_tokens_text_stops_shown_or_hidden(skip: bool) -> None:
    ids = [*data_ids("hi"), *pieces("<|im_end|>"), *data_ids("more")]
    received = whole(ids, TextPlan(stop=("<|im_end|>",), skip_special_tokens=skip))
    assert received.told == whole(ids[:3], TextPlan(stop=("<|im_end|>",), skip_special_tokens=skip)).told
    assert received.text == "hi"
    assert received.finish is not None
    assert (received.finish.stop, received.finish.token_offset) == (StopText("<|im_end|>"), 3)


def test_20_a_stop_that_goes_on_after_a_hidden_special_token_is_found() -> None:
    ids = [*data_ids("hi"), *pieces("<|im_end|>", "\n"), *data_ids("more")]
    assert whole(ids, TextPlan(stop=("<|im_end|>\n",))).text == "hi"


def test_a_hidden_token_inside_a_character_leaves_it_whole_and_goes_with_it() -> None:
    (special,) = pieces("<|im_end|>")
    first, *rest = data_ids("世")
    route = Route(vocabulary_of(byte_level()), TextPlan())
    for token_id in (first, special):
        route.give([token_id])
    assert not route.received.ids
    route.give(rest)
    assert (route.received.text, route.received.ids) == ("世", [first, special, *rest])


def test_20_text_held_for_a_stop_that_would_go_on_after_a_hidden_token_comes_when_it_does_not() -> None:
    ids = [*data_ids("hi"), *pieces("<|im_end|>"), *data_ids("x")]
    received = whole(ids, TextPlan(stop=("i<|im_end|>\n",)))
    assert received.text == "hix"
    assert received.deltas == ["h", "ix"]


def test_21_an_empty_stop_never_ends_anything_and_a_stop_of_spaces_is_a_stop() -> None:
    """The door refuses empty ones; whitespace is text like any other."""
    assert answer(["a", " ", " ", "b"], "").text == "a  b"
    assert answer(["a", " ", " ", "b"], "  ").text == "a"


def test_22_no_stop_takes_effect_before_min_tokens() -> None:
    received = answer(["\n"] * 30, "\n", min_tokens=20)
    assert received.text == "\n" * 19
    assert received.finish is not None
    assert received.finish.token_offset == 20


def test_23_nothing_after_the_match_comes_out_at_the_end() -> None:
    received = answer(["one, two, three, four, ", "five", " six"], "five")
    assert received.text == "one, two, three, four, "


def test_24_the_earlier_match_wins_and_of_two_at_one_place_the_longer_is_reported() -> None:
    assert answer(["xx bbb aaa yy"], "aaa", "bbb").text == "xx "
    received = answer(["xx abcd yy"], "abc", "abcd")
    assert received.finish is not None
    assert received.finish.stop == StopText("abcd")


def test_26_steps_of_one_two_and_eight_tokens_give_one_text() -> None:
    ids = data_ids("Die Straße 世界 🙂 ends STOP here")
    plan = TextPlan(stop=("STOP",))
    vocabulary = vocabulary_of(byte_level())
    texts = {run(vocabulary, plan, split(ids, range(0, len(ids), step)), LENGTH).text for step in (1, 2, 8)}
    assert texts == {"Die Straße 世界 🙂 ends "}


def test_27_two_hundred_emoji_after_a_stops_beginning_are_held_no_longer_than_they_must() -> None:
    vocabulary, deltas = words("🙂", *["🙂"] * 200)
    route = Route(vocabulary, TextPlan(stop=("🙂x",)))
    for count, delta in enumerate(deltas, 1):
        route.give(delta)
        assert len(route.received.text) == count - 1
    route.end(LENGTH)
    assert route.received.text == "🙂" * 201


@BOTH
def test_28_separators_controls_and_a_byte_order_mark_are_text(tokenizer: Tokenizer) -> None:
    text = "\ufeffa\u2028b\u2029c\u0085d\re\x00f\r\n"
    assert whole(data_ids(text, tokenizer), tokenizer=tokenizer).text == text


@BOTH
@pytest.mark.parametrize("name", STRINGS)
def test_every_string_of_the_corpus_comes_through_one_byte_at_a_time(tokenizer: Tokenizer, name: str) -> None:
    received = whole(data_ids(STRINGS[name], tokenizer), tokenizer=tokenizer)
    assert received.text == STRINGS[name]
    assert "".join(received.deltas) == STRINGS[name]
    assert all(len(delta) == 1 for delta in received.deltas)


def test_the_end_tokens_text_is_left_out_and_counted() -> None:
    vocabulary, deltas = words("a", ".", "b")
    ids = [delta[0] for delta in deltas]
    plan = TextPlan(end_token_ids=frozenset({ids[1]}))
    route = Route(vocabulary, plan)
    route.give(ids[:2])
    assert route.received.told.text == "a"
    route.end(End(FinishReason.STOP, EndOfText(ids[1])))
    assert (route.received.text, route.received.ids) == ("a", ids[:2])


def test_an_end_token_that_ended_nothing_is_text() -> None:
    vocabulary, deltas = words("a", ".", "b")
    ids = [delta[0] for delta in deltas]
    received = run(vocabulary, TextPlan(end_token_ids=frozenset({ids[1]})), deltas, LENGTH)
    assert received.deltas == ["a", ".b"]


def test_a_stop_text_completed_by_the_last_token_goes_before_the_engines_own_end() -> None:
    received = answer(["a", "END"], "END")
    assert received.finish is not None
    assert (received.finish.reason, received.finish.stop) == (FinishReason.STOP, StopText("END"))


def test_include_stop_keeps_the_match_and_nothing_after_it() -> None:
    assert answer(["a", "xENDy"], "END", include_stop_in_output=True).text == "axEND"
