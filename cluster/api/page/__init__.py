"""HTML status page of a replica, for authenticated users."""

from forebay.cluster.api.page.labels import page_headers
from forebay.cluster.api.page.pages import PAGES_PATH, Ask, PageMatch, Pages, find_page, is_page
