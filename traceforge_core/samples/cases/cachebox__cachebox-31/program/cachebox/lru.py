from collections import OrderedDict


class LruCache:
    """Keeps `size` entries and drops the least recently used one."""

    def __init__(self, size):
        if size < 1:
            raise ValueError("size must be at least 1")
        self.size = size
        self._entries = OrderedDict()

    def __len__(self):
        return len(self._entries)

    def get(self, key, default=None):
        """The value of a key. Counts as use."""
        return self._entries.get(key, default)

    def peek(self, key, default=None):
        """The value of a key, without counting as use."""
        return self._entries.get(key, default)

    def put(self, key, value):
        """Add or overwrite an entry. Counts as use."""
        if key not in self._entries and len(self._entries) == self.size:
            self._entries.popitem(last=False)
        self._entries[key] = value
