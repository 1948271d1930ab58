"""The shape of a key/value page pool."""

BACKENDS = ("xla", "reference")


def pool_shape(num_pages: int, page_size: int, num_kv_heads: int, head_dim: int, backend: str = "xla") -> tuple[int, ...]:
    """Shape of one layer's ``k_pages`` (and, alike, of its ``v_pages``) for ``backend``.

    Both present backends keep tokens together, ``[num_pages, page_size, num_kv_heads, head_dim]``: writing a token touches one
    contiguous row and reading a page is one contiguous block, which is what a gather by page likes best. Create the arrays with
    ``jnp.zeros``. Callers take the shape from here and never index the pool themselves, so that a backend may change it.

    Raises ValueError for an unknown backend or a size below one.
    """
    check_backend(backend)
    sizes = {"num_pages": num_pages, "page_size": page_size, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
    for name, value in sizes.items():
        if value < 1:
            raise ValueError(f"{name}={value}: expected at least 1")
    return num_pages, page_size, num_kv_heads, head_dim


def pool_axes(backend: str = "xla") -> tuple[str, ...]:
    """Names of the dimensions of :func:`pool_shape`, for sharding: the pool is split over "kv_heads" only."""
    check_backend(backend)
    return "pages", "page_size", "kv_heads", "head_dim"


def check_backend(backend: str) -> None:
    """Raise ValueError unless ``backend`` is one that this package has."""
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: expected one of {BACKENDS}")
