"""The status page of a replica: what the API answers, as HTML, to whoever may ask for it."""

from cluster.api.page.labels import page_headers
from cluster.api.page.pages import PAGES_PATH, Ask, PageMatch, Pages, find_page, is_page
