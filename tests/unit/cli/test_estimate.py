"""`seqcomp estimate`: exit codes, streams and JSON."""

import functools
import json
import subprocess
import sys

import pytest

H100 = ("--model", "llama3-8b", "--cluster", "h100")


@pytest.fixture
def run(run):
    return functools.partial(run, "estimate")


def test_text(run) -> None:
    args = ("--seq-len", "131072", "--mode", "prefill", "--gpu-hour-price", "2.5")
    code, out, err = run("usp_4x8", *H100, *args)
    assert (code, err) == (0, "")
    assert out.startswith("usp_4x8: llama3-8b on ring 4 x ulysses 8 of 8 x H100")
    for part in ("waiting for communication", "keys and values", "of peak", "price", "peak "):
        assert part in out


def test_json_of_a_plan_that_does_not_fit(run) -> None:
    code, out, err = run("ring_2", *H100, "--seq-len", "131072", "--json")
    data = json.loads(out)
    assert (code, err, data["fits"], data["price"]) == (1, "", False, None)
    assert data["peak_bytes"] > data["capacity"]
    assert [item["code"] for item in data["findings"]] == ["SC121"]
    assert {event["stream"] for event in data["timeline"]} >= {"compute", "communication"}


@pytest.mark.parametrize(
    ("args", "code", "text"),
    [
        (("ring_2", *H100, "--seq-len", "15"), 1, "SC206"),
        (("ring_x", *H100, "--seq-len", "16"), 1, "SC012"),
        (("ulysses_3", *H100, "--seq-len", "48"), 1, "SC201"),
        (("ring_2", "--model", "llama-8b", "--cluster", "h100", "--seq-len", "16"), 2, "llama3-8b"),
        (("ring_2", "--model", "llama3-8b", "--cluster", "h10", "--seq-len", "16"), 2, "SC027"),
        (("ring_16", *H100[:3], "cpu-gloo", "--seq-len", "64", "--dtype", "fp32"), 1, "SC120"),
        (("ring_2", *H100), 2, "--seq-len"),
        (("ring_2", *H100, "--seq-len", "2" + "0" * 300), 2, "--seq-len"),
        (("ring_2", *H100, "--seq-len", "16", "--gpu-hour-price", "inf"), 2, "price"),
        (("ring_2", *H100, "--seq-len", "16", "--mode", "sleep"), 2, "sleep"),
    ],
)  # fmt: skip
def test_refusals(run, args, code, text) -> None:
    found, _, err = run(*args)
    assert found == code
    assert text in err


def test_known_shapes_need_no_torch() -> None:
    code = (
        "import sys; from seqcomp.cli import main\n"
        "try: main(['estimate', 'usp_2x2', '--model', 'llama3-8b', '--cluster', 'h100', "
        "'--seq-len', '4096', '--json'])\n"
        "except SystemExit: pass\n"
        "print([m for m in ('torch', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "[]"


def test_packed_documents(run) -> None:
    args = ("--seq-len", "131072", "--mode", "prefill", "--json", "--documents")
    code, out, err = run("ring_8_contiguous", *H100, *args, "65536,4096x16")
    data = json.loads(out)
    assert (code, err, data["documents"]) == (0, "", "65536,4096x16")
    assert data["busiest"]["attends"] == 3
    (uneven,) = [item for item in data["findings"] if item["code"] == "SC418"]
    assert "layout: striped" in uneven["help"]
    code, _, err = run("ring_8", *H100, *args, "4096x31")
    assert (code, "4096x31,4096" in err) == (2, True)
    code, _, err = run("ring_8", *H100, *args, "many")
    assert (code, "4096x32" in err) == (2, True)


def test_the_dtype_of_a_profile(run) -> None:
    """The kernels of CPUs are measured in fp32; what is asked for comes first."""
    machine = ("ring_2", *H100[:3], "cpu-gloo", "--seq-len", "64", "--json")
    for asked, dtype, said in (((), "fp32", True), (("--dtype", "bf16"), "bf16", False)):
        data = json.loads(run(*machine, *asked)[1])
        assert data["dtype"] == dtype
        assert ("SC419" in [item["code"] for item in data["findings"]]) == said
    data = json.loads(run("ring_2", *H100, "--seq-len", "64", "--json")[1])
    assert (data["dtype"], "SC419" in str(data["findings"])) == ("bf16", False)
