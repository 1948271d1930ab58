"""Reference for kv_write: one numpy assignment per token; not traceable."""

import numpy as np


def kv_write_reference(k_pages, v_pages, k, v, slot_mapping):
    """Return copies of the pools with every token of non-negative slot written, in order."""
    k_pages, v_pages = np.array(k_pages), np.array(v_pages)
    page_size = k_pages.shape[1]
    for token, slot in enumerate(np.asarray(slot_mapping)):
        if slot >= 0:
            k_pages[slot // page_size, slot % page_size] = np.asarray(k[token], k_pages.dtype)
            v_pages[slot // page_size, slot % page_size] = np.asarray(v[token], v_pages.dtype)
    return k_pages, v_pages
