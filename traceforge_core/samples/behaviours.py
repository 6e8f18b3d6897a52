"""How the scripted agent goes about a case: each behaviour is a generator that yields turns and is sent what they gave.

    def behaviour(case, voice):
        observations = yield Turn("Let me look around.", ["ls"])

Some mend the bug, one mends half of it and believes itself, one stumbles over commands that fail and finds its way,
some never get to an end. What a behaviour says varies with the case and the run (`Voice`), so that runs part at their
first turn.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Callable, Generator
from dataclasses import dataclass, field

from traceforge_core.samples.cases import Case, Edit, Fix
from traceforge_core.samples.workbench import Observation

SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT && cat patch.txt"


class ModelUnavailable(Exception):
    """The provider of the (imagined) model gave up: the run ends without a verdict on the agent."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One answer of the agent. Without commands it is a format error. `think` becomes reasoning_content."""

    say: str
    commands: list[str] = field(default_factory=list)
    think: str | None = None


@dataclass(frozen=True, slots=True)
class Voice:
    """Picks among wordings, the same each time for one case and run."""

    case: str
    run: str

    def pick(self, *wordings: str) -> str:
        digest = hashlib.sha256("\0".join((self.case, self.run, *wordings)).encode()).digest()
        return wordings[digest[0] % len(wordings)]


Behaviour = Callable[[Case, Voice], Generator[Turn, list[Observation], None]]


def steady(case: Case, voice: Voice) -> Generator[Turn, list[Observation], None]:
    """Reads, reproduces, mends, checks, submits."""
    yield Turn(
        voice.pick(
            "I start with an overview of the files and the module that the issue is about.",
            "First the layout of the project, and the code in question.",
            "Let me see which files there are and read the module named in the issue.",
        ),
        ["git ls-files", f"cat {case.module}"],
    )
    yield Turn(
        voice.pick(
            "Before I change anything I want to see the bug happen.",
            "A small script shall show the wrong behaviour first.",
            "I write down the examples of the issue so that I can run them before and after the change.",
        ),
        [write_script(case)],
        think=voice.pick(
            f"The issue gives exact examples. {case.cause} A script with these examples will confirm it.",
            f"{case.cause} I should not trust my reading alone, so I reproduce it first.",
        ),
    )
    yield Turn(
        voice.pick("The output agrees with the issue. ", "Reproduced. ", "That is the bug. ") + case.right.plan,
        [edit_command(case, case.right)],
        think=case.cause,
    )
    observations = yield Turn(
        voice.pick(
            "Now the script again, and the tests of the project.",
            "Check the change: the examples and the existing tests.",
        ),
        ["python reproduce.py", "python -m unittest"],
    )
    yield from finish(case, voice, observations[-1])


def brisk(case: Case, voice: Voice) -> Generator[Turn, list[Observation], None]:
    """Few steps, a patch instead of a script, a fix of its own kind."""
    yield Turn(
        voice.pick(
            f"The issue names the place well enough; I look for `{case.symbol}`.",
            f"Searching for `{case.symbol}` should lead straight to the code.",
        ),
        [f"grep -rn {case.symbol} --include=*.py ."],
    )
    yield Turn(voice.pick("Now the whole module.", "I read the module."), [f"cat {case.module}"])
    yield Turn(case.other.plan, [patch_command(case, case.other)], think=case.cause)
    observations = yield Turn(voice.pick("Run the tests.", "Do the tests still pass?"), ["python -m unittest"])
    yield from finish(case, voice, observations[-1])


def hasty(case: Case, voice: Voice) -> Generator[Turn, list[Observation], None]:
    """Takes the first explanation for the whole truth; the visible tests do not tell it otherwise."""
    yield Turn(
        voice.pick("This looks simple. I open the module.", "I think I know what this is; a look at the code first."),
        [f"cat {case.module}"],
    )
    yield Turn(
        voice.pick("Here it is. ", "Found it. ", "Clear enough. ") + case.wrong.plan,
        [edit_command(case, case.wrong)],
    )
    observations = yield Turn(
        voice.pick("The existing tests should be enough to check that.", "A quick run of the tests."),
        ["python -m unittest"],
    )
    if observations[-1].returncode != 0:
        yield Turn(
            voice.pick(
                "A test disagrees, but it tests something else, I think. The example of the issue is what counts.",
                "One failure. That test looks unrelated to the issue, so I leave it.",
            ),
            [f"git diff --stat -- {case.module}"],
        )
    yield Turn("The change is small. I make the patch.", [f"git diff -- {case.module} > patch.txt; cat patch.txt"])
    yield Turn(voice.pick("Submitting.", "Done; I submit it."), [SUBMIT])


