"""The layers that models are made of, one idea per file."""

import os

# oneDNN keeps code for every new number of rows, half a megabyte each, by default for 1024 of them. It reads
# this limit at its first product, so torch may have been imported before.
for _cache in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
    os.environ.setdefault(_cache, "128")
