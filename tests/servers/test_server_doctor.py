"""/server doctor: planted faults in a server that decodes with this program's own loop, sound ones, and odd figures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from copy import deepcopy
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from drafter_checkpoints import HIDDEN, layer_keys
from fakes import VOCABULARY, Screen, TinyPair, records_of, table_pair, tiny_pair
from servers.decoding_server import DecodingServer, noisy_pair
from servers.loopback_values import Faults
from servers.server_sessions import server_session
from torch import nn
from torch.nn.functional import cross_entropy

from utils.commands.experiments.speed_model import expected_drafts
from utils.commands.servers import server_doctor
from utils.commands.servers.server_doctor import ServerText, _drafts_a_round
from utils.decode.features import FeatureReader
from utils.drafter_formats.checkpoint import DrafterCheckpoint
from utils.drafter_formats.eagle3 import Eagle3, layer_config
from utils.drafter_formats.target_parts import DraftHead, share_parts
from utils.models.feature_drafter import Conventions
from utils.repl.repl_session import Verdict
from utils.servers.address import ServerAddress
from utils.servers.kinds.completion import ServerAcceptance
from utils.servers.kinds.server_kind import setup_facts

WORDS = "apple bread cloud dream eagle flame grape house island jungle kettle lemon"
PROMPTS = [f"{word} has {len(word)} letters" for word in WORDS.split()]
LENGTH, RIGHT = 8, Conventions((1, 2, 3))
SHORT = f"length={LENGTH} long=0"
AT_ONCE = Faults(tokens_per_chunk=100)  # where speed does not matter
PACE = Faults(chunk_delay=0.005)  # of the baseline where it does


EXPECTED: dict[tuple[Any, ...], Any] = {}


def expected_once(job: Any, text: Any, temperature: float, count: int, *, counts_ends: bool = False) -> Any:
    """What is expected of a text. Greedy texts are the same in most examinations."""
    pair, options = job.pair, (temperature, count, counts_ends)
    conventions = pair.drafter.conventions if isinstance(pair.drafter, Eagle3) else None
    key = (pair.target, pair.drafter, conventions, *text.context, "answer", *text.tokens, options)
    if key not in EXPECTED:
        EXPECTED[key] = expected_drafts(job, text, temperature, count, counts_ends=counts_ends)
    return EXPECTED[key]


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    file = tmp_path / "prompts.txt"
    file.write_text("\n".join(PROMPTS))
    return file


@pytest.fixture
def examined(view: Screen, prompts: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """What the screen shows of an examination, and its findings."""
    monkeypatch.setattr(server_doctor, "expected_drafts", expected_once)

    def run(
        server: DecodingServer,
        options: str = SHORT,
        *lines: str,
        pair: Any = "own",
        template: bool = False,
        **address: str,
    ) -> tuple[str, list[Any]]:
        file = tmp_path / "doctor.jsonl"
        if not template:  # a server that does not tokenize chats is not asked for texts in its own template
            server.posted.clear()
        if not address.get("baseline"):
            server.faults = AT_ONCE
        with server, DecodingServer(pair=server.pair, fault="off", faults=PACE) as plain:
            loaded = server.pair if pair == "own" else pair
            addresses = ServerAddress("plain", plain.url), ServerAddress("spec", server.url, **address)
            session = server_session(view, *addresses, monkeypatch=monkeypatch, pair=loaded, records=file)
            for line in ("/chat off", *lines, f"/server doctor spec {prompts} {options}"):
                verdict = session.handle(line)
        out, messages = view.take()
        shown = " ".join(f"{out} {messages}".split())
        return shown, records_of(file)[-1]["findings"] if verdict is Verdict.DONE else []

    yield run


@cache
def eagle_pair() -> TinyPair:
    """A target and an EAGLE-3 drafter that has learnt its greedy answers to the prompts."""
    pair = tiny_pair(kind="llama", drafter=False, num_hidden_layers=4)
    texts = _greedy_texts(pair, 36)
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.manual_seed(0)
        config = layer_config(layer_keys(), DrafterCheckpoint("drafter", {}, {"layers.0.x": ()}), head_norms=False)
        config.vocab_size = VOCABULARY
        drafter = Eagle3(config, RIGHT, pair.target)
        head = DraftHead(nn.Linear(HIDDEN, VOCABULARY, bias=False), None, VOCABULARY)
        share_parts(drafter, pair.target.get_input_embeddings(), head, pair.target)
        drafter.requires_grad_(True)
        drafter.embed_tokens.requires_grad_(False)
        _fit(drafter, pair.target, texts)
        drafter.requires_grad_(False)
    pair.drafter, pair.drafter_kind, pair.drafter_name = drafter, "EAGLE-3", "tiny-eagle"
    return pair


@torch.no_grad()
def _greedy_texts(pair: TinyPair, length: int) -> torch.Tensor:
    """The prompts with greedy answers of the target (B, length). What follows a token does not change its logits."""
    prompts = [pair.tokenizer(prompt)["input_ids"][:24] for prompt in PROMPTS]
    texts = torch.tensor([ids + [0] * (length - len(ids)) for ids in prompts])
    ends, rows = torch.tensor([len(ids) for ids in prompts]), torch.arange(len(prompts))
    while (short := ends < length).any():
        following = pair.target(texts).logits[rows, ends - 1].argmax(-1)
        texts[rows[short], ends[short]] = following[short]
        ends += short
    return texts


def _fit(drafter: Eagle3, target: Any, texts: torch.Tensor) -> None:
    with torch.no_grad():
        features = FeatureReader(target, RIGHT.feature_layers)
        states = torch.stack([features.features(target(text[None], output_hidden_states=True)) for text in texts])
    states = states.reshape(len(texts), texts.shape[1], -1)
    drafter.config._attn_implementation = "sdpa"  # which has gradients
    positions = torch.arange(texts.shape[1])[None]
    optimizer = torch.optim.Adam([part for part in drafter.parameters() if part.requires_grad], lr=1.5e-2)
    for _ in range(50):
        made = drafter.next_states(drafter.fuse_features(states[:, :-2]), texts[:, 1:-1], positions[:, :-2], None)
        loss = cross_entropy(drafter.logits(made.flatten(0, 1)), texts[:, 2:].flatten())
        fed = drafter.feedback(made)[:, :-1]
        second = drafter.next_states(fed, texts[:, 2:-1], positions[:, 1:-2], None)
        loss = loss + cross_entropy(drafter.logits(second.flatten(0, 1)), texts[:, 3:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    drafter.config._attn_implementation = "row_invariant"


def test_a_sound_server_is_called_sound(examined: Any) -> None:
    shown, findings = examined(DecodingServer(pair=noisy_pair()), template=True)
    assert "Sound: drafts are accepted as expected" in shown and "at most 1%" in shown
    assert {row["cause"] for row in findings} == {"sound"} and "Settings for other programs:" in shown
    greedy = [row for row in findings if row["texts"] == "greedy"]
    # The replay makes the server's rounds again, up to the last one before an end token.
    assert greedy and all(abs(row["loss"]) < 0.02 for row in greedy[:2])
    assert {"sampled", "other template"} <= {row["texts"] for row in findings}


@pytest.mark.parametrize(
    ("fault", "options", "expected"),
    [
        ("off", SHORT, "spec makes no drafts"),
        ("cliff", SHORT, "before position 2 are accepted as expected, and at position 2 0.0"),
        ("window", f"length={LENGTH} long=80", "Sound in short contexts, but in long ones draft 1 is accepted at"),
        ("greedy drafts", SHORT, "the server drafts greedily at a temperature above 0"),
        ("template", SHORT, "Sound with the prompts of this program, but in the other chat template"),
    ],
)
def test_a_planted_fault_gets_its_cause(examined: Any, fault: str, options: str, expected: str) -> None:
    shown, _ = examined(DecodingServer(pair=noisy_pair(), fault=fault), options, template=fault == "template")
    assert expected in shown and ('"probabilistic"' in shown) == (fault == "greedy drafts")


@pytest.mark.parametrize(
    ("room", "expected"),
    [
        (0, r'makes no drafts on long context texts\..*"num_speculative_tokens": 3'),
        (2, r"spec made no drafts in [5-9]\d% of the decode steps of long context texts"),
    ],
)
def test_a_drafter_whose_context_is_full_is_named(examined: Any, room: int, expected: str) -> None:
    shown, _ = examined(DecodingServer(pair=noisy_pair(), fault="full", room=room), f"length={LENGTH} long=80")
    assert re.search(expected, shown), shown
    assert "decode steps of greedy texts" not in shown


@pytest.mark.parametrize("gamma", [3, pytest.param(5, marks=pytest.mark.full)])
def test_drafts_that_are_shorter_at_the_end_of_a_text_are_no_cliff(examined: Any, gamma: int) -> None:
    """Counters do not say where a draft ended, and the texts of a drafter that is always right end at the same one."""
    pair = TinyPair(**{**vars(noisy_pair()), "drafter": noisy_pair().target})
    server = DecodingServer(pair=pair, gamma=gamma, others=lambda number: 0)
    _, findings = examined(server)
    assert {row["cause"] for row in findings} == {"sound"} and len({row["position"] for row in findings}) == gamma
    assert all(row["measured"] == row["expected"] for row in findings)


def test_drafts_that_end_early_are_compared_without_positions(examined: Any) -> None:
    early = DecodingServer(pair=noisy_pair(), fault="early", others=lambda number: 0)
    shown, findings = examined(early, "length=12 long=0")
    assert "spec often ends its drafts before 3 tokens" in shown
    assert {(row["cause"], row["position"]) for row in findings} == {("sound", 0)}
    exact = DecodingServer(pair=noisy_pair(), fault="early")  # its answers say how long each draft was
    shown, findings = examined(exact)
    assert "often ends" not in shown and {row["position"] for row in findings} > {0}
    assert {row["cause"] for row in findings} <= {"sound", "not distinguishable"}


def test_shifted_layers_are_named_by_their_reading(examined: Any) -> None:
    pair = eagle_pair()
    drafter = deepcopy(pair.drafter)
    drafter.conventions = replace(RIGHT, feature_layers=(2, 3, 4))
    shown, _ = examined(DecodingServer(pair=pair, drafter=drafter, gamma=1))
    assert "The first draft is accepted at" in shown and "other hidden states or layers" in shown
    assert "Explained by layer ids read as outputs of layers, one later" in shown
    assert pair.drafter.conventions == RIGHT


def test_permuted_vocabulary_ids_are_no_reading(examined: Any) -> None:
    pair = eagle_pair()
    drafter = deepcopy(pair.drafter)
    plain = type(drafter).logits
    drafter.logits = MethodType(lambda self, state: plain(self, state).roll(7, -1), drafter)
    shown, _ = examined(DecodingServer(pair=pair, drafter=drafter, gamma=1))
    assert "The first draft is accepted at 0.0" in shown and "other readings of the drafter explains it" in shown


def test_a_sound_eagle_server_is_called_sound(examined: Any) -> None:
    shown, _ = examined(DecodingServer(pair=eagle_pair(), gamma=1))
    assert "Sound: drafts are accepted as expected" in shown


def test_a_sound_server_that_is_slow_gets_the_cost_of_a_round(examined: Any) -> None:
    slow = DecodingServer(pair=noisy_pair(), faults=Faults(chunk_delay=3 * PACE.chunk_delay))
    shown, findings = examined(slow, baseline="plain")
    assert {row["cause"] for row in findings} == {"sound, but slow"}, shown
    assert "as fast as plain would be called slow with a probability of at most 1%" in shown
    found = re.search(r"other reasons: (\S+)x \(.* the speed of plain with (\S+) tokens .* costs (\S+) decode", shown)
    assert found is not None, shown
    ratio, tokens, steps = map(float, found.groups())
    assert 0.2 < ratio < 0.6 and tokens > 1 and steps == pytest.approx(tokens / ratio, rel=0.05)


def test_other_clients_make_the_figures_unusable(examined: Any) -> None:
    server = DecodingServer(pair=noisy_pair(), others=lambda number: 5)
    shown, findings = examined(server)
    assert "for 0 of 12 prompts only, because other clients used it meanwhile" in shown and not findings
    server = DecodingServer(pair=noisy_pair(), others=lambda number: 5 * (number % 7 == 0))
    shown, findings = examined(server)
    assert {row["cause"] for row in findings} == {"sound"}


def test_a_server_that_reports_nothing_is_not_judged(examined: Any) -> None:
    server = DecodingServer(pair=noisy_pair(), others=lambda number: 0)
    server.pages["/metrics"] = (403, "text/plain", "no")
    assert "spec reports no drafts, so its acceptance is unknown" in examined(server)[0]


def test_another_model_is_recognised(examined: Any) -> None:
    other = noisy_pair()
    target = table_pair(max_position_embeddings=512, reads_all=True).drafter
    pair = TinyPair(**{**vars(other), "target": target})
    assert "that server has another model" in examined(DecodingServer(pair=pair), pair=other)[0]


def test_texts_that_are_tokenized_otherwise_are_not_replayed(examined: Any) -> None:
    server = DecodingServer(pair=noisy_pair())
    shown, findings = examined(server, omit="return_token_ids")
    assert "greedy: 12 of 12 texts are left out" in shown and "cannot be replayed here" in shown and not findings
    shown, findings = examined(DecodingServer(pair=noisy_pair(), fault="chats without ids"), template=True)
    assert "other template: 12 of 12 texts are left out" in shown
    assert {row["cause"] for row in findings} == {"sound"}
    assert {row["texts"] for row in findings} == {"greedy", "sampled"}


def test_records_of_another_machine_are_compared(examined: Any, tmp_path: Path) -> None:
    file = tmp_path / "expected.jsonl"
    rates = {"good": (300, 400), "bad": (30, 400)}
    for name, (accepted, drafted) in rates.items():
        settings = {"processor": "greedy", "length": LENGTH}
        lines = [
            {
                **{"schema": 2, "record": "generation", "prompt": prompt, "strategy": "speculative"},
                **{"settings": settings, "finish": "length", "tokens_per_second": 9.0},
                **{"accepted": accepted, "drafted": drafted, "accepted_by_position": [[accepted, drafted]]},
            }
            for prompt in PROMPTS
        ]
        file.with_suffix(f".{name}").write_text("\n".join(map(json.dumps, lines)))
    line = f"/length {LENGTH}"
    shown, _ = examined(DecodingServer(pair=noisy_pair(), fault=""), f"expect={file.with_suffix('.bad')}", line)
    assert "Sound: drafts are accepted as expected" in shown
    dead = DecodingServer(pair=noisy_pair(), drafter=table_pair(max_position_embeddings=512, reads_all=True).drafter)
    shown, _ = examined(dead, f"expect={file.with_suffix('.good')}", line)
    assert "The first draft is accepted at" in shown
    shown, _ = examined(dead, f"expect={file.with_suffix('.good')}", line, "/processor multinomial 1")
    assert "type /processor greedy first" in shown


def test_facts_come_from_pages_and_arguments() -> None:
    page = {
        "vllm_config": {
            "speculative_config": {"method": "eagle3", "model": "org/head", "num_speculative_tokens": 3, "x": [1]},
            "model_config": {"quantization": "fp8"},
        }
    }
    found = {"method": "eagle3", "drafter": "org/head", "drafts a round": "3", "quantization": "fp8"}
    assert setup_facts(page) == found
    assert setup_facts({"speculative_algorithm": "EAGLE3", "speculative_eagle_topk": 1, "quantization": None}) == {
        "method": "EAGLE3",
        "choice of drafts": "1",
    }
    # The page of llama.cpp has the defaults of requests, whose `speculative.types` is "none" although it drafts.
    props = {"default_generation_settings": {"params": {"speculative.types": "none"}}, "model_path": "/models/a.gguf"}
    assert setup_facts({**props, "model_ftype": "Q8_0"}) == {"quantization": "Q8_0"}
    assert setup_facts(None) == setup_facts([1]) == setup_facts({"method": {}}) == {}
    long = setup_facts({"speculative_algorithm": "\x1b[31m" + "x" * 500})
    assert len(long["method"]) <= 80 and "\x1b" not in long["method"]
    deep: Any = {}
    for _ in range(50_000):
        deep = {"a": deep}
    assert setup_facts(deep) == {}


def test_drafts_that_no_round_has_reached_count() -> None:
    drafts = ServerAcceptance(300, 1, 100, ((1, 100), (0, 1)))
    assert _drafts_a_round([ServerText([], [], drafts)]) == 3


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/server doctor", "which server?"),
        ("/server doctor spek", "Did you mean spec"),
        ("/server doctor spec long=x", "not a whole number"),
        ("/server doctor spec layers=3", "option"),
        ("/server doctor spec expect=missing.jsonl", "missing.jsonl"),
        ("/server doctor spec missing.txt", "missing.txt"),
        ("/server doctor spec", "there is nothing to compare with"),
    ],
)
def test_bad_input_gets_one_sentence(view: Screen, monkeypatch: pytest.MonkeyPatch, line: str, message: str) -> None:
    pair = None if line.endswith("spec") else noisy_pair()
    with DecodingServer(pair=noisy_pair()) as server:
        session = server_session(view, ServerAddress("spec", server.url), monkeypatch=monkeypatch, pair=pair)
        assert session.handle(line) is Verdict.FAILED
    assert message in view.take()[1]
