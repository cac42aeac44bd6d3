"""`python -m sampling.distill` on a tiny target: what it writes, learns, keeps and goes on from."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from shelf import load
from tiny import save_folder, tiny_head, tiny_llama, tiny_mamba, tiny_t5, tiny_tokenizer
from torch.nn.functional import log_softmax, softmax

from sampling.distill.__main__ import main
from sampling.distill.conversation import ANSWERED, ASKED, FORCED, Script, Speaker
from sampling.distill.corpus import Corpus
from sampling.distill.trainer import Trainer
from sampling.distill.training import Acceptance, HeadStudent, ModelStudent, count_acceptance, loss_of
from sampling.distill.writing import Page, Writer
from utils.caching import hidden_features

FLAGS = "--tokens 1000 --rows 6 --length 96 --batch 3 --passes 2 --vocabulary 150 --width 64 --depth 1"
LAYERS = (1, -1)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    """A tiny target in a folder, in float32 on every machine."""
    folder = tmp_path_factory.mktemp("target") / "tiny"
    save_folder(folder, tiny_llama(vocab_size=300), tiny_tokenizer())
    return folder


@pytest.fixture(autouse=True)
def _float32(monkeypatch):
    monkeypatch.setattr("sampling.distill.workshop.number_format", lambda device: torch.float32)


def make(target, out, *flags):
    return main(["--target", str(target), "--out", str(out), "--device", "cpu", *FLAGS.split(), *flags])


def weights(out):
    return load_file(Path(out) / "model.safetensors")


def page_of(model, *, seed=0, rows=6, length=40, asked=()):
    tokenizer = tiny_tokenizer(model.config.vocab_size)
    script = Script.of(tokenizer, frozenset({tokenizer.eos_token_id}), list(asked))
    return Writer(model, script, LAYERS, rows=rows, length=length).write(seed, asked=bool(asked)), script, tokenizer


def test_a_page_is_what_the_target_says_and_saw():
    """Features are those of one whole forward over each row, greedy rows hold the target's own choices, forced tokens are told apart."""
    model = tiny_llama(vocab_size=300)
    page, script, _ = page_of(model, length=90, asked=["Why?"])
    with torch.no_grad():
        output = model(input_ids=page.tokens.long(), output_hidden_states=True)
    assert torch.allclose(page.features.float(), hidden_features(output, LAYERS), atol=0.05, rtol=0.02)
    assert not page.own[:, : len(script.head)].any()
    assert page.tokens[:, : len(script.head)].tolist() == [list(script.head)] * 6
    greedy = (page.answers & (page.warmths == 0)[:, None])[:, 1:]
    assert greedy.any() and torch.equal(output.logits.argmax(-1)[:, :-1][greedy], page.tokens[:, 1:].long()[greedy])


def test_the_same_seed_writes_the_same_page():
    model = tiny_llama(vocab_size=300)
    assert torch.equal(page_of(model, seed=3)[0].tokens, page_of(model, seed=3)[0].tokens)
    assert not torch.equal(page_of(model, seed=3)[0].tokens, page_of(model, seed=4)[0].tokens)


def test_the_template_speaks_between_the_turns():
    tokenizer = tiny_tokenizer()
    script = Script.of(tokenizer, frozenset({tokenizer.eos_token_id}), [])
    end = tokenizer.eos_token_id
    speaker = Speaker(script, 0.0, ())
    said = [speaker.next(token) for token in [0] * len(script.head) + [65, 66, end] + [0] * (len(script.to_answer) - 1) + [67, end]]
    assert "".join(tokenizer.decode([token for token, _ in said])) == (
        "<|im_start|>system\nYou are a tiny model<|im_end|>\n<|im_start|>user\n"
        + tokenizer.decode([65, 66]) + "<|im_end|>\n<|im_start|>assistant\n" + tokenizer.decode([67]) + "<|im_end|>"
    )  # fmt: skip
    assert [(token, voice) for token, voice in said if voice] == [(65, ASKED), (66, ASKED), (67, ANSWERED), (end, ANSWERED)]
    assert speaker.temperature > 0 and tokenizer.decode(speaker.forced) == "\n<|im_start|>user\n"


