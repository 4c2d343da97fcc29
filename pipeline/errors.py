"""The error tree.

PipelineError                 a mistake of input or environment; shown to the user without a traceback, exit code 2
├── ParamsError               params.yaml or a flag
├── CheckpointError           the source: config, safetensors, index
├── TokenizerError            tokenizer.json
├── CorpusError               the text or its windows
├── QuantizationError         a tensor that a scheme cannot encode
├── OutputError               a place that cannot be written
├── ArtifactError             an artifact that is not what its artifact.json says, or does not load
└── MeasurementError          logits or times that cannot be true
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager


class PipelineError(Exception):
    """What is wrong and where, expected against found, and what to do."""


class ParamsError(PipelineError):
    pass


class CheckpointError(PipelineError):
    pass


class TokenizerError(PipelineError):
    pass


class CorpusError(PipelineError):
    pass


class QuantizationError(PipelineError):
    """`weights`: how many it is about, 0 where they were not counted."""

    def __init__(self, message: str, weights: int = 0) -> None:
        super().__init__(message)
        self.weights = weights


class OutputError(PipelineError):
    pass


class ArtifactError(PipelineError):
    pass


class MeasurementError(PipelineError):
    pass


@contextmanager
def gathered(problems: list[PipelineError] | None) -> Iterator[None]:
    """What fails within goes to `problems`, and its user goes on behind it; without such a list it is raised."""
    try:
        yield
    except PipelineError as error:
        if problems is None:
            raise
        problems.append(error)


@contextmanager
def together(first: Sequence[PipelineError] = ()) -> Iterator[list[PipelineError]]:
    """What is `gathered` within, behind `first`, is raised at its end in one error: of the class that all are of, else
    a PipelineError; one alone as it is.
    """
    problems = [*first]
    yield problems
    once = {str(problem): problem for problem in problems}
    if len(once) == 1:
        raise problems[0]
    if once:
        kinds = {type(problem) for problem in problems}
        kind = kinds.pop() if len(kinds) == 1 else PipelineError
        raise kind("\n\n".join(once))


def listed(problems: Sequence[str]) -> str:
    """Problems as indented lines."""
    return "\n".join(f"  - {problem}" for problem in problems)


def some(problems: Sequence[str], what: str, shown: int = 5) -> list[str]:
    """The first problems of a kind, and how many more there are: a file of another model has hundreds."""
    more = [f"… and {len(problems) - shown} more {what}"] if len(problems) > shown else []
    return [*problems[:shown], *more]


def difference(expected: str, found: str, around: int = 20) -> str:
    """'from character 12 on: expected …, found …' of two texts, where they part."""
    at = common(expected, found)
    shown = [text[max(0, at - around) : at + around] for text in (expected, found)]
    return f"from character {at} on: expected {shown[0]!r}, found {shown[1]!r}"


def common(a: Sequence[object], b: Sequence[object]) -> int:
    """How many items at the beginning are the same."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def unreadable(error: OSError) -> str:
    """What to do about a file that cannot be opened."""
    if isinstance(error, PermissionError):
        return "Give yourself the right to read it (chmod u+r, and u+x on its folders)."
    if isinstance(error, FileNotFoundError | NotADirectoryError | IsADirectoryError):
        return "Check the path."
    return "Check the disk it lies on."


def suggestion(word: str, known: Sequence[str]) -> str:
    """'did you mean …?' for a word close to a known one, else 'known: …'."""
    from difflib import get_close_matches

    close = get_close_matches(word, known, n=1)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(known)}."
