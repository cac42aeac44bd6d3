"""Server kinds: what they send, and what they make of recorded answers of real servers.

The recordings are by tests/benchmarks/server_figures.py, which compared their figures with the servers' own logs.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from servers.loopback import Loopback

from utils.servers.address import ServerAddress
from utils.servers.client import AnswerStream, ServerClient
from utils.servers.kinds import recognise
from utils.servers.kinds.completion import IDS, USAGE, Chat, ServerCompletion, ServerRequest
from utils.servers.kinds.llama_cpp import LARGEST_SEED, LlamaCppKind
from utils.servers.kinds.server_kind import ACCEPTED, DRAFTED, ServerKind, metric_values
from utils.servers.kinds.vllm import SglangKind, VllmKind

KINDS: dict[str, ServerKind] = {"llama.cpp": LlamaCppKind(), "vllm": VllmKind(), "sglang": SglangKind()}
RECORDINGS = [
    json.loads(line)
    for file in sorted((Path(__file__).parent / "recordings").glob("*.jsonl"))
    for line in file.read_text().splitlines()
]
REQUEST = ServerRequest("a b", 99)


def replayed(kind: ServerKind, events: list[dict[str, Any]]) -> ServerCompletion:
    """The completion of these events, as the client collects it."""
    stream = AnswerStream(ServerAddress("spec", "http://127.0.0.1:1"), kind, REQUEST)
    for event in events:
        list(stream.add(f"data: {json.dumps(event)}\n\n".encode(), 0.5))
    list(stream.add(b"data: [DONE]\n\n", 0.5))
    return stream.completion(0.5)


def recording(kind: str, method: str, name: str) -> dict[str, Any]:
    wanted = {"engine": kind, "method": method, "name": name}
    return next(entry for entry in RECORDINGS if wanted.items() <= entry.items())


def acceptance(entry: Mapping[str, Any], **changes: Any) -> Any:
    kind, entry = KINDS[entry["engine"]], {**entry, **changes}
    return kind.acceptance(replayed(kind, entry["events"]), entry["before"], entry["after"])


@pytest.mark.parametrize(
    "entry", RECORDINGS, ids=lambda entry: "-".join((entry["engine"], entry["method"], entry["name"]))
)
def test_recorded_answers(entry: dict[str, Any]) -> None:
    kind = KINDS[entry["engine"]]
    run = replayed(kind, entry["events"])
    assert run.text == entry["text"] and run.counted_by == IDS
    assert run.token_count == run.usage_tokens and run.prompt_tokens
    found = kind.acceptance(run, entry["before"], entry["after"])
    assert json.loads(json.dumps(None if found is None else asdict(found))) == entry["acceptance"]


def test_llama_cpp_forwards_are_the_rounds_that_its_stream_shows() -> None:
    """Each forward pass yields one token more than it accepts; the counters name the passes with drafts."""
    entry = recording("llama.cpp", "draft", "cut")
    found = acceptance(entry)
    # 7 tokens: one of the prefill, 4 accepted and a bonus token, and one without a draft.
    assert (found.drafted, found.accepted, found.rounds, found.forwards) == (4, 4, 1, 3)
    assert found.by_position == ((1, 1),) * 4


def test_llama_cpp_without_metrics_has_no_positions() -> None:
    entry = recording("llama.cpp", "lookup", "counting")
    with_metrics, without = acceptance(entry), acceptance(entry, before={}, after={})
    assert with_metrics.by_position and with_metrics.rounds
    assert without == replace(with_metrics, rounds=None, by_position=(), note="")
    # Counters that grew by more belong to other requests, too. The timings remain this request's own.
    busy = acceptance(entry, after=entry["after"] | {"tokens_predicted": entry["after"]["tokens_predicted"] + 1})
    assert busy == without and busy.valid


def test_chats_of_llama_cpp_are_timed_by_the_server() -> None:
    """The first piece of a chat may have several tokens."""
    events = [{"choices": [{"delta": {"content": "abc"}}]}, {"choices": [{"delta": {}, "finish_reason": "length"}]}]
    usage = {"choices": [], "usage": {"completion_tokens": 11}, "timings": {"predicted_n": 11, "predicted_ms": 500.0}}
    assert replayed(LlamaCppKind(), [*events, usage]).decode_tokens_per_second == 20.0
    for wrong in ({"predicted_n": 11, "predicted_ms": 0}, {"predicted_n": "x", "predicted_ms": 5}, "x"):
        assert replayed(LlamaCppKind(), [*events, usage | {"timings": wrong}]).own_rate is None


def test_llama_cpp_ids_that_are_missing_are_not_made_up() -> None:
    """A stream names one id of an emoji that has three."""
    piece = {"content": "\N{UNICORN FACE}", "tokens": [222], "stop": False}
    last = {"content": "", "tokens": [], "stop": True, "stop_type": "eos", "tokens_predicted": 3, "tokens_evaluated": 9}
    run = replayed(LlamaCppKind(), [piece, last])
    assert (run.token_ids, run.token_count, run.counted_by) == (None, 3, USAGE)
    assert replayed(LlamaCppKind(), [piece, last | {"tokens_predicted": 1}]).token_ids == (222,)


def test_vllm_positions_are_those_of_each_step() -> None:
    entry = recording("vllm", "ngram", "counting")
    own = next(event["metrics"] for event in reversed(entry["events"]) if event.get("metrics"))["speculative_decoding"]
    steps = list(zip(own["per_step_drafted"], own["per_step_accepted"], strict=True))
    found = acceptance(entry)
    assert (found.drafted, found.accepted, found.rounds) == (
        sum(drafted for drafted, _ in steps),
        sum(accepted for _, accepted in steps),
        len(steps),
    )
    reached = [sum(drafted > 2 and accepted >= 2 for drafted, accepted in steps)]
    assert found.by_position[2] == (sum(accepted > 2 for _, accepted in steps), *reached)


def test_counters_of_a_busy_server_are_invalid() -> None:
    entry = recording("vllm", "counters", "counting")
    quiet = acceptance(entry)
    assert quiet.valid and quiet.drafted and quiet.by_position
    after = entry["after"]
    busy = acceptance(entry, after=after | {"generation_tokens": after["generation_tokens"] + 5})
    assert not busy.valid and "5 tokens more" in busy.note
    early = acceptance(entry, after=after | {"generation_tokens": after["generation_tokens"] - 1})
    assert not early.valid and "whole answer" in early.note
    restarted = {name: value / 2 for name, value in entry["before"].items()} | {"generation_tokens": -1.0}
    assert acceptance(entry, after=restarted) is None
    assert acceptance(entry, before={}, after={}) is None
    assert acceptance(entry, before={}) is None, "counters since the start are not those of one answer"
    for drafts in ({}, {DRAFTED: entry["before"][DRAFTED] - 1}):
        page = {name: value for name, value in after.items() if name != DRAFTED} | drafts
        assert acceptance(entry, after=page) is None, "a counter is missing or went back"
    assert acceptance(entry, after=after | {ACCEPTED: entry["before"][ACCEPTED] - 1}) is None


def test_counters_agree_with_the_figures_of_the_answer() -> None:
    """The same request, once counted by /metrics and once with the answer."""
    entry = recording("vllm", "ngram", "counting")
    of_answer = acceptance(entry)
    of_metrics = acceptance(entry, events=[{**event, "metrics": None} for event in entry["events"]])
    for name in ("drafted", "accepted", "rounds", "forwards", "valid"):
        assert getattr(of_metrics, name) == getattr(of_answer, name)


def test_vllm_cuts_the_text_and_not_its_drafts() -> None:
    found = acceptance(recording("vllm", "ngram", "cut"))
    assert found.accepted == 8 > 7 - 2 and found.forwards == 3  # prefill and two passes, of which 3 tokens were cut
    assert "after the end" in found.note


FIGURES: list[Any] = [[], {"draft_n": "many"}, {"num_draft_tokens": 3}, "x", {"draft_n": 4}]
FIGURES += [
    {"draft_n": drafted, "draft_n_accepted": accepted, "predicted_n": 2}
    for drafted, accepted in (("x", 0), (10**400, 0), (4, "x"), (4, 5), (10**15, 10**15), (4, -1), (True, True))
]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("figures", FIGURES)
def test_figures_of_another_shape_are_no_acceptance(name: str, figures: Any) -> None:
    kind = KINDS[name]
    event = {"choices": [{"text": "a", "finish_reason": "stop"}], "timings": figures}
    event |= {"metrics": {"speculative_decoding": figures}, "sglext": {"spec_tokens_details": figures}}
    assert kind.acceptance(replayed(kind, [event]), {}, {}) is None


def test_sampling_fields() -> None:
    request = ServerRequest((5, 6), 8, temperature=0.5, top_k=0, top_p=0.9, seed=LARGEST_SEED + 3, ignore_eos=True)
    llama = LlamaCppKind().body(request, "m")
    assert (llama["prompt"], llama["n_predict"], llama["seed"], llama["top_k"]) == ([5, 6], 8, 3, 0)
    assert llama["samplers"][0] == "temperature" and llama["cache_prompt"] is False and llama["ignore_eos"]
    for kind in (VllmKind(), SglangKind()):
        body = kind.body(request, "m")
        assert (body["prompt"], body["top_k"], body["min_p"], body["ignore_eos"]) == ([5, 6], -1, 0.0, True)
        assert body["cache_salt"] != kind.body(request, "m")["cache_salt"]
        assert "cache_salt" not in kind.body(replace(request, reuses_prefix=True), "m")
        assert kind.body(replace(request, top_k=7), "m")["top_k"] == 7


def test_chats_of_llama_cpp_use_the_common_path() -> None:
    request = ServerRequest(Chat(({"role": "user", "content": "hi"},)), 8)
    assert LlamaCppKind().path(request) == "/v1/chat/completions"
    body = LlamaCppKind().body(request, "m")
    assert body["messages"] and body["cache_prompt"] is False and "n_predict" not in body
    assert LlamaCppKind().path(REQUEST) == "/completion"


@pytest.mark.parametrize(
    ("owner", "name"),
    [("vllm", "vllm"), ("sglang", "sglang"), ("llamacpp", "llama.cpp"), ("me", "openai"), (None, "openai")],
)
def test_kinds_are_recognised_by_the_owner_of_their_model(owner: str | None, name: str) -> None:
    entry = {"id": "tiny"} if owner is None else {"id": "tiny", "owned_by": owner}
    pages: Any = {"/v1/models": (200, "application/json", json.dumps({"data": [entry]}))}
    with Loopback(pages=pages) as server, ServerClient(ServerAddress("spec", server.url)) as client:
        assert recognise(client).name == name


# Not recorded: SGLang has never been run here. The shapes are those of sglext, SpecTokensDetails and the collector of
# metrics in SGLang 0.5.23.
SGLANG_DETAILS = {
    "spec_accept_rate": 0.5,
    "spec_accept_length": 2.6,
    "spec_num_correct_drafts": 8,
    "spec_num_proposed_drafts": 16,
    "spec_verify_ct": 4,
    "spec_correct_drafts_histogram": [1, 0, 2, 0, 1],
}
SGLANG_EVENTS: list[dict[str, Any]] = [
    {"choices": [{"index": 0, "text": "a", "token_ids": [1], "finish_reason": None}]},
    {"choices": [{"index": 0, "text": "bcd", "token_ids": list(range(12)), "finish_reason": "length"}]},
    {"choices": [], "sglext": {"spec_tokens_details": SGLANG_DETAILS}},
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 13, "total_tokens": 17}},
]


def test_sglang_details_of_the_answer() -> None:
    kind = SglangKind()
    run = replayed(kind, SGLANG_EVENTS)
    assert run.token_count == 13 and run.counted_by == IDS
    found = kind.acceptance(run, {}, {})
    assert found is not None and (found.drafted, found.accepted, found.rounds, found.forwards) == (16, 8, 4, 5)
    # The histogram: one pass accepted nothing, two accepted 2, one accepted 4.
    assert found.by_position == ((3, 4), (3, 3), (1, 3), (1, 1)) and "slot" in found.note
    assert sum(accepted for accepted, _ in found.by_position) == found.accepted
    assert found.forwards == 5


PAGE = """# HELP vllm:generation_tokens_total Number of generation tokens processed.
vllm:generation_tokens_total{engine="0",model_name="a,position=\\"9\\""} 3.0
vllm:generation_tokens_total{engine="1",model_name="b"} 1e1
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="0"} 4.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="1",position="0"} 5.0
vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",position="1"} 2.0
vllm:spec_decode_num_drafts_total not-a-number
vllm:spec_decode_num_drafts_created{engine="0"} 1.7e9
other:generation_tokens_total 99
vllm:generation_tokens_total{
"""


def test_metrics_are_added_up_over_processes() -> None:
    names = ("generation_tokens", "spec_decode_num_accepted_tokens_per_pos", "spec_decode_num_drafts")
    per_position = {f"spec_decode_num_accepted_tokens_per_pos/{place}": value for place, value in ((0, 9.0), (1, 2.0))}
    assert metric_values(PAGE, "vllm:", names) == {"generation_tokens": 13.0} | per_position


def test_prompts_are_tokenized_by_the_server() -> None:
    class Server:
        def __init__(self, **pages: Any) -> None:
            self.pages, self.sent = pages, {}

        def get_json(self, path: str, body: Any) -> Any:
            self.sent[path] = body
            return self.pages.get(path[1:].replace("-", "_"))

        get_text = None

    chat = Chat(({"role": "user", "content": "hi"},))
    llama: Any = Server(apply_template={"prompt": "<s>hi"}, tokenize={"tokens": [1, 2]})
    assert LlamaCppKind().tokens(llama, chat) == (1, 2) and llama.sent["/tokenize"]["content"] == "<s>hi"
    # llama.cpp leaves the first token out of the template's text if its tokenizer adds one.
    assert llama.sent["/tokenize"]["add_special"] is True
    assert LlamaCppKind().tokens(llama, "hi") and llama.sent["/tokenize"]["add_special"] is False
    assert LlamaCppKind().tokens(llama, "hi", special=True) and llama.sent["/tokenize"]["add_special"] is True
    for kind in (VllmKind(), SglangKind()):
        server: Any = Server(tokenize={"tokens": [3]})
        assert kind.tokens(server, chat) == (3,) and server.sent["/tokenize"]["messages"]
        assert kind.tokens(server, "hi") == (3,) and server.sent["/tokenize"]["add_special_tokens"] is False
        assert kind.tokens(server, "hi", special=True) and server.sent["/tokenize"]["add_special_tokens"] is True
        odd: Any = Server(tokenize={"tokens": ["3"]})
        assert kind.tokens(odd, "hi") is None
