"""`make bench`: every arm generates the same text, rates are computed correctly, and a whole run of the benchmark on
tiny models and a fake llama.cpp shows, writes and appends its results.
"""

import json
import math
import os
import sys
from dataclasses import replace
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import screen, tiny_pair
from paths import BENCHMARKS

sys.path.append(str(BENCHMARKS))

import bench
import measurement
import probes
import report
import worker
from arms import Arm, Run, our_arms
from bars import bars
from peers import Peer, PeerFailed, environments, fastest, generate_arms, llama_arms

from utils.decode.model_session import ModelSession

IDS = [5, 6, 7, 5, 6, 7, 5, 6]


class Local(Peer):
    """A peer whose handlers run in this process."""

    def __init__(self, handlers: dict[str, worker.Handler]) -> None:
        self.handlers, self.environment, self.threads, self.closed = handlers, "here", 1, False

        self._process = SimpleNamespace(stdin=self, stdout=self)

    def write(self, line: str) -> None:
        self.replies = StringIO()
        worker.serve(self.handlers, [line], self.replies)

    def flush(self) -> None:
        self.replies.seek(0)

    def readline(self) -> str:
        return self.replies.readline()

    def close(self) -> None:
        self.closed = True


class FakeLlama:
    """A server with llama.cpp's replies, whose model is a tiny one."""

    def __init__(self, pair: Any) -> None:
        self.pair, self.plain = pair, our_arms(pair, 1)[0]

    def handle_completions(self, request: dict[str, Any]) -> str:
        ids, count = request["prompt"], request["n_predict"]
        if "logit_bias" in request:
            (token, bias), *others = request["logit_bias"]
            assert bias > 100 and not others
            logits = ModelSession(self.pair.target).feed(ids, keep=1)[0]
            shown = {"id": token, "logprob": float(logits.log_softmax(-1)[token])}
            return json.dumps({"choices": [{"logprobs": {"content": [shown]}}]})
        new = self.plain.run(ids, count).tokens
        text = self.pair.tokenizer.decode(new, skip_special_tokens=True)
        times = {"prompt_ms": 20.0, "predicted_ms": 5.0 * count, "predicted_n": len(new)}
        return json.dumps({"choices": [{"text": text}], "timings": times})


def llama_peer(pair: Any) -> tuple[Local, list[tuple[int, bool]]]:
    started = []

    def start(threads: int, lookup: bool) -> FakeLlama:
        started.append((threads, lookup))
        return FakeLlama(pair)

    return Local(worker.llama_handlers(start)), started


def test_every_arm_generates_the_greedy_text() -> None:
    ours, theirs = tiny_pair(), tiny_pair()
    ours.engine.use("invariant", 1)
    peer = Local(worker.generate_handlers(theirs))
    texts = {}
    for arm in [*our_arms(ours, 1), *generate_arms(peer)]:
        run = arm.run(IDS, 20)
        assert 1 <= run.first <= run.count <= 20
        assert 0 < run.first_seconds <= run.seconds
        assert run.tokens is not None and len(run.tokens) == run.count
        texts[arm.name] = run.tokens
    assert len(texts) == 6
    assert len({tuple(tokens) for tokens in texts.values()}) == 1, texts


def test_the_decode_rate_leaves_out_the_first_tokens() -> None:
    run = Run(11, seconds=3.0, first=1, first_seconds=1.0)
    assert (run.decode_rate, run.rate) == (5.0, pytest.approx(11 / 3))
    assert Run(3, 1.0, 1, 0.5).decode_rate is None


def test_llama_receives_ids_and_its_times_are_those_of_the_server() -> None:
    pair = tiny_pair()
    peer, started = llama_peer(pair)
    plain, lookup = llama_arms(peer)
    run = plain.run(IDS, 10)
    assert run.decode_rate == pytest.approx((run.count - 1) / 0.05)
    assert (run.first, run.first_seconds, run.tokens) == (1, 0.02, None)
    plain.run(IDS, 10), lookup.run(IDS, 10)
    peer.threads = 2
    peer.run("plain", IDS, 4)
    assert started == [(1, False), (1, True), (2, False)]  # one server for each, until the threads change


