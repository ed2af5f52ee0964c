"""Output files of commands."""

from pathlib import Path

from forebay.cluster.cli.exits import bad_input
from forebay.cluster.system import replace_private


def write_whole(output: Path, content: bytes, place: str = "-o") -> None:
    """Write a file completely or not at all; a file that is replaced keeps its owner and mode.

    Raises:
        Failure: bad input, at the option `place`, if the file cannot be written.
    """
    try:
        replace_private(output, content, durable=False)
    except OSError as error:
        raise bad_input(f"{output} cannot be written: {error.strerror}", "name another file", place=place) from error
