"""What there is: jobs, buffers, pools, nodes, accounts, configuration, transfers, one noun a module."""

from typing import TYPE_CHECKING

from replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from replica.model.accounts import (
        ACCOUNT_REASONS,
        DEFAULT_RULES,
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
        check_asked,
        check_license,
        check_qos,
        check_rules,
        is_of_group,
        limits_for_each,
        with_members_sorted,
    )
    from replica.model.arrays import (
        ArrayFault,
        ArrayUse,
        Tasks,
        compressed,
        is_active,
        is_ahead,
        is_gated,
        is_waiting,
        parse_array,
        parse_reference,
        parse_tasks,
        shown_reference,
    )
    from replica.model.buffers import (
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
        persistent_variable,
        step,
    )
    from replica.model.configuration import (
        DEFAULT_SITE,
        FLAGS,
        FOUNDING_FIELDS,
        RESTART_POLICIES,
        UNKNOWN_OPTIONS,
        Site,
        buffer_user_refusal,
        check_site,
        expand_roots,
        flags_text,
        get_sys_state_of,
        get_sys_status_of,
        ordered_flags,
        persistent_refusal,
        private_data,
        program_fault,
        provision_of,
        teardown_on_failure,
    )
    from replica.model.drills import SCENARIOS, Drill, DrillLock, DrillVerdict, last_tried
    from replica.model.failure_texts import (
        CREATE_ERROR,
        delete_denied,
        different_buffer,
        duplicate_name,
        failure_comment,
        failure_reason,
        operation_of,
    )
    from replica.model.job_names import NameGroup, Several, first_of, members_of
    from replica.model.job_states import ENDED, JobState
    from replica.model.jobs import (
        ExternalJob,
        ExternalJobEpochs,
        ExternalJobStep,
        Hold,
        Job,
        Scheduler,
        commented,
        external_job_id_fault,
        external_job_name,
        interrupted,
        scheduler_fault,
    )
    from replica.model.mail import MAIL_TYPES, Mail, MailKind, message_name, wants
    from replica.model.nodes import (
        CAPACITY_CONTROLS,
        PROCESS_CONTROLS,
        AbandonedBuffer,
        AbandonedBuffers,
        AdmittedNode,
        Node,
        NodeState,
        Recovery,
    )
    from replica.model.operations import (
        QUEUED_STAGES,
        TRANSFERS,
        MovingKey,
        Stage,
        agent_of,
        counted_under,
        queue_position,
        set_back,
        stage_of,
        takes_slot,
        waits_for_slot,
    )
    from replica.model.orders import NO_STATUS, NOTHING_SPECIAL, JobStatus, Order, OrderFilesystem, SpecialTransfers
    from replica.model.partitions import (
        AnyNode,
        Partition,
        Partitions,
        PartitionState,
        check_partition,
        chosen_partition,
        is_in,
        partition_gate,
        place_name,
    )
    from replica.model.pools import (
        UNIT_WORDS,
        Pool,
        PoolUnit,
        Rates,
        SeenFilesystem,
        SharedFilesystem,
        are_nested,
        filesystem_in,
        format_amount,
        format_slurm_amount,
        free_bytes,
        parse_amount,
        rates_of,
        unit_in,
        unit_of,
    )
    from replica.model.provider import (
        NATIVE,
        PROVIDERS,
        Provision,
        provider_facts,
    )
    from replica.model.requests import (
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
        dependency_text,
        destinations_of,
        difference,
        error_path,
        expanded,
        input_path,
        named_by,
        output_path,
        parse_signal,
        requested,
        with_options,
    )
    from replica.model.reservations import Reservation, ReservedSpace, check_reservation, left_of
    from replica.model.transfers import (
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
        choice_verb,
        choices_of,
        clipped_checkpoint,
        clipped_count,
        clipped_receipt,
        default_backend,
        is_due,
        template_fault,
        template_words,
    )
    from replica.model.usage import (
        Consumed,
        SchedulingClass,
        UsageKey,
        consumed_key,
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
        accounts: ACCOUNT_REASONS DEFAULT_RULES QOS_REASONS TRES_PREFIX Account AccountUser License Limit LimitKind
        accounts: Qos Revocation SchedulingRules ancestors certificate_fault check_account check_asked check_license
        accounts: check_qos check_rules is_of_group limits_for_each with_members_sorted
        arrays: ArrayFault ArrayUse Tasks compressed is_active is_ahead is_gated is_waiting
        arrays: parse_array parse_reference parse_tasks shown_reference
        buffers: BEFORE_RUN HOLDING PERSISTENT_PREFIX PERSISTENT_STATES VARIABLE_DIRECTORIES WHOLE_BUFFER
        buffers: Access Buffer BufferInput BufferState IllegalTransition PersistentBuffer Transfer
        buffers: TransferKind persistent_variable step
        configuration: DEFAULT_SITE FLAGS FOUNDING_FIELDS RESTART_POLICIES Site buffer_user_refusal check_site
        configuration: UNKNOWN_OPTIONS expand_roots flags_text get_sys_state_of get_sys_status_of
        configuration: ordered_flags persistent_refusal private_data program_fault provision_of
        configuration: teardown_on_failure
        drills: SCENARIOS Drill DrillLock DrillVerdict last_tried
        failure_texts: CREATE_ERROR delete_denied different_buffer duplicate_name failure_comment failure_reason
        failure_texts: operation_of
        job_names: NameGroup Several first_of members_of
        job_states: ENDED JobState
        jobs: ExternalJob ExternalJobEpochs ExternalJobStep Hold Job Scheduler commented external_job_id_fault
        jobs: external_job_name interrupted scheduler_fault
        mail: MAIL_TYPES Mail MailKind message_name wants
        nodes: CAPACITY_CONTROLS PROCESS_CONTROLS AbandonedBuffer AbandonedBuffers AdmittedNode Node NodeState Recovery
        operations: QUEUED_STAGES TRANSFERS MovingKey Stage agent_of counted_under queue_position set_back stage_of
        operations: takes_slot waits_for_slot
        orders: NO_STATUS NOTHING_SPECIAL JobStatus Order OrderFilesystem SpecialTransfers
        partitions: AnyNode Partition Partitions PartitionState check_partition chosen_partition is_in partition_gate
        partitions: place_name
        pools: SharedFilesystem SeenFilesystem are_nested filesystem_in
        pools: UNIT_WORDS Pool PoolUnit Rates format_amount format_slurm_amount free_bytes parse_amount rates_of unit_in
        pools: unit_of
        provider: NATIVE PROVIDERS Provision provider_facts
        requests: DEFAULT_PRIORITY NO_CHANGE NO_OPTIONS OPEN_MODES AfterTask ArrayTask BufferRequest CreatePersistent
        requests: Dependency DependencyKind DestroyPersistent JobChange JobOptions JobRequest ListTransfer
        requests: dependency_text
        requests: NODE_SYMBOL SIGNAL_NAMES WarningSignal destinations_of difference
        requests: error_path expanded input_path named_by output_path parse_signal requested with_options
        reservations: Reservation ReservedSpace check_reservation left_of
        transfers: ALGORITHMS BACKENDS CHOICE_KEYS CHOOSABLE DEFAULT_TRANSFER_RULES LINKS NO_CHOICE
        transfers: RECEIPTS_PER_JOB_MAX TIMEOUTS VERIFY_LEVELS JobTransfers LeftOut RateShares TransferCheckpoint
        transfers: TransferChoice TransferReceipt TransferRules check_transfer_rules choice_verb choices_of
        transfers: clipped_checkpoint clipped_count clipped_receipt default_backend is_due template_fault
        transfers: template_words
        usage: Consumed SchedulingClass UsageKey consumed_key holding_usage minutes_of running_usage
        usage: scheduling_class_of takes_cpus usage_of
        """,
    )
