class CycleError(ValueError):
    """Something depends on itself, directly or through others."""


def build_order(needs):
    """Names in an order in which each comes after all that it needs.

    `needs` maps a name to the names that it needs.
    Raises CycleError where there is no such order.
    """
    order = []
    visited = set()

    def visit(name):
        if name in visited:
            raise CycleError(f"{name} depends on itself")
        visited.add(name)
        for needed in needs.get(name, []):
            visit(needed)
        order.append(name)

    for name in needs:
        if name not in visited:
            visit(name)
    return order
