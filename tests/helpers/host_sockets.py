"""Changed calls of the sockets between the ranks of a host."""

import socket
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any
from unittest.mock import patch


def changed(method: str, act: Callable[..., Any]) -> AbstractContextManager[object]:
    """For the block, ``act(original, socket, *arguments)`` in place of a method of these sockets, and no others.

    With ``method="socket"`` the making of such a socket is changed.
    """
    name = "__init__" if method == "socket" else method
    original = getattr(socket.socket, name)

    def call(self: socket.socket, *arguments: Any, **options: Any) -> Any:
        kind = arguments[1] if name == "__init__" and len(arguments) > 1 else getattr(self, "type", 0)
        if kind & ~socket.SOCK_CLOEXEC == socket.SOCK_SEQPACKET:
            return act(original, self, *arguments, **options)
        return original(self, *arguments, **options)

    return patch.object(socket.socket, name, call, create=True)


def refused(method: str, error: OSError) -> AbstractContextManager[object]:
    """For the block, ``method`` of these sockets raises ``error``."""

    def refuse(*_: object, **__: object) -> Any:
        raise error

    return changed(method, refuse)
