"""Every message survives the wire; nothing else gets through."""

from __future__ import annotations

import dataclasses
import typing
from enum import Enum

import msgpack
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gyre_base import messages, wire

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**53), 2**53), st.text(max_size=20))


def values(kind):
    """A strategy for one annotated type."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if kind in (str, int, bool, bytes, float):
        return {
            str: st.text(max_size=30),
            int: st.integers(-(2**62), 2**62),
            bool: st.booleans(),
            bytes: st.binary(max_size=64),
            float: st.floats(allow_nan=False),
        }[kind]
    if isinstance(kind, type) and issubclass(kind, Enum):
        return st.sampled_from(list(kind))
    if dataclasses.is_dataclass(kind):
        return instances(kind)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return st.lists(values(arguments[0]), max_size=4).map(tuple)
        return st.tuples(*(values(a) for a in arguments))
    if origin is dict:
        item = scalars if arguments[1] is typing.Any else values(arguments[1])
        return st.dictionaries(st.text(max_size=8), item, max_size=4)
    return st.one_of(*(st.none() if a is type(None) else values(a) for a in arguments))


def instances(cls):
    hints = typing.get_type_hints(cls)
    return st.builds(cls, **{f.name: values(hints[f.name]) for f in dataclasses.fields(cls)})


@pytest.mark.parametrize("tag", sorted(messages.BY_TAG))
def test_every_message_survives_the_wire(tag):
    @given(instances(messages.BY_TAG[tag]), st.integers(0, 2**31))
    @settings(max_examples=20, deadline=None)
    def survives(message, correlation):
        assert wire.decode(wire.encode(message, correlation)) == (message, correlation)

    survives()


@pytest.mark.parametrize("tag", sorted(messages.BY_TAG))
def test_the_text_of_a_message_is_its_json(tag):
    @given(instances(messages.BY_TAG[tag]))
    @settings(max_examples=20, deadline=None)
    def same(message):
        assert orjson.loads(wire.to_text(message)) == orjson.loads(orjson.dumps(wire.to_json(message)))

    same()


@given(st.lists(st.binary(max_size=80), max_size=4))
def test_rubbish_is_refused(frames):
    with pytest.raises(wire.WireError):
        wire.decode(frames)


def test_a_message_of_the_wrong_type_is_refused():
    frames = wire.encode(messages.Welcome(life=3))
    frames[1] = msgpack.packb({"life": "three"})
    with pytest.raises(wire.WireError, match="life"):
        wire.decode(frames)


def test_bulk_stays_out_of_journals():
    row = wire.to_json(
        messages.GradientSum(batch=1, ids=("a",), weight_sum=1.0, stats={}, digest="d", payload=b"x" * 99)
    )
    assert row["payload"] == {"bytes": 99}


def test_two_messages_may_not_share_a_tag():
    with pytest.raises(AssertionError, match="hello"):

        @messages.message("hello")
        class Second:
            x: int
