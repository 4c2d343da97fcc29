"""params.yaml as frozen dataclasses: every key is known, of its type, and named when it is not."""

from __future__ import annotations

import math
import re
import types
from collections.abc import Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from pipeline import paths
from pipeline.errors import ParamsError, suggestion, unreadable
from pipeline.types import Limits, Options, mix_name


@dataclass(frozen=True)
class Corpus:
    name: str = "sample"
    path: str | None = None
    windows: int | None = 40
    context: int = 512


@dataclass(frozen=True)
class Calibration:
    """The text that importance matrices are computed from, and how many windows of it; off without a path."""

    path: str | None = None
    windows: int = 32
    context: int = 512


@dataclass(frozen=True)
class Overrides:
    """A variant's own `evaluate` settings, over those of all."""

    threads: int | None = None
    flash_attention: bool | None = None
    kv_type: str | None = None


SIZES = ("chunk", "max_context", "score_window")
"""Of a Core ML package, in tokens."""


@dataclass(frozen=True)
class Variant:
    """What to build, a scheme with types or sizes of its own or without, or what to measure as it lies at `path`.

    `imatrix`: by the importance matrix of the calibration text (true), or by that of the file named.
    """

    format: str
    scheme: str | None = None
    types: Mapping[str, str] = field(default_factory=dict)
    chunk: int | None = None
    max_context: int | None = None
    score_window: int | None = None
    imatrix: bool | str = False
    path: str | None = None
    evaluate: Overrides = field(default_factory=Overrides)

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes of a Core ML package that are given."""
        return {key: value for key in SIZES if (value := getattr(self, key)) is not None}

    @property
    def options(self) -> Options:
        """What it is built with beside its scheme."""
        return Options(self.types, self.sizes, paths.imatrix(self.imatrix))

    @property
    def asked(self) -> dict[str, str]:
        """What measurements.json must say of it."""
        own = {**self.types, **self.sizes}
        what = {"path": self.path} if self.path else {"scheme": mix_name(self.scheme or "", own, bool(self.imatrix))}
        return {"format": self.format, **what}


@dataclass(frozen=True)
class Evaluate:
    threads: int = 0
    flash_attention: bool = False
    kv_type: str = "f16"


@dataclass(frozen=True)
class Benchmark:
    prompt_lengths: tuple[int, ...] = (128, 512, 2048)
    decode: int = 64
    rounds: int = 7
    device: str = "auto"
    threads: int = 0
    flash_attention: bool | str = "auto"
    kv_type: str = "f16"


@dataclass(frozen=True)
class Gate:
    inconclusive: str = "fail"
    limits: Mapping[str, Limits] = field(default_factory=dict)

    def limits_of(self, variant: str) -> Limits:
        """The default's limits with the variant's own over them."""
        default, own = (asdict(self.limits.get(name, Limits())) for name in ("default", variant))
        return Limits(**{key: own[key] if own[key] is not None else default[key] for key in default})


@dataclass(frozen=True)
class Params:
    checkpoint: str
    revision: str | None
    corpus: Corpus
    variants: Mapping[str, Variant]
    evaluate: Evaluate
    benchmark: Benchmark
    gate: Gate
    calibration: Calibration = field(default_factory=Calibration)

    @property
    def calibrated(self) -> bool:
        """Whether a variant asks for the importance matrix of the calibration text."""
        return any(variant.imatrix is True for variant in self.variants.values())

    @property
    def asked(self) -> dict[str, dict[str, str]]:
        """The format, and the scheme or path, of each variant."""
        return {name: variant.asked for name, variant in self.variants.items()}

    def evaluate_of(self, name: str) -> Evaluate:
        """The `evaluate` settings of a variant: its own over those of all.

        Raises:
            ParamsError: no such variant.
        """
        own = {key: value for key, value in asdict(self.variant(name).evaluate).items() if value is not None}
        return replace(self.evaluate, **own)

    def timed_as(self, name: str) -> dict[str, Any]:
        """The engine settings of its own that a variant is timed with: a row of the report is one configuration."""
        own = self.variant(name).evaluate
        settings = {"flash_attention": own.flash_attention, "kv_type": own.kv_type}
        return {key: value for key, value in settings.items() if value is not None}

    def variant(self, name: str) -> Variant:
        """A variant by name.

        Raises:
            ParamsError: no such variant.
        """
        if name not in self.variants:
            raise ParamsError(f"params.yaml has no variant {name!r}; {suggestion(name, [*self.variants])}")
        return self.variants[name]


def load(path: Path) -> Params:
    """The parameters of a project.

    Raises:
        ParamsError: no such file, not YAML, or a key that is unknown, missing or of the wrong type.
    """
    import yaml

    try:
        raw = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        hint = "Run this in the project's folder." if isinstance(error, FileNotFoundError) else unreadable(error)
        raise ParamsError(f"{path} cannot be read: {error.strerror}. {hint}") from error
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: not UTF-8, or a date that is none
        raise ParamsError(f"{path} is not valid YAML: {error}. Correct it, or take the committed one.") from error
    params: Params = parse(raw, Params, "")
    _check_values(params)
    return params


def _check_values(params: Params) -> None:
    if not params.variants:
        raise ParamsError("params.yaml: variants is empty; name at least one.")
    for name in params.variants:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_-]*", name):
            raise ParamsError(
                f"params.yaml: variant name {name!r} is also a file's and a DVC stage's: use letters, digits, - and _."
            )
    for name, variant in params.variants.items():
        if (variant.path is None) == (variant.scheme is None):
            raise ParamsError(
                f"params.yaml: variants.{name} needs either a scheme to build or the path of a file or folder."
            )
        if variant.types and variant.scheme is None:
            raise ParamsError(f"params.yaml: variants.{name} has types, but no scheme to build them over.")
        if variant.sizes and variant.scheme is None:
            raise ParamsError(f"params.yaml: variants.{name} has {', '.join(variant.sizes)}, but no scheme to build.")
        _check_imatrix(name, variant, params.calibration)
        if (variant.evaluate.threads or 0) < 0:
            raise ParamsError(f"params.yaml: variants.{name}.evaluate.threads must be 0 or more.")
    if params.gate.inconclusive not in {"fail", "warn"}:
        raise ParamsError(f"params.yaml: gate.inconclusive must be fail or warn, found {params.gate.inconclusive!r}.")
    if params.benchmark.flash_attention not in {True, False, "auto"}:
        raise ParamsError(
            f"params.yaml: benchmark.flash_attention must be true, false or auto, "
            f"found {params.benchmark.flash_attention!r}."
        )
    for limits in params.gate.limits.values():
        if limits.min_same_top is not None and not 0 <= limits.min_same_top <= 1:
            raise ParamsError(f"params.yaml: min_same_top is a share from 0 to 1, found {limits.min_same_top:g}.")
        if limits.max_regression is not None and limits.max_regression < 0:
            raise ParamsError(
                f"params.yaml: max_regression is how much loss may grow, 0 or more nats per token, found "
                f"{limits.max_regression:g}."
            )
        if limits.max_slowdown is not None and limits.max_slowdown <= 0:
            raise ParamsError(
                f"params.yaml: max_slowdown is a share above 0 (0.1: a tenth more time), found "
                f"{limits.max_slowdown:g}: equal speeds differ by noise, so no variant would pass."
            )
    if min(params.evaluate.threads, params.benchmark.threads) < 0:
        raise ParamsError(
            f"params.yaml: threads must be 0 (one per physical core) or more, found "
            f"{min(params.evaluate.threads, params.benchmark.threads)}."
        )
    sizes = {
        "corpus.windows": (params.corpus.windows,),
        "corpus.context": (params.corpus.context,),
        "calibration.windows": (params.calibration.windows,),
        "calibration.context": (params.calibration.context,),
        "benchmark.prompt_lengths": params.benchmark.prompt_lengths or (0,),
        "benchmark.decode": (params.benchmark.decode,),
        "benchmark.rounds": (params.benchmark.rounds,),
    }
    for key, values in sizes.items():
        for value in values:
            if value is not None and value < 1:
                raise ParamsError(f"params.yaml: {key} must be positive, found {value}.")


def _check_imatrix(name: str, variant: Variant, calibration: Calibration) -> None:
    if variant.imatrix == "":
        raise ParamsError(f"params.yaml: variants.{name}.imatrix must be true, false or the path of a file.")
    if not variant.imatrix:
        return
    if variant.scheme is None:
        raise ParamsError(f"params.yaml: variants.{name} has an imatrix, but no scheme to build by it.")
    if variant.imatrix is True and calibration.path is None:
        raise ParamsError(
            f"params.yaml: variants.{name} has imatrix: true, but calibration.path is null: name the UTF-8 text to "
            "compute it from there, or the file of an importance matrix instead of true."
        )


def parse(raw: Any, kind: Any, where: str) -> Any:
    """`raw` as `kind`: a dataclass, a mapping or sequence of one type, a union, or a plain type.

    Raises:
        ParamsError: `raw` is not of that kind, said with `where` it stands.
    """
    origin = get_origin(kind)
    if isinstance(kind, type) and hasattr(kind, "__dataclass_fields__"):
        return _parse_dataclass(raw, kind, where)
    if origin is types.UnionType:
        options = get_args(kind)
        if raw is None and type(None) in options:
            return None
        for option in options:
            if isinstance(option, type) and _fits(raw, option):
                return option(raw)
    elif origin is not None and issubclass(origin, tuple) and isinstance(raw, list):
        return tuple(parse(item, get_args(kind)[0], f"{where}[{i}]") for i, item in enumerate(raw))
    elif origin is not None and issubclass(origin, Mapping) and isinstance(raw, dict):
        return {str(key): parse(value, get_args(kind)[1], f"{where}.{key}") for key, value in raw.items()}
    elif isinstance(kind, type) and _fits(raw, kind):
        return kind(raw)
    raise ParamsError(f"params.yaml: {where} must be {_describe(kind)}, found {raw!r}.")


def _fits(raw: Any, kind: type) -> bool:
    if isinstance(raw, bool) or kind is bool:  # YAML's true is an int to Python
        return isinstance(raw, bool) and kind is bool
    return isinstance(raw, int | float) and math.isfinite(raw) if kind is float else isinstance(raw, kind)


def _parse_dataclass(raw: Any, kind: type, where: str) -> Any:
    if not isinstance(raw, dict):
        raise ParamsError(f"params.yaml: {where or 'the file'} must be a mapping, found {raw!r}.")
    hints = get_type_hints(kind)
    known = [f.name for f in fields(kind)]
    for key in raw:
        if key not in known:
            raise ParamsError(f"params.yaml: unknown key {_join(where, str(key))!r}; {suggestion(str(key), known)}")
    values = {key: parse(value, hints[key], _join(where, key)) for key, value in raw.items()}
    for f in fields(kind):
        if f.name not in raw and f.default is MISSING and f.default_factory is MISSING:
            raise ParamsError(f"params.yaml: {_join(where, f.name)} is missing. Give it a value.")
    return kind(**values)


def _join(where: str, key: str) -> str:
    return f"{where}.{key}" if where else key


def _describe(kind: Any) -> str:
    names = {"int": "a whole number", "float": "a number", "str": "text", "bool": "true or false", "NoneType": "null"}
    if get_origin(kind) is types.UnionType:
        return " or ".join(_describe(option) for option in get_args(kind))
    if get_origin(kind) is not None:
        return "a list" if issubclass(get_origin(kind), tuple) else "a mapping"
    return names.get(getattr(kind, "__name__", ""), str(kind))
