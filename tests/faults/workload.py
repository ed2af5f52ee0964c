"""Real input for the examples of docs/examples, and their expected results, computed independently."""

import hashlib
import random
from collections import Counter
from pathlib import Path

from tests.faults.local_cluster import RunFailed

EXAMPLES = Path(__file__).resolve().parents[2] / "docs" / "examples"
TEXTS = 20
WORDS = "forebay keeps water before the turbines so that they never wait for it and the data before the nodes".split()


class Workload:
    """The input of one run and the expected results."""

    def __init__(self, work: Path, *, numbers: int, seed: int) -> None:
        """Write the input: a file of `numbers` integers, one a line, and a directory of texts."""
        self.work = work
        chance = random.Random(seed)
        values = [chance.randrange(10**7) for _ in range(numbers)]
        text = "".join(f"{value}\n" for value in values)
        inputs = work / "input"
        (inputs / "texts").mkdir(parents=True)
        (inputs / "numbers.txt").write_text(text)
        counts: dict[str, int] = {}
        for index in range(TEXTS):
            counts[f"{index}.txt"] = chance.randrange(1_000, 20_000)
            chosen = chance.choices(WORDS, k=counts[f"{index}.txt"])
            (inputs / "texts" / f"{index}.txt").write_text(" ".join(chosen) + "\n")
        digits = Counter(value % 10 for value in values)
        self.expected: dict[str, str | dict[str, str]] = {
            "sum": f"{sum(values)}\n",
            "sort": hashlib.sha256("".join(f"{value}\n" for value in sorted(values)).encode()).hexdigest(),
            "histogram": "".join(f"{digit} {digits[digit]}\n" for digit in range(10)),
            "digest": hashlib.sha256(text.encode()).hexdigest() + "\n",
            "words": {name: f"{count}\n" for name, count in counts.items()},
        }

    def check_result(self, name: str, job: int) -> None:
        """Compare what a job brought back with what it must be; RunFailed says what differs."""
        path = self.work / "results" / (f"{name}-{job}" + ("" if name == "words" else ".txt"))
        expected = self.expected[name]
        try:
            found: str | dict[str, str]
            if name == "words":
                found = {file.name: file.read_text() for file in path.iterdir()}
            elif name == "sort":
                found = hashlib.sha256(path.read_bytes()).hexdigest()
            else:
                found = path.read_text()
        except OSError as error:
            raise RunFailed(f"job {job} ({name}) brought nothing back: {path}: {error.strerror}") from error
        if found != expected:
            raise RunFailed(f"job {job} ({name}): {path} is not what it must be")

    def completions(self) -> Counter[int]:
        """Return how often each job's script ran to its end: each adds one line to completed.txt."""
        file = self.work / "completed.txt"
        lines = file.read_text().splitlines() if file.exists() else []
        return Counter(int(line.split()[1]) for line in lines)


def space_of(name: str) -> str | None:
    """Return the --bb that an example is submitted with: the script of the others asks itself."""
    return "capacity=40MB pool=bulk access=striped" if name == "digest" else None


def submit_words(name: str, work: Path) -> list[str]:
    """Return the words after `forebay` that submit an example."""
    asked = space_of(name)
    space = [] if asked is None else ["--bb", asked]
    return ["submit", "--json", "--chdir", str(work), *space, str(EXAMPLES / f"{name}.sh")]
