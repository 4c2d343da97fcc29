"""The architectures in float32 torch (transformers): the reference that every variant is compared with.

What is stored is the target's log-probability and the final hidden state of each scored position, not logits: those
are rebuilt as hidden @ head.T, exactly, from files that are smaller by vocabulary over width.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import chat as chats
from pipeline.chat import Chat
from pipeline.errors import MeasurementError, TokenizerError
from pipeline.files import new_folder, read_array, read_object, write_json
from pipeline.logits import Head, logprob_of, shifted_logits
from pipeline.models import spec_of
from pipeline.models.numbers import numbers
from pipeline.progress import Advance, silent
from pipeline.runtimes import Messages, Prompt, Reply
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.torch_layers import final_states, is_larger
from pipeline.torch_model import library
from pipeline.torch_runtime import REFERENCE, TorchRuntime, checked, engine_of, head_of, of_checkpoint
from pipeline.types import SourceIdentity, Windows


@dataclass(frozen=True)
class Reference:
    """A stored reference; `chat` is None where the checkpoint has no chat template.

    hidden: float32 [windows, scored, d_model], mapped from disk. logprob: float32 [windows, scored], nats.
    """

    hidden: NDArray[np.float32]
    logprob: NDArray[np.float32]
    head: Head
    meta: dict[str, Any]
    chat: Chat | None = None

    def logits(self, window: int) -> NDArray[np.float32]:
        """float32 [scored, vocab] of one window."""
        return self.head.logits(np.asarray(self.hidden[window]))

    def window(self, window: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Logits float32 [scored, vocab] of one window, and its targets' log-probabilities float32 [scored], nats."""
        return self.logits(window), self.logprob[window]


class FreshReference:
    """A reference of which each window is computed when it is asked for, bit for bit as a stored one, and nothing is
    stored: for those who may not need all.

    Raises:
        CheckpointError: the checkpoint is not whole.
    """

    def __init__(self, checkpoint: Checkpoint, windows: Windows) -> None:
        self._runtime = of_checkpoint(checkpoint)
        self._windows = windows
        self.chat = reference_chat(checkpoint, self._runtime)

    def window(self, window: int) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """See Reference.

        Raises:
            MeasurementError: logits that are not finite or all alike.
        """
        windows, head = self._windows, self._runtime.head
        ids = windows.ids[window]
        logits = head.logits(self._runtime.hidden(ids, windows.start)[: windows.scored])
        return logits, _target_logprob(logits, ids[windows.start + 1 :])


def write_reference(
    checkpoint: Checkpoint,
    source: SourceIdentity,
    windows: Windows,
    folder: Path,
    advance: Advance = silent,
    layer_by_layer: bool = False,
) -> None:
    """Score the windows by the reference into a new folder; `advance` is told of all windows.

    It is computed layer by layer where it is asked for, or where the model `is_larger` than memory: the same bits, but
    no reply in a chat, which needs all layers for every token.

    Raises:
        CheckpointError: the checkpoint is not whole.
        MeasurementError: its logits are not finite or all alike.
    """
    if layer_by_layer or is_larger(checked(checkpoint)):
        _write_by_layers(checkpoint, source, windows, folder, advance)
        return
    runtime = of_checkpoint(checkpoint)

    def states(window: int) -> NDArray[np.float32]:
        advance(1)
        return runtime.hidden(windows.ids[window], 0)

    with new_folder(folder) as partial:
        _write(partial, states, runtime.head, windows)
        _write_rest(partial, reference_chat(checkpoint, runtime), source, windows, checkpoint)


def _write_by_layers(
    checkpoint: Checkpoint, source: SourceIdentity, windows: Windows, folder: Path, advance: Advance
) -> None:
    spec = checked(checkpoint)
    with new_folder(folder) as partial, ExitStack() as stack:
        states = stack.enter_context(final_states(checkpoint, spec, windows, partial, advance))
        _write(partial, states, head_of(checkpoint), windows)
        _write_rest(partial, reference_chat(checkpoint), source, windows, checkpoint)


def _write(partial: Path, states: Callable[[int], NDArray[np.float32]], head: Head, windows: Windows) -> None:
    """hidden.npy and logprobs.npy; `states` gives the final hidden states [context, d_model] of a window."""
    shape = (len(windows.ids), windows.scored)
    logprob = np.empty(shape, np.float32)
    with (partial / "hidden.npy").open("wb") as file:  # not mapped: a full disk would kill the process
        header = {"descr": "<f4", "fortran_order": False, "shape": (*shape, head.weight.shape[1])}
        np.lib.format.write_array_header_1_0(file, header)
        for window in range(len(windows.ids)):
            scored = np.ascontiguousarray(states(window)[windows.start : windows.stop])
            logprob[window] = _target_logprob(head.logits(scored), windows.ids[window, windows.start + 1 :])
            file.write(scored.data)
    np.save(partial / "logprobs.npy", logprob)


