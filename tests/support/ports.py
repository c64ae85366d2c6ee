"""Ports of this machine."""

import socket


def find_free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as one:
        return int(one.getsockname()[1])