def test_perplexities_of_both_sides_are_that_of_the_text() -> None:
    pair, ids = tiny_pair(), [5, 9, 200, 17, 3]
    logits = torch.log_softmax(pair.target(torch.tensor([ids])).logits[0].detach().double(), -1)
    expected = math.exp(-float(sum(logits[index, token] for index, token in enumerate(ids[1:]))) / 4)
    assert probes.perplexity(pair.target, ids) == pytest.approx(expected, rel=1e-4)
    peer, _ = llama_peer(pair)
    assert peer.ask("perplexity", ids=ids)["perplexity"] == pytest.approx(expected, rel=1e-4)


def test_a_token_that_llama_did_not_sample_is_an_error() -> None:
    class Stubborn(FakeLlama):
        def handle_completions(self, request: dict[str, Any]) -> str:
            shown = {"id": 1, "logprob": 0.0}
            return json.dumps({"choices": [{"logprobs": {"content": [shown]}}]})

    peer = Local(worker.llama_handlers(lambda threads, lookup: Stubborn(tiny_pair())))
    with pytest.raises(PeerFailed, match="instead of 9"):
        peer.ask("perplexity", ids=[5, 9])


def timed_peer(name: str, rates: dict[int, float], asked: list[tuple[str, int]]) -> Local:
    def plain(request: dict[str, Any]) -> dict[str, Any]:
        asked.append((name, request["threads"]))
        seconds = 1 + (request["length"] - 1) / rates[request["threads"]]
        return {"count": request["length"], "seconds": seconds, "first": 1, "first_seconds": 1}

    return Local({"plain": plain})


def test_the_fastest_environment_and_threads_are_chosen_and_the_others_end() -> None:
    asked: list[tuple[str, int]] = []
    passive, spinning = timed_peer("passive", {1: 9, 2: 10}, asked), timed_peer("spinning", {1: 8, 2: 12}, asked)
    chosen = fastest([passive, spinning], [1, 2], IDS)
    assert (chosen, chosen.threads) == (spinning, 2)
    assert (passive.closed, spinning.closed) == (True, False)
    asked.clear()
    slow = timed_peer("slow", {1: 9, 2: 0.1}, asked)
    assert fastest([slow], [1, 2], IDS).threads == 1
    assert asked.count(("slow", 2)) == 1  # hopeless, so it is not tried again


