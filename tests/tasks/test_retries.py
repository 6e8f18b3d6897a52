"""Which failures of reading and downloading are tried again."""

from __future__ import annotations

import errno

import pytest
from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from tasks.retries import may_pass
from traceforge_core.errors import TraceForgeError


class Failed:
    """As much of a Prefect state as the condition looks at."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def result(self, raise_on_failure: bool) -> BaseException:
        return self.error


def caused_by(error: BaseException, cause: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


@pytest.mark.parametrize(
    ("error", "again"),
    [
        (ConnectionResetError("reset by peer"), True),
        (TimeoutError("slow"), True),
        (OSError(errno.ESTALE, "Stale file handle"), True),
        (caused_by(TraceForgeError("cannot download"), ConnectionRefusedError()), True),
        (FileNotFoundError(errno.ENOENT, "no such file"), False),
        (OSError(errno.ENOSPC, "no space"), False),
        (TraceForgeError("the model path does not exist"), False),
        (caused_by(TraceForgeError("a worker was ended by SIGTERM"), KeyboardInterrupt()), False),
    ],
)
def test_only_what_may_pass_is_tried_again(error: BaseException, again: bool) -> None:
    assert may_pass(None, None, Failed(error)) is again


def test_a_chain_of_causes_that_bites_its_tail_ends() -> None:
    one, other = ValueError(), KeyError()
    one.__cause__, other.__cause__ = other, one
    assert may_pass(None, None, Failed(one)) is False


@pytest.mark.slow
@pytest.mark.usefixtures("prefect_server")
def test_prefect_tries_again_after_a_dropped_connection_and_not_after_a_wrong_path() -> None:
    tries: list[str] = []

    @task(retries=2, retry_delay_seconds=0, retry_condition_fn=may_pass, cache_policy=NO_CACHE)
    def read(kind: str) -> None:
        tries.append(kind)
        if kind == "passing" and tries.count(kind) < 2:
            raise ConnectionResetError("reset by peer")
        if kind == "wrong":
            raise TraceForgeError("there is no such folder")

    @flow
    def reading() -> None:
        read("passing")
        with pytest.raises(TraceForgeError):
            read("wrong")

    reading()
    assert tries == ["passing", "passing", "wrong"]
