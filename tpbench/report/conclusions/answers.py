"""Sentences about the verdicts of a workload's problems, and the names of its grids."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from statistics import median

from tpbench.report.conclusions.verdicts import Timed, Verdict
from tpbench.report.grids.grid import RecordGrid, heading
from tpbench.report.grids.records import value_text
from tpbench.report.numbers.metric import number


def answer(verdicts: Sequence[Verdict]) -> str:
    """Return the fastest variant, its share of the floor, and the ratio to the next variant, as sentences.

    The floor is called the hardware limit there, because the sentences are read first.
    Problems with a single measured cell do not count, unless there are no others. Variants that ran only in Triton's
    interpreter are named, because a reader would miss them.
    """
    compared_ones = [each for each in verdicts if each.runner_up]
    decided = [(each, each.fastest) for each in compared_ones or verdicts]
    won = Counter(value_text(fastest.record["variant"]) for _, fastest in decided if fastest)
    if not won:
        return f"No row is both correct and a measurement.{_interpreted(verdicts)}"
    (winner, count), *others = won.most_common()
    of_winner = [(each, fastest) for each, fastest in decided if fastest and _variant(fastest) == winner]
    clocks = {each.clock.name for each, _ in of_winner}
    total = sum(won.values())
    kind = "compared problems" if compared_ones else "problems"
    where = "" if total == 1 else f" in {'all' if count == total else f'{count} of'} {total} {kind}"
    rest = [f"{name} in {number_of}" for name, number_of in others[:3]]
    if more := sum(number_of for _, number_of in others[3:]):
        rest.append(f"others in {more}")
    elsewhere = f" ({', '.join(rest)})" if rest else ""
    sentences = [f"{'Fastest' if compared_ones else 'Measured alone'}: {winner}{where}{elsewhere}"]
    floors = [fastest.record["fraction_of_floor"] for _, fastest in of_winner]
    known = [share for share in floors if share is not None]
    if known:
        sentences[0] += f", at {100 * median(known):.0f}% of the hardware limit"
    behind = [(each.runner_up, each) for each, _ in of_winner]
    compared = [(other, float(other.record[each.clock.time_column]) / each.time_ms) for other, each in behind if other]
    if compared:
        names = Counter(_variant(other) for other, _ in compared)
        times = median(factor for _, factor in compared)
        next_name = names.most_common(1)[0][0] if len(names) == 1 else "The next variant"
        sentences.append(f"{next_name} takes {_times(times)} as long")
    middle = "medians, " if count > 1 and (known or compared) else ""
    return f"{'. '.join(sentences)} ({middle}{' or '.join(sorted(clocks))} time).{_interpreted(verdicts)}"


def _interpreted(verdicts: Sequence[Verdict]) -> str:
    """Return a sentence about the correct variants that only Triton's interpreter ran, or nothing."""
    cells = [record for each in verdicts for record in each.row.records if record and record["status"] == "ok"]
    ran, measured = (
        {value_text(record["variant"]): None for record in cells if bool(record["interpreted"]) == interpreted}
        for interpreted in (True, False)
    )
    names = [name for name in ran if name not in measured]
    return f" Only Triton's interpreter ran {', '.join(names)}, so there is no time to compare." if names else ""


def _variant(cell: Timed) -> str:
    return value_text(cell.record["variant"])


def _times(factor: float) -> str:
    return f"{factor:.2f} times" if factor < 1.1 else f"{factor:.1f} times" if factor < 10 else f"{factor:.0f} times"


def disagreement(verdicts: Sequence[Verdict]) -> str:
    """Return a sentence about the problems in which wall time and device time name different winners, or nothing."""
    differing = [each for each in verdicts if "wall differs" in each.doubts]
    if not differing:
        return ""
    most = max(differing, key=lambda each: each.time_ms)
    grids = list({id(each.grid): each.grid for each in verdicts}.values())
    where = group_names(grids)[grids.index(most.grid)]
    fastest = most.fastest
    assert fastest is not None
    wall = next(each for each in most.order if each.column == most.wall_fastest)
    return (
        "By wall time another variant or other options are the fastest "
        f"in {len(differing)} of {len(verdicts)} problems. The slowest of them is "
        f"{where}{', ' if where else ''}{most.problem}: by device "
        f"time {fastest.column} ({number(most.time_ms)} ms, wall {number(fastest.record['time_ms'])} ms), by wall time "
        f"{wall.column} ({number(wall.record['time_ms'])} ms, device {number(wall.record[most.clock.time_column])} ms)."
    )


def group_names(grids: Sequence[RecordGrid]) -> list[str]:
    """Return for each grid the facts that not all grids share, as one line."""
    shared = shared_facts(grids)
    return [heading({name: text for name, text in grid.facts.items() if name not in shared}) for grid in grids]


def shared_facts(grids: Sequence[RecordGrid]) -> dict[str, str]:
    """Return the facts that all grids have in common."""
    if not grids:
        return {}
    return {name: text for name, text in grids[0].facts.items() if all(each.facts.get(name) == text for each in grids)}
