"""Frozen configuration, one class per layer of the engine, composed in EngineConfig; command-line flags are made from the fields."""

from __future__ import annotations

import dataclasses
import re
from dataclasses import dataclass, field
from typing import Any, cast

DTYPES = ("auto", "float32", "bfloat16", "float16")
# "auto", and pallas_kernels.BACKENDS
ATTENTION_BACKENDS = ("auto", "xla", "numba", "reference", "mosaic_gpu", "mosaic_tpu", "mosaic_tpu_lanes")


def option(default: Any, help: str, **metadata: Any) -> Any:
    """A dataclass field that is also a flag: `help` is its one-line text, `choices` and `least` limit it, `secret` hides it."""
    return field(default=default, repr=not metadata.get("secret", False), metadata={"help": help, **metadata})


class Checked:
    """A config class whose values are checked on construction, before anything is loaded: ValueError names field, value and limit."""

    def __post_init__(self) -> None:
        for f in dataclasses.fields(cast(Any, self)):  # the subclasses are dataclasses
            value, choices, least = getattr(self, f.name), f.metadata.get("choices"), f.metadata.get("least")
            if choices is not None and value not in choices:
                raise ValueError(f"{f.name} is {value!r}; give one of: {', '.join(choices)}")
            if least is not None and value is not None:
                for number in value if isinstance(value, tuple) else (value,):
                    if isinstance(number, bool) or not isinstance(number, int) or number < least:
                        raise ValueError(f"{f.name} is {value!r}; give an integer of at least {least}")


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (arXiv:2104.09864) and how its frequencies are scaled for long contexts.

    `kind` is one of default, linear, dynamic, llama3, yarn, longrope; the other fields carry the names of Hugging Face's
    `rope_parameters` and are None where the kind does not use them.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None


@dataclass(frozen=True)
class ModelConfig:
    """The architecture of one decoder-only model, read from config.json or from GGUF metadata."""

    architecture: str  # key of jaxserve.models.registry, e.g. "LlamaForCausalLM"
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float = 1e-6
    rope: RopeConfig = RopeConfig()
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    head_bias: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # the union of all declared end-of-sequence ids


@dataclass(frozen=True)
class LoadConfig(Checked):
    """What to load and in which number format."""

    model: str = option("", "directory, .gguf file, Orbax checkpoint or hub id of the model", positional=True)
    tokenizer: str | None = option(None, "directory or hub id of the tokenizer; default: the model's own")
    dtype: str = option("auto", "dtype of weights and activations; auto: float32 on CPU, bfloat16 elsewhere", choices=DTYPES)
    generation_config: str = option(
        "auto", "auto: default sampling from the model's generation_config.json; none: ignore it", choices=("auto", "none")
    )


@dataclass(frozen=True)
class CacheConfig(Checked):
    """The page pool."""

    page_size: int | None = option(None, "tokens a page; default: what the attention backend likes, 16, on TPUs 128", least=8)
    num_pages: int | None = option(None, "pages in the pool; default: what the memory allows", least=1)
    kv_cache_memory: int | None = option(None, "bytes for the pool; default: 1 GiB on CPU, else by --memory-fraction", least=1)
    memory_fraction: float = option(0.9, "share of the accelerator's memory for weights, programs and pool together")
    kv_cache_dtype: str = option("auto", "dtype of the pool; auto: the model's dtype", choices=DTYPES)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.page_size is not None and self.page_size % 8:
            raise ValueError(f"page_size is {self.page_size}; give a multiple of 8")
        if not 0 < self.memory_fraction <= 1:
            raise ValueError(f"memory_fraction is {self.memory_fraction}; give a number above 0 and at most 1")


@dataclass(frozen=True)
class SchedulerConfig(Checked):
    """Limits of one step, and the shapes that programs are built for."""

    max_model_len: int | None = option(None, "most tokens of one request, prompt and output; default: the model's own limit", least=1)
    max_num_seqs: int = option(128, "most requests that run at once", least=1)
    max_num_batched_tokens: int = option(512, "most tokens in one step", least=1)
    max_num_queued_requests: int | None = option(None, "most requests that wait; beyond it new ones get 503; default: no limit", least=0)
    decode_buckets: tuple[int, ...] | None = option(None, "rows of the decode programs; default: derived from max_num_seqs", least=1)
    token_buckets: tuple[int, ...] | None = option(
        None, "tokens of the mixed programs; default: derived from max_num_batched_tokens", least=1
    )


