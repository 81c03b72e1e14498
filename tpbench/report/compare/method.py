"""Sentences about the method of a comparison, printed beside its numbers."""

from __future__ import annotations

from tpbench.report.analysis.ratios import CONFIDENCE
from tpbench.report.compare.changes import ALPHA, SAME, UNCLEAR, Comparison, verdict_words
from tpbench.report.compare.uncertainty import LEAST_SPREAD, is_counted

ASSUMPTION = (
    "Samples of one run are not independent, so a row counts as one observation, as uncertain as the spread of its "
    f"samples (percentile 5 to 95; at least {LEAST_SPREAD:.0%})"
)
COUNTED_ASSUMPTION = f"A row counts as one observation with a standard deviation of {LEAST_SPREAD:.0%}"
FALSE_ALARMS = (
    f"Of comparisons where nothing changed, at most {ALPHA:.0%} have a false alarm in any cell, if runs scatter no "
    "more than assumed"
)


def method(comparison: Comparison) -> list[str]:
    """Return what the verdicts mean, how runs scatter, and the false-alarm rate."""
    above, below, _, _ = verdict_words(comparison.metric)
    tested = comparison.tested
    name = comparison.metric.name
    sentences = [
        f"{above}, {below}: {name} differs by more than {100 * comparison.threshold:.3g}%, and a t test of "
        f"its logarithm has p < {ALPHA} after Holm's correction for the {tested} cells tested. {SAME}: it differs by "
        f"less. {UNCLEAR}: runs may scatter that much. ratio: after over before, with its {CONFIDENCE:.0%} interval",
        f"{FALSE_ALARMS}. {COUNTED_ASSUMPTION if is_counted(comparison.metric) else ASSUMPTION}",
    ]
    freedom, factor = comparison.scatter.freedom, comparison.scatter.factor
    if freedom:
        sentences[-1] += (
            f". Repeated rows of a cell ({freedom} more than one a side) scatter {factor**0.5:.2g} times as much as "
            "that, which is taken into account. Rows of one side that follow each other count as one"
        )
    visible = comparison.least_visible
    if visible is not None and visible > comparison.threshold:
        sentences.append(
            f"These rows can show changes of about {visible:.0%} or more (median cell). To see smaller ones, repeat "
            "both sweeps in turns and name all: compare A1,A2,A3 B1,B2,B3"
        )
    return sentences
