"""The embedded policy's tokenizer: one token per printable ASCII character, plus newline, the role words and the ChatML marks.

104 ids. `save` writes the files that `AutoTokenizer` reads; text that is not in the vocabulary becomes `<|unk|>`.
A word of ROLES is one token wherever it stands, so that the header of a turn costs three tokens. A task whose answers are long strings of
few kinds can have `words` of its own, which come last.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

PAD, UNKNOWN, START, END = "<|pad|>", "<|unk|>", "<|im_start|>", "<|im_end|>"
MARKS = (PAD, UNKNOWN, START, END)
ROLES = ("system", "user", "assistant", "tool")
CHARACTERS = ("\n", *(chr(code) for code in range(32, 127)))
VOCABULARY = {token: index for index, token in enumerate((*MARKS, *ROLES, *CHARACTERS))}
MAX_LENGTH = 4096  # positions of the embedded policy

# ChatML, with tool calls as in Hermes and Qwen: JSON between tags, each on lines of its own. Tools themselves are not shown.
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '" + START + "' + message['role'] + '\\n' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{% if message['content'] or not loop.first %}{{ '\\n' }}{% endif %}"
    "{{ '<tool_call>\\n{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ call['function']['arguments'] | tojson }}{{ '}\\n</tool_call>' }}"
    "{% endfor %}{{ '" + END + "' + '\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '" + START + "assistant\\n' }}{% endif %}"
)


def build(words: tuple[str, ...] = ()) -> Tokenizer:
    """The tokenizer as an object of the `tokenizers` library."""
    ids = {**VOCABULARY, **{word: len(VOCABULARY) + index for index, word in enumerate(words)}}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token=UNKNOWN))
    # Every match is a piece of its own; [\s\S] rather than a dot, because a dot leaves newlines out.
    whole = "|".join(map(re.escape, (*sorted(words, key=len, reverse=True), *ROLES)))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(whole + r"|[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    return tokenizer


def save(directory: Path, words: tuple[str, ...] = ()) -> None:
    """Write tokenizer.json and tokenizer_config.json."""
    build(words).save(str(directory / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "unk_token": UNKNOWN,
        "eos_token": END,
        "model_max_length": MAX_LENGTH,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
