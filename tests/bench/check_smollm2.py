"""SmolLM2-135M-Instruct: our logits against those of transformers, and what our engine answers. Prints figures, fails if they are wrong.

    python tests/bench/check_smollm2.py "$(launch/smollm2.sh)"
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch

from miles_core import numerics
from miles_core.engine.engine import Engine, Request, SamplingParams
from miles_core.model import hf
from miles_core.model.attend import PackedAttend

QUESTION = "What is the capital of France?"
TOLERANCE = 2e-4


def main(model_dir: Path) -> None:
    from transformers import AutoModelForCausalLM

    numerics.setup()
    model, tokenizer = hf.load(model_dir), hf.load_tokenizer(model_dir)
    prompt = tokenizer.apply_chat_template(
        [{"role": "user", "content": QUESTION}], add_generation_prompt=True, tokenize=True, return_dict=False
    )
    engine = Engine(model, tokenizer, seed=0, num_pages=4, max_batch_tokens=64, max_sequences=1)
    greedy = SamplingParams(0.0, 1.0, 0, 40, hf.load_stop_ids(model_dir, tokenizer))
    completion = engine.generate([Request(0, 0, np.array(prompt, np.int32), greedy)])[0]
    print(f"{QUESTION} -> {completion.text!r}")
    assert "Paris" in completion.text

    reference = AutoModelForCausalLM.from_pretrained(model_dir, dtype=torch.float32, attn_implementation="eager").eval()
    text = tokenizer.encode(Path(__file__).read_text())[:300]
    for name, ids in (("answer", completion.trajectory.tokens.tolist()), ("source text", text)):
        tokens_T, positions_T = torch.tensor(ids), torch.arange(len(ids))
        attend = PackedAttend(torch.tensor([0, len(ids)], dtype=torch.int32), model.config.head_dim**-0.5)
        with torch.no_grad():
            ours, theirs = model(tokens_T, positions_T, attend, positions_T), reference(tokens_T[None]).logits[0]
        error, agree = (ours - theirs).abs().max().item(), (ours.argmax(-1) == theirs.argmax(-1)).sum().item()
        print(f"{name}: {len(ids)} tokens, largest difference of a logit {error:.1e} (allowed {TOLERANCE}), argmax equal at {agree}")
        assert error < TOLERANCE and agree == len(ids)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
