"""choose_backend over a table of devices, with kernels that take everything, and its fall-back when they do not."""

import types

import pytest

from pallas_kernels import choose_backend, dispatch

LLAMA_8B = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "dtype": "bfloat16", "page_dtype": "bfloat16", "jax_version": "0.12.0"}
HOPPER = ("NVIDIA H100 80GB HBM3", "NVIDIA H100 PCIe", "NVIDIA H200", "NVIDIA GH200 480GB", "NVIDIA H800", "NVIDIA H20")
DEVICES = [
    *(("gpu", kind, {}, "mosaic_gpu", kind) for kind in HOPPER),
    ("cuda", "NVIDIA H200", {}, "mosaic_gpu", "NVIDIA H200"),
    ("gpu", "NVIDIA H200", {"jax_version": "0.11.0"}, "mosaic_gpu", "NVIDIA H200"),
    ("gpu", "NVIDIA H200", {"jax_version": "0.10.2"}, "xla", "JAX 0.10.2 is too old"),
    ("gpu", "NVIDIA B200", {}, "xla", "Blackwell"),
    ("gpu", "NVIDIA GB200", {}, "xla", "Blackwell"),
    ("gpu", "NVIDIA GeForce RTX 5090", {}, "xla", "Blackwell"),
    ("gpu", "NVIDIA A100-SXM4-80GB", {}, "xla", "Ampere"),
    ("gpu", "NVIDIA A10G", {}, "xla", "Ampere"),
    ("gpu", "NVIDIA L40S", {}, "xla", "Ada"),
    ("gpu", "NVIDIA L4", {}, "xla", "Ada"),
    ("gpu", "NVIDIA GeForce RTX 4090", {}, "xla", "Ada"),
    ("gpu", "Tesla T4", {}, "xla", "no GPU that a kernel is known for"),
    ("rocm", "AMD Instinct MI300X", {}, "xla", "MI300X"),
    ("cpu", "cpu", {}, "numba", "cpu has a kernel"),
    *(("tpu", kind, {}, "mosaic_tpu", kind) for kind in ("TPU v4", "TPU v5 lite", "TPU v5p", "TPU v6 lite", "TPU7x")),
    ("tpu", "TPU v6 lite", {"head_dim": 64}, "mosaic_tpu_lanes", "TPU v6 lite"),
    ("tpu", "TPU v6 lite", {"num_kv_heads": 1}, "mosaic_tpu_lanes", "TPU v6 lite"),
    ("tpu", "TPU v6 lite", {"num_kv_heads": 2}, "mosaic_tpu", "TPU v6 lite"),
    ("tpu", "TPU v6 lite", {"num_kv_heads": 2, "page_dtype": "int8"}, "mosaic_tpu_lanes", "TPU v6 lite"),
    ("tpu", "TPU v6 lite", {"page_dtype": "int8"}, "mosaic_tpu_lanes", "TPU v6 lite"),
    ("tpu", "TPU v6 lite", {"num_heads": 36, "num_kv_heads": 6}, "mosaic_tpu_lanes", "TPU v6 lite"),
    ("tpu", "TPU v6 lite", {"head_dim": 64, "page_size": 16}, "xla", "page_size 16 is no multiple of 128"),
    ("tpu", "TPU v6 lite", {"page_size": 16}, "mosaic_tpu", "TPU v6 lite"),
    ("gpu", "NVIDIA H200", {"page_size": 12}, "xla", "page_size 12 is no multiple of 8"),
]


def fake_kernels(monkeypatch, answer):
    calls = []

    def unsupported(*args):
        calls.append(args)
        return answer

    monkeypatch.setattr(dispatch, "kernel_module", lambda backend: types.SimpleNamespace(unsupported=unsupported))
    return calls


@pytest.mark.parametrize(("platform", "kind", "change", "backend", "reason"), DEVICES)
def test_table_of_devices(monkeypatch, platform, kind, change, backend, reason):
    fake_kernels(monkeypatch, None)
    got, why = choose_backend(platform, kind, **(LLAMA_8B | change))
    assert got == backend
    assert reason in why and "\n" not in why


@pytest.mark.parametrize(("platform", "kind"), [("gpu", "NVIDIA H200"), ("tpu", "TPU v5p"), ("cpu", "cpu")])
def test_falls_back_where_the_kernel_refuses(monkeypatch, platform, kind):
    calls = fake_kernels(monkeypatch, "head_dim=128: expected 64")
    got, why = choose_backend(platform, kind, **LLAMA_8B)
    assert got == "xla" and "head_dim=128: expected 64" in why
    (arguments,) = calls
    assert arguments[0] == (1, 32, 128) and arguments[2][0] == 1 and arguments[1] == arguments[3] == "bfloat16"
