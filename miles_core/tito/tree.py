"""The tree of a session: one node for each turn of the model, append-only (DESIGN 4.8).

    prepared = tree.prepare(messages, tools, template_kwargs)      # finds the node, renders what is new; changes nothing
    with tree.attempt(prepared.node) as attempt:
        result = ... generate from prepared.tokens ...
        node = tree.commit(prepared, result, message, attempt, params)

Where a request attaches: every node has the digest of its whole history, message by message, and the tree finds nodes by digest. So a
request goes to the deepest node whose messages it begins with, by whatever way its client came to them, and what it adds is a new branch.

What a turn costs: the few branches used last are kept whole (`_Path`), as the client spelt them, next to their ids. A request that goes on
with one of them is compared with it in one pass of equality of objects that exist already, and its ids are copied in one go; normalising,
digests, rendering and tokenising are for new messages only. Everything is plain code without await: in one event loop, a call is atomic.

Legend: T tokens of a whole prompt, P tokens that a turn's messages added, M sampled tokens.
"""

from __future__ import annotations

import copy
from bisect import bisect_right
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count
from operator import eq
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from miles_core.engine.sequence import Rows
from miles_core.tito import messages as msgs
from miles_core.tito.errors import ContextExceeded, SessionError
from miles_core.tito.messages import Matcher, Message

if TYPE_CHECKING:
    from miles_core.engine.sequence import SamplingParams
    from miles_core.tito.backend import TurnResult

MAX_PATHS = 4  # branches kept whole
# English and code have 3 to 5. Messages with more than this for each token that fits are refused unread: tokenising takes 1 to 3
# microseconds a character, and meanwhile all sessions wait.
CHARACTERS_A_TOKEN = 8
_NO_TOKENS = np.zeros(0, np.int32)


@dataclass(frozen=True)
class Limits:
    """Of one session: turns, tokens of all its nodes together."""

    nodes: int = 4096
    tokens: int = 1 << 22


@dataclass(frozen=True)
class Rendered:
    """`tokens` int32 [P]. `opening`: text of an answer that the prompt begins for it. `thinking`: the prompt ended in an open <think>."""

    tokens: np.ndarray
    opening: str = ""
    thinking: bool = False


class RendererLike(Protocol):
    """What the tree asks of render.Renderer."""

    def first(self, messages: list[Message], tools: Any, template_kwargs: dict[str, Any], force_call: bool) -> Rendered: ...

    def later(self, last: int, messages: list[Message], tools: Any, template_kwargs: dict[str, Any], force_call: bool) -> Rendered: ...


@dataclass(frozen=True)
class Head:
    """What stands before the messages of a conversation. Conversations with different heads share nothing but the root."""

    tools: list[dict[str, Any]] | None
    template_kwargs: dict[str, Any]
    digest: bytes


@dataclass(eq=False, repr=False)
class Node:
    """A turn: `messages` it added, the assistant's last; `prompt` int32 [P] that they became; what was sampled (backend.TurnResult)."""

    number: int
    parent: Node | None
    messages: tuple[Message, ...]
    head: Head | None
    asked: bytes  # digest of the history up to the request; answers to one request have it in common
    digest: bytes  # ... and with this turn's answer
    prompt: np.ndarray
    sampled: np.ndarray
    logp: np.ndarray
    version: np.ndarray
    finish: str
    cached: int
    routes: Rows | None  # of this turn's tokens and of the parent's last, which is computed when there is a next turn; not of the own last
    attempt: int
    params: SamplingParams | None
    depth: int  # turns up to this one
    num_messages: int  # up to this turn
    num_tokens: int
    children: list[Node] = field(default_factory=list)
    continued: bool = False  # a child has, or is to have, this node's attempt

    def __repr__(self) -> str:
        """Short: asyncio writes the results of tasks into its messages, and a node leads to the whole tree."""
        return f"Node({self.number}, turn {self.depth}, {self.num_tokens} tokens, {self.finish})"

    @property
    def extendable(self) -> bool:
        return self.finish != "length"

    def branch(self) -> list[Node]:
        """The turns from the first to this one."""
        nodes: list[Node] = []
        node: Node | None = self
        while node is not None and node.parent is not None:
            nodes.append(node)
            node = node.parent
        return nodes[::-1]

    def branch_routes(self) -> Rows | None:
        """Of all tokens of the turns from the first to this one, but the last. None where nothing is recorded, as of a dense model."""
        return None if self.routes is None else Rows.join([node.routes for node in self.branch()])


