class Pager:
    """A listing cut into pages of `size` entries; the first page is 1."""

    def __init__(self, entries, size=10):
        if size < 1:
            raise ValueError("size must be at least 1")
        self.entries = entries
        self.size = size

    @property
    def pages(self):
        """How many pages there are."""
        return len(self.entries) // self.size + 1

    def page(self, number):
        """The entries of a page."""
        if number > self.pages:
            raise IndexError(f"there is no page {number}")
        start = (number - 1) * self.size
        return self.entries[start : start + self.size]

    def has_next(self, number):
        """Whether another page follows."""
        return number < self.pages
