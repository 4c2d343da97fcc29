"""A short chat, the same for every variant: perplexity does not see a broken template, other prompt ids or a stop token
that does not stop.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline.errors import MeasurementError, common, difference
from pipeline.files import read_object
from pipeline.runtimes import Messages, Prompt, Reply

FILE = "reply.json"
MESSAGES: Messages = [{"role": "user", "content": "Repeat after me: one, two, three."}]
"""A model that can chat stops soon, and fewer bits hardly sway it: SmolLM2's best logits lead by 0.67 at least."""

LIMIT = 32  # tokens of a reply

NOT_MEASURED = "not measured: the reference was run layer by layer"


@dataclass(frozen=True)
class Chat:
    """The reference's chat: what was asked, the prompt by its own template, where it would stop, what it says.

    `reply` is None where it was not computed: the reference was run layer by layer, and a reply needs all layers for
    every token.
    """

    messages: Messages
    prompt: Prompt
    stop_ids: tuple[int, ...]
    reply: Reply | None


def load_chat(folder: Path) -> Chat | None:
    """The chat that a reference's folder holds: None where its checkpoint has no chat template.

    Raises:
        MeasurementError: reply.json is broken.
    """
    if not (folder / FILE).exists():
        return None
    raw = read_object(folder / FILE, MeasurementError)
    prompt, reply = raw["prompt"], raw["reply"]
    return Chat(
        raw["messages"],
        Prompt(prompt["text"], tuple(prompt["ids"])),
        tuple(raw["stop_ids"]),
        Reply(tuple(reply["ids"]), reply["text"], reply["stopped"]) if reply else None,
    )


def prompt_problem(found: Prompt | None, expected: Prompt | None) -> str | None:
    """How the artifact asks in other words or ids than the reference; None where it does not."""
    if found is None and expected is None:
        return None
    if found is None:
        return "the artifact has no chat template, the reference has one"
    if expected is None:
        return "the artifact has a chat template, the reference has none"
    if found.text != expected.text:
        where = difference(expected.text, found.text)
        return f"the artifact's chat template makes another prompt than the reference's, {where}"
    if found.ids != expected.ids:
        at = common(found.ids, expected.ids)
        return (
            f"the artifact's tokenizer reads the chat prompt as other tokens than the reference's from token {at} on: "
            f"expected {expected.ids[at : at + 8]}, found {found.ids[at : at + 8]}"
        )
    return None


def end_problem(found: Reply, chat: Chat) -> str | None:
    """Where the artifact's reply goes on behind a stop token of the reference; None where it does not."""
    over = [i for i, token in enumerate(found.ids) if token in chat.stop_ids]
    if not over or (found.stopped is not None and over[0] == len(found.ids) - 1):
        return None
    return (
        f"the artifact's reply goes on behind token {over[0] + 1}, id {found.ids[over[0]]}, where the reference would "
        f"have stopped: {found.text!r}"
    )


def compare(found: Reply, chat: Chat) -> dict[str, Any]:
    """The artifact's reply beside the reference's, as quality.json has it."""
    expected = chat.reply
    return {
        "text": found.text,
        "tokens": len(found.ids),
        "stopped": found.stopped,
        "same_tokens": common(found.ids, expected.ids) if expected else None,
        "reference_tokens": len(expected.ids) if expected else None,
    }


def sameness(reply: Mapping[str, Any]) -> str:
    """'6 of 8', how many tokens of a reply of quality.json are the reference's, or why nobody knows."""
    if reply["reference_tokens"] is None:
        return NOT_MEASURED
    return f"{reply['same_tokens']} of {reply['reference_tokens']}"
