"""Grammar of burst-buffer requests and of burst_buffer.conf.

Theory of operation
===================

`lexer` finds the directives of a text: comment lines at the top whose first word is a known kind, with continuation
lines joined. Each word keeps its place. `dw`, `bb` and `lua` read one kind of directive each, `slurm` those of jobs
that Slurm schedules, `spur` and `bb` the two forms of `--bb` without directives. All of them add to a `RequestBuilder`
(`request`), which assembles the job's buffer request and rejects contradictions. `directives` is the entry point.
Pools, users and job IDs are unknown here; they are checked when the job is decided.
"""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.replica.grammar.account_limits import (
        LimitTextError,
        format_limits,
        format_reserved,
        parse_limits,
        parse_reserved,
    )
    from forebay.replica.grammar.burst_buffer_conf import (
        ConfFault,
        ConfLine,
        ConfSetting,
        SettingError,
        format_place,
        included_file,
        parse_lines,
        parse_settings,
        split_lines,
    )
    from forebay.replica.grammar.destinations import find_overlap, find_overlap_in, with_file_name
    from forebay.replica.grammar.directives import ParsedRequest, read_external_job_request, read_request
    from forebay.replica.grammar.lexer import PACKED_MARK, DirectiveRejected, script_bytes_max, split_packed
    from forebay.replica.grammar.paths import check_adapters, check_filesystem, path_fault, split_inside
    from forebay.replica.grammar.settings import (
        KEYS,
        SettingKey,
        SettingOwner,
        ValueFormatError,
        ValueKind,
        find_key,
        format_value,
    )
    from forebay.replica.grammar.slurm import external_job_tables
    from forebay.replica.grammar.variables import (
        UNKNOWN_VARIABLES,
        PathVariables,
        is_pattern,
        match_literally,
        path_variable_table,
        variable_names,
    )
else:
    __getattr__ = export_lazily(__name__)
