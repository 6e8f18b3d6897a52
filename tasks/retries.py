"""When a stage that reads from elsewhere deserves a second try: a network or network disk that failed for a moment."""

from __future__ import annotations

import errno
from typing import Any

PASSING = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN, errno.EBUSY, errno.ENETUNREACH})
PASSING_NAMES = frozenset({"ConnectError", "ConnectTimeout", "ReadError", "ReadTimeout", "RemoteProtocolError"})


def may_pass(task: Any, task_run: Any, state: Any) -> bool:
    """Prefect's retry_condition_fn. False for whatever a second try cannot mend, such as a wrong path."""
    error = state.result(raise_on_failure=False)
    seen: set[int] = set()
    while isinstance(error, BaseException) and id(error) not in seen:
        seen.add(id(error))
        if isinstance(error, (ConnectionError, TimeoutError)) or type(error).__name__ in PASSING_NAMES:
            return True
        if isinstance(error, OSError) and error.errno in PASSING:
            return True
        error = error.__cause__ or error.__context__
    return False
