"""What is kept of recalls, and what of them /metrics counts."""

from __future__ import annotations

from dataclasses import replace

from fake_engine import recall_report

from kvmem_llama.memory.positions import TokenPos
from kvmem_llama.server.metrics import Metrics
from kvmem_llama.server.recalls import RecallHistory


def test_the_newest_recalls_of_a_workspace_are_kept() -> None:
    left: list[int] = []
    history = RecallHistory(left.append)
    first = recall_report()
    moved = replace(first.blocks[1], start=TokenPos(640))
    for _ in range(70):
        history.add("a", first)
    history.add("b", first)
    history.add("a", replace(first, blocks=(first.blocks[0], moved)))
    found = history.since("a")
    assert len(found) == 64
    assert [block["start"] for block in found[-1]["blocks"]] == [0, 640]
    assert history.since("a", found[-2]["number"]) == found[-1:]
    assert history.since("a", found[-1]["number"]) == [] == history.since("c")
    assert sum(left) == left[-1] == 2  # blocks 320 and 960 went
    assert all("text" not in block for recall in found for block in recall["blocks"])
    history.forget("a")
    assert history.since("a") == [] and len(history.since("b")) == 1


def test_recalls_are_counted_by_the_tier_their_blocks_came_from() -> None:
    metrics = Metrics()
    report = recall_report()
    blocks = (report.blocks[0], replace(report.blocks[1], tier="disk"), report.blocks[2])
    metrics.recalled(replace(report, blocks=blocks), record_bytes=1000, n_replayed=5)
    metrics.recalled(replace(report, blocks=blocks, noop=True), record_bytes=1000, n_replayed=5)
    metrics.blocks_out(3)
    text = metrics.text().decode()
    for line in (
        'kvmem:blocks_selected_total{tier="disk"} 2.0',
        'kvmem:blocks_in_total{tier="disk"} 2.0',
        "kvmem:restore_bytes_total 2000.0",
        "kvmem:replay_tokens_total 5.0",
        "kvmem:blocks_out_total 3.0",
        "kvmem:blocks_retained_total 0.0",
        "kvmem:recall_seconds_count 2.0",
        'kvmem:recall_seconds_bucket{le="0.03"} 0.0',
        'kvmem:recall_seconds_bucket{le="0.1"} 2.0',
    ):
        assert line in text.splitlines(), line
    assert "_created" not in text


def test_rates_are_those_since_the_last_look_and_leave_out_the_first_token() -> None:
    metrics = Metrics()
    metrics.prompt(100, 20, 2.0)
    metrics.predicted(5, 2.0)
    metrics.predicted(1, 0.0)
    metrics.decoded(2)
    metrics.decoded(1)
    first, second = metrics.text().decode().splitlines(), metrics.text().decode().splitlines()
    assert "llamacpp:prompt_tokens_seconds 50" in first
    assert "llamacpp:predicted_tokens_seconds 2" in first  # four steps of decoding in two seconds
    assert "llamacpp:predicted_tokens_seconds 0" in second
    for line in ("llamacpp:tokens_predicted_total 6", "llamacpp:prompt_tokens_cached_total 20",
                 "llamacpp:n_busy_slots_per_decode 1.5"):  # fmt: skip
        assert line in first and line in second
