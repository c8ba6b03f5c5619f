"""Messages out of bytes: the same however they are cut, whole or an error."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gyre_exec import http1

NAMES = st.text(alphabet="abcxyz-", min_size=1, max_size=8).filter(
    lambda n: n not in ("content-length", "transfer-encoding", "connection")
)
VALUES = st.text(alphabet="abc ;=/\"'ü", max_size=12).map(lambda v: v.strip().encode())
HEADERS = st.lists(st.tuples(NAMES.map(str.encode), VALUES), max_size=5)


def cut(data: bytes, places: list[int]) -> list[bytes]:
    marks = sorted({0, len(data), *(p % (len(data) + 1) for p in places)})
    return [data[a:b] for a, b in itertools.pairwise(marks)]


def read_all(reader: http1.Reader, data: bytes, places: list[int]) -> list[http1.Message]:
    return [message for part in cut(data, places) for message in reader.feed(part)]


@given(
    headers=HEADERS,
    bodies=st.lists(st.binary(max_size=40), min_size=1, max_size=3),
    places=st.lists(st.integers(0, 999)),
)
def test_requests_come_out_as_they_went_in_however_they_are_cut(
    headers: list[tuple[bytes, bytes]], bodies: list[bytes], places: list[int]
) -> None:
    reader = http1.Reader(requests=True)
    data = b"".join(http1.request(b"POST", b"/x/e/v1?a=b", headers, body) for body in bodies)
    found = read_all(reader, data, places)
    assert [(f.method, f.target, f.body) for f in found] == [(b"POST", b"/x/e/v1?a=b", body) for body in bodies]
    assert [f.headers[:-1] for f in found] == [tuple(headers)] * len(bodies) and reader.idle


@given(chunks=st.lists(st.binary(min_size=1, max_size=30), max_size=4), places=st.lists(st.integers(0, 999)))
def test_chunked_answers_are_joined(chunks: list[bytes], places: list[int]) -> None:
    data = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    data += b"".join(map(http1.chunk, chunks)) + b"0\r\nx-trailer: 1\r\n\r\n"
    reader = http1.Reader(requests=False)
    (message,) = read_all(reader, data, places)
    assert (message.status, message.body, message.reason, reader.idle) == (200, b"".join(chunks), b"OK", True)


@given(data=st.binary(max_size=30), places=st.lists(st.integers(0, 99)))
def test_every_proper_beginning_of_a_message_is_no_message_and_its_end_is_an_error(
    data: bytes, places: list[int]
) -> None:
    whole = http1.response(200, ((b"a", b"b"),), data)
    chunked = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n" + http1.chunk(data or b"x") + http1.LAST_CHUNK
    for message in (whole, chunked):
        for length in range(1, len(message)):
            reader = http1.Reader(requests=False)
            assert read_all(reader, message[:length], places) == []
            with pytest.raises(http1.HttpError):
                reader.end()


def test_an_answer_without_length_lasts_until_the_connection_ends() -> None:
    reader = http1.Reader(requests=False)
    assert reader.feed(b"HTTP/1.0 200 OK\r\n\r\nall of it") == []
    message = reader.end()
    assert message is not None and (message.body, message.keep_alive) == (b"all of it", False)


def test_an_answer_to_head_has_no_body() -> None:
    reader = http1.Reader(requests=False)
    reader.answers_head = True
    assert reader.feed(b"HTTP/1.1 200 OK\r\ncontent-length: 10\r\n\r\n")[0].body == b""


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /x HTTP/1.1\r\ncontent-length: 1\r\ntransfer-encoding: chunked\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\ncontent-length: +1\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\ntransfer-encoding: gzip, chunked\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\na: b\r\n folded: c\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nno colon\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\nname : b\r\n\r\n", 400),
        (b"GET http://elsewhere/x HTTP/1.1\r\n\r\n", 400),
        (b"GET /x y HTTP/1.1\r\n\r\n", 400),
        (b"GET /x HTTP/2\r\n\r\n", 400),
        (b"\x16\x03\x01 tls\r\n\r\n", 400),
        (b"GET /x HTTP/1.1\r\n" + b"a: b\r\n" * 201 + b"\r\n", 431),
        (b"GET /x HTTP/1.1\r\nbig: " + b"x" * 70_000, 431),
        (b"GET /x HTTP/1.1\r\ncontent-length: 99999999999\r\n\r\n", 413),
        (b"GET /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\nfffffffff\r\n", 413),
        (b"GET /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n-1\r\n", 400),
        (b"GET /x HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n1\r\nxy\r\n", 400),
    ],
)
def test_what_is_ambiguous_or_too_large_is_refused(data: bytes, status: int) -> None:
    with pytest.raises(http1.HttpError) as caught:
        http1.Reader(requests=True).feed(data)
    assert caught.value.status == status


@given(data=st.binary(max_size=200) | st.text(alphabet="GET /HTP1.\r\n:0a", max_size=200).map(str.encode))
def test_garbage_is_an_error_or_waits_for_more(data: bytes) -> None:
    for requests in (True, False):
        try:
            http1.Reader(requests=requests).feed(data)
        except http1.HttpError:
            pass
