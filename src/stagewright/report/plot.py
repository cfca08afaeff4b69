"""A curve as text: columns of blocks, the scale at their left."""

from __future__ import annotations

from collections.abc import Sequence

_EIGHTHS = " ▁▂▃▄▅▆▇█"


def plot(values: Sequence[float], width: int, height: int = 6) -> list[str]:
    """Lines of text; each column is the mean of its share of the values."""
    known = [value for value in values if abs(value) < 1e300]  # neither endless nor no number
    if not known or width < 16:
        return []
    low, high = min(known), max(known)
    labels = [f"{high:.4g}", f"{low:.4g}"]
    margin = max(map(len, labels)) + 1
    columns = min(len(known), width - margin)
    means = []
    for number in range(columns):
        share = known[len(known) * number // columns : len(known) * (number + 1) // columns]
        means.append(sum(share) / len(share))
    levels = [round((mean - low) / ((high - low) or 1.0) * (8 * height - 1)) + 1 for mean in means]
    rows = []
    for row in reversed(range(height)):
        label = labels[0] if row == height - 1 else labels[1] if row == 0 else ""
        rows.append(
            label.rjust(margin - 1) + " " + "".join(_EIGHTHS[min(8, max(0, level - 8 * row))] for level in levels)
        )
    return rows
