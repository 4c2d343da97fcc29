"""config.json of an MLX folder: the checkpoint's own, as mlx-lm reads it, with what says how weights are packed.

Source: mlx-lm 0.32.2 (utils.py: load_config, quantize_model, save_config; models/rope_utils.py: YarnRoPE). The way
back is arguments.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.formats.mlx.arguments import YARN, rope
from pipeline.formats.mlx.arrange import ROUTERS, is_packable
from pipeline.formats.mlx.schemes import AFFINE_DEFAULT, FLOATS, PACKINGS, Packing, Scheme
from pipeline.models import MODEL_TYPES
from pipeline.models.readers import DELTA, EVERY_LAYER, MlxLm
from pipeline.types import ModelSpec, Planned, Rope

DROPPED = ("_name_or_path", "vision_config", "quantization", "quantization_config")
"""mlx-lm drops the first two as well; where there are the others, they are empty (refuse_quantized)."""

CODE = ("model_file", "quantize_activations")
"""What has mlx-lm run something else than the checkpoint's architecture; transformers knows neither."""


def config_text(
    config: Mapping[str, Any],
    generation: Mapping[str, Any],
    spec: ModelSpec,
    scheme: Scheme,
    planned: Sequence[Planned],
) -> str:
    """config.json as mlx_lm.convert writes it, of a checkpoint's config.json and generation_config.json.

    Unlike there, the dtype is that of the weights where a scheme casts them: what casts to a config's dtype, as
    mlx_lm.convert and transformers do, would undo it unseen.

    Raises:
        CheckpointError: mlx-lm has no way to compute what the checkpoint says.
    """
    written = {key: value for key, value in normalised(config, spec).items() if key not in (*DROPPED, *CODE)}
    if (stops := generation.get("eos_token_id")) not in (None, []):  # mlx-lm itself would go on behind an id 0
        written["eos_token_id"] = stops
    if scheme.quantized:
        written["quantization"] = written["quantization_config"] = _quantization(scheme, planned)
    elif spec.dtype is not None and FLOATS[spec.dtype] != scheme.base:
        own = next(name for name, encoding in FLOATS.items() if encoding == scheme.base)
        for part in (written, written.get("text_config") or {}):
            part |= {key: own for key in ("torch_dtype", "dtype") if key in part}
    return json.dumps(_tagged(dict(sorted(written.items()))), indent=4)


