"""The status page of a replica: what the API answers, as HTML, to whoever may ask for it."""

from cluster.api.page.pages import PAGES_PATH, Ask, Found, Pages, find_page, is_page
from cluster.api.page.words import page_headers