def test_whole_questions_are_asked_and_answered():
    page, script, tokenizer = page_of(tiny_llama(vocab_size=300), length=70, asked=["Why?"])
    start = [*script.head, *tokenizer("Why?")["input_ids"], *script.to_answer]
    assert page.tokens[:, : len(start)].tolist() == [start] * 6
    assert not page.own[:, : len(start)].any() and page.own[:, len(start)].all()


def test_a_model_without_a_template_just_writes():
    tokenizer = tiny_tokenizer(chat=False)
    script = Script.of(tokenizer, frozenset({tokenizer.eos_token_id}), [])
    speaker = Speaker(script, 0.7, ())
    first = tokenizer.bos_token_id
    assert [speaker.next(9) for _ in range(3)] == [(first, FORCED), (9, ANSWERED), (9, ANSWERED)]
    assert speaker.next(tokenizer.eos_token_id) == (tokenizer.eos_token_id, ANSWERED) and speaker.next(9) == (first, FORCED)


@pytest.mark.parametrize("kind", ["head", "lm"])
def test_the_loss_and_its_gradient_are_cross_entropy(kind):
    """The fused sum against autograd over whole rows of logits."""
    model = tiny_llama()
    page = Page(torch.randint(64, (2, 12)), torch.randn(2, 12, 64), torch.rand(2, 12) > 0.3, torch.zeros(2))
    student, _ = student_of(kind, model)
    head = model.lm_head.weight.detach()
    fused = loss_of(student, page, head, 2)
    fused.backward()
    ours = {name: part.grad.clone() for name, part in student.weights.named_parameters() if part.grad is not None}
    student.weights.zero_grad()
    plain = []
    for guesses in student.guesses(page, 2):
        width = guesses.states.shape[1]
        own = page.own[:, guesses.place : guesses.place + width]
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


@pytest.mark.parametrize("kind", ["head", "lm"])
def test_a_drafter_is_made_described_and_loaded(target, tmp_path, kind, capsys):
    assert make(target, tmp_path / "made", "--kind", kind) == 0
    card = (tmp_path / "made" / "README.md").read_text()
    assert (
        "draft's place in its round | 1 | 2 | 3" in card
        and "tokens that the target chose" in card
        and "--target TARGET" in card
        and str(target) not in card
    )
    assert not (tmp_path / "made" / "work").exists()
    pair = load(target, tmp_path / "made")
    assert pair.drafter_kind == ("head" if kind == "head" else "model")
    said = capsys.readouterr().err
    assert "greedy acceptance" in said


def test_the_cards_figures_can_be_had_again(target, tmp_path, capsys):
    assert make(target, tmp_path, "--keep") == 0
    first = capsys.readouterr().err.splitlines()[-1]
    assert make(target, tmp_path, "--measure") == 0
    again = capsys.readouterr().err.splitlines()[-1]
    assert first == again and "greedy acceptance" in again


@pytest.mark.parametrize("kind", ["head", "lm"])
@pytest.mark.parametrize("when", ["writing", "training"])
def test_what_was_interrupted_goes_on_exactly(target, tmp_path, monkeypatch, kind, when):
    """The same weights, to the bit, as the run that nobody interrupted."""
    assert make(target, tmp_path / "whole", "--kind", kind) == 0
    where, method, after = (Corpus, "add", 1) if when == "writing" else (Trainer, "train", 5)
    whole, count = getattr(where, method), []

    def interrupted(self, *args):
        whole(self, *args)
        count.append(1)
        if len(count) == after + (when == "writing"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(where, method, interrupted)
        assert make(target, tmp_path / "parts", "--kind", kind) == 130
    assert not (tmp_path / "parts" / "model.safetensors").exists()
    assert main(["--out", str(tmp_path / "parts"), "--resume"]) == 0
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_learning_helps(target, tmp_path):
    """Many looks at little text: the loss of what was learnt falls."""
    assert make(target, tmp_path, "--keep", "--passes", "30", "--rate", "0.05") == 0
    curve = json.loads((tmp_path / "work" / "progress.json").read_text())["curve"]
    assert curve[-1]["loss"] < 0.9 * curve[0]["loss"]


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--resume"], "nothing to resume"),
        ([], "--target is missing"),
        (["--target", "./nowhere"], "does not exist"),
        (["--target", "embedded", "--device", "cuda:99"], "CUDA"),
        (["--target", "embedded", "--prompts", "./nowhere"], "cannot be read"),
        (["--target", "embedded", "--prompts", "/dev/null"], "holds no prompt"),
    ],
)
def test_orders_that_cannot_be_carried_out(tmp_path, capsys, flags, words):
    assert main(["--out", str(tmp_path), *flags]) == 1
    said = capsys.readouterr().err
    assert words in said and "Traceback" not in said