@dataclass(frozen=True)
class Attachment:
    """Where a request belongs: below `node`, with the messages `appended` (normalised) and the digest after each of them."""

    node: Node
    appended: list[Message]
    digests: list[bytes]
    head: Head
    path: _Path | None  # one that passes through the node


@dataclass(frozen=True)
class Prepared:
    """A turn that may be generated. `tokens` int32 [T]: the whole prompt; `opening`, `thinking`: see Rendered."""

    attachment: Attachment
    spelling: list[Any]  # the appended messages as the client sent them
    prompt: np.ndarray  # int32 [P], what the appended messages became
    tokens: np.ndarray
    opening: str
    thinking: bool

    @property
    def node(self) -> Node:
        return self.attachment.node


class _Path:
    """A branch from the root to `nodes[-1]`, whole. `spelling`: its messages as the client sent them last; `digests`: after each."""

    def __init__(self, head: Head, root: Node) -> None:
        self.head, self.nodes = head, [root]
        self.spelling: list[Any] = []
        self.digests: list[bytes] = []
        self._ids = np.empty(256, np.int32)

    def ids(self, node: Node) -> np.ndarray:
        """All tokens up to the end of a node of this path, int32; a view."""
        return self._ids[: node.num_tokens]

    def passes(self, node: Node) -> bool:
        return node.depth < len(self.nodes) and self.nodes[node.depth] is node

    def deepest(self, num_messages: int) -> Node:
        """The last node that has at most so many messages."""
        return self.nodes[bisect_right(self.nodes, num_messages, key=lambda node: node.num_messages) - 1]

    def common(self, messages: list[Any], matcher: Matcher) -> int:
        """How many messages at the start are the same. A message that is the same in a new spelling is remembered in the new one."""
        equal = [*map(eq, self.spelling, messages), False]
        at = equal.index(False)
        while at < len(equal) - 1:
            before = self.digests[at - 1] if at else self.head.digest
            if msgs.chain(before, matcher(msgs.normalise(messages[at], f"messages[{at}]"))) != self.digests[at]:
                break
            self.spelling[at] = copy.deepcopy(messages[at])
            at = equal.index(False, at + 1)
        return at

    def fork(self, node: Node) -> _Path:
        """A copy that ends with `node`."""
        path = _Path(self.head, self.nodes[0])
        path.nodes = self.nodes[: node.depth + 1]
        path.spelling, path.digests = self.spelling[: node.num_messages], self.digests[: node.num_messages]
        path._write(0, self.ids(node))
        return path

    def extend(self, node: Node, spelling: list[Any], digests: list[bytes]) -> None:
        assert node.parent is self.nodes[-1], (node.number, self.nodes[-1].number)
        before = node.parent.num_tokens
        self._write(before, node.prompt)
        self._write(before + len(node.prompt), node.sampled)
        self.nodes.append(node)
        self.spelling += spelling
        self.digests += digests

    def _write(self, at: int, tokens: np.ndarray) -> None:
        if at + len(tokens) > len(self._ids):
            grown = np.empty(2 * (at + len(tokens)), np.int32)
            grown[:at] = self._ids[:at]
            self._ids = grown
        self._ids[at : at + len(tokens)] = tokens


