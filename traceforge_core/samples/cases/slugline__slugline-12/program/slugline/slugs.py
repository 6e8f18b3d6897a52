import re
import unicodedata


def slugify(title, longest=40):
    """The words of a title in lower case, joined by hyphens."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    words = re.findall(r"[a-z0-9]+", plain.lower())
    return "-".join(words)[:longest].strip("-") or "untitled"


class SlugRegistry:
    """Hands out slugs; a title seen before gets a number behind it."""

    def __init__(self):
        self._seen = {}

    def claim(self, title):
        base = slugify(title)
        count = self._seen.get(base, 0) + 1
        self._seen[base] = count
        return base if count == 1 else f"{base}-{count}"
