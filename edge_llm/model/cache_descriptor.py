"""CacheDescriptor: what a session reads of the KV cache that it runs over (layout.Cache). It never sees the owner's object."""

from __future__ import annotations

import ctypes

import numpy as np

from edge_llm.errors import SessionError
from edge_llm.kernels.layout import CACHE_MAGIC, LAYER_FIELDS, UNBOUNDED, Cache, CacheLayer


class CacheDescriptor:
    """The int64 record at an address. Raises `SessionError` if it is none."""

    def __init__(self, address: int) -> None:
        header = np.ctypeslib.as_array((ctypes.c_int64 * Cache.FIRST_LAYER).from_address(address))
        if header[Cache.MAGIC] != CACHE_MAGIC:
            raise SessionError("the cache descriptor is not one")
        length = Cache.FIRST_LAYER + LAYER_FIELDS * int(header[Cache.LAYERS])
        self.record = np.ctypeslib.as_array((ctypes.c_int64 * length).from_address(address))
        layers = self.record[Cache.FIRST_LAYER :].reshape(-1, LAYER_FIELDS)
        capacities, sinks, windows = (
            layers[:, field] for field in (CacheLayer.CAPACITY, CacheLayer.SINKS, CacheLayer.WINDOW)
        )
        self.capacity = int(capacities.max())
        """rows of a slot in the layer that holds most"""
        self.sink_context = int((sinks + windows)[sinks > 0].min(initial=UNBOUNDED))
        """the first position whose row sees the sinks and no longer all that follows them"""
        self.max_rows = int((capacities - sinks - windows + 1)[windows < UNBOUNDED].min(initial=UNBOUNDED))
        """rows that a step may have: it writes them before the first attends to its window"""
