"""A checkup as text for a terminal."""

from __future__ import annotations

import textwrap

from traceforge_core.doctor.examine import Checkup

MARKS = {"ok": "✓", "note": "·", "warning": "!", "problem": "✗", "not tried": "-"}


def render(checkup: Checkup, width: int = 110) -> str:
    """One line a finding with a mark before it, what to do below it, the preset at the end."""
    widest = max(len(finding.subject) for finding in checkup.findings)
    lines = []
    for finding in checkup.findings:
        head = f"{MARKS[finding.status]} {finding.subject:<{widest}}  "
        lines += textwrap.wrap(finding.what, width, initial_indent=head, subsequent_indent=" " * len(head))
        if finding.do:
            indent = " " * (len(head)) + "→ "
            lines += textwrap.wrap(finding.do, width, initial_indent=indent, subsequent_indent=" " * len(indent))
    count = len(checkup.problems)
    warnings = sum(finding.status == "warning" for finding in checkup.findings)
    lines.append("")
    lines.append(f"{count} problem{'' if count == 1 else 's'}, {warnings} warning{'' if warnings == 1 else 's'}.")
    command = f"traceforge run --preset {checkup.preset}"
    command += "".join(f" --set {setting}" for setting in checkup.settings)
    lines += [*textwrap.wrap(f"Preset that suits: {checkup.preset} ({checkup.reason}).", width), f"    {command}"]
    return "\n".join(lines)
