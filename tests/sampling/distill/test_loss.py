"""What a step of training computes, and how acceptance is counted, against the plain way of doing it."""

import pytest
import torch
from tiny import tiny_head, tiny_llama
from torch.nn.functional import log_softmax, softmax

from sampling.distill.chat_script import ANSWERED
from sampling.distill.generate import Page
from sampling.distill.loss import Acceptance, HeadStudent, ModelStudent, count_acceptance, loss_of
from utils.decode.model_session import hidden_features

LAYERS = (1, -1)


@pytest.mark.parametrize("kind", ["head", "lm"])
def test_the_loss_and_its_gradient_are_cross_entropy(kind):
    """The fused sum against autograd over whole rows of logits."""
    model = tiny_llama()
    page = Page(torch.randint(64, (2, 12)), torch.randn(2, 12, 64), torch.randint(3, (2, 12)), torch.zeros(2))
    student, _ = student_of(kind, model)
    head = model.lm_head.weight.detach()
    fused = loss_of(student, page, head, 2)
    fused.backward()
    ours = {name: part.grad.clone() for name, part in student.weights.named_parameters() if part.grad is not None}
    student.weights.zero_grad()
    plain = []
    for guesses in student.guesses(page, 2):
        width = guesses.states.shape[1]
        own = page.voices[:, guesses.place : guesses.place + width] > 0
        truth = page.features[:, guesses.place - 1 : guesses.place - 1 + width, -32:] @ head.T
        truth = truth if student.vocabulary is None else truth[..., student.vocabulary]
        each = -(softmax(truth, -1) * log_softmax(guesses.states @ guesses.rows.T, -1)).sum(-1)
        plain.append(each[own].mean())
    expected = (plain[0] + 0.8 * plain[1]) / 1.8
    expected.backward()
    assert torch.allclose(fused, expected, atol=1e-5)
    for name, part in student.weights.named_parameters():
        if part.grad is not None:
            assert torch.allclose(ours[name], part.grad, atol=1e-5), name


def student_of(kind, model):
    if kind == "lm":
        return ModelStudent(tiny_llama(5, num_hidden_layers=1).train().requires_grad_(True)), None
    grafted = tiny_head(model)
    grafted.head.requires_grad_(True)
    grafted.head.config._attn_implementation = "sdpa"
    return HeadStudent(grafted.head, grafted.embed, grafted.rows.weight.detach(), grafted.vocabulary), grafted


def test_acceptance_is_counted_as_drafting_would_meet_it():
    """By hand: place by place along the text, a place counting only where all before it in the same round agreed."""
    model = tiny_llama(vocab_size=16)
    student, _ = student_of("lm", model)
    student = ModelStudent(tiny_llama(5, vocab_size=16, num_hidden_layers=1))
    tokens = torch.randint(16, (4, 30))
    with torch.no_grad():
        truth = model(input_ids=tokens, output_hidden_states=True)
        guess = student.model(input_ids=tokens).logits
    page = Page(tokens, hidden_features(truth, LAYERS), torch.randint(3, (4, 30)), torch.tensor([0.0, 0.0, 1.0, 0.5]))
    counts = Acceptance.empty(2)
    count_acceptance(student, page, model.lm_head.weight.detach(), counts)
    same = guess.argmax(-1) == truth.logits.argmax(-1)
    greedy, drawn = [[0, 0], [0, 0]], [[0.0, 0], [0.0, 0]]
    overlap = torch.minimum(guess.softmax(-1), truth.logits.softmax(-1)).sum(-1)
    for entry in range(27):
        for step in range(2):
            place = entry + step + 2
            for row in range(4):
                if page.voices[row, place] == ANSWERED and row < 2 and (step == 0 or same[row, place - 2]):
                    greedy[step][0] += int(same[row, place - 1])
                    greedy[step][1] += 1
                if page.voices[row, place] == ANSWERED and row == 2:
                    drawn[step][0] += float(overlap[row, place - 1])
                    drawn[step][1] += 1
    assert counts.greedy == greedy
    assert torch.allclose(torch.tensor(counts.drawn), torch.tensor(drawn), atol=1e-4)
