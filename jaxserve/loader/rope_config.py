"""The rope entries of config.json, old spelling (`rope_theta`, `rope_scaling`) and new (`rope_parameters`) -> RopeConfig."""

from __future__ import annotations

import logging
from typing import Any

from jaxserve.config import RopeConfig
from jaxserve.layers.rope import KINDS

logger = logging.getLogger(__name__)

DEFAULT_THETA = 10000.0
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
_OPTIONAL = {
    "llama3": ("original_max_position_embeddings",),
    "yarn": ("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim", "truncate"),
    "longrope": ("original_max_position_embeddings", "attention_factor", "factor"),
}
_LISTS = ("short_factor", "long_factor")


def parse_rope(config: dict[str, Any], where: str, head_dim: int, max_positions: int) -> RopeConfig:
    """RopeConfig of a config.json's content; ValueError names the unknown kind or the missing or wrong field of its entry."""
    key = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
    entry = config.get(key) or {}
    entry = entry.get("full_attention", entry) if isinstance(entry, dict) else entry
    if not isinstance(entry, dict):
        raise ValueError(f"{where}: {key} is {entry!r}; it must be an object")
    kind = entry.get("rope_type", entry.get("type", "default"))
    if kind not in KINDS:
        raise ValueError(f"{where}: {key} has rope_type {kind!r}, which is not supported; supported: {', '.join(KINDS)}")
    theta = _number(entry.get("rope_theta", config.get("rope_theta", DEFAULT_THETA)), f"{where}: rope_theta")
    partial = entry.get("partial_rotary_factor", config.get("partial_rotary_factor"))
    if partial not in (None, 1, 1.0):
        raise ValueError(f"{where}: partial_rotary_factor is {partial!r}; only 1 (the whole head is rotated) is supported")
    known = (*_REQUIRED[kind], *_OPTIONAL.get(kind, ()))
    fields = {name: _field(name, entry[name], f"{where}: {key}.{name}", head_dim) for name in known if entry.get(name) is not None}
    for name in _REQUIRED[kind]:
        if name not in fields:
            raise ValueError(f"{where}: {key} has rope_type {kind!r} but lacks {name}; add it")
    unknown = sorted(set(entry) - set(known) - {"rope_type", "type", "rope_theta", "partial_rotary_factor"})
    if unknown:
        logger.warning("%s: %s of rope_type %r ignores %s", where, key, kind, ", ".join(unknown))
    if "original_max_position_embeddings" in known:
        outer = config.get("original_max_position_embeddings")  # as in Transformers, this place wins over the entry's
        original = outer if outer is not None else fields.get("original_max_position_embeddings", max_positions)
        fields["original_max_position_embeddings"] = int(_number(original, f"{where}: original_max_position_embeddings"))
    if kind == "llama3" and fields["high_freq_factor"] <= fields["low_freq_factor"]:
        raise ValueError(f"{where}: {key}.high_freq_factor must be above low_freq_factor ({fields['low_freq_factor']})")
    return RopeConfig(theta=theta, kind=kind, **fields)


def _field(name: str, value: Any, where: str, head_dim: int) -> Any:
    if name == "truncate":
        if not isinstance(value, bool):
            raise ValueError(f"{where} is {value!r}; it must be true or false")
        return value
    if name not in _LISTS:
        return _number(value, where)
    if not isinstance(value, list) or len(value) != head_dim // 2:
        size = f"a list of {len(value)}" if isinstance(value, list) else repr(value)
        raise ValueError(f"{where} is {size}; it must be a list of {head_dim // 2} numbers, one for each rotary pair")
    return tuple(_number(x, where) for x in value)


def _number(value: Any, where: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise ValueError(f"{where} is {value!r}; it must be a number above 0")
    return float(value)
