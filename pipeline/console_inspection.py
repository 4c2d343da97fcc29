"""What `quantgate inspect` prints: a checkpoint, what each scheme would weigh, what schemes do to tensors, problems."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from rich.markup import escape
from rich.table import Table
from rich.text import Text

from pipeline.console_tables import Listed, add_row, new_table, show
from pipeline.report.text import binary, effective, experts, megabytes
from pipeline.types import ExpertUse


def inspection(found: Mapping[str, Any], plans: Sequence[str] = ()) -> None:
    """`plans` are the formats of which all schemes' plans are shown."""
    show(_facts(found))
    for part in found["dropped"]:
        show("", f"[yellow]dropped[/yellow] {escape(_dropped(part))}")
    if found["schemes"]:
        show("", _weights(found["schemes"]))
    for reason, names in _refused(found["schemes"]).items():
        show("", f"[yellow]refused[/yellow] {', '.join(names)}: {escape(reason)}")
    if found["plan"]:
        show("", _plan(found["plan"]))
        for line in _numbered(found["plan"], found["architecture"]):
            show("", line)
    for format_name in plans:
        show("", _plans({n: s for n, s in found["schemes"].items() if n.startswith(f"{format_name}/")}))
    for problem in found["problems"]:
        show("", f"[red]problem[/red] {escape(problem)}")


def _facts(found: Mapping[str, Any]) -> Table:
    table = new_table("", "")
    table.show_header = False
    add_row(table, "checkpoint", found["checkpoint"])
    dtypes = f"({', '.join(found['dtypes'])})" if found["dtypes"] else ""
    if (imatrix := found["imatrix"]) is not None:
        add_row(table, "imatrix", f"{imatrix['file']}: {imatrix['tensors']} matrices")
        if imatrix["experts"]:
            add_row(table, "", experts([ExpertUse(**use) for use in imatrix["experts"]]))
    if found["architecture"] is None:
        add_row(table, "dtypes", dtypes.strip("()") or "-")
        return table
    shape, counted = found["architecture"], found["numbers"]
    add_row(table, "weights", f"{found['weights']:,} in {found['tensors']} tensors {dtypes}".rstrip())
    if (routed := shape["experts"]) is not None:
        add_row(
            table, "active", f"{counted['active_weights']:,}: {routed['used']} of {routed['count']} experts a token"
        )
    for label, text in (*_caches(shape, counted), *_shape(shape, counted)):
        add_row(table, label, text)
    return table


def _caches(shape: Mapping[str, Any], counted: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Of one token, and of the whole context with the state that linear layers keep."""
    one, whole = (
        ", ".join(f"{binary(cache[key])} in {kind}" for kind, cache in counted["caches"].items())
        for key in ("per_token", "context")
    )
    where = f" ({counted['attention_layers']} of {counted['layers']} layers)" if counted["state_bytes"] else ""
    yield "KV of a token", one + where
    if counted["state_bytes"]:
        yield "state", f"{binary(counted['state_bytes'])} of {shape['linear_layers']} Gated DeltaNet layers, in float32"
    yield "whole context", whole + (", state included" if counted["state_bytes"] else "")


def _shape(shape: Mapping[str, Any], counted: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for key, value in shape.items():
        if value is None or (key in ("linear_layers", "mtp_layers") and not value):
            continue
        if key == "experts":
            every = f", and one of width {value['shared_d_ff']} that all take" if value["shared_d_ff"] else ""
            yield key, f"{value['count']} of width {value['d_ff']}, {value['used']} a token{every}"
        elif key == "delta":
            heads = (f"{value[f'{part}_heads']} heads of {value[f'{part}_dim']}" for part in ("k", "v"))
            yield key, "K {}, V {}, convolution over {} tokens".format(*heads, value["conv"])
        elif key == "mtp_layers":
            yield key, f"{value}, of {counted['mtp_weights']:,} weights beside those above"
        else:
            yield key, {True: "yes", False: "no"}[value] if isinstance(value, bool) else str(value)


def _dropped(part: Mapping[str, Any]) -> str:
    formats = ", ".join(part["formats"])
    return f"{part['part']}: {part['tensors']} tensors, {part['weights']:,} weights, by {formats}: {part['reason']}"


def _weights(schemes: Mapping[str, Any]) -> Table:
    table = new_table("scheme", "tensors, MB", "bits/weight", "effective types", right=("tensors, MB", "bits/weight"))
    for _, rows in groupby(schemes.items(), key=lambda row: row[0].partition("/")[0]):
        if table.row_count:
            table.add_row()
        for name, scheme in rows:
            if "refused" in scheme:
                add_row(table, name, "-", "-", Text("refused", "yellow"))
                continue
            size, types = megabytes(scheme["tensor_bytes"]), effective(scheme["effective_types"]).split(", ")
            add_row(table, name, size, f"{scheme['bits_per_weight']:.2f}", Listed(types))
    return table


def _refused(schemes: Mapping[str, Any]) -> dict[str, list[str]]:
    """Schemes by the reason, which may name the scheme first. Those that only count otherwise are told once, without
    what is counted.
    """
    alike: dict[str, dict[str, list[str]]] = {}
    for name, scheme in schemes.items():
        if "refused" in scheme:
            reason = scheme["refused"].removeprefix(name.partition("/")[2] + " ")
            first, last = reason.splitlines()[0], reason.splitlines()[-1]
            key = reason if not re.search(r"\d", first) else re.sub(r" for \d+ .*", f".\n{last}", first)
            alike.setdefault(key, {}).setdefault(reason, []).append(name)
    return {
        next(iter(reasons)) if len(reasons) == 1 else key: [name for names in reasons.values() for name in names]
        for key, reasons in alike.items()
    }


def _plan(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = new_table("role", "layers", "shape", "type", "why")
    for row in rows:
        add_row(table, row["role"], row["layers"], " x ".join(map(str, row["shape"])), row["type"], row["reason"])
    return table


def _numbered(rows: Sequence[Mapping[str, Any]], shape: Mapping[str, Any]) -> Iterator[str]:
    """Which layers of a plan lie behind the model's own."""
    last = max(int(number) for row in rows for number in re.findall(r"\d+", row["layers"]))
    first = shape["n_layers"]
    if last == first:
        yield f"Layer {first} is the MTP layer, which guesses a further token."
    elif last > first:
        yield f"Layers {first}-{last} are the MTP layers, which guess further tokens."


def _plans(schemes: Mapping[str, Any]) -> Table:
    """What each scheme makes of the tensors of each role; of which it treats in two ways, with how many."""
    table = new_table("scheme", "type", "tensors")
    for name, scheme in schemes.items():
        if "refused" in scheme:
            continue
        counts: dict[str, dict[str, int]] = {}
        for row in scheme["plan"]:
            kinds = counts.setdefault(row["role"], {})
            kinds[row["type"]] = kinds.get(row["type"], 0) + row["tensors"]
        label = name
        for kind in scheme["effective_types"]:
            of_kind = {role: kinds for role, kinds in counts.items() if kind in kinds}
            roles = [role if len(kinds) == 1 else _share(role, kinds, kind) for role, kinds in of_kind.items()]
            add_row(table, label, kind, Listed(roles))
            label = ""
    return table


def _share(role: str, kinds: Mapping[str, int], kind: str) -> str:
    return f"{role} ({kinds[kind]} of {sum(kinds.values())})"
