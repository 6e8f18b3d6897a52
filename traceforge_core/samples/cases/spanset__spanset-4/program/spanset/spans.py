def merge_spans(spans):
    """Join spans (start, end) that overlap or touch; the result is sorted."""
    merged = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return merged


def covered(spans):
    """How much time the spans cover together."""
    return sum(end - start for start, end in merge_spans(spans))


def gaps(spans, start, end):
    """The free spans between `start` and `end`."""
    free = []
    for busy_start, busy_end in merge_spans(spans):
        if busy_start > start:
            free.append((start, min(busy_start, end)))
        start = max(start, busy_end)
    if start < end:
        free.append((start, end))
    return free
