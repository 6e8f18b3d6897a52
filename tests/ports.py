"""Ports for servers under test."""

from __future__ import annotations

import contextlib
import random
import socket


def free_port() -> int:
    """A port that nobody listens on, below those that the kernel gives to outgoing connections (32768 and up on Linux):
    any program could be given one of those in the seconds until the server under test takes its own."""
    while True:
        port = random.randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
