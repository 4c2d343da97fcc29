"""Rotary settings out of config.json, under the three spellings in which checkpoints have them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipeline.models.settings import SIZES, is_number, is_positive
from pipeline.types import Rope

ROPE_KEYS = {
    *("type", "rope_type", "rope_theta", "factor", "original_max_position_embeddings"),
    *("attention_factor", "beta_fast", "beta_slow"),
}


THETA = 10_000.0
"""Where config.json says none."""

SECTIONED = {"partial_rotary_factor", "mrope_section", "mrope_interleaved"}
"""Keys of models that rotate a part of each head, or by several positions."""


def read_rope(
    config: dict[str, Any], *, partial: float | None = None, sections: tuple[int, ...] = ()
) -> tuple[Rope, list[str]]:
    """Rotary settings from `rope_theta` with `rope_scaling.type` or `.rope_type`, or from transformers 5's
    `rope_parameters`; and each scaling, or key or value of one, that is not computed: then the settings are none.

    `partial` is the share of `head_dim` that is rotated where config.json does not say; None for models that rotate
    all. `sections` are those of models that have them, where config.json does not say.
    """
    parameters, scaling = (config.get(key) or {} for key in ("rope_parameters", "rope_scaling"))
    given = (("rope_parameters", parameters), ("rope_scaling", scaling))
    if wrong := [(key, found) for key, found in given if not isinstance(found, dict)]:
        return Rope(THETA), [f"{key} must be an object or null, found {found!r}" for key, found in wrong]
    beside = parameters if scaling else {}  # of which transformers reads nothing then
    scaling = scaling or parameters
    thetas = [found["rope_theta"] for found in (scaling, config) if found.get("rope_theta") is not None]
    theta = thetas[0] if thetas else THETA
    problems = [] if is_number(theta) else [f"rope_theta must be a number above 0, found {theta!r}"]
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    both = {**config, **scaling}
    taken = {**both, "rope_theta": theta, "rope_type": kind, "type": kind}
    problems += (
        f"rope_parameters says {key} {value!r}, but rope_scaling takes its place, without it: leave one of them"
        for key, value in beside.items()
        if value is not None and taken.get(key) != value
    )
    if kind in ("default", "yarn", "linear"):
        more = SECTIONED if partial else set()
        problems += (f"rope scaling {kind}: {problem}" for problem in _scaling_problems(scaling, kind, more))
    else:
        problems.append(f"rope scaling {kind!r} is not supported; known: default, linear, yarn")
    share: Any = both.get("partial_rotary_factor", partial)
    own = both.get("mrope_section", sections) if sections else ()
    if partial is not None and not (is_number(share) and share <= 1):
        problems.append(f"partial_rotary_factor must be above 0 and at most 1, found {share!r}")
    if sections and not (isinstance(own, list | tuple) and 3 <= len(own) <= 4 and all(_is_whole(n) for n in own)):
        problems.append(f"mrope_section must be three or four whole numbers, found {own!r}")
    if sections and both.get("mrope_interleaved", True) is not True:
        problems.append(f"mrope_interleaved must be true, found {both['mrope_interleaved']!r}")
    head_dim = config.get("head_dim")
    # a head_dim that is no size is told with the sizes
    dims = int(head_dim * float(share)) if partial is not None and is_positive(head_dim) and is_number(share) else None
    if dims is not None and (dims < 2 or dims % 2):
        problems.append(f"partial_rotary_factor {share} of head_dim {head_dim} must be an even number, found {dims}")
    if problems:
        return Rope(THETA), problems
    if kind == "default":
        return Rope(float(theta), dims=dims, sections=tuple(own)), []
    return Rope(
        float(theta),
        dims=dims,
        sections=tuple(own),
        scaling=kind,
        factor=float(scaling["factor"]),
        original_context=scaling.get("original_max_position_embeddings") or config.get("max_position_embeddings"),
        attention_factor=scaling.get("attention_factor"),
        beta_fast=scaling.get("beta_fast"),
        beta_slow=scaling.get("beta_slow"),
    ), []


def _scaling_problems(scaling: dict[str, Any], kind: str, more: set[str]) -> Iterator[str]:
    given = {key: value for key, value in scaling.items() if value is not None}
    instead = {"mscale"} if "attention_factor" in given else set()  # of which transformers takes the latter
    allowed = ROPE_KEYS | more | instead
    for key, value in given.items():
        if key not in allowed and (key, value) != ("partial_rotary_factor", 1.0):
            yield f"{key} is not supported"
    if kind == "default":
        return
    factor, original = given.get("factor"), given.get("original_max_position_embeddings", 1)
    if not is_number(factor) or factor < 1:
        yield f"factor must be a number of at least 1, found {factor!r}"
    if not is_positive(original) or original > SIZES["max_position_embeddings"]:
        yield f"original_max_position_embeddings must be a positive integer, found {original!r}"
    for key in ("attention_factor", "beta_fast", "beta_slow"):
        if key in given and not is_number(given[key]):
            yield f"{key} must be a number above 0, found {given[key]!r}"


def _is_whole(number: object) -> bool:
    return type(number) is int and number >= 0
