"""Records of the replicated state, one noun per module: jobs, buffers, pools, nodes, accounts, transfers and others."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.replica.model.accounts import (
        ACCOUNT_REASONS,
        DEFAULT_SCHEDULING_RULES,
        QOS_REASONS,
        TRES_PREFIX,
        Account,
        AccountUser,
        License,
        Limit,
        LimitKind,
        Qos,
        Revocation,
        SchedulingRules,
        ancestors,
        certificate_fault,
        check_account,
        check_license,
        check_licenses_and_nice,
        check_qos,
        check_rules,
        individual_limits,
        is_group_limit,
        sort_members,
    )
    from forebay.replica.model.arrays import (
        ArrayError,
        ArrayUse,
        Tasks,
        format_reference,
        format_tasks,
        has_array_limits,
        is_active,
        is_staged_ahead,
        parse_array,
        parse_reference,
        parse_tasks,
        waits_for_array,
    )
    from forebay.replica.model.buffers import (
        BEFORE_RUN,
        HOLDING,
        PERSISTENT_PREFIX,
        PERSISTENT_STATES,
        VARIABLE_DIRECTORIES,
        WHOLE_BUFFER,
        Access,
        Buffer,
        BufferInput,
        BufferState,
        IllegalTransition,
        PersistentBuffer,
        Transfer,
        TransferKind,
        next_state,
        persistent_variable,
    )
    from forebay.replica.model.configuration import (
        DEFAULT_SITE,
        FLAGS,
        FOUNDING_FIELDS,
        RESTART_POLICIES,
        UNKNOWN_OPTIONS,
        Site,
        check_persistent_allowed,
        check_site,
        check_user_lists,
        expand_roots,
        format_flags,
        get_sys_state_of,
        get_sys_status_of,
        has_private_data,
        program_fault,
        provision_of,
        sort_flags,
        tears_down_on_failure,
    )
    from forebay.replica.model.drills import SCENARIOS, Drill, DrillLock, DrillVerdict, latest_completed
    from forebay.replica.model.failure_texts import (
        CREATE_ERROR,
        delete_denied_reason,
        different_buffer_comment,
        duplicate_name_comment,
        failure_comment,
        failure_reason,
        operation_of,
    )
    from forebay.replica.model.job_names import NamedJobs, NameGroup, first_job, group_members
    from forebay.replica.model.job_states import ENDED, JobState
    from forebay.replica.model.jobs import (
        ExternalJob,
        ExternalJobEpochs,
        ExternalJobStep,
        Hold,
        Job,
        Scheduler,
        append_comment,
        external_job_id_fault,
        external_job_name,
        scheduler_fault,
        update_interruptions,
    )
    from forebay.replica.model.mail import MAIL_TYPES, Mail, MailKind, message_id_local_part, wants_mail
    from forebay.replica.model.nodes import (
        CAPACITY_CONTROLS,
        PROCESS_CONTROLS,
        AbandonedBuffer,
        AbandonedBuffers,
        AdmittedNode,
        Node,
        NodeState,
        Recovery,
    )
    from forebay.replica.model.orders import (
        NO_SPECIAL_TRANSFERS,
        NO_STATUS,
        JobStatus,
        Order,
        OrderFilesystem,
        SpecialTransfers,
    )
    from forebay.replica.model.partitions import (
        NodeSetWaiters,
        Partition,
        Partitions,
        PartitionState,
        check_partition,
        choose_partition,
        is_node_in,
        node_set_name,
        partition_gate,
    )
    from forebay.replica.model.pools import (
        UNIT_WORDS,
        ObservedFilesystem,
        Pool,
        PoolUnit,
        Rates,
        SharedFilesystem,
        are_nested,
        format_amount,
        format_slurm_amount,
        free_bytes,
        parse_amount,
        parse_unit,
        pool_filesystem,
        pool_unit,
        rates_of,
    )
    from forebay.replica.model.provider import (
        NATIVE,
        PROVIDERS,
        Provision,
        provider_facts,
    )
    from forebay.replica.model.requests import (
        DEFAULT_PRIORITY,
        NO_CHANGE,
        NO_OPTIONS,
        NODE_SYMBOL,
        OPEN_MODES,
        SIGNAL_NAMES,
        AfterTask,
        ArrayTask,
        BufferRequest,
        CreatePersistent,
        Dependency,
        DependencyKind,
        DestroyPersistent,
        JobChange,
        JobOptions,
        JobRequest,
        ListTransfer,
        WarningSignal,
        apply_change,
        destinations_of,
        effective_change,
        error_path,
        expand_job_symbols,
        format_dependencies,
        input_path,
        output_path,
        parse_signal,
        persistent_names,
        with_options,
    )
    from forebay.replica.model.reservations import Reservation, ReservedSpace, check_reservation, unused_space
    from forebay.replica.model.stages import (
        QUEUED_STAGES,
        TRANSFERS,
        MovingKey,
        Stage,
        agent_of,
        awaited_slot,
        clamp_times,
        moving_keys,
        occupied_slot,
        queue_position,
        stage_of,
    )
    from forebay.replica.model.transfers import (
        ALGORITHMS,
        BACKENDS,
        CHOICE_KEYS,
        CHOOSABLE,
        DEFAULT_TRANSFER_RULES,
        LINKS,
        NO_CHOICE,
        RECEIPTS_PER_JOB_MAX,
        TIMEOUTS,
        VERIFY_LEVELS,
        JobTransfers,
        LeftOut,
        RateShares,
        TransferCheckpoint,
        TransferChoice,
        TransferReceipt,
        TransferRules,
        check_transfer_rules,
        choice_prefix,
        clip_checkpoint,
        clip_count,
        clip_receipt,
        default_backend,
        is_checkpoint_due,
        template_fault,
        template_words,
        transfer_choices,
    )
    from forebay.replica.model.usage import (
        Consumed,
        SchedulingClass,
        UsageKey,
        consumption_key,
        holding_usage,
        minutes_of,
        running_usage,
        scheduling_class_of,
        takes_cpus,
        usage_of,
    )
else:
    __getattr__ = export_lazily(
        __name__,
        """
        accounts: ACCOUNT_REASONS DEFAULT_SCHEDULING_RULES QOS_REASONS TRES_PREFIX Account AccountUser License Limit
        accounts: LimitKind Qos Revocation SchedulingRules ancestors certificate_fault check_account
        accounts: check_licenses_and_nice check_license check_qos check_rules is_group_limit individual_limits
        accounts: sort_members
        arrays: ArrayError ArrayUse Tasks format_tasks is_active is_staged_ahead has_array_limits waits_for_array
        arrays: parse_array parse_reference parse_tasks format_reference
        buffers: BEFORE_RUN HOLDING PERSISTENT_PREFIX PERSISTENT_STATES VARIABLE_DIRECTORIES WHOLE_BUFFER Access Buffer
        buffers: BufferInput BufferState IllegalTransition PersistentBuffer Transfer TransferKind persistent_variable
        buffers: next_state
        configuration: DEFAULT_SITE FLAGS FOUNDING_FIELDS RESTART_POLICIES UNKNOWN_OPTIONS Site check_user_lists
        configuration: check_site expand_roots format_flags get_sys_state_of get_sys_status_of sort_flags
        configuration: check_persistent_allowed has_private_data program_fault provision_of tears_down_on_failure
        drills: SCENARIOS Drill DrillLock DrillVerdict latest_completed
        failure_texts: CREATE_ERROR delete_denied_reason different_buffer_comment duplicate_name_comment
        failure_texts: failure_comment failure_reason operation_of
        job_names: NameGroup NamedJobs first_job group_members
        job_states: ENDED JobState
        jobs: ExternalJob ExternalJobEpochs ExternalJobStep Hold Job Scheduler append_comment external_job_id_fault
        jobs: external_job_name update_interruptions scheduler_fault
        mail: MAIL_TYPES Mail MailKind message_id_local_part wants_mail
        nodes: CAPACITY_CONTROLS PROCESS_CONTROLS AbandonedBuffer AbandonedBuffers AdmittedNode Node NodeState Recovery
        stages: QUEUED_STAGES TRANSFERS MovingKey Stage agent_of moving_keys queue_position clamp_times stage_of
        stages: occupied_slot awaited_slot
        orders: NO_STATUS NO_SPECIAL_TRANSFERS JobStatus Order OrderFilesystem SpecialTransfers
        partitions: NodeSetWaiters Partition Partitions PartitionState check_partition choose_partition is_node_in
        partitions: partition_gate node_set_name
        pools: UNIT_WORDS Pool PoolUnit Rates ObservedFilesystem SharedFilesystem are_nested pool_filesystem
        pools: format_amount format_slurm_amount free_bytes parse_amount rates_of pool_unit parse_unit
        provider: NATIVE PROVIDERS Provision provider_facts
        requests: DEFAULT_PRIORITY NO_CHANGE NO_OPTIONS NODE_SYMBOL OPEN_MODES SIGNAL_NAMES AfterTask ArrayTask
        requests: BufferRequest CreatePersistent Dependency DependencyKind DestroyPersistent JobChange JobOptions
        requests: JobRequest ListTransfer WarningSignal format_dependencies destinations_of effective_change error_path
        requests: expand_job_symbols input_path persistent_names output_path parse_signal apply_change with_options
        reservations: Reservation ReservedSpace check_reservation unused_space
        transfers: ALGORITHMS BACKENDS CHOICE_KEYS CHOOSABLE DEFAULT_TRANSFER_RULES LINKS NO_CHOICE
        transfers: RECEIPTS_PER_JOB_MAX TIMEOUTS VERIFY_LEVELS JobTransfers LeftOut RateShares TransferCheckpoint
        transfers: TransferChoice TransferReceipt TransferRules check_transfer_rules choice_prefix transfer_choices
        transfers: clip_checkpoint clip_count clip_receipt default_backend is_checkpoint_due template_fault
        transfers: template_words
        usage: Consumed SchedulingClass UsageKey consumption_key holding_usage minutes_of running_usage
        usage: scheduling_class_of takes_cpus usage_of
        """,
    )
