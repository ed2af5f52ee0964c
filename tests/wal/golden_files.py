"""Golden files of the codec: for each released event, the bytes of a batch and the decoded content.

`python -m tests.wal.golden_files` writes missing files. An existing file is a promise to every ledger (law 12). Rewrite
a file with `--rewrite-golden NAME` only if no release has had the event.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import msgspec

from forebay.wal.codec import encode_batch
from tests.wal.samples import EVENTS, sample_batch, tag_of

GOLDEN = Path(__file__).parent / "golden"


def path_of(event: type[msgspec.Struct]) -> Path:
    return GOLDEN / f"{tag_of(event):03d}-{event.__name__}.json"


def content_of(event: type[msgspec.Struct]) -> dict[str, Any]:
    batch = sample_batch(event)
    return {"event": event.__name__, "tag": tag_of(event), "batch": plain(batch), "bytes": encode_batch(batch).hex()}


def plain(value: object) -> Any:
    """Convert a record to values that JSON can represent."""
    return json.loads(msgspec.json.encode(value))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rewrite-golden", metavar="NAME", action="append", default=[])
    rewritten = set(parser.parse_args().rewrite_golden)
    unknown = rewritten - {event.__name__ for event in EVENTS} - {"all"}
    if unknown:
        parser.error(f"no event is named {', '.join(sorted(unknown))}")
    GOLDEN.mkdir(exist_ok=True)
    for event in EVENTS:
        path = path_of(event)
        if not path.exists() or event.__name__ in rewritten or "all" in rewritten:
            path.write_text(json.dumps(content_of(event), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            print(f"wrote {path.name}")


if __name__ == "__main__":
    main()
