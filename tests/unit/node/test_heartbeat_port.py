"""Strangers at the heartbeat port: whatever they send, and however many they are, a node that knows
the key counts as alive; and a node believes nobody but the driver."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anabranch.driver import heartbeats as port
from anabranch.driver.heartbeats import Caller, Heartbeats
from anabranch.model.ids import NodeId
from anabranch.node import activity
from anabranch.node.process import heartbeat
from anabranch.node.process.heartbeat import (
    ALIVE,
    LOST,
    NONCE_BYTES,
    PROOF_BYTES,
    Heartbeat,
    Pulse,
    Side,
    greet,
)

NODE = NodeId("7")
NONCE = bytes(NONCE_BYTES)

HOSTILE = {
    "a list": b"[]\n",
    "null": b"null\n",
    "a number": b"1e999\n",
    "no token": b'{"node": "7"}\n',
    "a token that is not ASCII": '{"token": "é", "node": "7"}\n'.encode(),
    "a token that is a list": b'{"token": [], "node": {}}\n',
    "deep nesting": b"[" * 100_000 + b"\n",
    "half a character": b'"\xff\xfe\n',
    "a long number": b"9" * 100_000,
    "HTTP": b"GET / HTTP/1.1\r\nHost: driver\r\n\r\n",
    "TLS": bytes.fromhex("16030100a5010000a10303") + bytes(160),
    "beats": ALIVE * 10_000,
    "zeros": bytes(100_000),
    "ones": b"\xff" * 100_000,
    "no name": bytes(NONCE_BYTES + PROOF_BYTES + 1),
    "a name that is not text": bytes(NONCE_BYTES + PROOF_BYTES) + b"\x02\xff\xfe",
    "half a greeting": bytes(NONCE_BYTES),
    "nothing": b"",
}


def eventually(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 120.0
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.005)
    return condition()


@pytest.fixture(scope="module")
def listener() -> Iterator[Heartbeats]:
    found = Heartbeats("127.0.0.1", timeout_s=60.0)
    yield found
    found.close()


@pytest.fixture(scope="module")
def node(listener: Heartbeats) -> Iterator[socket.socket]:
    """A node of ours, known before anybody else comes."""
    with connected(listener) as connection:
        greet(connection, listener.pulse, NODE)
        yield connection


def connected(listener: Heartbeats) -> socket.socket:
    return socket.create_connection(listener.pulse.address, timeout=120)


def attack(listener: Heartbeats, data: bytes) -> None:
    """Send it, end, and read until the other side has hung up."""
    with connected(listener) as stranger:
        try:
            stranger.sendall(data)
            stranger.shutdown(socket.SHUT_WR)
            while stranger.recv(65_536):
                pass
        except OSError as e:  # hung up before all was said
            assert not isinstance(e, TimeoutError)


def assert_alive(listener: Heartbeats, node: socket.socket) -> None:
    """One that was there, and one that comes now."""
    listener._liveness.forget(NODE)
    node.sendall(ALIVE)
    assert node.recv(1) == ALIVE
    assert eventually(lambda: listener._liveness.knows(NODE))
    with connected(listener) as newcomer:
        greet(newcomer, listener.pulse, NodeId("8"))
        newcomer.sendall(ALIVE)
        assert newcomer.recv(1) == ALIVE
    assert set(listener._liveness._heard) <= {NODE, "8"}
    assert listener.silent() == {}


@pytest.mark.parametrize("data", HOSTILE.values(), ids=HOSTILE)
def test_a_stranger_does_not_silence_a_node(
    listener: Heartbeats, node: socket.socket, data: bytes
) -> None:
    attack(listener, data)
    assert_alive(listener, node)


def test_what_the_port_took_before_is_no_greeting(
    listener: Heartbeats, node: socket.socket
) -> None:
    hello = {"token": listener.pulse.key.hex(), "node": "9"}
    attack(listener, json.dumps(hello).encode() + b"\n")
    assert_alive(listener, node)


def test_random_bytes_do_not_silence_a_node(listener: Heartbeats, node: socket.socket) -> None:
    @given(st.binary(max_size=400))
    @example(b"[]\n")
    @settings(max_examples=150, deadline=None)
    def send(data: bytes) -> None:
        attack(listener, data)

    send()
    assert_alive(listener, node)


@given(st.lists(st.binary(min_size=1, max_size=100), max_size=20))
def test_a_greeting_never_takes_more_than_it_has(pieces: list[bytes]) -> None:
    """Without a socket: it asks for at most so many bytes, and ends by a refusal."""
    caller = Caller(Pulse(("driver", 1), b"key", 1.0))
    taken = 0
    with contextlib.suppress(ConnectionError):
        for piece in pieces:
            part = piece[: caller.wanted]
            taken += len(part)
            assert caller.hear(part) is None
    assert caller.node is None
    assert taken <= NONCE_BYTES + PROOF_BYTES + 1 + 255


@pytest.mark.parametrize("cut", range(1, NONCE_BYTES + PROOF_BYTES + 3, 9))
def test_a_greeting_may_come_in_pieces(cut: int) -> None:
    pulse = Pulse(("driver", 1), b"key", 1.0)
    caller = Caller(pulse)
    name = b"12"
    proof = pulse.proof(Side.NODE, caller.nonce + NONCE, name)
    hello = NONCE + proof + bytes([len(name)]) + name
    answer = None
    while hello:
        size = min(cut, caller.wanted)
        answer, hello = caller.hear(hello[:size]), hello[size:]
    assert answer == pulse.proof(Side.DRIVER, caller.nonce + NONCE, name)
    assert caller.node == "12"


@pytest.mark.parametrize(
    ("key", "side", "nonce"),
    [
        (b"another", Side.NODE, None),  # does not know the key
        (b"key", Side.NODE, NONCE),  # overheard, when the driver had sent another nonce
        (b"key", Side.DRIVER, None),  # got from the driver
    ],
)
def test_a_wrong_proof_is_refused(key: bytes, side: Side, nonce: bytes | None) -> None:
    caller = Caller(Pulse(("driver", 1), b"key", 1.0))
    other = Pulse(("driver", 1), key, 1.0)
    proof = other.proof(side, (nonce or caller.nonce) + NONCE, b"7")
    with pytest.raises(ConnectionError):
        caller.hear((NONCE + proof + b"\x01")[: caller.wanted])
        caller.hear(b"7")
    assert caller.node is None


def test_many_strangers_who_say_nothing_do_not_silence_a_node(
    listener: Heartbeats, node: socket.socket
) -> None:
    """Each of them takes a file descriptor of the driver: it has so many and no more."""
    with contextlib.ExitStack() as strangers:
        for _ in range(3 * port.MAX_UNKNOWN):
            strangers.enter_context(connected(listener))
        assert_alive(listener, node)
        assert len(listener._unknown) <= port.MAX_UNKNOWN


def test_strangers_who_say_nothing_have_to_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(port, "GREET_S", 0.02)
    listener = Heartbeats("127.0.0.1", timeout_s=60.0)
    with contextlib.closing(listener), connected(listener) as stranger:
        assert len(stranger.recv(100)) == NONCE_BYTES
        assert stranger.recv(1) == b""  # hung up, though nobody else has called
        assert listener._unknown == {}


def test_a_node_that_comes_again_has_one_connection() -> None:
    listener = Heartbeats("127.0.0.1", timeout_s=60.0)
    with contextlib.closing(listener), connected(listener) as cut_off:
        greet(cut_off, listener.pulse, NODE)
        with connected(listener) as again:
            greet(again, listener.pulse, NODE)
            assert cut_off.recv(1) == b""
            again.sendall(ALIVE)
            assert again.recv(1) == ALIVE
            assert list(listener._known) == [NODE]


@pytest.mark.parametrize("answer", [LOST * PROOF_BYTES, NONCE])
def test_a_node_does_not_end_itself_for_whoever_has_the_drivers_port(answer: bytes) -> None:
    """The driver has ended, and somebody else got its port. If the node believed it, this process
    would end."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        pulse = Pulse(impostor.getsockname(), b"key", 0.001)
        heartbeat = Heartbeat(pulse, NODE, None)
        for _ in range(3):
            caller, _ = impostor.accept()
            with caller:
                caller.sendall(NONCE)
                assert b"key" not in caller.recv(1_000)
                caller.sendall(answer + LOST)
                with contextlib.suppress(ConnectionResetError):
                    assert caller.recv(1) == b""  # no beat: it has hung up
        heartbeat.stop()


def test_the_key_is_not_shown() -> None:
    assert "sesame" not in repr(Pulse(("driver", 1), b"sesame", 1.0))


def test_the_listening_thread_ends_with_it() -> None:
    before = set(threading.enumerate())
    listener = Heartbeats("127.0.0.1", timeout_s=60.0)
    (thread,) = set(threading.enumerate()) - before
    listener.close()
    thread.join(20)
    assert not thread.is_alive()


@pytest.mark.parametrize("torn", [b"          or 'a' (count/0)", b"x 1 y", b"1.0 self y", b"\xff"])
def test_a_node_beats_whatever_is_read_from_its_slate(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torn: bytes
) -> None:
    """A line may be read while it is wiped: its beginning is gone, its end is there still."""
    path = tmp_path / "slate"
    path.write_bytes(torn)
    monkeypatch.setattr(activity, "_slate", activity.Slate(path))
    assert heartbeat._sign() == ALIVE
