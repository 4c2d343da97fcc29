"""config.json of an MLX folder: the checkpoint's own, as mlx-lm reads it, with what says how weights are packed.

Source: mlx-lm 0.32.2 (utils.py: load_config, quantize_model, save_config; models/qwen2.py, qwen3.py: ModelArgs;
models/rope_utils.py: YarnRoPE). The way back is arguments.py.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from pipeline.errors import CheckpointError
from pipeline.formats.mlx.arguments import YARN
from pipeline.formats.mlx.schemes import AFFINE_DEFAULT, FLOATS, PACKINGS, Packing, Scheme
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
        written |= {key: own for key in ("torch_dtype", "dtype") if key in written}
    return json.dumps(_tagged(dict(sorted(written.items()))), indent=4)


def normalised(config: Mapping[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """A checkpoint's config.json with each key that mlx-lm needs and lacks or would read otherwise than transformers.

    Those are what transformers 5 writes elsewhere (rope_parameters, dtype) and what it leaves out for defaults of its
    own. Nothing else changes.

    Raises:
        CheckpointError: mlx-lm has no way to compute what the checkpoint says.
    """
    read = _read(spec)
    changed = {key: value for key, value in read.items() if key not in config or config[key] != value}
    if spec.model_type == "qwen2" and config.get("rope_traditional"):  # of mlx-lm alone
        changed["rope_traditional"] = False
    if spec.dtype is not None and config.get("torch_dtype") != spec.dtype:
        changed["torch_dtype"] = spec.dtype
    wanted = _scaling(spec.rope)
    if _computed(wanted) != _computed(_scaling_read(config, spec)):
        changed["rope_scaling"] = wanted
    return {**config, **changed}


def _read(spec: ModelSpec) -> dict[str, Any]:
    """The keys that mlx-lm's ModelArgs take besides rope_scaling."""
    read = {
        "model_type": spec.model_type,
        "hidden_size": spec.d_model,
        "num_hidden_layers": spec.n_layers,
        "intermediate_size": spec.d_ff,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "rms_norm_eps": spec.norm_eps,
        "vocab_size": spec.vocab_size,
        "max_position_embeddings": spec.context_length,
        "rope_theta": spec.rope.theta,
        "tie_word_embeddings": spec.tied,
    }
    if spec.model_type == "qwen3":
        return read | {"head_dim": spec.head_dim}
    if spec.head_dim * spec.n_heads != spec.d_model:
        raise CheckpointError(
            f"config.json: head_dim is {spec.head_dim}, but mlx-lm takes hidden_size / num_attention_heads, "
            f"{spec.d_model} / {spec.n_heads}, for every {spec.model_type}. MLX cannot hold this checkpoint."
        )
    return read


def _scaling_read(config: Mapping[str, Any], spec: ModelSpec) -> Mapping[str, Any]:
    """What mlx-lm takes as rope_scaling."""
    found = config.get("rope_scaling")
    if found is None and spec.model_type == "qwen3":
        found = config.get("rope_parameters")
    return found or {}


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
    """One packing for all, and of a mixed recipe that of every matrix by its path."""
    if scheme.high is None:
        return _packed(PACKINGS[scheme.base])
    paths = {p.tensor.name.removesuffix(".weight"): PACKINGS[p.encoding] for p in planned if p.encoding in PACKINGS}
    return _packed(AFFINE_DEFAULT) | {path: _packed(packing) for path, packing in paths.items()}


def _packed(packing: Packing) -> dict[str, Any]:
    return {"group_size": packing.group, "bits": packing.bits, "mode": packing.mode}


def _tagged(value: Any) -> Any:
    """Infinity and NaN as transformers writes them: JSON has neither."""
    if isinstance(value, float) and not math.isfinite(value):
        return {"__float__": "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"}
    if isinstance(value, dict):
        return {key: _tagged(item) for key, item in value.items()}
    return [_tagged(item) for item in value] if isinstance(value, list) else value
