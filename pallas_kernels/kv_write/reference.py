"""Reference for kv_write: one numpy assignment per token; not traceable."""

import numpy as np


def kv_write_reference(k_pages, v_pages, k, v, slot_mapping, k_scales=None, v_scales=None):
    """Return copies of the token-major pools (and scales) with every token of non-negative slot written, in order."""
    pools = [np.array(x) for x in (k_pages, v_pages, k_scales, v_scales) if x is not None]
    page_size = pools[0].shape[1]
    for token, slot in enumerate(np.asarray(slot_mapping)):
        if slot < 0:
            continue
        place = slot // page_size, slot % page_size
        for i, vectors in enumerate((np.asarray(k[token]), np.asarray(v[token]))):
            if k_scales is not None:
                vectors, pools[2 + i][place] = _quantized(vectors.astype(np.float32), pools[i].dtype)
            pools[i][place] = vectors.astype(pools[i].dtype)
    return tuple(pools)


def _quantized(vectors, dtype):
    """vectors float32 [KVH, D] -> (what to store, scales [KVH])."""
    largest = np.float32(127 if dtype == np.int8 else 448)
    top = np.abs(vectors).max(axis=-1)
    scales = np.where(top > 0, top / largest, np.float32(1))
    stored = np.clip(vectors / scales[:, None], -largest, largest)
    return np.rint(stored) if dtype == np.int8 else stored, scales
