"""Heads as beginnings of EAGLE-3 drafters: equal where the format can express them, and trained further."""

import dataclasses

import pytest
import torch
from tiny import save_folder, tiny_llama, tiny_tokenizer

from sampling.distill.__main__ import main
from sampling.distill.conversion import eagle3_from_head
from sampling.distill.dataset import Corpus
from sampling.distill.generate import Page
from sampling.distill.student_files import _head_student, load_student
from sampling.distill.students import HeadStudent
from sampling.distill.target import Target, output_weight
from utils.decode.features import FeatureReader
from utils.models.draft_head import Head, feature_layers, shape_for

LAYERS, ROWS, LENGTH, STEPS = 8, 4, 24, 3
FLAGS = "--tokens 500 --rows 6 --length 96 --batch 3 --rate 0.1 --vocabulary 150 --device cpu --dtype float32"


@pytest.fixture(scope="module")
def target() -> Target:
    model = tiny_llama(vocab_size=300, num_hidden_layers=LAYERS)
    with torch.no_grad():
        model.model.norm.weight.copy_(torch.rand(model.config.hidden_size) + 0.5)
    return Target(model, tiny_tokenizer(), output_weight(model))


@torch.no_grad()
def page_of(model, layers: tuple[int, ...]) -> Page:
    tokens = torch.randint(300, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1)).int()
    reader = FeatureReader(model, layers)
    with reader.watching():
        features = reader.features(model(tokens.long(), output_hidden_states=True, use_cache=False))
    return Page(tokens, features, torch.full_like(tokens, 2, dtype=torch.uint8), torch.zeros(ROWS))


@torch.no_grad()
def head_that_keeps_the_state(target: Target) -> Head:
    """It reads the last hidden state alone, and passes states to its layer unmixed."""
    torch.manual_seed(3)
    head = Head(shape_for(target.model, feature_layers(LAYERS)))
    size = head.shape.hidden
    head.read.weight[:, :-size] = 0
    head.mix.weight.copy_(torch.cat([torch.zeros(size, size), torch.eye(size)], dim=1))
    head.layer.input_layernorm.weight.copy_(torch.rand(size) + 0.5)
    head.norm.weight.copy_(torch.rand(size) + 0.5)
    return head


def logits(student: HeadStudent, page: Page) -> list[torch.Tensor]:
    return [one.states @ one.rows.T for one in student.predictions(page, STEPS)]


@pytest.mark.parametrize("has_pages", [True, False])
def test_a_head_that_the_format_can_express_is_equal(target, has_pages, tmp_path) -> None:
    ids = torch.arange(0, 300, 2)
    head = _head_student(head_that_keeps_the_state(target), target, ids)
    new = _head_student(eagle3_from_head(head, target, Corpus(tmp_path / "none")), target, ids)
    page = page_of(target.model, new.layers)
    if has_pages:
        corpus = Corpus(tmp_path / "pages")
        corpus.add(page)
        new = _head_student(eagle3_from_head(head, target, corpus), target, ids)
    size = head.rows.shape[1]
    own = dataclasses.replace(
        page, features=torch.cat([page.features[..., : 2 * size], page.features[..., 3 * size :]], -1)
    )
    with torch.no_grad():
        for before, after in zip(logits(head, own), logits(new, page), strict=True):
            assert torch.allclose(before, after, atol=2e-3 * float(before.std()), rtol=0)
            assert float(before.std()) > 0.01


def test_training_continues_from_a_head(target, tmp_path, capsys) -> None:
    save_folder(tmp_path / "tiny", target.model, target.tokenizer)

    def run(name: str, *flags: str) -> int:
        given = ("--target", str(tmp_path / "tiny"), "--out", str(tmp_path / name), *FLAGS.split(), *flags)
        return main(list(given))

    assert run("head", "--kind", "head", "--passes", "1") == 0
    assert run("new", "--kind", "eagle3", "--passes", "1", "--start", str(tmp_path / "head")) == 0
    student = load_student(tmp_path / "new", target)
    assert student.kind == "eagle3" and student.layers == (2, 6, LAYERS + 1, -1)
    assert student.head.conventions.norm_before_residual
    capsys.readouterr()
    assert run("back", "--kind", "head", "--passes", "1", "--start", str(tmp_path / "new")) == 1
    assert "--kind eagle3" in capsys.readouterr().err
