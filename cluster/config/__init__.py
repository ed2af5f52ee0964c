"""Configuration file of a site, and the initial files of a new site."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.config.access import OPERATOR_NAME, AccessConfig, ReplicaConfig
    from forebay.cluster.config.accounts import GROUP_SIGN, MUNGE, AccessTable
    from forebay.cluster.config.config import AgentConfig, Config, RetentionConfig, TracesConfig
    from forebay.cluster.config.discovery import find_config, read_access
    from forebay.cluster.config.drill import DrillConfig, HelperConfig
    from forebay.cluster.config.limits import DEFAULT_LIMITS, LimitsConfig
    from forebay.cluster.config.mail import MailConfig
    from forebay.cluster.config.new_site import (
        FIRST_START_NAME,
        GUIDE_NAME,
        HOSTS_NAME,
        LOCAL_GATEWAY,
        FileOwner,
        Founding,
        FoundingRefused,
        PoolSpec,
        create_site,
        guide_of,
        hosts_of,
        replica_hosts,
    )
    from forebay.cluster.config.reloading import AGREED, Reloader
    from forebay.cluster.config.sinks import SinkConfig
    from forebay.cluster.config.toml import ConfigError
    from forebay.cluster.config.witnesses import WitnessConfig
else:
    __getattr__ = export_lazily(__name__)