class SessionTree:
    """All turns of a session. `nodes[0]` is the root: no messages, no tokens. `max_context`: tokens of a prompt and its answer.

    `matcher`: see messages.py.
    """

    def __init__(self, renderer: RendererLike, limits: Limits, max_context: int, matcher: str | Matcher = "strict") -> None:
        self._renderer, self._limits, self._matcher = renderer, limits, msgs.matcher_of(matcher)
        self._max_context = max_context
        nothing = np.zeros(0, np.float32)
        root = Node(0, None, (), None, b"", b"", _NO_TOKENS, _NO_TOKENS, nothing, _NO_TOKENS, "stop", 0, None, 0, None, 0, 0, 0)
        self.nodes = [root]
        self.num_tokens = 0  # of all nodes
        self._by_digest: dict[bytes, Node] = {}
        self._paths: list[_Path] = []  # the one used last comes first
        self._heads: dict[bytes, Head] = {}  # so that turns share one
        self._used = {0}  # attempts, of nodes and in flight
        self._in_flight = 0

    @property
    def root(self) -> Node:
        return self.nodes[0]

    @property
    def leaves(self) -> list[Node]:
        return [node for node in self.nodes[1:] if not node.children]

    def attach(self, messages: Any, tools: Any = None, template_kwargs: dict[str, Any] | None = None) -> Attachment:
        """The deepest node whose messages `messages` begin with, and what they add to it. Raises SessionError 400 for bad messages.

        Of several nodes that deep (a retry that said the same again) it is the latest. Other tools or template_kwargs are another head, and
        attach to the root.
        """
        if not isinstance(messages, list) or not messages:
            raise SessionError(400, "messages must be a list with at least one message")
        head, node, path = self._head(tools, template_kwargs), self.root, None
        best = 0
        for candidate in self._paths:
            if candidate.head.digest == head.digest and (same := candidate.common(messages, self._matcher)) > best:
                best, path = same, candidate
                if same == len(candidate.spelling):
                    break
        if path is not None:
            node = path.deepest(best)
        digest = node.digest or head.digest
        node = self._by_digest.get(digest, node)
        appended, digests = [], []
        for i in range(node.num_messages, len(messages)):
            appended.append(msgs.normalise(messages[i], f"messages[{i}]"))
            digest = msgs.chain(digest, self._matcher(appended[-1]))
            digests.append(digest)
            if (deeper := self._by_digest.get(digest)) is not None:
                node, appended, digests = deeper, [], []
        return Attachment(node, appended, digests, head, self._path_through(node))

    def prepare(
        self, messages: Any, tools: Any = None, template_kwargs: dict[str, Any] | None = None, *, force_call: bool = False
    ) -> Prepared:
        """The prompt that a request stands for. Nothing is changed. `force_call`: the answer is to begin as a tool call does.

        Raises SessionError: 400 for what cannot be rendered or does not fit into the context (ContextExceeded), 409 for a turn that cannot
        be extended, 413 beyond the limits.
        """
        attachment = self.attach(messages, tools, template_kwargs)
        node, appended = attachment.node, attachment.appended
        if not appended or appended[-1]["role"] == "assistant":
            raise SessionError(400, "there is nothing to answer: the last message must not be the assistant's")
        if not node.extendable:
            raise SessionError(
                409, "the last turn was cut by length and cannot be extended; go on from an earlier one", "turn_cut_by_length"
            )
        msgs.check_tool_results(appended, node.messages[-1] if node.messages else None)
        if len(self.nodes) - 1 + self._in_flight >= self._limits.nodes:
            raise SessionError(413, f"the session has its {self._limits.nodes} turns; open another")
        head, room = attachment.head, self._max_context - node.num_tokens
        characters = msgs.characters([*appended, head.tools] if node.parent is None else appended)
        if characters > CHARACTERS_A_TOKEN * room:
            raise ContextExceeded(node, f"the new messages have {characters} characters, and there is room for {room} tokens")
        if node.parent is None:
            made = self._renderer.first(appended, head.tools, head.template_kwargs, force_call)
        else:
            made = self._renderer.later(int(node.sampled[-1]), appended, head.tools, head.template_kwargs, force_call)
        if len(made.tokens) >= room:
            total = node.num_tokens + len(made.tokens)
            raise ContextExceeded(node, f"the conversation has {total} tokens and the context is {self._max_context}")
        if self.num_tokens + len(made.tokens) > self._limits.tokens:
            raise SessionError(413, f"the session would have more than its {self._limits.tokens} tokens; open another")
        before = attachment.path.ids(node) if attachment.path is not None else self._ids(node)
        tokens = np.concatenate((before, made.tokens))
        spelling = copy.deepcopy(messages[node.num_messages :])  # the client may write to its own while it waits
        return Prepared(attachment, spelling, made.tokens, tokens, made.opening, made.thinking)

    @contextmanager
    def attempt(self, node: Node) -> Iterator[int]:
        """The number of the branch that a turn below `node` belongs to: the node's own, or if it has been taken, one that nobody has.

        Turns with one attempt lie on one branch. A number whose turn was not committed is free again: who asks again gets the same turn.
        """
        continues = not node.continued
        number = node.attempt if continues else next(n for n in count() if n not in self._used)
        children = len(node.children)
        node.continued = True
        self._used.add(number)
        self._in_flight += 1
        try:
            yield number
        finally:
            self._in_flight -= 1
            if not any(child.attempt == number for child in node.children[children:]):
                if continues:
                    node.continued = False
                else:
                    self._used.discard(number)

    def commit(self, prepared: Prepared, result: TurnResult, message: Message, attempt: int, params: SamplingParams | None = None) -> Node:
        """Add the turn; `message` is what the assistant said, in OpenAI form. Asserts before it changes anything."""
        attachment, parent = prepared.attachment, prepared.node
        arrays = [np.array(x, kind) for x, kind in ((result.tokens, np.int32), (result.logp, np.float32), (result.version, np.int32))]
        sizes = {len(array) for array in arrays}
        assert len(sizes) == 1 and 0 not in sizes, f"a turn of {sizes} tokens"
        assert result.finish in ("stop", "length"), result.finish
        said = msgs.normalise(message, "the answer")
        digest = msgs.chain(attachment.digests[-1], self._matcher(said))
        added = len(prepared.prompt) + len(arrays[0])
        node = Node(
            len(self.nodes),
            parent,
            (*attachment.appended, said),
            attachment.head,
            attachment.digests[-1],
            digest,
            prepared.prompt,
            *arrays,
            result.finish,
            result.cached,
            result.routes,
            attempt,
            params,
            parent.depth + 1,
            parent.num_messages + len(attachment.appended) + 1,
            parent.num_tokens + added,
        )
        self._remember(node, attachment, [*prepared.spelling, copy.deepcopy(message)])
        self._heads.setdefault(attachment.head.digest, attachment.head)
        self.nodes.append(node)
        parent.children.append(node)
        self.num_tokens += added
        twin = self._by_digest.get(digest)
        if twin is None or node.extendable or not twin.extendable:
            self._by_digest[digest] = node
        return node

    def _remember(self, node: Node, attachment: Attachment, spelling: list[Any]) -> None:
        """Make the node the end of the path used last."""
        parent = attachment.node
        path = attachment.path or self._rebuilt(parent, attachment.head)
        if path.nodes[-1] is not parent:
            path = path.fork(parent)
        path.extend(node, spelling, [*attachment.digests, node.digest])
        self._paths = [path, *(other for other in self._paths if other is not path)][:MAX_PATHS]

    def _path_through(self, node: Node) -> _Path | None:
        return None if node.parent is None else next((path for path in self._paths if path.passes(node)), None)

    def _rebuilt(self, tip: Node, head: Head) -> _Path:
        """The path to a node whose branch is not among those kept."""
        path = _Path(head, self.root)
        for node in tip.branch():
            digests, digest = [], path.digests[-1] if path.digests else head.digest
            for message in node.messages:
                digest = msgs.chain(digest, self._matcher(message))
                digests.append(digest)
            path.extend(node, list(node.messages), digests)
        return path

    def _ids(self, node: Node) -> np.ndarray:
        return np.concatenate([_NO_TOKENS, *(part for turn in node.branch() for part in (turn.prompt, turn.sampled))])

    def _head(self, tools: Any, template_kwargs: dict[str, Any] | None) -> Head:
        msgs.check_tools(tools)
        if template_kwargs is not None and not isinstance(template_kwargs, dict):
            raise SessionError(400, f"chat_template_kwargs must be an object, got {type(template_kwargs).__name__}")
        try:
            digest = msgs.chain(b"", [tools or None, template_kwargs or {}])
        except (TypeError, ValueError, RecursionError) as error:
            raise SessionError(400, f"tools and chat_template_kwargs must be JSON: {error}") from error
        return self._heads.get(digest) or Head(copy.deepcopy(tools or None), copy.deepcopy(template_kwargs or {}), digest)
