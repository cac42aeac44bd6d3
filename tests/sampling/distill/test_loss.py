"""The training loss and the acceptance of a page, against straightforward implementations."""

from itertools import product

import pytest
import torch
from tiny import hidden_features, tiny_head, tiny_llama
from torch.nn.functional import log_softmax, logsigmoid, softmax

from sampling.distill.options import TrainingPlan
from sampling.distill.pages import ANSWER, Corpus, TextPage
from sampling.distill.students import Student, Target, create_student
from sampling.distill.trainer import count_acceptance, distillation_loss

LAYERS = (1, -1)


@pytest.mark.parametrize("kind", ["eagle3", "block"])
def test_the_loss_and_its_gradient_are_cross_entropy(tmp_path, kind):
    """The chunked loss against autograd over all logits. That of a confidence has no gradient for the drafts."""
    model, size = tiny_llama(), 64 if kind == "eagle3" else 96
    page = TextPage(torch.randint(64, (2, 12)), torch.randn(2, 12, size), torch.randint(3, (2, 12)), torch.zeros(2))
    student = student_of(model) if kind == "eagle3" else block_student(model, tmp_path)
    lm_head = model.lm_head.weight.detach()
    loss = distillation_loss(student, page, lm_head, 2, turn=3)
    loss.backward()
    gradients = {name: part.grad.clone() for name, part in student.head.named_parameters() if part.grad is not None}
    student.head.zero_grad()
    step_losses = []
    chosen = slice(None) if kind == "eagle3" else slice(1, None, 2)
    for begin, states in enumerate(student.predictions(page, 2, chosen), start=2):
        end = begin + 9
        target_logits = page.features[:, begin - 1 : end - 1, -32:][:, chosen] @ lm_head.T
        target_logits = target_logits[..., student.vocabulary]
        log_q = log_softmax(states @ torch.cat([student.rows, student.extra], dim=1).T, -1)
        p = softmax(target_logits, -1)
        losses = -(p * log_q).sum(-1)
        if student.confidence is not None:
            known, overlap = student.confidence(states.detach())[..., 0], torch.minimum(p, log_q.exp()).sum(-1).detach()
            losses = losses - overlap * logsigmoid(known) - (1 - overlap) * logsigmoid(-known)
        step_losses.append(losses[page.sources[:, begin:end][:, chosen] > 0].mean())
    expected = (step_losses[0] + 0.8 * step_losses[1]) / 1.8
    expected.backward()
    assert torch.allclose(loss, expected, atol=1e-5)
    assert kind == "eagle3" or len(gradients) == len([*student.head.parameters()])
    for name, part in student.head.named_parameters():
        if part.grad is not None:
            assert torch.allclose(gradients[name], part.grad, atol=1e-5, rtol=1e-4), name


def student_of(model):
    drafter = tiny_head(model)
    drafter.layers.requires_grad_(True)
    drafter.fc.requires_grad_(True)
    return Student(drafter, drafter.embed_tokens, drafter.lm_head.rows.weight.detach(), drafter.lm_head.vocabulary)


def block_student(model, empty):
    plan = TrainingPlan("x", kind="block", steps=2, vocabulary=20)
    student = create_student(Target(model, None, model.lm_head.weight.detach()), Corpus(empty), plan)
    for part in student.head.parameters():
        torch.nn.init.normal_(part, std=0.3)
    return student


class ModelStudent:
    """Drafts what a model without hidden states of the target predicts, at every step from the true tokens."""

    def __init__(self, model):
        self.model, self.rows, self.vocabulary = model, model.lm_head.weight, torch.arange(model.config.vocab_size)
        self.extra = self.rows[:, :0]

    def predictions(self, page, steps):
        states = self.model.model(input_ids=page.tokens).last_hidden_state
        count = page.tokens.shape[1] - steps - 1
        for step in range(steps):
            yield states[:, step + 1 : step + 1 + count]


def test_acceptance_counts_drafts_as_decoding_would():
    """Counted position by position along the text; a draft counts only if the earlier drafts of its round match."""
    model = tiny_llama(vocab_size=16)
    student = ModelStudent(tiny_llama(5, vocab_size=16, num_hidden_layers=1))
    tokens, sources = torch.randint(16, (4, 30)), torch.randint(3, (4, 30))
    with torch.no_grad():
        target = model(input_ids=tokens, output_hidden_states=True)
        logits = student.model(input_ids=tokens).logits
    page = TextPage(tokens, hidden_features(target, LAYERS), sources, torch.tensor([0.0, 0.0, 1.0, 0.5]))
    counts = torch.zeros(2, 2, 2, dtype=torch.float64)
    count_acceptance(student, page, model.lm_head.weight.detach(), counts)
    matches = logits.argmax(-1) == target.logits.argmax(-1)
    overlap = torch.minimum(logits.softmax(-1), target.logits.softmax(-1)).sum(-1)
    greedy, sampled = [[0, 0], [0, 0]], [[0.0, 0], [0.0, 0]]
    for entry, step, row in product(range(27), range(2), range(4)):
        position = entry + step + 2
        if sources[row, position] != ANSWER:
            continue
        if row < 2 and (step == 0 or matches[row, position - 2]):
            greedy[step][0] += int(matches[row, position - 1])
            greedy[step][1] += 1
        if row == 2:
            sampled[step][0] += float(overlap[row, position - 1])
            sampled[step][1] += 1
    assert counts[0].tolist() == greedy
    assert torch.allclose(counts[1], torch.tensor(sampled, dtype=torch.float64), atol=1e-4)
