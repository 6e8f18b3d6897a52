"""A histogram as SVG text, with a line where the limit is.

svg = histogram("Tokens in a sample", lengths, limit=32768)
"""

from __future__ import annotations

import html

import numpy as np
import numpy.typing as npt

BINS = 30
WIDTH, HEIGHT, FOOT = 420, 120, 18


def histogram(title: str, values: npt.NDArray[np.float64], limit: float | None = None) -> str:
    """A card with the title, the quantiles in words, and bars of equal width from 0 to the largest value.

    The limit is drawn where it lies within twice the largest value, and always named.
    """
    if not len(values):
        return f"<section class=card><h3>{html.escape(title)}</h3><p>None.</p></section>"
    largest = float(values.max())
    end = max(limit, largest) if limit is not None and limit <= 2 * largest else largest
    end = end or 1.0
    counts, edges = np.histogram(values, bins=BINS, range=(0, end))
    tallest = int(counts.max())
    step = WIDTH / BINS
    bars = []
    for number, count in enumerate(counts):
        if count:
            height = max(1.0, (HEIGHT - FOOT) * count / tallest)
            span = f"{edges[number]:,.0f} to {edges[number + 1]:,.0f}: {count:,}"
            bars.append(
                f'<rect x="{number * step:.1f}" y="{HEIGHT - FOOT - height:.1f}" width="{step - 1:.1f}" '
                f'height="{height:.1f}"><title>{span}</title></rect>'
            )
    line = ""
    if limit is not None and limit <= end:
        x = min(WIDTH - 1.0, WIDTH * limit / end)
        line = f'<line class=limit x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{HEIGHT - FOOT}"><title>limit</title></line>'
    middle, high = np.quantile(values, [0.5, 0.9])
    words = f"{len(values):,} in all; median {middle:,.0f}, 90% up to {high:,.0f}, largest {largest:,.0f}"
    if limit is not None:
        words += f"; limit {limit:,.0f}"
    return (
        f"<section class=card><h3>{html.escape(title)}</h3>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role=img aria-label="{html.escape(words)}">{"".join(bars)}{line}'
        f'<text x="0" y="{HEIGHT - 4}">0</text><text x="{WIDTH}" y="{HEIGHT - 4}" text-anchor=end>{end:,.0f}</text>'
        f"</svg><p>{words}</p></section>"
    )
