"""Conversion of a script and options to a submit request, with the places of errors."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.cli.submission.readers import Context, read_bounded, read_change, typed_settings
    from forebay.cluster.cli.submission.request import PreparedSubmit, locate, path_variables, prepare
    from forebay.cluster.cli.submission.sbatch import IgnoredOption, read_typed
    from forebay.cluster.cli.submission.waiting import wait_until_finished
else:
    __getattr__ = export_lazily(__name__)
