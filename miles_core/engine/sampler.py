"""From logits to tokens: noise that depends on (seed, group, sample, position) alone, and the search for stop strings.

Legend: M rows, V vocabulary.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels import sample as ops
from miles_core.engine.sequence import Table
from miles_core.model.hf import Tokenizer


def sample(logits_MV: torch.Tensor, table: Table, lanes_M: np.ndarray, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Next token (int64 [M]) of each lane and its log-prob under the distribution it was drawn from (float32 [M])."""
    device = logits_MV.device

    def column(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values[lanes_M]).to(device)

    # the position of the token about to be sampled is the number of tokens before it
    uniform_M = ops.uniform(seed, column(table.group), column(table.sample), column(table.length))
    token_M, logp_M = ops.sample(logits_MV, column(table.temperature), column(table.top_p), column(table.top_k), uniform_M)
    return token_M.cpu().numpy(), logp_M.cpu().numpy()


class StopStrings:
    """Looks for stop strings in an answer as its tokens arrive, decoding only the last few of them each time.

    A token's text can depend on its neighbours (bytes of one character, spaces), so a short window of tokens before the new ones is decoded
    along with them and its text taken off again (as text-generation-inference does).
    """

    WINDOW = 6  # tokens of one decoding at most, when they do not add up to whole characters

    def __init__(self, tokenizer: Tokenizer, strings: tuple[str, ...]):
        self.tokenizer, self.strings = tokenizer, strings
        self.keep = max(map(len, strings)) - 1  # characters of the past that a match can reach back to
        self.past = ""
        self.tokens: list[int] = []  # the window
        self.read = 0  # of these, how many are in `past`

    def push(self, token: int) -> bool:
        """Add one sampled token. True when the answer now contains a stop string."""
        self.tokens.append(token)
        text = self._decode(self.tokens)[len(self._decode(self.tokens[: self.read])) :]
        found = any(string in self.past + text for string in self.strings)
        if not text.endswith("\ufffd") or len(self.tokens) - self.read >= self.WINDOW:
            self.past = (self.past + text)[-self.keep :] if self.keep else ""
            self.tokens = self.tokens[self.read :]
            self.read = len(self.tokens)
        return found

    def cut(self, text: str) -> str:
        """`text` up to the first stop string in it."""
        return text[: min((text.find(string) for string in self.strings if string in text), default=len(text))]

    def _decode(self, tokens: list[int]) -> str:
        return self.tokenizer.decode(tokens, skip_special_tokens=True)
