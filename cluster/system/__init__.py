"""Interfaces to the operating system: clock, addresses, descriptors, processes."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.system.accounts import (
        OVERFLOW_UID,
        PeerAccount,
        account_of,
        group_name,
        is_member,
        peer_account,
        short_path,
        uid_of,
    )
    from forebay.cluster.system.address import Address, AddressError
    from forebay.cluster.system.clock import Clock, SystemClock, format_instant, parse_instant, processor_s
    from forebay.cluster.system.descriptors import (
        SLOW_SYNC_S,
        closing,
        free_bytes,
        is_disk_full,
        names_in,
        open_directory,
        sync_directory,
        try_lock,
        write_all,
    )
    from forebay.cluster.system.garbage_collection import Collector, collect_for_a_reader
    from forebay.cluster.system.job_process import (
        CAPABILITIES,
        LIMITS,
        UNLIMITED,
        JobProcess,
        forgo,
        limit,
        prepare,
        reset,
    )
    from forebay.cluster.system.log_rate_limiter import LogRateLimiter
    from forebay.cluster.system.logs import about, as_logged, begin_logging, is_logged, say_at_last
    from forebay.cluster.system.measures import format_span, readable_size
    from forebay.cluster.system.private_files import (
        keep_ownership,
        make_private_directory,
        name_beside,
        new_private_file,
        open_private_file,
        replace_private,
    )
    from forebay.cluster.system.processes import (
        TREE,
        all_pids,
        become_subreaper,
        boot_id,
        cgroup_of,
        descendants,
        die_with_parent,
        environment_variables,
        fields_of,
        hold_termination,
        ignore_hangup,
        is_terminated,
        leave_when_terminated,
        python_of,
        send,
        start_time,
        sync_file_system,
    )
    from forebay.cluster.system.service_manager import (
        EXIT_CONFIGURATION,
        FORMAT_VARIABLE,
        FORMATS,
        LEVELS,
        READY,
        STOPPING,
        SYSTEMD,
        VARIABLES,
        enable_command,
        start_command,
        tell_manager,
    )
    from forebay.cluster.system.trusted_paths import UntrustedFile, open_trusted
else:
    __getattr__ = export_lazily(__name__)
