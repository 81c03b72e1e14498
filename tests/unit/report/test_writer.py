"""Tables align words to the left and numbers to the right."""

import pytest
from tpbench.report.tables.writer import TextDocument, TextTable, aligned, as_markdown, is_number


@pytest.mark.parametrize(
    "text",
    [
        "7", "-2.32%", "9.54e-07", "0.303 ms (1.00x)", "0.160 ms† (1.00x)", "0.122*", "12.5x",
        "4.096 ms†‡ [device 2.799] (1.49x)", "3.830 ms +-22%", "0.98 to 1.02", "3, 4", "8611 tokens/s", "1.5 GB/s",
    ],
)  # fmt: skip
def test_numbers(text: str) -> None:
    assert is_number(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "-",
        "OOM",
        "ok†",
        "fp32",
        "0.6B",
        "1.41x ddp",
        "2436602295c6",
        "3e684047",
        "2.28.9",
        "3 steps by one process",
        "2026-11-20 10:00",
        "v1",
    ],
)
def test_words(text: str) -> None:
    assert not is_number(text)


def test_a_column_of_numbers_may_have_words() -> None:
    rows = [("triton_tp", "ok", "0.3 ms", "-"), ("gather", "oom", "OOM", "-")]
    columns = ("variant", "status", "time", "note")
    assert "| :--- | :--- | ---: | :--- |" in as_markdown(TextDocument([TextTable(columns, rows)]))
    assert [line.plain for line in aligned(columns, rows)] == [
        "variant    status    time  note",
        "triton_tp  ok      0.3 ms  -",
        "gather     oom        OOM  -",
    ]