def test_peers_are_tried_as_users_run_them_and_as_we_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_WAIT_POLICY", "PASSIVE")
    found = {name: value for name, value in os.environ.items() if name not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    first, second = environments(found).values()
    assert first["OMP_WAIT_POLICY"] == "PASSIVE" and "OMP_WAIT_POLICY" not in second
    assert list(environments(dict(os.environ)).values()) == [dict(os.environ)]  # the user had chosen already


def test_a_peer_answers_from_its_process_and_a_dead_one_is_noticed() -> None:
    code = "import sys, json\nfor line in sys.stdin: print(json.dumps({'got': json.loads(line)}), flush=True)"
    peer = Peer([sys.executable, "-c", code], "default", dict(os.environ))
    peer.threads = 3
    assert peer.ask("plain", ids=[1])["got"] == {"arm": "plain", "threads": 3, "ids": [1]}
    peer.close()
    dead = Peer([sys.executable, "-c", "raise SystemExit('no model')"], "default", dict(os.environ))
    with pytest.raises(PeerFailed, match="status 1; no model"):
        dead.ask("plain", ids=[1])


def test_steps_are_compared_with_their_products_in_a_lean_forward(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "CACHED", 20)
    pair = tiny_pair(drafter=False)
    assert probes.step_over_products(pair.target, 1) is None
    assert pair.engine.use("invariant", 1).verified
    found = probes.step_over_products(pair.target, 1, rounds=3)
    assert found and len(found["step"]) == len(found["products"]) == 3
    pair.engine.use("plain", 1)


def test_a_step_reads_every_linear_weight_once() -> None:
    for tied in (True, False):
        pair = tiny_pair(drafter=False, tie_word_embeddings=tied)
        model = pair.target
        layers = sum(weight.nbytes for weight in model.model.layers.parameters() if weight.dim() == 2)
        expected = layers + model.get_output_embeddings().weight.nbytes
        pair.engine.state = replace(pair.engine.state, weights="float32")
        assert probes.bytes_per_step(pair, model) == expected
        pair.engine.state = replace(pair.engine.state, weights="bfloat16")
        assert probes.bytes_per_step(pair, model) == expected // 2
        pair.engine.state = replace(pair.engine.state, weights="int8")
        assert 0 < probes.bytes_per_step(pair, model) <= expected


def test_long_prompts_have_the_length_that_they_should_have() -> None:
    seen = []

    def arm(name: str) -> Arm:
        def run(ids: list[int], length: int) -> Run:
            seen.append((name, len(ids)))
            return Run(length, 2.0, 1, 0.5)

        return Arm(name, 1, run)

    found = probes.long_prompts([arm("one"), arm("two")], [1, 2, 3], {7: 2, 9: 1})
    assert seen == [("one", 7), ("two", 7), ("two", 7), ("one", 7), ("one", 9), ("two", 9)]
    step = pytest.approx(1.5 / (probes.LONG_TOKENS - 1))
    assert found[7]["two"] == [{"first_seconds": 0.5, "step_seconds": step}] * 2


def test_a_whole_benchmark(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"task": name, "prompt": name}) + "\n" for name in ("a", "b", "a")))
    machines = tmp_path / "machines.md"
    machines.write_text("| a table |\n")
    ours, plain = (tiny_pair(max_position_embeddings=1024) for _ in range(2))
    ours.engine.use("invariant", 1), plain.engine.use("plain", 1)
    llama, _ = llama_peer(plain)
    loaded = measurement.Loaded(ours, plain, (1, 1), Local(worker.generate_handlers(plain)), llama)
    program = {"seconds": 1.0, "resident": 1e6}
    monkeypatch.setattr(probes, "LONG_PROMPTS", {20: 2, 30: 1})
    monkeypatch.setattr(probes, "LONG_TOKENS", 6)
    monkeypatch.setattr(probes, "VERIFY_ROUNDS", 1)
    monkeypatch.setattr(probes, "PASSAGE", "words of a tiny text\nin two lines")
    monkeypatch.setattr(probes, "program", lambda *arguments: program)
    monkeypatch.setattr(report, "MACHINES", machines)
    monkeypatch.setattr(bench, "load", lambda *arguments: loaded)
    view = screen()
    monkeypatch.setattr(bench, "make_renderer", lambda **options: view.renderer)
    bench.main(["--prompts", str(prompts), "--tokens", "6", "--repeats", "2", "--append", "--out", str(tmp_path)])
    result = json.loads((tmp_path / "bench.json").read_text())
    names = set(result["texts"][0]["arms"])
    assert len(names) == 11 and all(cell["same_text"] for cell in result["texts"][0]["arms"].values())
    assert names - set(result["texts"][1]["arms"]) == {name for name in names if "plain eng" in name or "assis" in name}
    assert {bar["verdict"] for bar in result["bars"] if "6000" not in bar["name"]} <= {
        "met",
        "missed",
        *(f"{word}, uncertain" for word in ("met", "missed")),
    }
    assert result["first_start"] == result["program"] == program
    assert result["perplexity"]["float32"] == pytest.approx(result["perplexity"]["llama.cpp (Q4_1)"], rel=1e-3)
    row = machines.read_text().splitlines()[1]
    header = next(line for line in (BENCHMARKS / "README.md").read_text().splitlines() if line.startswith("| date"))
    assert row.count("|") == header.count("|")
    assert llama.closed


def test_a_part_whose_peer_fails_is_left_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = bench.flags_of(["--parts", "perplexity", "memory", "--out", str(tmp_path)])
    plain = tiny_pair(drafter=False)
    loaded = measurement.Loaded(plain, plain, (1, 1), Local({}), Local({}))
    monkeypatch.setattr(measurement, "our_arms", lambda *arguments, **options: [])
    monkeypatch.setattr(probes, "PASSAGE", "a few words")
    monkeypatch.setattr(probes, "program", lambda *arguments: {"seconds": 1.0})
    view = screen()
    result = measurement.Bench(flags, view.renderer, loaded).measure()
    assert set(result) == {"setting", "program"} and "KeyError" in view.take()[1]


def test_parts_that_are_not_asked_for_are_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result: dict[str, Any] = {"setting": {}}
    flags = bench.flags_of(["--parts", "memory", "--out", str(tmp_path)])
    plain = tiny_pair(drafter=False)
    loaded = SimpleNamespace(ours=plain, plain=plain, threads=(1, 1), llama=None, generate=Local({}))
    monkeypatch.setattr(measurement, "our_arms", lambda *arguments, **options: [])
    monkeypatch.setattr(probes, "program", lambda *arguments: {"seconds": 1.0})
    result = measurement.Bench(flags, screen().renderer, loaded).measure()
    assert set(result) == {"setting", "program"}
    assert {bar.verdict for bar in bars(result)} == {"not measured"}