def normalised(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """A checkpoint's config.json with each key that mlx-lm needs and lacks or would read otherwise than transformers;
    of a larger model the text part's alone, or in its text_config where mlx-lm looks there.

    Those are what transformers 5 writes elsewhere (rope_parameters, dtype) or under another name (num_local_experts,
    layer_types), and what it leaves out for defaults of its own. Nothing else changes.

    Raises:
        CheckpointError: mlx-lm has no way to compute what the checkpoint says.
    """
    reader = MODEL_TYPES[spec.model_type].mlx_lm
    outer, text = {key: value for key, value in config.items() if key != "text_config"}, config.get("text_config")
    found = outer if text is None else {key: value for key, value in text.items() if key not in (*DROPPED, *CODE)}
    if text is not None and not reader.nested:
        found = {**outer, **found}
    read = _read(spec, reader, found)
    theirs = {**reader.defaults, **found}
    changed = {key: value for key, value in read.items() if key not in theirs or theirs[key] != value}
    if reader.traditional and found.get("rope_traditional"):  # of mlx-lm alone
        changed["rope_traditional"] = False
    changed |= _rope(spec, reader, found)
    whole: dict[str, Any] = {"model_type": spec.model_type}
    if spec.dtype is not None and config.get("torch_dtype") != spec.dtype:
        whole["torch_dtype"] = spec.dtype
    if text is not None and reader.nested:
        if "eos_token_id" in text and "eos_token_id" not in outer:  # mlx-lm looks for it there alone
            whole["eos_token_id"] = text["eos_token_id"]
        return {**outer, "text_config": {**found, **changed}, **whole}
    return {**found, **changed, **whole}


def _read(spec: ModelSpec, reader: MlxLm, found: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that mlx-lm's ModelArgs take, but what the rope is scaled by.

    Raises:
        CheckpointError: it takes another value than the checkpoint's whatever config.json says.
    """
    values: dict[str, Any] = {
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "intermediate_size": spec.d_ff,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_length,
        "rope_theta": spec.rope.theta,
        "partial_rotary_factor": _share(spec, found.get("partial_rotary_factor")),
        "tie_word_embeddings": spec.tied,
    }
    if (experts := spec.experts) is not None:
        values |= {
            "intermediate_size": spec.d_ff or experts.d_ff,  # of layers without experts, and there are none
            "num_experts": experts.count,
            "num_experts_per_tok": experts.used,
            "moe_intermediate_size": experts.d_ff,
            "shared_expert_intermediate_size": experts.shared_d_ff,
            "norm_topk_prob": experts.norm_topk,
            **EVERY_LAYER,
        }
    if (delta := spec.delta) is not None:
        sizes = (delta.conv, delta.k_heads, delta.v_heads, delta.k_dim, delta.v_dim)
        values |= {**dict(zip(DELTA, sizes, strict=True)), "full_attention_interval": _interval(spec)}
    for key, fixed in reader.fixed.items():
        _check_fixed(spec, key, values[key], fixed)
    return {key: values[key] for key in (*reader.required, *reader.defaults)}


def _check_fixed(spec: ModelSpec, key: str, value: Any, fixed: Any) -> None:
    is_same, takes = value == fixed, json.dumps(fixed)
    if fixed is None:
        is_same = value * spec.n_heads == spec.d_model
        takes = f"hidden_size / num_attention_heads, {spec.d_model} / {spec.n_heads},"
    if not is_same:
        raise CheckpointError(
            f"config.json: {key} is {json.dumps(value)}, but mlx-lm takes {takes} for every {spec.model_type}. "
            "MLX cannot hold this checkpoint."
        )


def _interval(spec: ModelSpec) -> int:
    """Every how many layers one has attention.

    Raises:
        CheckpointError: they do not lie as regularly.
    """
    attention = [layer for layer in range(spec.n_layers) if layer not in spec.linear]
    interval = attention[0] + 1 if attention else 0
    if not attention or attention != [*range(interval - 1, spec.n_layers, interval)]:
        raise CheckpointError(
            f"config.json: layer_types: full attention in layers {', '.join(map(str, attention)) or '(none)'}, counted "
            "from 0, but mlx-lm has it in every n-th layer (full_attention_interval). MLX cannot hold this checkpoint."
        )
    return interval


def _share(spec: ModelSpec, found: Any) -> float:
    """The share of a head that is rotated: the found one where mlx-lm rotates as much by it."""
    dims = spec.head_dim if spec.rope.dims is None else spec.rope.dims
    if isinstance(found, int | float) and int(spec.head_dim * found) == dims:
        return found
    share = dims / spec.head_dim
    return share if int(spec.head_dim * share) == dims else math.nextafter(share, 1)


def _rope(spec: ModelSpec, reader: MlxLm, found: Mapping[str, Any]) -> dict[str, Any]:
    """What to change for mlx-lm to scale the rope, and to take the rest of it where that lies in the same place.

    Raises:
        CheckpointError: a scaling that mlx-lm does not compute.
    """
    if reader.rope == "nowhere":
        if spec.rope.scaling is not None:
            raise CheckpointError(
                f"config.json: rope scaling is {spec.rope.scaling}, but mlx-lm scales no rope of {spec.model_type}: "
                "the artifact would run wrong. MLX cannot hold this checkpoint."
            )
        return {"rope_scaling": None} if found.get("rope_scaling") else {}  # a file that scales none may refuse any
    wanted, theirs = _scaling(spec.rope), rope(found, reader)
    is_same = _computed(wanted) == _computed(theirs["rope_scaling"] or {})
    if reader.rope != "rope_parameters":
        return {} if is_same else {"rope_scaling": wanted}
    own = {"rope_theta": spec.rope.theta, "partial_rotary_factor": _share(spec, theirs["partial_rotary_factor"])}
    if is_same and all(theirs[key] == value for key, value in own.items()):
        return {}
    return {"rope_parameters": {**wanted, **own, "mrope_section": [*spec.rope.sections], "mrope_interleaved": True}}


def _scaling(rope: Rope) -> dict[str, Any]:
    """rope_scaling for every reader: older ones know it by `type`, and mlx-lm the attention factor by `mscale`.

    Raises:
        CheckpointError: an attention factor that no mscale gives.
    """
    kind = rope.scaling or "default"
    scaling: dict[str, Any] = {"type": kind, "rope_type": kind}
    if kind == "default":
        return scaling
    scaling["factor"] = rope.factor
    if kind != "yarn":
        return scaling
    named = {"beta_fast": rope.beta_fast, "beta_slow": rope.beta_slow, "attention_factor": rope.attention_factor}
    scaling["original_max_position_embeddings"] = rope.original_context
    scaling |= {key: value for key, value in named.items() if value is not None}
    if rope.attention_factor is None:
        return scaling
    if rope.factor > 1:  # YarnRoPE scales by 0.1 * mscale * ln(factor) + 1
        scaling["mscale"] = (rope.attention_factor - 1) / (0.1 * math.log(rope.factor))
    elif rope.attention_factor != 1:
        raise CheckpointError(
            f"config.json: rope scaling attention_factor is {rope.attention_factor:g}, but mlx-lm takes 1 where the "
            "factor is 1: the artifact would run wrong. MLX cannot hold this checkpoint."
        )
    return scaling


def _computed(scaling: Mapping[str, Any]) -> tuple[Any, ...]:
    """What mlx-lm's initialize_rope makes of rope_scaling."""
    kind = scaling.get("type") or scaling.get("rope_type", "default")
    keys = {"linear": ["factor"], "yarn": ["factor", *YARN]}.get(kind, [])
    return kind, *(scaling.get(key, YARN.get(key)) for key in keys)


def _quantization(scheme: Scheme, planned: Sequence[Planned]) -> dict[str, Any]:
    """One packing for all, and by their paths those of routers, or of a mixed recipe those of all matrices."""
    matrices = {p.tensor.name.removesuffix(".weight"): p for p in planned if is_packable(p.tensor)}
    own: dict[str, Any] = {}
    for path, p in matrices.items():
        if (packing := PACKINGS.get(p.encoding)) is None:
            own[path] = False
        elif scheme.high is not None:
            own[path] = _packed(packing)
        elif p.tensor.role in ROUTERS:  # as mlx-lm's predicates have it: affine is what no mode means
            own[path] = {"group_size": packing.group, "bits": packing.bits}
    return _packed(AFFINE_DEFAULT if scheme.high else PACKINGS[scheme.base]) | own


def _packed(packing: Packing) -> dict[str, Any]:
    return {"group_size": packing.group, "bits": packing.bits, "mode": packing.mode}


def _tagged(value: Any) -> Any:
    """Infinity and NaN as transformers writes them: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: _tagged(item) for key, item in value.items()}
    return [_tagged(item) for item in value] if isinstance(value, list) else value
