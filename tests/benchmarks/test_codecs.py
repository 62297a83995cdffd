"""The table of codecs in short: swarm alone, on small vectors."""

from __future__ import annotations

from benchmarks import codecs
from benchmarks.report import as_record


def test_codec_rows_can_be_stored_as_records() -> None:
    messages: list[str] = []
    rows = codecs.rows(messages.append, None, elements=20_000, rounds=2)
    assert len({row.identifier for row in rows}) == len(rows) == 4 * len(codecs.CODECS) - 2
    assert all(as_record(row, "run")["ours_value"] is not None for row in rows)
    assert len(messages) == len(codecs.CODECS)


def test_errors_grow_with_fewer_bits() -> None:
    rows = codecs.rows(
        lambda _: None, None, names=("float16", "int8", "int4", "int2"), elements=100_000, rounds=1
    )
    on_normal = [row.ours.median or 0.0 for row in rows if row.quantity == "relative L2 error, N(0, 1)"]
    assert on_normal == sorted(on_normal)
    assert 0 < on_normal[0] < 3e-4
    assert 0.4 < on_normal[-1] < 0.45
