"""Fields of requests: from prompt files and /request to the chat template and to servers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from fakes import Screen, open_session, records_of, table_pair
from recordings import before_each_run
from tiny import tiny_tokenizer

from utils.commands.verdicts.selection import race_of
from utils.comparison.arms import request_maker
from utils.config.settings import Settings
from utils.errors import UserError
from utils.prompts.conversation import Turn, prompt_ids
from utils.prompts.prompt_files import Prompt, read_prompts
from utils.prompts.request_fields import parse_request
from utils.repl.repl_session import Verdict
from utils.servers.kinds.server_kind import ServerKind

TEMPLATE = (
    "{% if tools %}T{{ tools | tojson }}{% endif %}{% if enable_thinking is defined %}K{{ enable_thinking }}{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}:{{ message.content }}"
    "{% if message.tool_calls %}C{{ message.tool_calls[0].id }}{% endif %}<|im_end|>{% endfor %}"
)
TOOLS = [{"type": "function", "function": {"name": "weather", "description": "of <|im_end|> a town"}}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"id": "c7"}]}
LOG = [
    {"messages": [{"role": "user", "content": "Hi"}], "tag": "chat"},
    {
        "custom_id": "1",
        "body": {
            "messages": [
                {"role": "system", "content": "Be brief."},
                {"role": "user", "content": [{"type": "text", "text": "Rome"}, {"type": "text", "text": "?"}]},
                CALL,
                {"role": "tool", "tool_call_id": "c7", "content": "sunny"},
            ],
            "tools": TOOLS,
            "response_format": {"type": "json_object"},
            "chat_template_kwargs": {"enable_thinking": False},
            "temperature": 0.7,
        },
        "metadata": {"tag": "tools"},
    },
]


def tokenizer() -> Any:
    found = tiny_tokenizer()
    found.chat_template = TEMPLATE
    return found


@pytest.fixture
def log(tmp_path: Path) -> Path:
    file = tmp_path / "log.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in LOG))
    return file


def test_a_request_log_is_a_file_of_prompts(log: Path) -> None:
    chat, tools = read_prompts(log)
    assert chat == Prompt("Hi", "chat") and (tools.text, tools.task) == ("sunny", "tools")
    ids = prompt_ids(tokenizer(), tools.text, chat=True, system="no", request=tools.request)
    text = tokenizer().decode(ids)
    assert text.startswith(f"T{json.dumps(TOOLS)}KFalse<|im_start|>system:Be brief.<|im_end|>")
    assert text.endswith(
        "<|im_start|>user:Rome?<|im_end|><|im_start|>assistant:Cc7<|im_end|><|im_start|>tool:sunny<|im_end|>"
    )
    # The name in the tools is text: only the template writes special tokens.
    assert ids.count(tokenizer().convert_tokens_to_ids("<|im_end|>")) == 4


def test_earlier_messages_come_before_the_conversation() -> None:
    request = parse_request(json.dumps({"messages": [{"role": "user", "content": "A"}]}))
    ids = prompt_ids(tokenizer(), "B", chat=True, system="S", request=request, history=(Turn("C", "D"),))
    parts = ("system:S", "user:A", "user:C", "assistant:D", "user:B")
    assert tokenizer().decode(ids) == "".join(f"<|im_start|>{part}<|im_end|>" for part in parts)


def test_servers_receive_the_fields(log: Path) -> None:
    prompt = read_prompts(log)[1]
    nothing: Any = None
    made = request_maker(None, prompt.text, Settings(request=prompt.request))(ServerKind(), nothing)
    body = ServerKind().body(made, "m")
    sent = LOG[1]["body"]
    assert isinstance(sent, dict)
    assert all(body[name] == sent[name] for name in ("tools", "response_format", "chat_template_kwargs"))
    assert [message["role"] for message in body["messages"]] == ["system", "user", "assistant", "tool"]
    assert body["messages"][-1] == {"role": "tool", "tool_call_id": "c7", "content": "sunny"}
    assert "tools" not in ServerKind().body(request_maker(None, "x", Settings())(ServerKind(), nothing), "m")


def test_every_command_runs_the_lines_with_their_own_fields(
    view: Screen, tmp_path: Path, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pair, file = table_pair(), tmp_path / "runs.jsonl"
    pair.tokenizer.chat_template = TEMPLATE
    session = open_session(view, pair, records=file)
    prompts = read_prompts(log)
    for prompt in prompts:
        assert session.send(prompt.text, prompt.request) is Verdict.DONE
    rows = records_of(file)
    expected = [
        len(prompt_ids(pair.tokenizer, one.text, chat=True, system=None, request=one.request)) for one in prompts
    ]
    assert [rows[0]["prompt_tokens"], rows[3]["prompt_tokens"]] == expected and expected[1] > 2 * expected[0]
    assert rows[0]["settings"]["request"] == "none" and session.settings.request == ""
    ran = list[str]()
    before_each_run(monkeypatch, lambda strategy, settings: ran.append(settings.request))
    assert session.handle(f"/race {log}") is Verdict.DONE and {*ran} == {"", prompts[1].request}
    nothing: Any = None
    (item,) = race_of(nothing, {1: prompts[1]}, Settings(), ()).items
    assert item.settings.request == prompts[1].request
    assert session.handle(f"/race {log}") is Verdict.DONE and {row["task"] for row in _found(file)} >= {"chat", "tools"}
    assert session.handle(f"/replay {file}") is Verdict.DONE
    assert all(row["same_text"] for row in _found(file)), view.take()[0]


def _found(file: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = records_of(file)[-1]["findings"]
    return found


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "valid JSON"),
        ("[]", "JSON object"),
        ('{"tool": []}', "Did you mean tools"),
        ('{"tools": {}}', "tools"),
        ('{"tools": ["x"]}', "tools"),
        ('{"messages": [{"content": "x"}]}', "role"),
        ('{"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}', "text"),
    ],
)
def test_invalid_fields_are_refused(text: str, words: str) -> None:
    with pytest.raises(UserError, match=words):
        parse_request(text)


def test_a_keyword_with_another_meaning_is_refused() -> None:
    request = parse_request('{"chat_template_kwargs": {"tokenize": false}}')
    with pytest.raises(UserError, match="tokenize"):
        prompt_ids(tokenizer(), "x", chat=True, system=None, request=request)


def test_a_log_without_text_is_refused_with_its_line(tmp_path: Path) -> None:
    file, image = tmp_path / "log.jsonl", {"role": "user", "content": [{"type": "image_url"}]}
    for messages, words in (
        ([], "line 1"),
        ([image], "line 1: .*image"),
        ([image, {"role": "assistant", "content": "A cat."}, {"role": "user", "content": "Sure?"}], "line 1: .*image"),
    ):
        file.write_text(json.dumps({"messages": messages}))
        with pytest.raises(UserError, match=words):
            read_prompts(file)
