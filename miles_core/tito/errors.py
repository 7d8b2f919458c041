"""What a session raises at a client."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from miles_core.tito.tree import Node


class SessionError(Exception):
    """A request that is refused; the session is as it was. `status`: the HTTP status that says so (400, 404, 409, 413, 429, 503).

    `code`: a word for programs, as in the OpenAI API ("context_length_exceeded", ...). `retry_after`: seconds, where it helps to ask again.
    """

    def __init__(self, status: int, message: str, code: str = "invalid_request", retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.retry_after = status, message, code, retry_after


class Elsewhere(SessionError):
    """What is asked for is to be had from another rank of this node, `ranks` further: its port is as much higher."""

    def __init__(self, ranks: int) -> None:
        super().__init__(307, f"ask the rank {ranks:+d} from this one", "elsewhere")
        self.ranks = ranks


class ContextExceeded(SessionError):
    """What a request adds to `node` leaves no room for an answer."""

    def __init__(self, node: Node, message: str) -> None:
        super().__init__(400, message, "context_length_exceeded")
        self.node = node
