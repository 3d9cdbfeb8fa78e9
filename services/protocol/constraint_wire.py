"""Constraints on the wire: read and checked as far as can be told without compiling them."""

from __future__ import annotations

from services.protocol.request import MAX_CONSTRAINT_BYTES, Constraint, ConstraintKind
from services.runtime.errors import InvalidRequest
from tailrace.v1 import common_pb2


def constraint_from_wire(pb: common_pb2.Constraint, field: str) -> Constraint:
    """Raises InvalidRequest naming `field` or the kind in it."""
    name = pb.WhichOneof("kind")
    if name is None:
        raise InvalidRequest(field, "must have one of json_schema, regex, choices and grammar")
    kind = ConstraintKind(name)
    field = f"{field}.{name}.texts" if kind is ConstraintKind.CHOICES else f"{field}.{name}"
    texts = tuple(pb.choices.texts) if kind is ConstraintKind.CHOICES else (getattr(pb, name),)
    if not texts or not all(texts):
        raise InvalidRequest(field, "must not be empty")
    if (size := sum(len(text.encode()) for text in texts)) > MAX_CONSTRAINT_BYTES:
        raise InvalidRequest(field, f"must be at most {MAX_CONSTRAINT_BYTES} bytes, not {size}")
    return Constraint(kind, texts)


def constraint_to_wire(constraint: Constraint | None) -> common_pb2.Constraint | None:
    """What `constraint_from_wire` reads again."""
    if constraint is None:
        return None
    if constraint.kind is ConstraintKind.CHOICES:
        return common_pb2.Constraint(choices=common_pb2.Choices(texts=constraint.texts))
    pb = common_pb2.Constraint()
    setattr(pb, constraint.kind.value, constraint.texts[0])
    return pb
