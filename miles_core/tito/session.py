"""A session: one episode of a model that acts in turns. It owns the tokens of every turn (DESIGN 4.8).

    session = Session("s1", renderer, backend, group=7, sample=0, max_context=4096)
    reply = await session.chat([{"role": "user", "content": "31="}], params=params)
    reply.message["content"], reply.finish, session.budget_left
    session.finish(reward=1.0)

A session is used from one event loop. Requests may overlap: each attaches to the tree as it is when it arrives and commits when its turn is
done, without an await in between, so two that overlap become two branches.

Legend: M sampled tokens.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import inspect
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from miles_core.schema import VERDICTS
from miles_core.tito.backend import SAMPLE_BITS, Backend, Piece, Turn, TurnRequest, TurnResult
from miles_core.tito.errors import ContextExceeded, SessionError
from miles_core.tito.parsers import parse_assistant
from miles_core.tito.tree import Limits, Node, Prepared, SessionTree

if TYPE_CHECKING:
    from miles_core.engine.sequence import SamplingParams
    from miles_core.tito.messages import Matcher
    from miles_core.tito.render import Renderer

_LARGEST_REWARD = 3e38  # as a float32
TOOL_CHOICES = ("auto", "none", "required")


@dataclass(frozen=True)
class Opening:
    """How to read the tokens of an answer, known before the first one: the arguments of parsers.StreamParser.

    `text`: what the prompt makes the answer begin with (the tag of a call, for tool_choice "required"); it comes before the sampled text.
    """

    text: str
    family: str
    calls: bool
    thinking: bool
    prefix: str


OnOpening = Callable[[Opening], Awaitable[None] | None]
OnPiece = Callable[[Piece], Awaitable[None] | None]


@dataclass(frozen=True)
class Reply:
    """An answer.

    `message`: the assistant's, in OpenAI form: role, content, and where there are any reasoning_content and tool_calls. Send it back as it
    is. `finish`: "stop", "length" or "tool_calls". `usage`: prompt_tokens, completion_tokens, total_tokens, cached_tokens.
    `pieces`: what was streamed, for log-probs.
    """

    message: dict[str, Any]
    node: Node
    finish: str
    usage: dict[str, int]
    pieces: list[Piece] = field(repr=False)


class Session:
    """One episode. `group` and `sample` fix its sampling noise; `max_context` bounds prompt and answer of a turn together.

    `limits`: of the tree. `matcher`: "strict", "loose-tool-call", or a function from a message to what must be equal (messages.py).
    `max_turns`: answers, None = as many as fit. `judged`: a task's reward judges an episode that is "ok" and brings none.
    """

    def __init__(
        self,
        id: str,
        renderer: Renderer,
        backend: Backend,
        *,
        group: int,
        sample: int,
        max_context: int,
        limits: Limits | None = None,
        matcher: str | Matcher = "strict",
        max_turns: int | None = None,
        judged: bool = False,
    ) -> None:
        self.id, self.renderer, self.backend = id, renderer, backend
        self.noise, self.group, self.sample = sample, group, sample & ((1 << SAMPLE_BITS) - 1)  # see Player.add
        self.max_context = min(max_context, backend.max_context)
        self.max_turns, self.judged = max_turns, judged
        self.tree = SessionTree(renderer, limits or Limits(), self.max_context, matcher)
        self.last_used = time.monotonic()
        self.overflowed: Node | None = None  # the turn after which there was no room for another
        self.reward: float | None = None
        self.verdict: str | None = None
        self.detail = ""  # for people, beside the verdict
        self._turns: set[Turn] = set()

    @property
    def finished(self) -> bool:
        return self.verdict is not None

    @property
    def in_flight(self) -> int:
        """Turns being generated."""
        return len(self._turns)

    @property
    def budget_left(self) -> int:
        """Tokens that still fit after the turn made last: the next messages and all further answers of that branch."""
        return self.max_context - self.tree.nodes[-1].num_tokens

    @property
    def turns_left(self) -> int | None:
        """Answers that may still be asked for, beside those in flight; None = no limit."""
        return None if self.max_turns is None else self.max_turns - (len(self.tree.nodes) - 1) - self.in_flight

    @property
    def last_answer(self) -> str:
        """The text of the answer made last."""
        messages = self.tree.nodes[-1].messages
        return (messages[-1]["content"] or "") if messages else ""

    async def chat(
        self,
        messages: list[dict[str, Any]],
        *,
        tools: list[dict[str, Any]] | None = None,
        tool_choice: str = "auto",
        params: SamplingParams,
        template_kwargs: dict[str, Any] | None = None,
        top_logprobs: int = 0,
        seed: int | None = None,
        on_piece: OnPiece | None = None,
        on_opening: OnOpening | None = None,
    ) -> Reply:
        """Answer `messages`, the whole conversation in OpenAI form. `on_opening` is called once the request is known to be good, `on_piece`
        as tokens are sampled; what they return is awaited if it can be.

        params.max_new_tokens is cut to what fits. If the task that awaits is cancelled, so is the engine's turn.
        Raises SessionError; then, and after a cancellation, the tree is as it was.
        """
        self.last_used = time.monotonic()
        self._check_open()
        if self.turns_left is not None and self.turns_left < 1:
            raise SessionError(409, f"session {self.id} has had its {self.max_turns} turns", "no_turns_left")
        if tool_choice not in TOOL_CHOICES:
            raise SessionError(400, f"tool_choice {tool_choice!r} is not supported: use one of {', '.join(TOOL_CHOICES)}")
        try:
            prepared = self.tree.prepare(messages, tools, template_kwargs, force_call=tool_choice == "required")
        except ContextExceeded as error:
            self.overflowed = error.node
            raise
        params = dataclasses.replace(params, max_new_tokens=min(params.max_new_tokens, self.max_context - len(prepared.tokens)))
        with self.tree.attempt(prepared.node) as attempt:
            opening = self._opening(prepared, calls=bool(tools) and tool_choice != "none", attempt=attempt)
            await _call(on_opening, opening)
            routes = prepared.node.branch_routes()
            request = TurnRequest(prepared.tokens, params, self.group, self.noise, attempt, seed, top_logprobs, routes)
            result, pieces = await self._generate(request, on_piece)
            self._check_open()  # it may have been finished meanwhile
            message = self._message(opening, result, params.stop_strings, tools)
            node = self.tree.commit(prepared, result, message, attempt, params)
        self.last_used = time.monotonic()
        return Reply(copy.deepcopy(message), node, _finish_reason(result, message), _usage(prepared, result), pieces)

    def finish(self, reward: float | None = None, verdict: str = "ok", detail: str = "") -> None:
        """End the episode; turns in flight are cancelled. A verdict other than "ok" needs no reward. Raises SessionError."""
        self._check_open()
        if verdict not in VERDICTS:
            raise SessionError(400, f"verdict {verdict!r} is unknown: use one of {', '.join(VERDICTS)}")
        finite = isinstance(reward, int | float) and not isinstance(reward, bool) and abs(reward) <= _LARGEST_REWARD
        if not finite and (reward is not None or (verdict == "ok" and not self.judged)):
            raise SessionError(400, f"the reward must be a finite number, got {reward!r:.80}")
        self.reward, self.verdict, self.detail = (None if reward is None else float(reward)), verdict, detail
        self.cancel()

    def cancel(self) -> None:
        """Cancel the turns in flight."""
        for turn in tuple(self._turns):
            turn.cancel()

    def _check_open(self) -> None:
        if self.finished:
            raise SessionError(409, f"session {self.id} is finished", "session_finished")

    async def _generate(self, request: TurnRequest, on_piece: OnPiece | None) -> tuple[TurnResult, list[Piece]]:
        try:
            turn = self.backend.submit(request)
        except ValueError as error:
            raise SessionError(400, str(error)) from error
        self._turns.add(turn)
        pieces: list[Piece] = []
        done = False
        try:
            async for piece in turn:
                pieces.append(piece)
                await _call(on_piece, piece)
            result = await turn.result()
            done = True
        except ValueError as error:
            raise SessionError(400, str(error)) from error
        except asyncio.CancelledError:
            if self.finished:  # it was `finish` that cancelled the turn, not somebody the task
                self._check_open()
            raise
        finally:
            self._turns.discard(turn)
            if not done:
                turn.cancel()
        return result, pieces

    def _opening(self, prepared: Prepared, calls: bool, attempt: int) -> Opening:
        prefix = f"call_{prepared.node.num_messages}_{attempt}_"  # no two turns of a tree have both numbers in common
        return Opening(prepared.opening, self.renderer.parser, calls, prepared.thinking, prefix)

    def _message(self, opening: Opening, result: TurnResult, stops: tuple[str, ...], tools: list[dict[str, Any]] | None) -> dict[str, Any]:
        """What the sampled tokens say, in OpenAI form."""
        text = self.renderer.answer(result.tokens)
        if result.finish == "stop":
            text = text[: min((at for stop in stops if (at := text.find(stop)) >= 0), default=len(text))]
        parsed = parse_assistant(
            opening.text + text, opening.family, tools=tools, calls=opening.calls, thinking=opening.thinking, prefix=opening.prefix
        )
        optional = {key: parsed[key] for key in ("reasoning_content", "tool_calls") if parsed.get(key)}
        return {"role": "assistant", "content": parsed["content"], **optional}


async def _call(function: Callable[[Any], Awaitable[None] | None] | None, argument: Any) -> None:
    if function is not None:
        waiting = function(argument)
        if inspect.isawaitable(waiting):
            await waiting


def _finish_reason(result: TurnResult, message: dict[str, Any]) -> str:
    return "tool_calls" if result.finish == "stop" and message.get("tool_calls") else result.finish


def _usage(prepared: Prepared, result: TurnResult) -> dict[str, int]:
    prompt, answer = len(prepared.tokens), len(result.tokens)
    return {"prompt_tokens": prompt, "completion_tokens": answer, "total_tokens": prompt + answer, "cached_tokens": result.cached}
