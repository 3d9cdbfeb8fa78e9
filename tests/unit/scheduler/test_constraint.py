"""Constraints: what is refused, in which time, and what the masks of those that compile allow."""

import asyncio
import json
import threading
import time
from contextlib import suppress

import pytest
import torch

from services.protocol.request import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from services.runtime.errors import InvalidRequest, Overloaded
from services.scheduler.constraint import workshop
from services.scheduler.constraint.compiler import MAX_KEPT, ConstraintCompiler
from services.scheduler.constraint.workshop import Workshop
from services.scheduler.engine.api import CompiledConstraint, Failed, GuideLost, Sampled, SamplingSpec
from tests.byte_tokenizer import BYTE_VOCAB_SIZE, EOS_ID, byte_ids_of, text_of, write_byte_tokenizer
from tests.sampling import Sampling
from tests.unit.scheduler.driver import submission

GIVEN_UP_WITHIN = 100
"""Tokens. Each costs more than the one before; with the library's own limits over a hundred were written."""

POINT = '{"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"], "additionalProperties": false}'


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> ConstraintCompiler:
    folder = tmp_path_factory.mktemp("tokenizer")
    return ConstraintCompiler(write_byte_tokenizer(folder), BYTE_VOCAB_SIZE, (EOS_ID,))


def schema(text: str) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, (text,))


