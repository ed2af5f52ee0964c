"""Charts over one time axis, and self-contained HTML pages with the figures as tables."""

from typing import TYPE_CHECKING

from forebay.replica.lazy_exports import export_lazily

if TYPE_CHECKING:
    from forebay.cluster.schemas.page.document import COLOURS, HeadlineFigure, details, html_table, key, page, tiles
    from forebay.cluster.schemas.page.svg import (
        BAR_WIDTH_MIN,
        ChartBar,
        ChartFrame,
        Layer,
        areas,
        bar_strip,
        bars,
        lines,
        moment,
        number,
        stacked_areas,
    )
else:
    __getattr__ = export_lazily(__name__)
