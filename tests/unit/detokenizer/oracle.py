"""What must have left a sequence after k tokens, computed from its definition alone: slow, whole-text, no state.

It shares nothing with the code under test but the table of bytes per id: UTF-8 is read by the table of well-formed
sequences, stops are found by trying every place, and every prefix is computed anew.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from services.detokenizer.plan import TextPlan
from services.protocol.events import EndOfText, FinishReason, StopMatch, StopText, StopToken
from services.text.vocabulary import Vocabulary

# The Unicode Standard, table 3-7.
WELL_FORMED = re.compile(
    rb"[\x00-\x7f]|[\xc2-\xdf][\x80-\xbf]"
    rb"|\xe0[\xa0-\xbf][\x80-\xbf]|[\xe1-\xec\xee\xef][\x80-\xbf]{2}|\xed[\x80-\x9f][\x80-\xbf]"
    rb"|\xf0[\x90-\xbf][\x80-\xbf]{2}|[\xf1-\xf3][\x80-\xbf]{3}|\xf4[\x80-\x8f][\x80-\xbf]{2}"
)
# The longest beginning of a well-formed sequence.
SUBPART = re.compile(
    rb"[\xc2-\xdf]|\xe0[\xa0-\xbf]?|[\xe1-\xec\xee\xef][\x80-\xbf]?|\xed[\x80-\x9f]?"
    rb"|\xf0(?:[\x90-\xbf][\x80-\xbf]?)?|[\xf1-\xf3][\x80-\xbf]{0,2}|\xf4(?:[\x80-\x8f][\x80-\xbf]?)?"
)


@dataclass(frozen=True)
class End:
    """How the engine ended a sequence."""

    reason: FinishReason
    stop: StopMatch | None = None


@dataclass(frozen=True)
class Told:
    """What has left: ids, text, and the finish (reason, stop) if there was one."""

    ids: list[int]
    text: str
    finish: tuple[FinishReason, StopMatch | None] | None = None


@dataclass(frozen=True)
class Text:
    """The text of some ids with special tokens in it, which of its characters are shown, and if one is incomplete."""

    full: str
    shown: tuple[bool, ...]
    incomplete: bool

    def visible(self, start: int = 0, end: int | None = None) -> str:
        """The shown part of a part of it."""
        pairs = zip(self.full[start:end], self.shown[start:end], strict=True)
        return "".join(character for character, shown in pairs if shown)


def read_utf8(data: bytes) -> tuple[str, bytes]:
    """The text of some bytes, and the bytes at their end that may yet become a character."""
    text, place = "", 0
    while place < len(data):
        if whole := WELL_FORMED.match(data, place):
            text += whole[0].decode()
            place = whole.end()
            continue
        part = SUBPART.match(data, place)
        if part and part.end() == len(data):
            return text, part[0]
        text += "\ufffd"
        place = part.end() if part else place + 1
    return text, b""


def text_of(vocabulary: Vocabulary, plan: TextPlan, ids: Sequence[int]) -> Text:
    """The definition: the shown tokens' bytes joined, read as UTF-8; a hidden token's text where it stands."""
    full, shown, data = "", [], b""
    strip = plan.begins_text and vocabulary.strips_first_space
    before_special = False
    for token_id in ids:
        piece, special = vocabulary.pieces[token_id], token_id in vocabulary.special
        if special and plan.skip_special_tokens:
            (text, data), hidden = read_utf8(data), piece.decode()
            full += text + hidden
            shown += [True] * len(text) + [False] * len(hidden)
            continue
        if strip and piece:
            piece, strip = piece.removeprefix(b" ") if not special else piece, False
        data += b" " + piece if special and before_special and plan.spaces_between_special_tokens else piece
        before_special = special
    text, rest = read_utf8(data)
    return Text(full + text, (*shown, *[True] * len(text)), bool(rest))


def told(vocabulary: Vocabulary, plan: TextPlan, ids: Sequence[int], end: End | None = None) -> Told:
    """What must have left after exactly these ids, and the engine's end if it has come."""
    before = text_of(vocabulary, plan, ())
    texts = [before]
    for count, token_id in enumerate(ids, 1):
        if not 0 <= token_id < len(vocabulary.pieces):
            tail = "\ufffd" if before.incomplete else ""
            return Told(list(ids[: count - 1]), before.visible() + tail, (FinishReason.ERROR, None))
        text = text_of(vocabulary, plan, ids[:count])
        assert text.full.startswith(before.full), "a longer sequence takes nothing back"
        found = first_stop(plan.stop, before.full, text.full)
        if found and count >= plan.min_tokens:
            start, stop = found
            cut = start + len(stop) if plan.include_stop_in_output else start
            return Told(list(ids[:count]), text.visible(0, cut), (FinishReason.STOP, StopText(stop)))
        texts.append(text)
        before = text
    return _left_open(plan, ids, texts) if end is None else _ended(plan, ids, texts, end)


def first_stop(stops: Sequence[str], before: str, text: str) -> tuple[int, str] | None:
    """Of the matches that a token completed: the first to begin, of those the longest."""
    matches = [
        (start, -len(stop), stop)
        for stop in stops
        for start in range(len(text))
        if stop and text.startswith(stop, start) and len(before) < start + len(stop)
    ]
    if not matches:
        return None
    start, _, stop = min(matches)
    return start, stop


def _left_open(plan: TextPlan, ids: Sequence[int], texts: Sequence[Text]) -> Told:
    text = texts[-1]
    held = max(
        (n for stop in plan.stop for n in range(1, len(stop)) if text.full.endswith(stop[:n])),
        default=0,
    )
    visible = text.visible(0, len(text.full) - held)
    if _may_be_the_end(plan, ids):
        visible = visible[: len(texts[-2].visible())]
    return Told(list(ids[: _ids_with(len(visible), texts)]), visible)


def _ended(plan: TextPlan, ids: Sequence[int], texts: Sequence[Text], end: End) -> Told:
    left_out = _may_be_the_end(plan, ids) and isinstance(end.stop, StopToken | EndOfText)
    text = texts[-2] if left_out else texts[-1]
    return Told(list(ids), text.visible() + ("\ufffd" if text.incomplete else ""), (end.reason, end.stop))


def _may_be_the_end(plan: TextPlan, ids: Sequence[int]) -> bool:
    return bool(
        ids and ids[-1] in plan.end_token_ids and len(ids) >= plan.min_tokens and not plan.include_stop_in_output
    )


def _ids_with(length: int, texts: Sequence[Text]) -> int:
    """How many ids go with so much text."""
    count = 0
    for before, text in pairwise(texts):
        if len(before.visible()) >= length and len(text.visible()) + text.incomplete > length:
            break
        count += 1
    return count
