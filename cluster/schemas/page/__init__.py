"""SVG charts over one time axis, and self-contained HTML pages with the figures as tables."""

from typing import TYPE_CHECKING

from replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from cluster.schemas.page.document import COLOURS, details, html_table, key, page
    from cluster.schemas.page.svg import (
        BAR,
        ChartBar,
        ChartFrame,
        Layer,
        area_strip,
        bar_strip,
        bars,
        lines,
        moment,
        number,
        stacked_areas,
    )
else:
    __getattr__ = export_lazily(
        __name__,
        """
        document: COLOURS details html_table key page
        svg: BAR ChartBar ChartFrame Layer area_strip bar_strip bars lines moment number stacked_areas
        """,
    )
