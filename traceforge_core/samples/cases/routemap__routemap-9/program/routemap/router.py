import re

PARAMETER = re.compile(r"\{(\w+)\}")


class Router:
    """Finds the first route, in the order they were added, that fits a path."""

    def __init__(self):
        self._routes = []

    def add(self, pattern, handler):
        """Add a route; `{name}` in the pattern is a parameter."""
        regex = re.compile(PARAMETER.sub(r"(?P<\1>.+)", pattern))
        self._routes.append((regex, handler))

    def resolve(self, path):
        """The handler and its parameters, or None where no route fits."""
        for regex, handler in self._routes:
            found = regex.match(path)
            if found:
                return handler, found.groupdict()
        return None
