"""The same promises over the real tokenizers of seven families, and every string of the corpus through each of them."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.strategies import SearchStrategy
from tokenizers import Tokenizer

from services.detokenizer.plan import TextPlan
from services.protocol.events import FinishReason
from services.text.vocabulary import Vocabulary, load_vocabulary
from tests.tokenizer_files import FAMILIES, needed_tokenizer_file
from tests.unit.detokenizer import laws
from tests.unit.detokenizer.oracle import End
from tests.unit.detokenizer.route import run
from tests.unit.detokenizer.texts import Case, cases, examples

STRINGS: dict[str, str] = json.loads((Path(__file__).parents[2] / "scenario/strings.json").read_text("utf-8"))
TEXTS = [*STRINGS.values(), "literal <0xEA> and <|im_end|x>", "    if x:\n", "a\ufffd"]
ALL_FAMILIES = ("smollm2", *FAMILIES)
NIGHTLY_SEQUENCES = 100_000
"""Over all families together: `make test-nightly`."""
LENGTH = End(FinishReason.LENGTH)


@dataclass(frozen=True, eq=False)
class Family:
    """A real tokenizer, as its library has it and as the detokenizer reads it."""

    name: str
    library: Tokenizer
    vocabulary: Vocabulary
    cases: SearchStrategy[Case]

    def ids(self, text: str) -> list[int]:
        return self.library.encode(text, add_special_tokens=False).ids

    def library_text(self, ids: list[int]) -> str:
        return self.library.decode(ids, skip_special_tokens=False)


def load(path: Path) -> Family:
    vocabulary = load_vocabulary(path)
    return Family(path.parent.name, Tokenizer.from_file(str(path)), vocabulary, cases(vocabulary))


@pytest.fixture(scope="module", params=ALL_FAMILIES)
def family(request: pytest.FixtureRequest) -> Family:
    if request.param == "smollm2":
        return load(request.getfixturevalue("model_directory") / "tokenizer.json")
    return load(needed_tokenizer_file(request.param))


def text(family: Family, ids: list[int], *, begins_text: bool = True) -> str:
    plan = TextPlan(skip_special_tokens=False, begins_text=begins_text)
    return run(family.vocabulary, plan, [[token_id] for token_id in ids], LENGTH).text


def test_every_id_alone_is_what_the_library_says(family: Family) -> None:
    different = [
        token_id
        for token_id in range(0, len(family.vocabulary.pieces), 29)
        if text(family, [token_id]) != family.library_text([token_id])
    ]
    assert not different


def test_every_string_comes_back_one_token_at_a_time(family: Family) -> None:
    """What was encoded comes back; where the tokenizer normalizes, what it made of it, as the library decodes it."""
    for string in TEXTS:
        ids = family.ids(string)
        decoded = text(family, ids)
        assert decoded == family.library_text(ids), string
        if family.name != "qwen3":  # it brings text into normal form C
            assert decoded == string


def test_every_string_comes_back_byte_by_byte(family: Family) -> None:
    """The worst that a model can do with a text that it may write: no token longer than a byte."""
    single = {piece: token_id for token_id, piece in enumerate(family.vocabulary.pieces) if len(piece) == 1}
    spellable = [string for string in TEXTS if all(bytes([byte]) in single for byte in string.encode())]
    assert len(spellable) > len(TEXTS) - 5, "nearly every byte has a token of its own"
    for string in spellable:
        assert text(family, [single[bytes([byte])] for byte in string.encode()], begins_text=False) == string


@settings(max_examples=examples(15, nightly=NIGHTLY_SEQUENCES // len(ALL_FAMILIES) + 1))
@given(st.data())
def test_the_laws_hold(family: Family, data: st.DataObject) -> None:
    case = data.draw(family.cases)
    for law in laws.OF_ONE:
        law(case)
