"""The short form of `--bb`: `access= capacity= swap= type= pool=`, which stands for `#DW` directives."""

from __future__ import annotations

from replica.grammar.asked import Asked
from replica.grammar.dw import BARE_SWAP_BYTES, read_space, set_swap
from replica.grammar.values import Options, read_options
from replica.grammar.words import Word
from replica.values.errors import RefusalCode
from replica.values.units import Quantity, format_size, parse_quantity

KEYS = ("capacity", "pool", "access", "type", "swap")


def read_short(words: tuple[Word, ...], asked: Asked) -> None:
    """Read the short form. Raises DirectiveRefused with the column; its grammar is closed, so options are not kept."""
    for word in words:
        if word.text in ("create_persistent", "destroy_persistent"):
            raise word.refuse(
                f"--bb may not contain {word.text}", "put #BB directives into the script, or into a file for --bbf"
            )
    options = read_options(words, KEYS, keep_others=False)
    known = options.known
    if "capacity" in known or "swap" not in known:
        space = {key: value for key, value in known.items() if key != "swap"}
        read_space(words[0], Options(space), asked, "access")
    else:
        for key in ("access", "type"):
            if key in known:
                raise known[key].word.refuse(
                    f"{key}= without capacity= says nothing", "add capacity=", code=RefusalCode.INVALID_CAPACITY
                )
    if "swap" in known:
        set_swap(known["swap"].word, known["swap"], known.get("pool"), asked)
    asked.lines.extend(_translated(options))


def _translated(options: Options) -> list[str]:
    """Return the directives that the short form stands for, as Slurm writes them."""
    texts = {key: value.text for key, value in options.known.items()}
    pool = f" pool={texts['pool']}" if "pool" in texts else ""
    lines = []
    if "swap" in texts:
        lines.append(f"#DW swap {format_bytes(parse_quantity(texts['swap'], BARE_SWAP_BYTES).value)}{pool}")
    if "capacity" in texts:
        access = f" access_mode={texts['access']}" if "access" in texts else ""
        kind = f" type={texts['type']}" if "type" in texts else ""
        lines.append(f"#DW jobdw capacity={format_quantity(parse_quantity(texts['capacity']))}{pool}{access}{kind}")
    return lines


def format_quantity(quantity: Quantity) -> str:
    """Return a capacity as a directive writes it; what had no suffix keeps none."""
    if quantity.unit == "bytes":
        return format_bytes(quantity.value)
    return f"{quantity.value}{'N' if quantity.unit == 'nodes' else ''}"


def format_bytes(size_bytes: int) -> str:
    """Return a size with a suffix, always: without one a swap would be read as GiB, and a capacity as units."""
    text = format_size(size_bytes)
    return f"{size_bytes // 1000}.{size_bytes % 1000:03}KB" if text.isdigit() else text
