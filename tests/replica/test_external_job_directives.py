"""The directives of jobs that Slurm schedules: what `#DW` reads, after Slurm's own word, where both read the same."""

import pytest

from forebay.replica.grammar import DirectiveRejected, read_external_job_request, read_request
from forebay.replica.model import Access, BufferRequest

SPACE = "#BB_LUA jobdw capacity=1GiB pool=fast"
IN = "stage_in type=file source=/in/a destination=$DW_JOB_STRIPED/a"


def read(*lines: str, directive: str = "BB_LUA") -> BufferRequest | None:
    return read_external_job_request("#!/bin/sh\n" + "\n".join(lines) + "\ntrue\n", directive=directive).request


def refused(*lines: str, directive: str = "BB_LUA") -> str:
    with pytest.raises(DirectiveRejected) as caught:
        read(*lines, directive=directive)
    return str(caught.value)


def test_the_site_s_word_is_followed_by_what_dw_reads() -> None:
    found = read(SPACE + " access_mode=striped type=scratch", f"#BB_LUA {IN}")
    asked = read_request(f"#DW jobdw capacity=1GiB pool=fast\n#DW {IN}").request
    assert found is not None and asked is not None
    assert (found.pool, found.capacity_bytes, found.stage_in) == (asked.pool, asked.capacity_bytes, asked.stage_in)
    assert found.access == (Access.STRIPED,)


def test_the_short_form_of_slurm_s_documents_is_jobdw() -> None:
    found = read("#BB_LUA pool=fast capacity=1GiB")
    assert found is not None and (found.pool, found.capacity_bytes) == ("fast", 2**30)
    again = read(found.text)
    assert again is not None and (again.pool, again.capacity_bytes) == ("fast", 2**30)


def test_a_site_that_calls_its_directive_dw_has_dw() -> None:
    found = read("#DW jobdw capacity=1GiB pool=fast", f"#DW {IN}", directive="DW")
    assert found is not None and len(found.stage_in) == 1


def test_a_script_without_directives_asks_for_nothing() -> None:
    assert read("#SBATCH -n1") is None


def test_directives_of_another_word_are_comments_with_a_warning() -> None:
    reading = read_external_job_request(f"{SPACE}\n#DW {IN}\n")
    assert reading.request is not None and not reading.request.stage_in
    assert "#DW is not read" in reading.warnings[0]


@pytest.mark.parametrize(
    ("line", "place", "says"),
    [
        ("#BB_LUA jobdw capacity=1.5GiB pool=fast", "column 25", "the whole number before its point"),
        ("#BB_LUA jobdw capacity=1GiB", "column 15", "capacity= needs pool="),
        ("#BB_LUA jobdw capacity=2N pool=fast", "column 24", "in nodes"),
        ("#BB_LUA jobdw xpool=slow pool=fast capacity=1GiB", "column 16", "the letters pool="),
        (f"{SPACE}\n#BB_LUA {IN} # capacity=2GiB", "column 73", "the letters capacity="),
        ("#BB_LUA jobdw capacity=1GiB\tpool=fast", "column 28", "the tab"),
        ("#BB_LUAX pool=fast capacity=1GiB", "column 1", "Slurm reads '#BB_LUAX' as #BB_LUA"),
        (f"{SPACE} access_mode=striped,private", "column 51", "access_mode=private"),
        ("#BB_LUA swap 2GiB pool=fast", "column 19", "the letters pool="),
        ("#BB_LUA swap 2GiB", "column 9", "unknown directive 'swap' of #BB_LUA"),
        ("#BB_LUA persistentdw name=a", "column 9", "unknown directive 'persistentdw'"),
        ("#BB_LUA", "column 1", "has no directive after it"),
        (f"#BB_LUA {IN}", "column 1", "requests no capacity; add for example #BB_LUA pool=fast"),
        (f"{SPACE}\n#BB_LUA pool=fast capacity=1GiB", "line 3, column 9", "a second time"),
    ],
)
def test_what_slurm_would_count_otherwise_is_refused_with_its_place(line: str, place: str, says: str) -> None:
    sentence = refused(line)
    assert place in sentence and says in sentence, sentence