def test_unfinished_work_is_not_overwritten(target, tmp_path, capsys):
    assert make(target, tmp_path, "--keep") == 0
    assert make(target, tmp_path) == 1
    assert "unfinished work" in capsys.readouterr().err
    assert main(["--out", str(tmp_path), "--resume", "--target", "other"]) == 1


@pytest.mark.parametrize(("build", "words"), [(tiny_t5, "encoder-decoder"), (tiny_mamba, "recurrent")])
def test_targets_that_no_drafter_can_be_made_for(tmp_path, capsys, build, words):
    save_folder(tmp_path / "target", build(vocab_size=300), tiny_tokenizer())
    assert make(tmp_path / "target", tmp_path / "out") == 1
    assert words in capsys.readouterr().err


def test_conversations_too_short_to_hold_any(target, tmp_path, capsys):
    assert make(target, tmp_path, "--length", "40") == 1
    assert "--length must be at least" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["plan.json", "progress.json", "trainer.safetensors", "pages/page-00000.safetensors"])
def test_damaged_work_is_a_sentence(target, tmp_path, capsys, name):
    assert make(target, tmp_path, "--keep") == 0
    (tmp_path / "work" / name).write_bytes((tmp_path / "work" / name).read_bytes()[:20])
    assert main(["--out", str(tmp_path), "--resume"]) == 1
    said = capsys.readouterr().err
    assert "damaged" in said and "Traceback" not in said


def test_a_step_that_was_interrupted_in_the_middle_is_done_again(target, tmp_path, monkeypatch):
    """Half of the weights stepped, half not: the checkpoint before it is gone on from, and the end is the same."""
    assert make(target, tmp_path / "whole") == 0
    step, calls = torch.optim.AdamW.step, []

    def interrupted(self, *args, **kwargs):
        calls.append(1)
        if len(calls) == 5:  # Muon's half of the step is done
            raise KeyboardInterrupt
        return step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", interrupted)
        patch.setattr("sampling.distill.workshop.CHECKPOINT_SECONDS", 0.0)
        assert make(target, tmp_path / "parts") == 130
    assert main(["--out", str(tmp_path / "parts"), "--resume"]) == 0
    ours, theirs = weights(tmp_path / "parts"), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)


def test_another_kind_in_the_same_folder_leaves_no_trace(target, tmp_path):
    assert make(target, tmp_path) == 0 and make(target, tmp_path, "--kind", "lm") == 0
    assert load(target, tmp_path).drafter_kind == "model"
    assert make(target, tmp_path) == 0
    assert load(target, tmp_path).drafter_kind == "head"


@pytest.mark.parametrize(
    "flags", [["--tokens", "0"], ["--tokens", "x"], ["--hours", "-1"], ["--hours", "nan"], ["--kind", "tree"], ["--device", "tpu"]]
)
def test_flags_that_mean_nothing(tmp_path, flags):
    with pytest.raises(SystemExit) as left:
        main(["--out", str(tmp_path), "--target", "embedded", *flags])
    assert left.value.code == 2


def test_hours_shorten_the_training(target, tmp_path, capsys):
    assert make(target, tmp_path, "--keep", "--hours", "0.0005", "--passes", "5000") == 0
    assert json.loads((tmp_path / "work" / "progress.json").read_text())["training"] < 10
