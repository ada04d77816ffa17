"""`seqcomp validate`: exit codes, streams, JSON, and what must not be imported."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


def test_legal_plans_exit_0_and_say_lengths(run) -> None:
    result = run("validate", str(ROOT / "plans/usp_4x8.yaml"), "--world", "32", "--seq-len", "4096")
    assert (result.code, result.err) == (0, "")
    assert "legal" in result.out
    assert "32 = ring 4 x ulysses 8" in result.out
    assert "multiples of 32" in result.out


def test_illegal_plans_exit_1_with_all_errors_on_stderr(run) -> None:
    result = run("validate", "usp_4x8", "--world", "24", "--seq-len", "1000")
    assert result.code == 1
    assert result.out == ""
    for part in ("SC104", "24", "32", "SC206", "992", "1024"):
        assert part in result.err
    assert "Traceback" not in result.err


def test_warnings_are_allowed(run, monkeypatch: pytest.MonkeyPatch) -> None:
    from seqcomp.integrations import validate as module
    from seqcomp.plan.facts import AttentionFacts, ModelFacts

    facts = ModelFacts((AttentionFacts("attn", 8, 8, 16, causal=True),), hidden=128)
    monkeypatch.setattr(module, "_facts", lambda model: (facts, ["attn"]))
    result = run("validate", "ring_4_contiguous", "--model", "hf:Any")
    assert result.code == 0
    assert "SC207" in result.err
    assert "1 warning" in result.out
    refused = run("validate", "ulysses_3", "--model", "hf:Any")
    assert refused.code == 1
    assert "1, 2, 4, 8" in refused.err


@pytest.mark.parametrize("name", ["missing.yaml", "no_such_preset", "\udcff", ""])
def test_unreadable_plans_exit_1(run, name: str) -> None:
    result = run("validate", name)
    assert result.code == 1
    assert "SC0" in result.err


@pytest.mark.parametrize(
    "args",
    [
        [],
        ["validate"],
        ["validate", "ring_2", "--world", "0"],
        ["validate", "ring_2", "--world", "two"],
        ["validate", "ring_2", "--seq-len", "-4"],
        ["validate", "ring_2", "--nonsense"],
        ["validate", "ring_2", "ring_4"],
        ["nonsense"],
        ["validate", "ring_2", "--model", "gguf:x"],
        ["validate", "ring_2", "--model", "hf:A?b"],
    ],
)
def test_wrong_usage_exits_2(run, args: list[str]) -> None:
    result = run(*args)
    assert result.code == 2
    assert result.err + result.out
    assert "Traceback" not in result.err


def test_json_is_the_only_thing_on_stdout(run) -> None:
    legal = run("validate", "ring_4", "--json")
    data = json.loads(legal.out)
    assert (legal.code, legal.err, data["legal"], data["diagnostics"]) == (0, "", True, [])
    assert data["plan"]["mesh"] == {"ring": 4}
    refused = run("validate", "ring_4", "--json", "--world", "3")
    data = json.loads(refused.out)
    assert (refused.code, data["legal"]) == (1, False)
    (item,) = data["diagnostics"]
    assert (item["code"], item["found"], item["legal"]) == ("SC104", 3, 4)


def test_debug_shows_what_a_model_raised(run, tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "broken_factory.py").write_text("def make():\n    raise KeyError('lost')\n")
    monkeypatch.chdir(tmp_path)
    spec = "python:broken_factory:make"
    plain = run("validate", "ring_2", "--model", spec)
    assert plain.code == 1
    assert "KeyError" in plain.err
    assert "Traceback" not in plain.err
    assert "Traceback" in run("validate", "ring_2", "--model", spec, "--debug").err


def fresh_process(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout


HEAVY = "{'torch', 'transformers', 'networkx', 'numpy', 'rich'}"


@pytest.mark.parametrize(
    "code",
    [
        "import seqcomp",
        "import seqcomp; assert seqcomp.validate('usp_4x8', world_size=32, seq_len=64) == []",
        "import seqcomp; seqcomp.load_plan('plans/ring_4.yaml'); seqcomp.Plan; seqcomp.PlanError",
        (
            "from seqcomp.cli import main\n"
            "try: main(['validate', 'usp_4x8', '--world', '3'])\nexcept SystemExit: pass"
        ),
    ],
)
def test_plans_alone_need_no_torch(code: str) -> None:
    loaded = fresh_process(f"{code}\nimport sys\nprint(sorted({HEAVY} & set(sys.modules)))")
    assert loaded.strip().splitlines()[-1] == "[]"


def test_module_and_version() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "seqcomp", "validate", "ring_4", "--world", "3"],
        cwd=ROOT, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert "SC104" in done.stderr
    assert done.stdout == ""
