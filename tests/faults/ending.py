"""End of a run: error with a command to repeat it, kept files after a failure, and JSON as the last line."""

import asyncio
import json
import shutil
import sys
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, NamedTuple

from forebay.cluster.client import ApiError
from tests.faults.local_cluster import RunFailed


class Ended(NamedTuple):
    """How a run ended."""

    succeeded: bool
    took_s: float
    seed: int

    def report(self, **figures: Any) -> int:
        """Print the last line, with these figures in front, and return the exit code."""
        always = {"failed": int(not self.succeeded), "seconds": round(self.took_s, 1), "seed": self.seed}
        print(json.dumps({**figures, **always}))
        return 0 if self.succeeded else 1


def perform(
    name: str, run: Coroutine[Any, Any, None], *, release: Callable[[], None], directory: Path, seed: int
) -> Ended:
    """Do a run to its end; `release` lets go of all that it has begun, whatever the end is."""
    succeeded = interrupted = False
    started_s = time.monotonic()
    try:
        asyncio.run(run)
        succeeded = True
    except (RunFailed, ApiError, TimeoutError, OSError) as error:
        again = f"again with --seed {seed}; images, logs and data: {directory}"
        print(f"{name}: FAILED: {error}\n{name}: {again}", file=sys.stderr)
    except KeyboardInterrupt:
        interrupted = True
        print(f"{name}: interrupted", file=sys.stderr)
    finally:
        release()
        # What failed is kept for whoever looks into it.
        if succeeded or interrupted:
            shutil.rmtree(directory)
    return Ended(succeeded, time.monotonic() - started_s, seed)


def percentiles(takeovers_s: list[float]) -> dict[str, float | None]:
    """Return the figures of how long it took until another replica answered as leader."""
    ordered = sorted(takeovers_s)
    return {
        "takeover_p50_s": round(ordered[len(ordered) // 2], 3) if ordered else None,
        "takeover_max_s": round(ordered[-1], 3) if ordered else None,
    }
