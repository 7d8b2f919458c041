"""What a session raises at a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.tito.tree import Node


class SessionError(Exception):
    """A request that is refused; the session is as it was. `status`: the HTTP status that says so (400, 404, 409, 413).

    `code`: a word for programs, as in the OpenAI API ("context_length_exceeded", ...).
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request") -> None:
        super().__init__(message)
        self.status, self.message, self.code = status, message, code


class ContextExceeded(SessionError):
    """What a request adds to `node` leaves no room for an answer."""

    def __init__(self, node: Node, message: str) -> None:
        super().__init__(400, message, "context_length_exceeded")
        self.node = node
