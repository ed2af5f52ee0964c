"""The cluster at a glance: what replicas say of themselves, what needs somebody, how full pools were."""

from typing import TYPE_CHECKING

from replica.faces import shown

if TYPE_CHECKING:
    from cluster.api.watch.overview import list_pool_use, show_overview
    from cluster.api.watch.statuses import Statuses, of_this_machine
else:
    # The service has the first, and handlers have the service.
    __getattr__ = shown(
        __name__,
        """
        overview: list_pool_use show_overview
        statuses: Statuses of_this_machine
        """,
    )
