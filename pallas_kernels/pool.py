"""The shape of a key/value page pool, which follows the backend that reads it."""

from jax import Array

BACKENDS = ("xla", "numba", "reference", "mosaic_gpu", "mosaic_tpu", "mosaic_tpu_lanes")
_LANE_MAJOR = ("mosaic_tpu_lanes",)
# A page is a whole number of the tiles that the backend moves: 8 rows of a TMA or TPU tile, or the 128 lanes of a TPU register.
_PAGE_SIZE_MULTIPLE = {"xla": 1, "numba": 1, "reference": 1, "mosaic_gpu": 8, "mosaic_tpu": 8, "mosaic_tpu_lanes": 128}
_DEFAULT_PAGE_SIZE = {"xla": 16, "numba": 16, "reference": 16, "mosaic_gpu": 16, "mosaic_tpu": 128, "mosaic_tpu_lanes": 128}


def pool_shape(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, backend: str = "xla") -> tuple[int, ...]:
    """Shape of one layer's ``k_pages`` (and, alike, of its ``v_pages``) for ``backend``.

    Token-major, ``[num_pages, page_size, num_kv_heads, head_dim]``, for all but one: writing a token touches one contiguous row and
    a page is one contiguous block. ``mosaic_tpu_lanes`` is lane-major, ``[num_pages, num_kv_heads, head_dim, page_size]``: a TPU pads
    the last dimension to 128 lanes, which would waste half of the memory at head_dim 64. Create the arrays with ``jnp.zeros``.
    Callers take the shape from here and never index the pool themselves.

    Raises ValueError for an unknown backend, a size below one, or a page size that the backend cannot have.
    """
    check_backend(backend)
    sizes = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    multiple = page_size_multiple(backend)
    if page_size % multiple:
        raise ValueError(f"page_size={page_size}: expected a multiple of {multiple} for backend {backend!r}")
    return tuple(
        {"pages": num_pages, "page_size": page_size, "kv_heads": num_kv_heads, "head_dim": head_dim}[axis] for axis in pool_axes(backend)
    )


def pool_axes(backend: str = "xla") -> tuple[str, ...]:
    """Names of the dimensions of :func:`pool_shape`, for sharding: the pool is split over "kv_heads" only."""
    check_backend(backend)
    return ("pages", "kv_heads", "head_dim", "page_size") if backend in _LANE_MAJOR else ("pages", "page_size", "kv_heads", "head_dim")


def scale_shape(num_pages: int, page_size: int, num_kv_heads: int) -> tuple[int, int, int]:
    """Shape of a layer's float32 ``k_scales`` (and ``v_scales``) for 8-bit pages: one a slot and head, the same for every backend."""
    return num_pages, page_size, num_kv_heads


def default_page_size(backend: str) -> int:
    """Tokens a page that suit ``backend``."""
    check_backend(backend)
    return _DEFAULT_PAGE_SIZE[backend]


def page_size_multiple(backend: str) -> int:
    """A page of ``backend`` holds a multiple of this many tokens."""
    check_backend(backend)
    return _PAGE_SIZE_MULTIPLE[backend]


def to_token_major(pages: Array, backend: str) -> Array:
    """``backend``'s pages as [num_pages, page_size, num_kv_heads, head_dim]; a copy where the layouts differ."""
    return pages.transpose(0, 3, 1, 2) if backend in _LANE_MAJOR else pages


def from_token_major(pages: Array, backend: str) -> Array:
    """Pages [num_pages, page_size, num_kv_heads, head_dim] in ``backend``'s layout; a copy where the layouts differ."""
    return pages.transpose(0, 2, 3, 1) if backend in _LANE_MAJOR else pages


def page_sizes(pages_shape: tuple[int, ...], backend: str) -> dict[str, int]:
    """The sizes of a pool by the names of :func:`pool_axes`."""
    return dict(zip(pool_axes(backend), pages_shape, strict=True))


def check_backend(backend: str) -> None:
    """Raise ValueError unless ``backend`` is one that this package has."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {BACKENDS}")