def stumbling(case: Case, voice: Voice) -> Generator[Turn, list[Observation], None]:
    """Runs into commands that fail, reads why, and does better."""
    tests = sorted(path.name for path in (case.program / "tests").glob("test_*.py"))[0]
    first, remedy = (
        ("python -m pytest -q", "There is no pytest here. The tests use unittest, so I run them with that.")
        if voice.pick("pytest", "script") == "pytest"
        else (
            f"python tests/{tests}",
            "Run as a script, the test does not find the package. From the top folder, as a module, it should.",
        )
    )
    yield Turn(
        voice.pick("Let me see how the tests stand.", "I begin with the tests, to know what works today."), [first]
    )
    yield Turn(remedy, ["python -m unittest"])
    package, _, file = case.module.partition("/")
    yield Turn(
        voice.pick("They pass, so the bug is not covered. Now the code.", "Now the code itself."), [f"cat {file}"]
    )
    yield Turn(f"The file lies in the package {package}.", [f"cat {case.module}"])
    from_memory = tuple(Edit(edit.misremembered or edit.old, edit.new) for edit in case.right.edits)
    yield Turn(case.right.plan, [edit_command(case, Fix(case.right.plan, from_memory))], think=case.cause)
    yield Turn(
        voice.pick(
            "The text that I wanted to replace is not in the file; I wrote it from memory. I take it from the file as "
            "it stands.",
            "My replacement found nothing, so nothing was written. With the exact lines it will.",
        ),
        [edit_command(case, case.right)],
    )
    observations = yield Turn(
        voice.pick("Now the examples of the issue, and the tests.", "Does it hold? Examples and tests:"),
        [write_script(case), "python -m unittest"],
    )
    yield from finish(case, voice, observations[-1])


def lost(case: Case, voice: Voice) -> Generator[Turn, list[Observation], None]:
    """Changes, takes back, changes again, until the steps are used up."""
    yield Turn(
        voice.pick("I look at the tests first.", "The tests may show what is expected."),
        ["ls tests", "head -n 16 tests/test_*.py"],
    )
    yield Turn("The problem must be in how the module is used. I would look at its callers next.")
    yield Turn("I use the shell for that.", [f"grep -rn {case.symbol} --include=*.py . | head -n 12"])
    yield Turn(voice.pick("Now the module.", "Let me read it."), [f"cat {case.module}"])
    yield Turn(case.wrong.plan, [edit_command(case, case.wrong)])
    yield Turn("Is that it?", [write_script(case)])
    yield Turn(
        voice.pick(
            "That is not what the issue asks for. I take it back and think again.",
            "Still wrong in one of the lines. I undo this.",
        ),
        [f"git checkout -q -- {case.module} && git status --short"],
        think="The output is still not right, so my explanation is not the whole story. I start over.",
    )
    while True:
        yield Turn(
            voice.pick("Perhaps the tests cover it after all.", "Let me run the tests once more."),
            ["python -m unittest -v 2>&1 | tail -n 5"],
        )
        yield Turn(
            voice.pick("I read this part again.", "Back to the code; I must have missed something."),
            [f"grep -n -A4 {case.symbol} {case.module} | head -n 20"],
        )


def speechless(case: Case, voice: Voice) -> Generator[Turn, list[Observation], None]:
    """Explains the bug instead of calling the shell, until it is stopped."""
    yield Turn(voice.pick("I read the module.", "Let me see the code."), [f"cat {case.module}"])
    while True:
        yield Turn(f"{case.cause} {case.right.plan}")


def cut_short(case: Case, voice: Voice) -> Generator[Turn, list[Observation], None]:
    """Knows the fix, and submits only the beginning of its patch."""
    yield Turn(voice.pick("I read the module first.", "To the code."), [f"cat {case.module}"])
    yield Turn(case.right.plan, [edit_command(case, case.right)], think=case.cause)
    yield Turn(
        "The patch, without too much output.", [f"git diff -- {case.module} | head -n 9 > patch.txt; wc -l patch.txt"]
    )
    yield Turn("Submitting the patch.", [SUBMIT])


def interrupted(case: Case, voice: Voice) -> Generator[Turn, list[Observation], None]:
    """Is getting somewhere when the provider fails."""
    yield Turn(voice.pick("Let me see the files.", "What is here?"), ["git ls-files"])
    yield Turn("Now the module.", [f"cat {case.module}"])
    raise ModelUnavailable("The model is overloaded. Please try again later.")


def finish(case: Case, voice: Voice, tests: Observation) -> Generator[Turn, list[Observation], None]:
    """Patch, look at it, submit; says honestly how the tests ended."""
    verdict = (
        "All pass." if tests.returncode == 0 else "Something fails that I cannot explain, but the issue is mended."
    )
    yield Turn(
        f"{verdict} "
        + voice.pick("I make the patch and look at it.", "The patch holds only the module that I changed."),
        [f"git diff -- {case.module} > patch.txt; " + voice.pick("cat patch.txt", "grep '^[-+]' patch.txt")],
    )
    yield Turn(voice.pick("This is what I meant to change. Submitting.", "The patch is right; I submit it."), [SUBMIT])


def write_script(case: Case) -> str:
    """The command that writes the case's script and runs it."""
    return f"cat > reproduce.py <<'EOF'\n{case.reproduce}EOF\npython reproduce.py"


def edit_command(case: Case, fix: Fix) -> str:
    """A Python script that makes the edits, and fails where an old text is not in the file."""
    lines = [
        "python - <<'EOF'",
        "from pathlib import Path",
        "",
        f'path = Path("{case.module}")',
        "text = path.read_text()",
    ]
    for edit in fix.edits:
        lines += [
            f"old = r'''{edit.old}'''",
            f"new = r'''{edit.new}'''",
            "assert old in text, f'not in the file: {old!r}'",
            "text = text.replace(old, new)",
        ]
    return "\n".join([*lines, "path.write_text(text)", "EOF"])


def patch_command(case: Case, fix: Fix) -> str:
    """The same change as a unified diff for `git apply`."""
    before, after = case.source, fix.applied_to(case.source)
    diff = difflib.unified_diff(
        before.splitlines(), after.splitlines(), f"a/{case.module}", f"b/{case.module}", lineterm=""
    )
    return "git apply - <<'EOF'\n" + "\n".join(diff) + "\nEOF"
