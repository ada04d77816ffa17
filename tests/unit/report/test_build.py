"""What a report holds besides bytes: kernels, JSON, text, findings."""

from __future__ import annotations

import json

import pytest
import torch

import seqcomp
from seqcomp.report.build import Report
from seqcomp.report.render import pattern, readable
from seqcomp.verify.lockstep import lockstep
from tests.fixtures import plans
from tests.fixtures.models import M0, Spec, build, inputs


def report_of(plan: plans.Plan | str, spec: Spec = M0, **kwargs: object) -> Report:
    def step(model, context, local):
        model(**local)
        return seqcomp.of(model).report()

    return lockstep(lambda: build(spec, **kwargs), plan, step, inputs=inputs(spec))[0]


def test_kernels() -> None:
    text = (
        "mesh: {ring: 2, ulysses: 2}\nstrategies: {ring: {layout: zigzag}, ulysses: {}}\n"
        "overrides: [{match: layers.1.attn, ring: {transport: allgather}}]\n"
    )
    found = report_of(text, dtype=torch.float32).kernels
    assert [row.module for row in found] == ["layers.0.attn", "layers.1.attn"]
    assert [row.transport for row in found] == ["p2p", "allgather"]
    first = found[0].to_json()
    assert first == {
        "module": "layers.0.attn", "kernel": "cpu_flash", "dtype": "float32", "heads": 4,
        "kv_heads": 2, "head_dim": 8, "mask": "causal", "layout": "zigzag", "transport": "p2p",
    }  # fmt: skip


def test_masks_and_no_ring() -> None:
    spec = Spec(causal=(False, True), labels="shifted")
    found = report_of(plans.ulysses(2), spec).kernels
    assert [row.mask for row in found] == ["full", "causal"]
    assert {(row.layout, row.transport) for row in found} == {("contiguous", "none")}


def test_json_is_plain_and_complete() -> None:
    report = report_of(plans.usp(2, 2))
    data = json.loads(json.dumps(report.to_json()))
    assert set(data) == set(Report.__dataclass_fields__)
    assert set(data["comm"][0]) == {
        "module", "kind", "axis", "count", "bytes_sent", "phase", "overlappable", "at_most",
    }  # fmt: skip
    assert sum(row["bytes_sent"] for row in data["comm"]) == report.bytes_sent()
    assert report.bytes_sent() == report.bytes_sent("forward") + report.bytes_sent("backward")


def test_findings_are_shown() -> None:
    """A mixer over the sequence is gathered: the report says so, in data and in text."""
    report = report_of(plans.usp(2, 2), Spec(mixer="cumsum"))
    codes = [finding.code for finding in report.findings]
    assert codes
    assert all(code in str(report) for code in codes)
    assert [finding["code"] for finding in report.to_json()["findings"]] == codes


def test_text() -> None:
    text = str(report_of(plans.usp(2, 2, "zigzag")))
    assert "ring 2 x ulysses 2; batch 2, length 16" in text
    attention = [line for line in text.splitlines() if "layers.*.attn " in line]
    # A line of kernels, one of work, two collectives in each phase; both layers together.
    assert len(attention) == 6
    assert "│ all_to_all │ ulysses" in attention[2]
    assert "\x1b" not in text
    assert all(line == line.rstrip() for line in text.splitlines())


def test_one_rank_sends_nothing() -> None:
    report = report_of({"mesh": {"ring": 1}, "strategies": {"ring": {}}})
    assert report.comm == ()
    assert [row.kernel for row in report.kernels] == ["sdpa", "sdpa"]


def test_no_report_before_the_first_call() -> None:
    def step(model, context, local):
        with pytest.raises(seqcomp.PlanError) as caught:
            seqcomp.of(model).report()
        return caught.value.diagnostics[0].code

    assert set(lockstep(build, "ring_2", step)) == {"SC309"}


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (999, "999 B"), (1024, "1 KiB"), (3 * 2**20 // 2, "1.5 MiB"), (2**40, "1 TiB")],
)
def test_readable_bytes(size: int, text: str) -> None:
    assert readable(size) == text


def test_pattern() -> None:
    assert pattern("model.layers.11.attn2.q") == "model.layers.*.attn2.q"
