"""Command line `forebay`.

It runs on any machine that has the configuration and a certificate, so it imports neither consensus nor storage.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from forebay.cluster.cli.exits import Failure
    from forebay.cluster.cli.submission import prepare, read_bounded


def __getattr__(name: str) -> Any:
    # `forebay --help` must not import it.
    from forebay.replica.lazy_exports import export_lazily

    return export_lazily(__name__)(name)


def main() -> None:
    """Run the command line; never return."""
    from forebay.cluster.cli.startup import defer_imports

    defer_imports()
    try:
        import forebay.cluster.cli.app as app
    except ModuleNotFoundError as error:
        import sys

        import forebay.cluster.cli.extras as extras

        lacking = extras.missing_extra(error)
        if lacking is None:
            raise
        print(*lacking.lines(), sep="\n", file=sys.stderr)
        sys.exit(lacking.code)
    app.main()
