"""The parser of transcripts: what is one, and how each mistake is said with its file and line."""

from pathlib import Path

import pytest

from tests.conformance.replayer.sightings import look
from tests.conformance.replayer.transcript import (
    Act,
    Log,
    Part,
    Remark,
    Sample,
    TranscriptError,
    parse,
    read_transcript,
)

HEAD = "[   0.000] # trace here  wall 2026-11-20T22:10:45.054\n"


def test_each_kind_of_line_becomes_what_it_is() -> None:
    text = HEAD + (
        "[   0.100] ## a part\n"
        "[   0.200] script:\n"
        "    #!/bin/bash\n"
        "    #BB_LUA pool=p capacity=1K\n"
        "    \n"
        "    true\n"
        "[   0.300] $ [ann] sbatch -n1 < script\n"
        "Submitted batch job 7\n"
        "[   0.400]   job 7: JobState=PENDING (squeue PENDING/PD) Reason=None BB=pending prio0 sc: now it: failed \n"
        "[   0.500] $ scontrol show burst | grep Job\n"
        "\n"
        "(exit 1)\n"
        "[   0.600] calls.log:\n"
        "    22:10:45.077 setup start 7\n"
        "[   0.700] -- said between\n"
    )
    (transcript,) = parse(text, "a.txt")
    assert (transcript.name, transcript.started, transcript.file) == ("here", "2026-11-20T22:10:45.054", "a.txt")
    part, submit, sample, listing, log, remark = transcript.items
    assert isinstance(part, Part) and part.title == "a part"
    assert isinstance(submit, Act) and (submit.user, submit.command, submit.submitted) == ("ann", "sbatch -n1", 7)
    assert submit.script == "#!/bin/bash\n#BB_LUA pool=p capacity=1K\n\ntrue\n"
    assert isinstance(sample, Sample) and (sample.job, sample.held, sample.torn) == (7, True, False)
    assert sample.comment == "now it: failed"
    assert isinstance(listing, Act) and (listing.exit_code, listing.output, listing.user) == (1, (), "")
    assert isinstance(log, Log) and log.lines == ("22:10:45.077 setup start 7",)
    assert isinstance(remark, Remark) and remark.lines == ("-- said between",)
    assert [item.line for item in transcript.items] == [2, 8, 10, 11, 14, 16]


def test_two_recordings_after_one_another_are_two_transcripts() -> None:
    found = parse(HEAD + "[   9.000] ## late\n" + HEAD + "[   0.100] ## early\n", "a.txt")
    assert [len(one.items) for one in found] == [1, 1]


def test_a_sample_that_nobody_answered_tells_nothing_of_the_job() -> None:
    text = HEAD + (
        "[   0.100]   job 7: JobState=RUNNING (squeue RUNNING/R) Reason=None BB=running \n"
        "[   0.200]   job 7: JobState=- (squeue -/-) Reason=- BB= \n"
        "[   0.300]   job 7: JobState=- (squeue /) Reason= BB=- \n"
        "[   9.000]   job 7: JobState=COMPLETED (squeue COMPLETED/CD) Reason=None BB=complete \n"
    )
    (transcript,) = parse(text, "a.txt")
    assert len(transcript.items) == 4 and [one.state for one in transcript.samples] == ["RUNNING", "COMPLETED"]
    assert [one.state for one in look(transcript, "lua").seen["7"]] == ["RUNNING", "COMPLETED"]


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("", 1, "empty"),
        ("hello\n", 1, "no stamp"),
        ("[   0.000] ## a part\n", 1, "does not begin"),
        (HEAD + "[   5.000] ## a\n[   1.000] ## b\n", 3, "time goes back"),
        (HEAD + "[   1.000] script:\n[   1.100] ## b\n", 2, "no script"),
        (HEAD + "[   1.000] script:\n#!/bin/sh\n", 3, "indented by four spaces"),
        (HEAD + "[   1.000] $ sbatch < script\n", 2, "no `script:`"),
        (HEAD + "[   1.000] $\n", 2, "a command is written as"),
        (HEAD + "[   1.000]   job 1: JobState=PENDING\n", 2, "an observation is written as"),
        (HEAD + "[   1.000]   job 1: JobState=R (squeue R/R) Reason=None BB=x hello\n", 2, "an observation is written"),
        (HEAD + "[   1.000] ## a part\nwith a line\n", 3, "without a stamp"),
    ],
)
def test_what_is_no_transcript_is_refused_with_file_and_line(text: str, line: int, words: str) -> None:
    with pytest.raises(TranscriptError) as caught:
        parse(text, "bad.txt")
    assert str(caught.value).startswith(f"bad.txt:{line}: ")
    assert words in caught.value.sentence


def test_a_script_is_read_by_one_command_only() -> None:
    text = HEAD + "[   1.000] script:\n    true\n[   1.100] $ sbatch < script\n[   1.200] $ sbatch < script\n"
    with pytest.raises(TranscriptError, match=r"a.txt:5: "):
        parse(text, "a.txt")


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bytes.txt"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(TranscriptError, match=r"bytes.txt:1: byte 0 is not UTF-8"):
        read_transcript(path)
