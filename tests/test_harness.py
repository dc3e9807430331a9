"""The test run itself: it cannot reach the network, and it checks signatures."""

from __future__ import annotations

import socket

import jaxtyping
import pytest

import triptych


@pytest.mark.parametrize("host", ["192.0.2.1", "example.invalid"])
def test_another_machine_is_out_of_reach(host: str) -> None:
    with socket.socket() as client, pytest.raises(ConnectionRefusedError, match="tests run offline"):
        client.connect((host, 9))


def test_this_machine_is_in_reach() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as client:
        client.connect(server.getsockname())
        assert client.getpeername() == server.getsockname()


def test_signatures_are_checked() -> None:
    with pytest.raises(jaxtyping.TypeCheckError, match="back"):
        triptych.window(2.5)  # type: ignore[arg-type]


def test_signatures_are_not_checked_on_request(unchecked: None) -> None:
    assert triptych.window(2.5) == triptych.window(2.5)  # type: ignore[arg-type]