def _write_rest(
    partial: Path, chat: Chat | None, source: SourceIdentity, windows: Windows, checkpoint: Checkpoint
) -> None:
    if chat is not None:
        write_json(partial / chats.FILE, chat)
    model = numbers(spec_of(checkpoint.config, checkpoint.shapes))
    own = {"engine": asdict(engine_of(REFERENCE)), "model": asdict(model)}
    write_json(partial / "meta.json", reference_meta(source, windows) | own)


def reference_chat(checkpoint: Checkpoint, runtime: TorchRuntime | None = None) -> Chat | None:
    """The reference's prompt, and the reply of `runtime` where one is given: None where the checkpoint has no chat
    template.

    Raises:
        TokenizerError: the template fails on a plain question.
    """
    tokenizer = Tokenizer(checkpoint.path)
    if tokenizer.chat_template is None:
        return None
    text = rendered(checkpoint.path, chats.MESSAGES)
    prompt = Prompt(text, tuple(tokenizer.encode(text, add_special=False).tolist()))
    stop_ids = tokenizer.stop_ids(checkpoint.config)
    if runtime is None:
        return Chat(chats.MESSAGES, prompt, stop_ids, None)
    ids = runtime.greedy(prompt.ids, chats.LIMIT, stop_ids)
    stopped = ids[-1] in stop_ids
    said = tokenizer.decode(ids[:-1] if stopped else ids)
    reply = Reply(tuple(ids), said, tokenizer.decode(ids[-1:]) if stopped else None)
    return Chat(chats.MESSAGES, prompt, stop_ids, reply)


def rendered(folder: Path, messages: Messages) -> str:
    """A prompt as transformers renders it, by the tokenizer files of a folder. Its tokenizer takes seconds to load.

    Raises:
        TokenizerError: the template fails.
    """
    from jinja2 import TemplateError

    _, transformers = library()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    try:
        return str(tokenizer.apply_chat_template([*messages], tokenize=False, add_generation_prompt=True))
    except TemplateError as error:
        raise TokenizerError(f"{folder}: the chat template fails on a plain question ({error}). Repair it.") from error


def reference_meta(source: SourceIdentity, windows: Windows) -> dict[str, Any]:
    """What a score belongs to: scores with another identity are not comparable."""
    import hashlib

    return {
        "source": asdict(source),
        "corpus": windows.name,
        "text_sha256": windows.text_sha256,
        "tokenizer_sha256": windows.tokenizer_sha256,
        "ids_sha256": hashlib.sha256(windows.ids.tobytes()).hexdigest(),
        "context": windows.context,
        "windows": len(windows.ids),
    }


def load_reference(folder: Path, checkpoint: Checkpoint) -> Reference:
    """A reference that `write_reference` left; its head comes from the checkpoint.

    Raises:
        MeasurementError: none there, or a broken one.
    """
    meta = read_object(folder / "meta.json", MeasurementError)
    hidden = read_array(folder / "hidden.npy", MeasurementError, mapped=True)
    logprob = read_array(folder / "logprobs.npy", MeasurementError)
    head = head_of(checkpoint)
    if hidden.shape != (*logprob.shape, head.weight.shape[1]) or not isinstance(meta.get("source"), dict):
        raise MeasurementError(
            f"{folder} holds no reference of {checkpoint.name}: hidden states {list(hidden.shape)} beside "
            f"log-probabilities {list(logprob.shape)}. Remove the folder and run again."
        )
    return Reference(hidden, logprob, head, meta, chats.load_chat(folder))


def _target_logprob(logits: NDArray[np.float32], targets: NDArray[np.int32]) -> NDArray[np.float32]:
    """Log-probability in nats, float32 [rows], of `targets` [rows] under logits [rows, vocab].

    Raises:
        MeasurementError: logits that are not finite, or all alike.
    """
    logprob = logprob_of(*shifted_logits(logits), targets)
    if not np.isfinite(logprob).all():
        raise MeasurementError("the reference's logits are not finite. Is the checkpoint whole?")
    if (logits.max(axis=1) == logits.min(axis=1)).any():
        raise MeasurementError("the reference's logits are all alike: the checkpoint predicts nothing.")
    return logprob
