"""The site's command line for moving data (`TransferTemplate`): a program, and words in which paths stand.

`{source}` and `{destination}` stand for the two paths, `{kind}` for `file` or `directory`. A line without any of them
is a program that is given source and destination, in this order. No shell reads it.
"""

from __future__ import annotations

import re

PLACES = ("{source}", "{destination}")


_WORD = re.compile(r"""(?:[^\s'"]|'[^']*'|"[^"]*")+""")
_QUOTED = re.compile(r"""'([^']*)'|"([^"]*)\"""")


def template_words(template: str) -> list[str]:
    """Return the words of the command line, in which both places stand; ValueError where quotes do not match.

    Blanks separate words; what is between two quotes, single or double, is taken as it is.
    """
    if _WORD.sub("", template).strip():
        raise ValueError(template)
    words = [_QUOTED.sub(lambda found: found[1] or found[2] or "", word) for word in _WORD.findall(template)]
    return words if any(place in word for place in PLACES for word in words) else [*words, *PLACES]


def template_fault(template: str) -> str | None:
    """Return what is wrong with the command line, in words that follow `the command line `, None if nothing is."""
    try:
        words = template_words(template)
    except ValueError:
        return "has quotes that do not match"
    if not template.strip():
        return "is empty"
    if not words[0].startswith("/"):
        return f"begins with {words[0][:48]!r}, which is not an absolute path"
    for place in PLACES:
        if not any(place in word for word in words[1:]):
            return f"has no {place}"
    return None
