"""The demo model, taught to call tools by itself: two or three minutes of training on tests/clients/tool_examples.py.

With `tool_choice` "auto" nothing forces a call, and the demo model never makes one. What the tests need is a model that
does, in the words in which the server tells tools to a template that knows none.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from cb_backend.engine.build import computing_alone
from cb_backend.text.chat import ChatTemplate, check_messages
from cb_backend.text.tools import conversation_with_tools
from tests.clients.tool_examples import Example, examples

EPOCHS = 2
BATCH = 4
LEARNING_RATE = 1e-4
WARM_UP = 5  # steps
# Of 30: enough is learned by the upper ones, and training all would take half as long again.
FROZEN_LAYERS = 15


def teach(source: Path, target: Path, seed: int = 0) -> int:
    """Writes the taught model (float32) and its tokenizer to `target`; returns the number of steps.

    Args:
        source: the demo model's directory.
        seed: of the order of the examples.
    """
    tokenizer = AutoTokenizer.from_pretrained(source)
    chat = ChatTemplate(tokenizer)
    taught = [_tokens(chat, example) for example in examples()]
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    # Where cores are shared two threads wait for each other in every product: a step took five times as long.
    with computing_alone():
        steps = _train(model, taught, random.Random(seed))
    model.save_pretrained(target)
    tokenizer.save_pretrained(target)
    return steps


def _tokens(chat: ChatTemplate, example: Example) -> tuple[torch.Tensor, int]:
    """Token ids of the chat with its answer, int64 [1, num_tokens], and how many of them are the prompt."""

    def render(messages: list[dict[str, Any]], is_prompt: bool) -> list[int]:
        told = conversation_with_tools(check_messages(messages), example.tools)
        return chat.render(told, add_generation_prompt=is_prompt)

    prompt = render(example.messages, True)
    whole = render([*example.messages, example.answer], False)
    if whole[: len(prompt)] != prompt:
        raise ValueError(f"the prompt is not the beginning of the chat: {example}")
    return torch.tensor([whole[:-1]]), len(prompt)  # the line break after the end token is never generated


def _train(model: Any, taught: list[tuple[torch.Tensor, int]], order: random.Random) -> int:
    """AdamW on the tokens of the answers alone; the learning rate rises, then falls to zero."""
    model.requires_grad_(False)
    model.model.layers[FROZEN_LAYERS:].requires_grad_(True)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, weight_decay=0.0, betas=(0.9, 0.99))
    batches = list(_batches(taught, order))
    for step, batch in enumerate(batches):
        rate = LEARNING_RATE * min(1.0, (step + 1) / WARM_UP) * (1 - step / len(batches))
        for group in optimizer.param_groups:
            group["lr"] = rate
        answers = sum(tokens.shape[1] - prompt for tokens, prompt in batch)
        for tokens, prompt in batch:
            hidden = model.model(tokens[:, :-1]).last_hidden_state[0, prompt - 1 :]
            loss = torch.nn.functional.cross_entropy(model.lm_head(hidden), tokens[0, prompt:], reduction="sum")
            (loss / answers).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return len(batches)


def _batches(taught: list[Any], order: random.Random) -> Iterator[list[Any]]:
    for _ in range(EPOCHS):
        shuffled = order.sample(taught, len(taught))
        yield from (shuffled[i : i + BATCH] for i in range(0, len(shuffled), BATCH))
