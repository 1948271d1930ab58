"""Write new keys and values into the page pool."""

from pallas_kernels.kv_write.api import kv_write

__all__ = ["kv_write"]
