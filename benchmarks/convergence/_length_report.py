"""The report of the study of lengths."""

import pathlib

import _length_plots
import _length_summary
import _length_tables
import _lengths
import _sizes
from _summary import Rows


def parts(rows: Rows, size: str, folder: pathlib.Path) -> list[str]:
    """The report's parts in order, none without final runs; draws its picture into ``folder``."""
    every = {task: _length_summary.every(rows, size, task) for task in _lengths.TASKS}
    if not any(every.values()):
        return []
    _length_plots.differences(every, size, folder / f"lengths_{size}.png")
    windows = _sizes.SIZES[_lengths.size_of(size)].final_windows
    todo = _length_tables.missing(rows, size)
    out = ["**Not finished**: what is missing is listed at the end."] if todo else []
    out += [
        f"Cross entropy in nats on {windows:,} held-out windows, minus AdamW's on the same seeds; "
        "below 0 is better than AdamW. In brackets 95 % intervals; their width comes from all "
        "contenders of a length together. One that has 0 in it shows no difference: it is called "
        "level. Intervals leave out that hyperparameters were chosen on one other seed.",
        f"![Loss minus AdamW's against the steps of a run](lengths_{size}.png)",
    ]
    for task, found in every.items():
        if not found:
            continue
        out += [f"## {task}", _length_tables.differences(found, size)]
        contrasts = _length_tables.contrasts(found, size)
        out += ["What confidence and debiasing change:", contrasts] if contrasts else []
        out += ["What the searches chose:", _length_tables.chosen(found)]
    return out + (["## Not there yet", todo] if todo else [])
