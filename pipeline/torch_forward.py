"""The architectures in float32 torch (transformers): the reference that every variant is compared with.

What is stored is the target's log-probability and the final hidden state of each scored position, not logits: those
are rebuilt as hidden @ head.T, exactly, from files that are smaller by vocabulary over width.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pipeline import chat as chats
from pipeline.chat import Chat
from pipeline.cores import cpu_name
from pipeline.errors import ArtifactError, CheckpointError, MeasurementError, PipelineError, TokenizerError
from pipeline.files import new_folder, read_array, read_object, write_json
from pipeline.logits import Head, logprob_of, shifted_logits
from pipeline.models import spec_of
from pipeline.progress import Advance, silent
from pipeline.source.checkpoint import Checkpoint
from pipeline.source.tokenizer import Tokenizer
from pipeline.types import Engine, Messages, Prompt, Reply, SourceIdentity, Windows


class TorchRuntime:
    """A model in float32 on the CPU, with sdpa attention. It scores; it is not timed. `of_checkpoint` and `of_tensors`
    make one.
    """

    def __init__(self, model: Any, head: Head, name: str) -> None:
        torch, transformers = _torch()
        self._torch = torch
        self._model = model.eval()
        self._decoder = self._model.model
        self.head = head
        self.vocab_size = len(self.head.weight)
        self.engine = Engine(
            name=name,
            version=f"transformers {transformers.__version__}, torch {torch.__version__}",
            instruction_set=instruction_set(),
            device="cpu",
            kv_type="f32",
            flash_attention="off",
            threads=torch.get_num_threads(),
        )

    def hidden(self, ids: NDArray[np.int32], start: int) -> NDArray[np.float32]:
        """Final hidden states float32 [context - start, d_model], behind the last norm."""
        with self._torch.inference_mode():
            states = self._decoder(self._torch.from_numpy(ids.astype(np.int64))[None]).last_hidden_state  # (1, T, C)
        return states[0, start:].numpy()  # type: ignore[no-any-return]

    def score(self, ids: NDArray[np.int32], start: int) -> Iterator[NDArray[np.float32]]:
        """See Scorer."""
        yield self.head.logits(self.hidden(ids, start))

    def greedy(self, ids: Sequence[int], limit: int, stop_ids: Collection[int]) -> list[int]:
        """The most likely tokens behind `ids`: at most `limit`, one of `stop_ids` being the last.

        Not transformers' `generate`: it would apply the repetition penalty of generation_config.json, which is no
        property of the weights.
        """
        found: list[int] = []
        given, cache = self._torch.tensor([[*ids]]), None  # (1, T)
        with self._torch.inference_mode():
            while len(found) < limit and not (found and found[-1] in stop_ids):
                out = self._model(given, cache=cache, use_cache=True, logits_to_keep=1)
                found.append(int(out.logits[0, -1].argmax()))
                given, cache = self._torch.tensor([found[-1:]]), out.cache
        return found


def instruction_set() -> str:
    """'AVX2, AMD EPYC 7B13': the kernels that torch was dispatched to, and the CPU, by which MKL chooses its own."""
    import torch

    return f"{torch.backends.cpu.get_cpu_capability()}, {cpu_name()}"


def of_checkpoint(checkpoint: Checkpoint, threads: int = 0) -> TorchRuntime:
    """A checkpoint as transformers loads it.

    Raises:
        CheckpointError: the checkpoint is not whole, or transformers does not load it.
    """
    torch, transformers = _torch(threads)
    checkpoint.check(spec_of(checkpoint.config))
    try:
        model = transformers.AutoModelForCausalLM.from_pretrained(
            checkpoint.path,
            dtype=torch.float32,
            attn_implementation="sdpa",
            use_safetensors=True,
            local_files_only=True,
            trust_remote_code=False,
        )
    except Exception as error:  # it raises many kinds, mostly of values in config.json
        raise CheckpointError(
            f"{checkpoint.path}: transformers {transformers.__version__} cannot load it: "
            f"{' '.join(str(error).split())}. Correct its config.json, or fetch it again."
        ) from error
    return TorchRuntime(model, head_of(checkpoint), "transformers")


def of_tensors(
    place: Path, config: Mapping[str, Any], tensors: Mapping[str, NDArray[np.float32]], name: str, threads: int = 0
) -> TorchRuntime:
    """The architecture of a config.json, which speaks of no quantization, with `tensors` by Hugging Face's names: every
    one that it needs, in its shape. They are not copied. `name` is what the engine is called, `place` is for errors.

    Raises:
        ArtifactError: transformers does not build it.
    """
    torch, transformers = _torch(threads)
    weights = {key: torch.from_numpy(np.require(tensor, np.float32, ["C", "W"])) for key, tensor in tensors.items()}
    try:
        read = transformers.CONFIG_MAPPING[config["model_type"]].from_dict({**config})
        model = transformers.MODEL_FOR_CAUSAL_LM_MAPPING[type(read)].from_pretrained(
            None, config=read, state_dict=weights, dtype=torch.float32, attn_implementation="sdpa"
        )
    except Exception as error:  # as above
        raise ArtifactError(
            f"{place}: transformers {transformers.__version__} cannot build what its config.json says: "
            f"{' '.join(str(error).split())}. Convert it again, or correct its config.json."
        ) from error
    head = weights["model.embed_tokens.weight" if read.tie_word_embeddings else "lm_head.weight"]
    return TorchRuntime(model, Head(head.numpy()), name)


def head_of(checkpoint: Checkpoint) -> Head:
    """The head of a checkpoint: its embedding where it is tied."""
    tied = spec_of(checkpoint.config).tied
    return Head(checkpoint.tensor("model.embed_tokens.weight" if tied else "lm_head.weight"))


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
        return _computed(self._runtime, self._windows, window)[1:]


def write_reference(
    checkpoint: Checkpoint, source: SourceIdentity, windows: Windows, folder: Path, advance: Advance = silent
) -> None:
    """Score the windows by the reference into a new folder; `advance` is told of each window.

    Raises:
        CheckpointError: the checkpoint is not whole.
        MeasurementError: its logits are not finite or all alike.
    """
    runtime = of_checkpoint(checkpoint)
    count, scored = len(windows.ids), windows.scored
    with new_folder(folder) as partial:
        shape = (count, scored, runtime.head.weight.shape[1])
        logprob = np.empty((count, scored), np.float32)
        with (partial / "hidden.npy").open("wb") as file:  # not mapped: a full disk would kill the process
            np.lib.format.write_array_header_1_0(file, {"descr": "<f4", "fortran_order": False, "shape": shape})
            for window in range(count):
                states, _, logprob[window] = _computed(runtime, windows, window)
                file.write(np.ascontiguousarray(states).data)
                advance(1)
        np.save(partial / "logprobs.npy", logprob)
        if (chat := reference_chat(checkpoint, runtime)) is not None:
            write_json(partial / chats.FILE, chat)
        write_json(partial / "meta.json", reference_meta(source, windows) | {"engine": asdict(runtime.engine)})


def _computed(
    runtime: TorchRuntime, windows: Windows, window: int
) -> tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.float32]]:
    """Of one window's scored positions: final hidden states, logits, and the targets' log-probabilities."""
    ids = windows.ids[window]
    states = runtime.hidden(ids, windows.start)[: windows.scored]
    logits = runtime.head.logits(states)
    return states, logits, _target_logprob(logits, ids[windows.start + 1 :])


def reference_chat(checkpoint: Checkpoint, runtime: TorchRuntime) -> Chat | None:
    """The reference's prompt and reply: None where the checkpoint has no chat template.

    Raises:
        TokenizerError: the template fails on a plain question.
    """
    tokenizer = Tokenizer(checkpoint.path)
    if tokenizer.chat_template is None:
        return None
    text = rendered(checkpoint.path, chats.MESSAGES)
    prompt = Prompt(text, tuple(tokenizer.encode(text, add_special=False).tolist()))
    stop_ids = tokenizer.stop_ids(checkpoint.config)
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

    _, transformers = _torch()
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


def _torch(threads: int = 0) -> tuple[Any, Any]:
    """torch and transformers, quiet; threads 0 leaves their number as it is."""
    try:
        import torch
        import transformers
    except ImportError as error:
        raise PipelineError(f"the reference needs torch and transformers ({error}). Run: make setup") from error
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    if threads:
        torch.set_num_threads(threads)
    return torch, transformers