@dataclass(frozen=True)
class ParallelConfig(Checked):
    """The mesh: axes ("data", "tensor")."""

    tensor_parallel_size: int = option(1, "devices that share each layer", least=1)


@dataclass(frozen=True)
class EngineConfig(Checked):
    """Everything an engine needs to start; every field has a working default but `load.model`."""

    load: LoadConfig = LoadConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    parallel: ParallelConfig = ParallelConfig()
    attention_backend: str = option("auto", "paged attention implementation; auto: the best for the device", choices=ATTENTION_BACKENDS)
    deterministic: bool = option(False, "attention of a row never depends, to the bit, on the rows beside it; may cost GPUs speed")
    layer_loop: str = option(
        "auto",
        "rolled: one loop over the layers, compiles 4 times faster; unrolled: what accelerators run faster",
        choices=("auto", "rolled", "unrolled"),
    )
    seed: int = option(0, "base of the seeds of requests that bring none")
    compilation_cache_dir: str | None = option(None, "where compiled programs are kept; default: ~/.cache/jaxserve/xla; 'none' keeps none")

    @classmethod
    def from_options(cls, **options: Any) -> EngineConfig:
        """An EngineConfig from flat names, e.g. from_options(model="DIR", page_size=32); TypeError names an unknown one."""
        return compose(cls, options)


@dataclass(frozen=True)
class ServerConfig:
    """The HTTP server."""

    host: str = option("127.0.0.1", "address to listen on")
    port: int = option(8000, "port to listen on")
    served_model_name: tuple[str, ...] = option((), "names of the model in the API; default: the model as given")
    api_key: str | None = option(None, "key that every request but /health must bring", secret=True)
    chat_template: str | None = option(None, "file with a Jinja chat template, or the template itself")
    allowed_origins: tuple[str, ...] = option((), "origins that browsers may call from")
    shutdown_timeout: float = option(30.0, "seconds that running requests get to finish after SIGTERM or Ctrl-C")
    request_body_timeout: float = option(60.0, "seconds in which a request's body must have come")
    max_request_bytes: int = option(32 * 1024 * 1024, "longest request body")
    metrics_prefix: str = option("jaxserve:", "prefix of the metrics' names")

    def __post_init__(self) -> None:
        checks = {
            "port": (0 <= self.port <= 65535, "a number from 0 to 65535; 0 takes any free port"),
            "served_model_name": (all(self.served_model_name), "names that are not empty"),
            "api_key": (
                self.api_key is None or self.api_key.strip() == self.api_key != "",
                "a key that is not empty and has no space at its ends",
            ),
            "shutdown_timeout": (self.shutdown_timeout >= 0, "seconds, 0 or more"),
            "request_body_timeout": (self.request_body_timeout > 0, "seconds, more than 0"),
            "max_request_bytes": (self.max_request_bytes >= 1, "at least 1"),
            "metrics_prefix": (re.fullmatch("[a-zA-Z_:][a-zA-Z0-9_:]*", self.metrics_prefix), "letters, digits, _ and :, no digit first"),
        }
        for name, (good, allowed) in checks.items():
            if not good:
                shown = "not usable" if name == "api_key" else repr(getattr(self, name))
                raise ValueError(f"{name} is {shown}; give {allowed}")


def layers(cls: type) -> dict[str, type]:
    """The nested config classes of a composed config class, by field name."""
    nested = {f.name: type(f.default) for f in dataclasses.fields(cls)}
    return {name: kind for name, kind in nested.items() if dataclasses.is_dataclass(kind)}


def compose(cls: type, options: dict[str, Any]) -> Any:
    """Build `cls` from flat option names, each going to the nested config that declares it."""
    options, parts = dict(options), {}
    for name, kind in layers(cls).items():
        names = {f.name for f in dataclasses.fields(kind)}
        parts[name] = kind(**{k: options.pop(k) for k in list(options) if k in names})
    own = {f.name for f in dataclasses.fields(cls)} - set(parts)
    unknown = sorted(set(options) - own)
    if unknown:
        known = sorted(own | {f.name for kind in layers(cls).values() for f in dataclasses.fields(kind)})
        raise TypeError(f"unknown option {unknown[0]!r}; known options: {', '.join(known)}")
    return cls(**parts, **options)