def allowed(mask: bytes) -> set[int]:
    return {token for token in range(BYTE_VOCAB_SIZE) if mask[token // 8] >> token % 8 & 1}


def allows(compiled: CompiledConstraint, text: str) -> bool:
    """Whether an answer may be this text and end."""
    try:
        return EOS_ID in allowed(compiled.start(byte_ids_of(text)).allowed())
    except GuideLost:
        return False


@pytest.mark.parametrize(
    ("constraint", "right", "wrong"),
    [
        (schema(POINT), ['{"x": 1}', '{"x": -20}'], ["{}", '{"x":1}', '{"x": 1', '{"x": "1"}', '{"x": 1, "y": 2}']),
        (Constraint(ConstraintKind.REGEX, ("[a-c]+d?",)), ["a", "abcd"], ["", "d", "abdd"]),
        (Constraint(ConstraintKind.CHOICES, ('say "yes"', "nö\n", "no")), ['say "yes"', "nö\n", "no"], ["n", "yes"]),
        (Constraint(ConstraintKind.GRAMMAR, ('start: "a" inner\ninner: "(" inner ")" | "b"',)), ["a((b))"], ["a((b)"]),
    ],
    ids=lambda value: value.kind.value if isinstance(value, Constraint) else "",
)
def test_exactly_what_it_says_is_allowed(
    compiler: ConstraintCompiler, constraint: Constraint, right: list[str], wrong: list[str]
) -> None:
    compiled = compiler.compile(constraint)
    assert [text for text in right if not allows(compiled, text)] == []
    assert [text for text in wrong if allows(compiled, text)] == []


def nested(depth: int) -> str:
    return '{"type":"object","properties":{"a":' * depth + "{}" + "}}" * depth


@pytest.mark.parametrize(
    "constraint",
    [
        schema('{"type": "objekt"}'),
        schema('{"type": '),
        schema("[1]"),
        schema('{"$ref": "#"}'),
        schema('{"$ref": "http://somewhere.else/schema"}'),
        schema(nested(10_000)),
        Constraint(ConstraintKind.REGEX, ("[a",)),
        Constraint(ConstraintKind.REGEX, ("(?=a)b",)),
        Constraint(ConstraintKind.GRAMMAR, ("start: nowhere",)),
    ],
    ids=["type", "not JSON", "a list", "no text fits", "elsewhere", "deep", "regex", "look-ahead", "grammar"],
)
def test_16_what_is_wrong_is_refused_by_name_and_at_once(compiler: ConstraintCompiler, constraint: Constraint) -> None:
    started_at = time.monotonic()
    with pytest.raises(InvalidRequest) as refused:
        compiler.compile(constraint)
    assert refused.value.field == f"constraint.{constraint.kind.value}"
    assert len(refused.value.reason_text) < 400
    assert time.monotonic() - started_at < 20


def test_16_a_recursive_schema_is_served(compiler: ConstraintCompiler) -> None:
    tree = '{"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": false}'
    compiled = compiler.compile(schema(tree))
    assert allows(compiled, '{"left": {"left": {}}}')
    assert not allows(compiled, '{"left": 1}')


def test_16_an_ambiguous_grammar_is_given_up_before_a_step_waits_for_it(compiler: ConstraintCompiler) -> None:
    ambiguous = Constraint(ConstraintKind.GRAMMAR, ('start: e\ne: e e | "a" | e "b" e | e e e',))
    guide = compiler.compile(ambiguous).start(())

    def write() -> None:
        for _ in range(GIVEN_UP_WITHIN):
            guide.accept(*byte_ids_of("a"))
            guide.allowed()

    with pytest.raises(GuideLost):
        write()


def test_as_many_choices_as_a_constraint_may_hold_can_be_told_apart(compiler: ConstraintCompiler) -> None:
    texts = [*(f"this is choice {number}" for number in range(3000)), "no", "not", "a\x7fb"]
    assert sum(map(len, texts)) < MAX_CONSTRAINT_BYTES
    compiled = compiler.compile(Constraint(ConstraintKind.CHOICES, tuple(texts)))
    assert all(allows(compiled, text) for text in (texts[0], texts[2999], "no", "not", "a\x7fb"))
    assert not any(allows(compiled, text) for text in ("", "this is choice 3000", "n", "ab"))


def test_the_next_equal_one_is_not_compiled_again_and_few_are_kept(compiler: ConstraintCompiler) -> None:
    first = compiler.compile(schema(POINT))
    assert compiler.compile(schema(POINT)) is first
    for number in range(MAX_KEPT):
        compiler.compile(Constraint(ConstraintKind.CHOICES, (str(number),)))
    assert compiler.compile(schema(POINT)) is not first


async def test_16_a_submit_that_is_repeated_learns_in_time_that_its_constraint_takes_too_long() -> None:
    compiled, begun, go_on = object(), 0, threading.Event()

    def slow(constraint: Constraint) -> CompiledConstraint:
        nonlocal begun
        begun += 1
        go_on.wait()
        return compiled  # type: ignore[return-value]  # never looked into

    shop, asked = Workshop(slow, timeout_s=0.3), submission(1, constraint=schema("{}"))

    async def ask() -> None:
        while True:
            with suppress(TimeoutError):
                await asyncio.wait_for(shop.prepare(asked), 0.1)

    with pytest.raises(InvalidRequest, match="longer than"):
        await asyncio.wait_for(ask(), 10)
    assert begun == 1, "asked for again while it was compiled, it isn't begun again"
    go_on.set()
    while True:  # until the thread is done
        with suppress(InvalidRequest):
            assert (await shop.prepare(asked)).sampling.constraint is compiled
            break
        await asyncio.sleep(0)
    shop.close()


async def test_a_constraint_that_only_waited_for_others_is_refused_as_overload() -> None:
    go_on = threading.Event()

    def slow(constraint: Constraint) -> CompiledConstraint:
        go_on.wait()
        raise InvalidRequest("constraint", "no")

    shop = Workshop(slow, timeout_s=0.1)
    asked = [submission(number, constraint=schema(str(number))) for number in range(1, 4)]
    refusals = await asyncio.gather(*map(shop.prepare, asked), return_exceptions=True)
    assert [type(refusal) for refusal in refusals] == [InvalidRequest, InvalidRequest, Overloaded]
    go_on.set()
    shop.close()


async def test_more_than_may_wait_are_refused_as_overload(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workshop, "MAX_WAITING", 1)
    go_on = threading.Event()

    def slow(constraint: Constraint) -> CompiledConstraint:
        go_on.wait()
        raise InvalidRequest("constraint", "no")

    shop = Workshop(slow)
    first = asyncio.create_task(shop.prepare(submission(1, constraint=schema("{}"))))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await shop.prepare(submission(2, constraint=schema("[]")))
    go_on.set()
    with pytest.raises(InvalidRequest):
        await first
    shop.close()


async def test_without_a_tokenizer_a_constraint_is_refused_and_all_else_is_served() -> None:
    shop = Workshop(None)
    assert (await shop.prepare(submission(1))).sampling.constraint is None
    with pytest.raises(InvalidRequest):
        await shop.prepare(submission(2, constraint=schema("{}")))
    shop.close()


def test_a_row_draws_only_what_its_constraint_allows(sampling: Sampling, compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(Constraint(ConstraintKind.REGEX, ("[xyz]{3}",)))
    logits = torch.randn(40, BYTE_VOCAB_SIZE, generator=torch.Generator().manual_seed(3))
    specs = [SamplingSpec(seed=seed, constraint=compiled if seed % 2 else None) for seed in range(40)]
    drawn = [answer.token_id for answer in sampling.each(logits, specs) if isinstance(answer, Sampled)]
    free = [sampling.each(logits[row : row + 1], [specs[row]])[0] for row in range(0, 40, 2)]
    assert {text_of([token]) for token in drawn[1::2]} == set("xyz")
    assert drawn[::2] == [answer.token_id for answer in free if isinstance(answer, Sampled)]


def test_an_end_is_suppressed_unless_nothing_else_may_follow(sampling: Sampling, compiler: ConstraintCompiler) -> None:
    compiled = compiler.compile(Constraint(ConstraintKind.REGEX, ("ab?",)))
    spec = SamplingSpec(seed=0, temperature=0.0, constraint=compiled, suppressible_ids=(EOS_ID,))
    logits = torch.zeros(1, BYTE_VOCAB_SIZE)
    logits[0, EOS_ID] = 9
    for output, expected in (("a", byte_ids_of("b")), ("ab", [EOS_ID])):
        (answer,) = sampling.each(logits, [spec], output=byte_ids_of(output), suppress=True)
        assert isinstance(answer, Sampled)
        assert [answer.token_id] == expected


def test_a_guide_that_is_lost_fails_its_own_row(sampling: Sampling, compiler: ConstraintCompiler) -> None:
    class Lost:
        def start(self, output_ids: object) -> "Lost":
            return self

        def allowed(self) -> bytes:
            raise GuideLost("too complex")

        def accept(self, token_id: int) -> None:
            raise AssertionError("nothing was drawn")

    specs = [SamplingSpec(seed=0, constraint=Lost()), SamplingSpec(seed=1)]
    bad, good = sampling.each(torch.zeros(2, BYTE_VOCAB_SIZE), specs)
    assert isinstance(bad, Failed)
    assert bad.message == "too complex"
    assert isinstance(good, Sampled)


def test_sixty_four_kilobytes_compile_in_seconds_and_are_served(compiler: ConstraintCompiler) -> None:
    wide = {"type": "object", "properties": {f"p{number}": {"type": "string"} for number in range(1500)}}
    started_at = time.monotonic()
    compiled = compiler.compile(schema(json.dumps(wide)))
    assert time.monotonic() - started_at < 30
    assert allows(compiled, '{"p3": "a", "p1499": "b"}')
