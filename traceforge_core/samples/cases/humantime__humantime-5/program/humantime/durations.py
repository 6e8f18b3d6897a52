import re

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
PART = re.compile(r"(\d+)\s*([smhd])")


def seconds(text):
    """Seconds of a duration such as "1h 30m".

    Raises ValueError for text that is no duration.
    """
    total = 0
    for amount, unit in PART.findall(text.lower()):
        total += int(amount) * UNITS[unit]
    return total


def describe(total):
    """The shortest text that `seconds` reads as `total`."""
    parts = []
    for unit in "dhms":
        amount, total = divmod(total, UNITS[unit])
        if amount:
            parts.append(f"{amount}{unit}")
    return " ".join(parts) or "0s"
