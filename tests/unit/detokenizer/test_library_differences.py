"""What docs/text.md says of the tokenizers library, so that it stays true, beside what is served here."""

from __future__ import annotations

from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream, Metaspace

from services.detokenizer.plan import TextPlan
from services.protocol.events import FinishReason
from tests.unit.detokenizer.oracle import End
from tests.unit.detokenizer.route import run
from tests.unit.detokenizer.small_tokenizers import byte_ids, byte_level, sentence_piece, vocabulary_of


def ours(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    return run(vocabulary_of(tokenizer), TextPlan(), [[token_id] for token_id in ids], End(FinishReason.LENGTH)).deltas


def streamed(tokenizer: Tokenizer, ids: list[int]) -> list[str | None]:
    stream = DecodeStream(skip_special_tokens=True)
    return [stream.step(tokenizer, token_id) for token_id in ids]


def test_a_valid_character_in_an_invalid_run_of_bytes_is_kept() -> None:
    ids = byte_ids(sentence_piece(), b"\xe4\xb8\x96\xff")
    assert sentence_piece().decode(ids) == "\ufffd" * 4
    assert ours(sentence_piece(), ids) == ["世", "\ufffd"]


def test_an_incomplete_end_is_one_replacement_in_both_families() -> None:
    data = b"\xf0\x9f\x98"
    assert sentence_piece().decode(byte_ids(sentence_piece(), data)) == "\ufffd" * 3
    for tokenizer in (sentence_piece(), byte_level()):
        assert ours(tokenizer, byte_ids(tokenizer, data)) == ["\ufffd"]


def test_bytes_that_form_no_character_leave_as_they_come() -> None:
    ids = byte_ids(byte_level(), b"\x80\x80\x80a")
    assert streamed(byte_level(), ids) == [None, None, None, "\ufffd\ufffd\ufffda"]
    assert ours(byte_level(), ids) == ["\ufffd", "\ufffd", "\ufffd", "a"]


def test_a_genuine_replacement_character_waits_for_nothing() -> None:
    ids = byte_ids(byte_level(), "\ufffdb".encode())
    assert streamed(byte_level(), ids) == [None, None, None, "\ufffdb"]
    assert ours(byte_level(), ids) == ["\ufffd", "b"]


def test_metaspace_strips_one_space_and_not_all_of_the_first_token() -> None:
    assert Metaspace().decode(["▁▁a", "▁b"]) == "a b"


def test_an_id_that_does_not_exist_is_left_out_by_the_library() -> None:
    assert byte_level().decode([2**31]) == ""


def test_a_hidden_token_inside_a_character_leaves_it_whole_here_and_there() -> None:
    first, *rest = byte_ids(byte_level(), "世".encode())
    ids = [first, byte_level().get_vocab()["<|im_end|>"], *rest]
    assert byte_level().decode(ids) == "世"
    assert ours(byte_level(), ids) == ["世"]
