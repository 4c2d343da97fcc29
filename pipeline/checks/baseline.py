"""reports/baseline.json: what was accepted, of several engines and machines side by side."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from pipeline.checks.identity import IDENTITY
from pipeline.checks.record import ENGINE, Record, engine_key
from pipeline.errors import PipelineError
from pipeline.files import read_object, write_text

VERSION = 1
"""Of the file. Another one is refused: what it would say is not known."""

VALUES_PER_LINE = 5
AGAIN = "Take the committed file (git checkout), or accept anew: remove it and run `quantgate baseline accept`."


@dataclass(frozen=True)
class Baseline:
    """Records by variant, one for each engine and instruction set; speeds by the fingerprint of their machine.

    `speeds`: short id of the machine -> machine, power_source, timing and, by variant, `tensors` (their hash), engine,
    prefill and decode as measurements.json has them.
    """

    records: Mapping[str, tuple[Record, ...]] = field(default_factory=dict)
    speeds: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def load(path: Path) -> Baseline | None:
    """What `save` left; None where there is no such file.

    Raises:
        PipelineError: a file that cannot be read, of another version, with a key that is unknown, missing or of
            another type, with a number that is not finite, or two records of a variant by one engine.
    """
    if not path.exists():
        return None
    raw = read_object(path)
    if (version := raw.get("version")) != VERSION:
        raise PipelineError(
            f"{path} is of version {version}, this quantgate reads version {VERSION}. Use the quantgate that wrote it, "
            "or accept anew: remove it and run `quantgate baseline accept`."
        )
    try:
        _keys(raw, ("version", "variants", "speeds"), "the file")
        _check_finite(raw, "")
        records = {name: _records(kept, name) for name, kept in _is(dict, raw["variants"], "variants").items()}
        speeds = _speeds(_is(dict, raw["speeds"], "speeds"))
    except ValueError as problem:
        raise PipelineError(f"{path} is not as this version writes it ({problem}). {AGAIN}") from problem
    return Baseline(records, speeds)


def of_engine(records: Iterable[Record], now: Record) -> Record | None:
    """The record that a run by the same engine is compared with, if any."""
    key = engine_key(now.engine)
    return next((record for record in records if engine_key(record.engine) == key), None)


def save(path: Path, baseline: Baseline) -> None:
    """Write all of it or nothing. Keys keep their order, so that a diff shows what changed; numbers are exact.

    Raises:
        OutputError: it cannot be written.
        ValueError: a number that is not finite.
    """
    plain = {
        "version": VERSION,
        "variants": {name: [asdict(record) for record in records] for name, records in baseline.records.items()},
        "speeds": baseline.speeds,
    }
    write_text(path, _text(plain) + "\n")


def _text(value: Any, indent: str = "") -> str:
    """JSON with a line for each key, a line for a few numbers of a list."""
    inner = indent + "  "
    if isinstance(value, Mapping) and value:
        items: Iterable[str] = (f"{inner}{json.dumps(key)}: {_text(item, inner)}" for key, item in value.items())
        return "{\n" + ",\n".join(items) + f"\n{indent}}}"
    if isinstance(value, list | tuple) and value:
        shown = [_text(item, inner) for item in value]
        step = 1 if isinstance(value[0], Mapping) else VALUES_PER_LINE
        items = (inner + ", ".join(shown[at : at + step]) for at in range(0, len(shown), step))
        return "[\n" + ",\n".join(items) + f"\n{indent}]"
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


TEXTS = ("files", "tensors")
"""Keys of a record that hold texts by name."""
SPEED = ("machine", "power_source", "timing", "variants")
SPEED_VARIANT = ("tensors", "engine", "prefill", "decode")


def _records(raw: Any, where: str) -> tuple[Record, ...]:
    records = tuple(_record(item, f"{where}, record {i}") for i, item in enumerate(_is(list, raw, where), 1))
    if len({engine_key(record.engine) for record in records}) < len(records):
        raise ValueError(f"{where}: two records of one engine")
    return records


def _record(raw: Any, where: str) -> Record:
    _keys(_is(dict, raw, where), [f.name for f in fields(Record)], where)
    for key in ("format", "scheme", *(["path"] if raw["path"] is not None else [])):
        _is(str, raw[key], f"{where}: {key}")
    for key in TEXTS:
        for name, text in _is(dict, raw[key], f"{where}: {key}").items():
            _is(str, text, f"{where}: {key}: {name}")
    for key, known in (("engine", ENGINE), ("identity", IDENTITY)):
        _keys(_is(dict, raw[key], f"{where}: {key}"), known, f"{where}: {key}")
    for key, kind in (("context", int), ("windows", int), ("source", dict)):
        _is(kind, raw["identity"][key], f"{where}: identity: {key}")
    source = f"{where}: identity: source"
    _keys(raw["identity"]["source"], ("name", "revision", "files"), source)
    _is(dict, raw["identity"]["source"]["files"], f"{source}: files")
    losses = _is(list, raw["window_nll"], f"{where}: window_nll")
    wrong = [loss for loss in losses if type(loss) not in {float, int}]
    if wrong or not losses or len(losses) != raw["identity"]["windows"]:
        raise ValueError(f"{where}: window_nll: expected {raw['identity']['windows']} numbers, found {len(losses)}")
    return Record(**{**raw, "window_nll": tuple(map(float, losses))})


def _speeds(raw: Mapping[str, Any]) -> dict[str, Any]:
    for machine, speed in raw.items():
        where = f"speeds: {machine}"
        _keys(_is(dict, speed, where), SPEED, where)
        for name, timed in _is(dict, speed["variants"], where).items():
            _keys(_is(dict, timed, f"{where}: {name}"), SPEED_VARIANT, f"{where}: {name}")
    return dict(raw)


def _keys(raw: Mapping[str, Any], known: Iterable[str], where: str) -> None:
    if wrong := raw.keys() ^ {*known}:
        raise ValueError(f"{where}: {', '.join(sorted(wrong))} missing or unknown")


def _is(kind: type, value: Any, where: str) -> Any:
    if type(value) is not kind:
        raise ValueError(f"{where}: expected {kind.__name__}, found {str(value)[:80]}")
    return value


def _check_finite(value: Any, where: str) -> None:
    """JSON has no NaN, Python reads it all the same."""
    for name, number in _numbers(value, where):
        if not math.isfinite(number):
            raise ValueError(f"{name.removeprefix(': ')}: a number that is not finite")


def _numbers(value: Any, where: str) -> Iterator[tuple[str, float]]:
    if isinstance(value, dict):
        for key, item in value.items():
            yield from _numbers(item, f"{where}: {key}")
    elif isinstance(value, list):
        for item in value:
            yield from _numbers(item, where)
    elif isinstance(value, float):
        yield where, value
